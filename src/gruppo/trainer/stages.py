"""Stages of a run: schedules and controllers of the step parameters, and the gates that end a
stage."""

from __future__ import annotations

import logging
import math
import operator
import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

from gruppo import distributed as dist
from gruppo.config.schema import SCHEDULED, Config, Stage
from gruppo.config.stages import peak_lr, stage_path
from gruppo.core.schedules import Controller, Schedule, warmup_decay
from gruppo.types import GruppoError, Sampling

log = logging.getLogger("gruppo")


@dataclass(frozen=True)
class StepParams:
    """What a stage sets for one step."""

    lr: float
    """Of the policy."""
    critic_lr: float
    """The critic's own rate, on the policy's schedule; the policy's where it has none of its
    own."""
    rl_coef: float
    sup_coef: float
    kl_coef: float
    entropy_coef: float
    value_coef: float
    is_critic_alone: bool
    """Whether only the critic learns, in its warmup."""
    group_size: int
    sampling: Sampling
    cons_coef: float = 0.0
    weight_decay: float = 0.0

    @property
    def samples(self) -> bool:
        """Whether anything but demonstrations is learned from."""
        return self.rl_coef > 0 or self.kl_coef > 0 or self.entropy_coef > 0


_COMPARED = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


class Gate:
    """The condition on a metric that ends a stage, parsed from its ``until``.

    "METRIC > X" compares the last value; "METRIC flat N by D" holds once the last N values exceed
    the best of those before them by no more than D.
    """

    def __init__(self, text: str, where: str) -> None:
        flat = re.fullmatch(r"\s*(\S+)\s+flat\s+(\d+)(?:\s+by\s+(\S+))?\s*", text)
        compared = re.fullmatch(r"\s*(\S+?)\s*(>=|<=|>|<)\s*(\S+)\s*", text)
        match = flat or compared
        try:
            assert match is not None
            self.metric, self._number = match[1], float(match[3] or 0)
            self._compare = None if flat else _COMPARED[match[2]]
            self._count = int(match[2]) if flat else 1
            assert math.isfinite(self._number) and self._count >= 1
            if flat:  # losses are to fall
                assert self._number >= 0 and not self.metric.startswith(("loss/", "sup/"))
        except (AssertionError, ValueError):
            raise GruppoError(f"""{where}.until={text!r} is not understood; it needs a metric, a
                comparison and a number, such as 'eval/reward_mean > 0.5', or a metric that is to
                rise and no longer does, such as 'eval/psnr flat 3'.""") from None

    def is_open(self, values: Sequence[float]) -> bool:
        """``values``: the metric's in the stage, the latest last."""
        if self._compare is not None:
            return bool(values) and self._compare(values[-1], self._number)
        count, by = self._count, self._number
        return len(values) > count and max(values[-count:]) <= max(values[:-count]) + by


