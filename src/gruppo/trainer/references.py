"""The reference of a run: which one it is, the proof that a frozen one is frozen, and a watch on one that moves."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

from gruppo.config.schema import IN_MEMORY, Config
from gruppo.config.schema import ReferenceConfig as Settings
from gruppo.config.stages import highest, where_of
from gruppo.environments import converse
from gruppo.modalities.common.lora import digest, has_adapter
from gruppo.modalities.common.reference import ReferenceModel, Rule
from gruppo.modalities.restoration.config import RestorationConfig
from gruppo.protocols import Reference
from gruppo.trainer.evaluate import evaluate, held_out
from gruppo.trainer.restorers import is_restorer
from gruppo.trainer.run import Run
from gruppo.types import GruppoError

log = logging.getLogger("gruppo")


def check_reference(config: Config) -> None:
    """Refuse settings that are out of range, and those that nothing would read."""
    chosen, usual = config.reference, Settings()
    if not 0 <= chosen.update_rate <= 1:
        raise GruppoError(
            f"reference.update_rate={chosen.update_rate} is out of range; it needs 0 to 1. Set --reference.update-rate "
            "0.6."
        )
    for name, least in (("update_every", 1), ("watch_prompts", 0)):
        if getattr(chosen, name) < least:
            raise GruppoError(
                f"reference.{name}={getattr(chosen, name)} is out of range; it needs at least {least}. Set --reference."
                f"{name.replace('_', '-')}."
            )
    renewed = [index for index, stage in enumerate(config.plan) if stage.new_reference]
    if renewed and not has_reference(config) and not (config.model == IN_MEMORY or is_restorer(config.model)):
        raise _unread(f"{where_of(config, renewed[0])}.new_reference")  # of a restorer, a reward may read it
    if chosen == usual:
        return
    if not has_reference(config):
        raise _unread("a reference")
    of_mixing = ("update_rate", "update_every", "watch_prompts")
    unread = [name for name in of_mixing if getattr(chosen, name) != getattr(usual, name)]
    if chosen.kind == "frozen" and unread:
        raise GruppoError(
            f"reference.{unread[0]} is of a reference that moves, and reference.kind='frozen' never does. Set "
            "--reference.kind mixed, or leave it out."
        )
    if chosen.kind == "mixed" and chosen.update_every > config.steps:
        raise GruppoError(
            f"reference.kind='mixed' with reference.update_every={chosen.update_every} never moves in {config.steps} "
            f"steps. Set --reference.update-every {max(config.steps // 10, 1)} or so, or --reference.kind frozen."
        )
    if chosen.place != "device" and (config.lora.rank or config.lora.adapter):
        raise _nothing_to_place(config)


def _unread(what: str) -> GruppoError:
    return GruppoError(
        f"{what} was set, but no stage's kl_coef is above 0, so that nothing is measured against it. Set "
        "--stage.kl-coef 0.05 or the like, or leave the --reference options and new_reference out."
    )


def _nothing_to_place(config: Config) -> GruppoError:
    return GruppoError(
        f"reference.place={config.reference.place!r} has nothing to place: of a policy with adapters the reference is "
        "its base, which is there once for both. Leave --reference.place out."
    )


def has_reference(config: Config) -> bool:
    """Whether anything is measured against one: a KL, or a consistency to its pictures."""
    is_held_to_it = highest(config, "cons_coef") > 0 and config.section(RestorationConfig).consistency == "reference"
    return highest(config, "kl_coef") > 0 or is_held_to_it


def open_reference(config: Config, policy: Any, *, is_read: bool = False) -> Reference | None:
    """What the policy, as it is now, is to be measured against; None where nothing is. ``is_read``: by a reward."""
    chosen, renewed = config.reference, [index for index, stage in enumerate(config.plan) if stage.new_reference]
    if not has_reference(config) and not (is_read and renewed):
        if renewed:
            raise _unread(f"{where_of(config, renewed[0])}.new_reference")
        return None
    rate, every = chosen.update_rate, chosen.update_every if chosen.kind == "mixed" else 0
    is_frozen = chosen.kind == "frozen" and not renewed
    if has_adapter(policy.module):
        if chosen.place != "device":
            raise _nothing_to_place(config)
        return ReferenceModel(policy, rule="adapter_off" if is_frozen else "ema", rate=rate, every=every)
    if chosen.place == "cpu" and policy.device.type == "cpu":
        log.info("reference.place=cpu saves nothing here: the device is the CPU. --reference.place disk does.")
    folder = existing(Path(config.runs_dir))
    rule: Rule = "frozen" if is_frozen else "ema"
    return ReferenceModel(policy, rule=rule, rate=rate, every=every, storage=chosen.place, folder=folder)


def existing(folder: Path) -> Path:
    """The folder, or the first above it that is there. Not the system's folder for such files: it may be memory."""
    folder = folder.absolute()
    return next((place for place in (folder, *folder.parents) if place.is_dir()), Path("/"))


