"""Stages of a config: the values that they reach, and presets by name,
``supervised:50,ramp:30,full``."""

from __future__ import annotations

from dataclasses import replace

from gruppo.config.schema import SCHEDULED as SCHEDULED
from gruppo.config.schema import SUPERVISED, Config, Stage, SupervisedConfig
from gruppo.types import GruppoError


def stage_path(config: Config, index: int) -> str:
    """The name of a stage in a config: ``stage``, or ``stages.1``."""
    return f"stages.{index}" if config.stages else "stage"


def values_of(config: Config, field: str) -> list[float]:
    """All values that a field starts with, ends with or changes to, in any stage that sets it."""
    schedules = [stage.schedules[field] for stage in config.plan if field in stage.schedules]
    return [value for schedule in schedules for value in schedule.values]


def highest(config: Config, field: str) -> float:
    """The largest value of a field in any stage, as far as it is known in advance."""
    return max(values_of(config, field), default=0.0)


def learns_from_samples(config: Config) -> bool:
    """Whether some stage learns from more than demonstrations, as far as it is known in advance."""
    return any(highest(config, name) > 0 for name in ("rl_coef", "kl_coef", "entropy_coef"))


def peak_lr(config: Config, index: int) -> float:
    """The largest learning rate of the policy in a stage."""
    schedules = config.plan[index].schedules
    return max(schedules["lr"].values) if "lr" in schedules else config.optim.lr


def planned(text: str, config: Config) -> Config:
    """The config with the named stages, each ``KIND:STEPS``; the last may go without its steps.

    ``supervised``: demonstrations only. ``ramp``: linearly from demonstrations to rewards.
    ``full``: the config's stage, or the last one of a recipe with stages.
    """
    full = config.stage
    if config.stages and full == Stage():
        full = replace(config.stages[-1], steps=0, until="")
    # A schedule of rl_coef is over its own stage: the ramp ends at the default.
    end = full.rl_coef if isinstance(full.rl_coef, int | float) else 1
    kinds = {
        # kl_coef and entropy_coef need samples, of which this stage has none; it also goes without
        # cons_coef.
        "supervised": replace(SUPERVISED, lr=full.lr),
        "ramp": replace(full, rl_coef=f"linear:0,{end:g}", sup_coef="linear:1,0"),
        "full": full,
    }
    stages = list[Stage]()
    may_reset = True
    for word in text.split(","):
        kind, _, steps = word.strip().partition(":")
        if kind not in kinds or not (steps or "0").isdigit():
            raise GruppoError(f"""--stages {text}: {word!r} is not a stage; it needs KIND:STEPS of
                {", ".join(kinds)}, as in supervised:50,ramp:30,full.""")
        stage = kinds[kind]
        # Only the first stage that would resets the reference, and not at the start of the run.
        resets = stage.new_reference and bool(stages) and may_reset
        may_reset &= not stage.new_reference
        stages.append(replace(stage, name=kind, steps=int(steps or 0), new_reference=resets))
    # If no stage learns from a recipe's demonstrations, their options have no effect.
    demonstrates = any(stage.sup_coef for stage in stages)
    supervised = config.supervised if demonstrates else SupervisedConfig()
    return replace(config, stages=tuple(stages), stage=Stage(), supervised=supervised)
