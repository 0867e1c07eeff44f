"""Options that a modality does not use, and clips of the ratio that are useless for joint
densities."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from gruppo.config.schema import Config
from gruppo.config.stages import highest
from gruppo.core.objective import Objective
from gruppo.core.surrogates import MAX_LOG_RATIO
from gruppo.protocols import Modality
from gruppo.types import GruppoError

ROUNDING_NATS = 3e-5
"""Times sqrt(dims): how far a joint log-ratio is off 0 in float32 at equal weights and a std of
0.02."""
TEXT_OPTIONS = {
    "rollout.max_new_tokens": "applies to text; --diffusion.steps sets the denoising steps",
    "objective.overlong": "penalizes long texts, and every image has as many steps",
    "objective.mask_truncated": "leaves out truncated texts, and images are never truncated",
    "critic.model": "has no effect: the critic of an image model is a head on its network",
    "lora.load_in_4bit": "is an option of language models",
    "environment.names": "is an environment that replies to texts",
}
"""Options that image models do not use, with the reason."""


def refuse(*problems: str | None) -> None:
    """Raise GruppoError with the first problem that there is."""
    for problem in filter(None, problems):
        raise GruppoError(problem)


def changed_options(section: Any, names: Iterable[str]) -> dict[str, Any]:
    """Options of a section that differ from their defaults, of those in ``names``."""
    default = type(section)()
    values = {name: getattr(section, name) for name in names}
    return {name: value for name, value in values.items() if value != getattr(default, name)}


def refuse_changed(config: Config, names: Iterable[str], owner: str) -> None:
    """Refuse options of the modality's section that only ``owner`` reads."""
    section, model = config.modality, config.model
    if section is None or not (changed := list(changed_options(section, names))):
        return
    option = f"{type(section).__name__.removesuffix('Config').lower()}.{changed[0]}"
    raise GruppoError(
        f"{option} is of {owner}, and {model!r} has its own", advice=f"Leave ${option} out"
    )


def refuse_unused_options(
    config: Config, modality: Modality, *, has_consistency: bool = False
) -> None:
    """Refuse options of other modalities; ``has_consistency``: whether it has a consistency
    term."""
    options, model = config.modality, config.model
    for option, reason in {}.items() if modality.has_lengths else TEXT_OPTIONS.items():
        section, _, name = option.partition(".")
        if value := changed_options(getattr(config, section), [name]):
            raise GruppoError(
                f"{option}={value[name]} {reason}, and {model!r} is an image model",
                advice=f"Leave ${option} out",
            )
    is_own = isinstance(options, modality.config_section or type(None))
    if options is not None and not is_own and options != type(options)():
        name = type(options).__name__.removesuffix("Config").lower()
        raise GruppoError(
            f"{name} settings were given, and {model!r} is no {name} model",
            advice=f"Leave the --{name} options out, or set $model to one",
        )
    if not has_consistency and highest(config, "cons_coef"):
        raise GruppoError(
            f"a stage's cons_coef is above 0: only restored images have a consistency, and "
            f"{model!r} restores none",
            option="stage.cons_coef",
            advice="0; $stage.kl_coef holds any policy to its reference",
        )


def joint_clip_nats(objective: Objective, dims: int) -> float:
    """Log-ratio of a joint density at which the clip stops it.

    log(1 + clip_high) of the joint ratio; with ``dims`` "mean" the ratio is its dims-th root, which
    allows dims times as much.
    """
    nats = objective.clip_high if objective.clip_unit == "nats" else math.log1p(objective.clip_high)
    return nats * dims if objective.dims == "mean" else nats


def check_trust_region(objective: Objective, dims: int) -> None:
    """Refuse a clip that never takes effect with ``dims`` dimensions per action, or one that
    rounding alone reaches."""
    # of one dimension, the joint ratio is the ratio
    if objective.surrogate not in ("clip", "cispo") or dims < 2:
        return
    is_ratio, nats = objective.clip_unit == "ratio", joint_clip_nats(objective, dims)
    least = 10 * ROUNDING_NATS * math.sqrt(dims)
    clip = f"objective.clip_high={objective.clip_high:g}"
    advice = "nats $objective.dims sum $objective.clip_low 1 $objective.clip_high 1"
    if objective.dims == "mean" and nats > MAX_LOG_RATIO:
        fitting = math.expm1(1 / dims) if is_ratio else 1 / dims  # one nat of the joint density
        raise GruppoError(
            f"""{clip}{"" if is_ratio else " nats"} of a mean over {dims} dimensions lets the joint
                log-ratio of a step reach {nats:.3g} nats: it never clips. At 0.2 the mean allows 12
                nats in 64 dimensions, 143 in 784, 2990 in 16384, 8960 in 49152. At 1e-4, 0.006,
                0.08, 1.6 and 4.9""",
            option="objective.clip_unit",
            advice=f"{advice}, or $objective.clip_high {fitting:.2g} for the same with the mean",
        )
    if nats < least:
        raise GruppoError(
            f"""{clip} with dims={objective.dims!r} clips a step of {dims} dimensions at {nats:.2g}
                nats of its joint density, a tenth of which is rounding alone; it needs at least
                {least:.2g}""",
            option="objective.clip_unit",
            advice=advice,
        )