class StageSchedule:
    """A run's way through its stages. Its state changes at step boundaries only."""

    def __init__(self, config: Config, sampling: Sampling | None = None) -> None:
        """``sampling``: what each step samples from, at its own temperature; that of a text model
        by default."""
        self.config, self.plan = config, config.plan
        self.sampling = sampling or config.rollout.sampling
        self.names = [stage.name or f"stage {n}" for n, stage in enumerate(self.plan, start=1)]
        self._schedules: list[dict[str, Schedule | Controller]] = [
            {name: copy(schedule) for name, schedule in stage.schedules.items()}
            for stage in self.plan
        ]
        self._gates = [
            Gate(stage.until, stage_path(config, index)) if stage.until else None
            for index, stage in enumerate(self.plan)
        ]
        self.index = 0
        self.began = 0
        """Step at which the stage began."""
        self.lr_scale = 1.0
        """Factor of the learning rate, lowered after each return to the best weights."""
        self.overrides: dict[str, float] = {}
        """Values that ``Trainer.set`` put in place of the schedules'."""
        self.settled = -1
        """Step whose gates have been evaluated."""
        self.is_over = False
        """Whether the gate of the last stage has opened, which ends the run."""
        self.sampled_since: int | None = None
        self.seen: list[float] = []
        """The values of the gate's metric in the stage."""

    @property
    def stage(self) -> Stage:
        return self.plan[self.index]

    @property
    def _controllers(self) -> dict[str, Controller]:
        """Those of all stages, by stage and name."""
        return {
            f"{index} {name}": one
            for index, own in enumerate(self._schedules)
            for name, one in own.items()
            if isinstance(one, Controller)
        }

    def step_params(self, step: int) -> StepParams:
        """Return the parameters of step 0, 1, ..., which is in the current stage."""
        config, stage, optim = self.config, self.stage, self.config.optim
        since = step - self.began
        # Steps that the stage lasts, if known; the last one has what earlier gates have saved too.
        length = config.steps - self.began
        if self.index + 1 < len(self.plan) and stage.steps:
            length = min(stage.steps, length)
        now: dict[str, Any] = {
            "lr": warmup_decay(
                step,
                peak=optim.lr,
                warmup=optim.warmup_steps,
                total=config.steps,
                decay=optim.decay,
                final_frac=optim.final_lr_frac,
            ),
            "weight_decay": optim.weight_decay,
            "temperature": self.sampling.temperature,
            "group_size": config.rollout.group_size,
        }
        for name, schedule in self._schedules[self.index].items():
            now[name] = schedule.at(since, length=length)
        now |= self.overrides
        lr = now.pop("lr") * self.lr_scale
        if stage.warmup_steps:
            lr *= min((since + 1) / stage.warmup_steps, 1.0)
        critic_lr, own, peak = lr, config.critic.lr, peak_lr(config, self.index)
        if own is not None and own != peak:
            critic_lr = lr * (own / peak) if peak else 0.0
        step_params = StepParams(
            lr=lr,
            critic_lr=critic_lr,
            is_critic_alone=False,
            group_size=round(now.pop("group_size")),
            sampling=replace(self.sampling, temperature=now.pop("temperature")),
            **now,
        )
        if not config.objective.has_critic or not step_params.samples:
            return step_params
        sampled = step - (step if self.sampled_since is None else min(self.sampled_since, step))
        return replace(step_params, is_critic_alone=sampled < config.critic.warmup_steps)

    def metrics(self, step_params: StepParams) -> dict[str, float]:
        """Return the step parameters that vary: set by a schedule or controller in some stage, or
        differing between stages."""
        metrics = {"stage/number": self.index + 1.0} if len(self.plan) > 1 else {}
        for name in SCHEDULED:
            values = {getattr(stage, name) for stage in self.plan}
            varies = len(values) > 1 or any(isinstance(value, str) for value in values)
            if name != "lr" and (varies or name in self.overrides):  # that is "optim/lr"
                owner: Any = step_params.sampling if name == "temperature" else step_params
                metrics[f"stage/{name}"] = float(getattr(owner, name))
        return metrics

    def measure(self, step: int, metrics: Mapping[str, float], *, rows: float = 0.0) -> None:
        """After step ``step``'s update: controllers move on, and gates remember."""
        if rows and self.sampled_since is None:
            self.sampled_since = step
        for schedule in self._schedules[self.index].values():
            if isinstance(schedule, Controller) and schedule.metric in metrics:
                schedule.update(metrics[schedule.metric], rows=rows)
        gate = self._gates[self.index]
        if gate is not None and (value := agreed(metrics, gate.metric)) is not None:
            self.seen.append(value)

    def advance(self, step: int) -> str | None:
        """At the boundary after ``step`` steps: begin the next stage, or end the run, if it is due,
        and return why.

        A gate that did not open within the stage's steps is a warning, with the last value of its
        metric.
        """
        if self.settled >= step or self.is_over:
            return None
        self.settled = step
        is_last = self.index + 1 == len(self.plan)
        gate, stage, name = self._gates[self.index], self.stage, self.names[self.index]
        if gate is not None and gate.is_open(self.seen):
            why = f"{gate.metric} is {self.seen[-1]:.4g}, and {name} lasts until {stage.until}"
            self.is_over = is_last
            if is_last:
                return f"step {step}: the run ends ({why})."
        else:
            end = self.config.steps if is_last else self.began + stage.steps
            if step < end or not (is_last or stage.steps):
                return None
            why = f"{name} has had its {stage.steps} steps"
            if gate is not None:
                last = f"{self.seen[-1]:.4g} at last" if self.seen else "never measured"
                text = "%s ends after its %d steps, and its gate %r never opened: %s was %s."
                log.warning(text, name, step - self.began, stage.until, gate.metric, last)
            if is_last:
                return None
        self.index += 1
        self.began = step
        self.seen = []
        return f"step {step}: {self.names[self.index]} begins ({why})."

    def state_dict(self) -> dict[str, Any]:
        # copies: a checkpoint may be written after the next step has changed these
        own = {name: copy(getattr(self, name)) for name in _SAVED}
        return own | {"controllers": {n: dict(vars(one)) for n, one in self._controllers.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update({name: copy(state[name]) for name in _SAVED})
        for name, controller in self._controllers.items():
            controller.load_state_dict(state["controllers"][name])


_SAVED = ("index", "began", "lr_scale", "overrides", "settled", "is_over", "sampled_since", "seen")
"""What a checkpoint holds of a StageSchedule, besides the controllers."""


def step_params_at(config: Config, step: int) -> StepParams:
    """Return the parameters of step 0, 1, ... in the first stage, if it samples from the
    beginning."""
    stage_schedule = StageSchedule(config)
    stage_schedule.sampled_since = 0
    return stage_schedule.step_params(step)


def agreed(metrics: Mapping[str, float], name: str) -> float | None:
    """Return a metric's mean over the ranks that have it, so that all decide alike; None if none
    has."""
    value = metrics.get(name, math.nan)
    numbers = [value, 1.0] if math.isfinite(value) else [0.0, 0.0]
    total, count = dist.all_sum(torch.tensor(numbers, dtype=torch.float64))
    return float(total / count) if count else None
