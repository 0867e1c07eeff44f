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
from gruppo.loading import did_you_mean
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
        self.sampling = config.rollout.sampling if sampling is None else sampling
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
    def names(self) -> list[str]:
        """Of all stages, in order."""
        return [stage.name or f"stage {number}" for number, stage in enumerate(self.plan, start=1)]

    def step_params(self, step: int) -> StepParams:
        """The parameters of step 0, 1, ..., which is in the current stage."""
        config, stage, optim = self.config, self.stage, self.config.optim
        # Steps that the stage lasts, as far as known; the last one has what earlier gates have
        # saved too.
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
            "temperature": None,
            "group_size": config.rollout.group_size,
        }
        for name, schedule in self._schedules[self.index].items():
            now[name] = schedule.at(step - self.began, length=length)
        now |= self.overrides
        lr = now["lr"] * self.lr_scale  # lowered at each return to the best weights
        if stage.warmup_steps:
            lr *= min((step - self.began + 1) / stage.warmup_steps, 1.0)
        critic_lr, own, peak = lr, config.critic.lr, peak_lr(config, self.index)
        if own is not None and own != peak:
            critic_lr = lr * (own / peak) if peak else 0.0
        sampling = self.sampling
        if now["temperature"] is not None:
            sampling = replace(sampling, temperature=now["temperature"])
        step_params = StepParams(
            lr=lr,
            critic_lr=critic_lr,
            is_critic_alone=False,
            group_size=round(now["group_size"]),
            sampling=sampling,
            weight_decay=now["weight_decay"],
            **{name: now[name] for name in _PLAIN},
        )
        if not config.objective.has_critic or not step_params.samples:
            return step_params
        since = step if self.sampled_since is None else min(self.sampled_since, step)
        return replace(step_params, is_critic_alone=step - since < config.critic.warmup_steps)

    def metrics(self, step_params: StepParams) -> dict[str, float]:
        """Step parameters that vary: set by a schedule or controller in some stage, or differing
        between stages."""
        values = {name: [getattr(stage, name) for stage in self.plan] for name in SCHEDULED}
        changing = self.overrides.keys() | {
            name
            for name, given in values.items()
            if len(set(given)) > 1 or any(isinstance(value, str) for value in given)
        }
        now = {"temperature": step_params.sampling.temperature}
        metrics = {
            f"stage/{name}": float(now.get(name, getattr(step_params, name, math.nan)))
            for name in SCHEDULED
            if name in changing and name != "lr"  # that is "optim/lr"
        }
        return metrics | ({"stage/number": self.index + 1.0} if len(self.plan) > 1 else {})

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

    def advance(self, step: int, known: Mapping[str, float]) -> str | None:
        """At the boundary after ``step`` steps: begin the next stage, or end the run, if it is due,
        and return why.

        A gate that did not open within the stage's steps is a warning, with the last value of its
        metric or, where that was never measured, the nearest of the ``known`` ones.
        """
        if self.settled >= step or self.is_over:
            return None
        self.settled = step
        is_last = self.index + 1 == len(self.plan)
        gate, stage, name = self._gates[self.index], self.stage, self.names[self.index]
        has_ended = step == self.config.steps
        if not is_last:
            has_ended = stage.steps > 0 and step - self.began >= stage.steps
        if gate is not None and gate.is_open(self.seen):
            why = f"{gate.metric} is {self.seen[-1]:.4g}, and {name} lasts until {stage.until}"
        elif has_ended:
            why = f"{name} has had its {stage.steps} steps"
            if gate is not None:
                self._warn_of_gate(gate, step, known)
            if is_last:
                return None
        else:
            return None
        if is_last:
            self.is_over = True
            return f"step {step}: the run ends ({why})."
        self.index += 1
        self.began = step
        self.seen = []
        return f"step {step}: {self.names[self.index]} begins ({why})."

    def _warn_of_gate(self, gate: Gate, step: int, known: Mapping[str, float]) -> None:
        last = f"{gate.metric} was never measured."
        if self.seen:
            last = f"{gate.metric} was {self.seen[-1]:.4g} at last."
        else:
            last += did_you_mean(gate.metric, known.keys() - {gate.metric})
        log.warning(
            "%s ends after its %d steps, and its gate %r never opened: %s",
            *(self.names[self.index], step - self.began, self.stage.until, last),
        )

    def state_dict(self) -> dict[str, Any]:
        controllers = [
            {name: dict(vars(one)) for name, one in own.items() if isinstance(one, Controller)}
            for own in self._schedules
        ]
        # copies: a checkpoint may be written after the next step has changed these
        return {name: copy(getattr(self, name)) for name in _SAVED} | {"controllers": controllers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update({name: copy(state[name]) for name in _SAVED})
        for stage, saved in zip(self._schedules, state["controllers"], strict=True):
            for name, controller in stage.items():
                if isinstance(controller, Controller):
                    controller.load_state_dict(saved[name])


_SAVED = ("index", "began", "lr_scale", "overrides", "settled", "is_over", "sampled_since", "seen")
"""What a checkpoint holds of a StageSchedule, beside the controllers."""
_PLAIN = ("rl_coef", "sup_coef", "kl_coef", "entropy_coef", "value_coef", "cons_coef")
"""Step parameters that are the value of their schedule, which no stage may leave out."""


def step_params_at(config: Config, step: int) -> StepParams:
    """The parameters of step 0, 1, ... in the first stage, if it samples from the beginning."""
    stage_schedule = StageSchedule(config)
    stage_schedule.sampled_since = 0
    return stage_schedule.step_params(step)


def agreed(metrics: Mapping[str, float], name: str) -> float | None:
    """A metric's mean over the ranks that have it, so that all decide alike; None where none
    has."""
    value = metrics.get(name, math.nan)
    is_there = math.isfinite(value)
    total, count = dist.all_sum(
        torch.tensor([value if is_there else 0.0, float(is_there)], dtype=torch.float64)
    )
    return float(total / count) if count else None