def cautions(config: Config) -> list[str]:
    """What works and may not be meant."""
    if not has_reference(config):
        return []
    if config.reference.kind == "mixed":
        return ["the reference follows the policy: the KL slows it down, and is no anchor to where it began"]
    if config.lora.adapter:
        return ["the reference is the base without the adapter that training begins with: the KL does not begin at 0"]
    return []


def memory(run: Run, width: int) -> dict[str, float]:
    """Bytes that live through the whole run, ``width`` a number of what computes.

    What rests on disk is there before the updates alone, and then needs less than gradients do after it.
    """
    numbers = sum(p.numel() for p in run.policy.module.parameters())
    reference, place = run.reference, run.config.reference.place
    if not isinstance(reference, ReferenceModel) or reference.rule == "adapter_off":
        return {}
    if reference.shares_module:
        return {"reference's adapter": 4 * sum(tensor.numel() for tensor in reference.state_dict().values())}
    if reference.is_offloaded and (place == "disk" or run.policy.device.type != "cpu"):
        return {}
    if reference.rule == "frozen":
        return {"reference": width * numbers}
    copied = {} if reference.is_offloaded or width == 4 else {"reference's copy": float(width * numbers)}
    return {"reference, float32": 4.0 * numbers, **copied}


def renew_if_asked(run: Run) -> None:
    """As a stage begins: its reference is the policy of now, where it says so."""
    if run.stage_schedule.stage.new_reference and isinstance(run.reference, ReferenceModel):
        run.reference.reset_to(run.policy)
        log.info("step %d: the reference is now the policy as it is.", run.step)


# --- a frozen one is frozen -------------------------------------------------------------------------------------------


def remember(run: Run) -> str | None:
    """SHA-256 of the weights that must not change, taken before the first update; None without any."""
    if run.reference is not None and not run.reference_sha256:
        run.reference_sha256 = _sha256(run.reference)
    return run.reference_sha256


def check_unchanged(run: Run) -> None:
    """Stop a run whose frozen weights are no longer what they were at its start."""
    then = run.reference_sha256
    if run.reference is None or then is None:
        return
    if (now := _sha256(run.reference)) != then:
        raise GruppoError(
            f"step {run.step}: the frozen weights of the reference have changed since the start (SHA-256 "
            f"{(now or 'none')[:12]}, was {then[:12]}), so the KL was to something else. Nothing was saved at this "
            "step; every save before it is kept. Something other than gruppo writes to the model: find it, then resume."
        )


def _sha256(reference: Reference) -> str | None:
    frozen = reference.frozen_state_dict()
    return digest(frozen) if frozen else None


# --- a watch on one that moves ----------------------------------------------------------------------------------------


def watch(run: Run) -> dict[str, float]:
    """Of a mixed reference, how far the policy is from it and how well it answers by itself."""
    reference = run.reference
    if not isinstance(reference, ReferenceModel) or reference.rule != "ema":
        return {}
    said = {"reference/distance_frac": reference.distance(run.policy)}
    if run.config.reference.kind == "mixed" and (prompts := held_out(run, run.config.reference.watch_prompts)):
        own = reference.sample
        answers = (
            own if run.environment is None else partial(converse, own, reference.continue_rollouts, run.environment)
        )
        said["reference/eval_reward_mean"] = evaluate(run, prompts, generate=answers).mean
    return said
