"""Stages of a config: the values that they schedule, and presets by name, ``supervised:50,ramp:30,full``."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace

from gruppo.config.schema import Config, Stage, SupervisedConfig
from gruppo.core.schedules import parse_schedule
from gruppo.types import GruppoError

SCHEDULED = (
    "rl_coef",
    "sup_coef",
    "kl_coef",
    "cons_coef",
    "entropy_coef",
    "value_coef",
    "lr",
    "weight_decay",
    "temperature",
    "group_size",
    "difficulty",
)
"""Fields of a stage that may change from step to step."""


def where_of(config: Config, index: int) -> str:
    """A stage as it is named in a config: ``stage``, or ``stages.1``."""
    return f"stages.{index}" if config.stages else "stage"


def values_of(config: Config, field: str) -> list[float]:
    """All that a field of the stages begins with, ends with or changes to; those that are left out are not there."""
    found = [(index, getattr(stage, field)) for index, stage in enumerate(config.plan)]
    return [
        value
        for index, given in found
        if given is not None
        for value in parse_schedule(given, f"{where_of(config, index)}.{field}").values
    ]


def highest(config: Config, field: str) -> float:
    """The largest value that a field takes in any stage, as far as it is known before."""
    return max(values_of(config, field), default=0.0)


def learns_from_samples(config: Config) -> bool:
    """Whether some stage learns from anything but demonstrations, as far as it is known before."""
    return any(highest(config, name) > 0 for name in ("rl_coef", "kl_coef", "entropy_coef"))


def peak_lr(config: Config, index: int) -> float:
    """The largest learning rate of a stage's policy."""
    own = config.plan[index].lr
    return config.optim.lr if own is None else max(parse_schedule(own, f"{where_of(config, index)}.lr").values)


# --- presets ---------------------------------------------------------------------------------------------------------


def _supervised(full: Stage) -> Stage:
    return Stage(rl_coef=0.0, sup_coef=1.0, lr=full.lr)


def _ramp(full: Stage) -> Stage:
    to = full.rl_coef if isinstance(full.rl_coef, int | float) else 1
    return replace(full, rl_coef=f"linear:0,{to:g}", sup_coef="linear:1,0")


def _full(full: Stage) -> Stage:
    return full


KINDS: dict[str, Callable[[Stage], Stage]] = {"supervised": _supervised, "ramp": _ramp, "full": _full}
"""Demonstrations alone; from demonstrations to rewards along a line; what the config's stage says, or its last."""


def planned(text: str, config: Config) -> Config:
    """The config with the stages that a text names, each ``KIND:STEPS``; the last may go without its steps."""
    words, full = [word.strip() for word in text.split(",")], config.stage
    if config.stages and full == Stage():  # a recipe of stages: its last one says what the whole is
        full = replace(config.stages[-1], steps=0, until="")
    stages = tuple(_stage(word, full, is_last=n + 1 == len(words)) for n, word in enumerate(words))
    renews = [n for n, stage in enumerate(stages) if stage.new_reference]
    stages = tuple(replace(stage, new_reference=n in renews[:1] and n > 0) for n, stage in enumerate(stages))
    learns = any(stage.sup_coef for stage in stages)  # without, a recipe's demonstrations stay behind
    supervised = config.supervised if learns else SupervisedConfig()
    return replace(config, stages=stages, stage=Stage(), supervised=supervised)


def _stage(word: str, full: Stage, *, is_last: bool) -> Stage:
    kind, _, steps = word.partition(":")
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, 1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise GruppoError(f"--stages: {kind or '(nothing)'} is no stage. {hint}Stages: {', '.join(KINDS)}.")
    if not (steps.isdigit() and int(steps)) and (steps or not is_last):
        raise GruppoError(
            f"--stages: {word!r} does not say how many steps it lasts; it needs a whole number, as in {kind}:50. The "
            "last stage may go without, for all that are left."
        )
    return replace(KINDS[kind](full), name=kind, steps=int(steps or 0))
