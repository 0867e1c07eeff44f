"""Where a run is in its plan: stages, what their schedules and controllers say now, and gates."""

from __future__ import annotations

import difflib
import logging
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from gruppo import distributed as dist
from gruppo.config.schema import Config, Stage
from gruppo.config.stages import SCHEDULED, peak_lr, stage_path
from gruppo.core.schedules import AdaptiveSpec, Controller, Schedule, make_controller, parse_schedule, warmup_decay
from gruppo.types import GruppoError, Sampling

log = logging.getLogger("gruppo")


@dataclass(frozen=True)
class StepParams:
    """What may change from step to step."""

    lr: float
    """Of the policy."""
    critic_lr: float
    """The critic's own rate, on the policy's schedule; the policy's where it has none of its own."""
    rl_coef: float
    sup_coef: float
    kl_coef: float
    entropy_coef: float
    value_coef: float
    is_critic_alone: bool
    """Whether the policy rests while the critic learns."""
    group_size: int
    sampling: Sampling
    difficulty: float = 1.0
    """Share of the prompts that are drawn, the easiest first."""
    cons_coef: float = 0.0
    weight_decay: float = 0.0

    @property
    def samples(self) -> bool:
        """Whether anything but demonstrations is learned from."""
        return self.rl_coef > 0 or self.kl_coef > 0 or self.entropy_coef > 0


@dataclass(frozen=True)
class Gate:
    """What a metric has to say for a stage to end."""

    metric: str
    is_open: Callable[[Sequence[float]], bool]
    """Of the metric's values in the stage, the last one at the end."""


_COMPARED = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


def gate_of(stage: Stage, where: str) -> Gate | None:
    """What ``until`` says; None without it."""
    if not stage.until:
        return None
    try:
        return _flat_gate(stage.until) or _compared_gate(stage.until)
    except (AssertionError, ValueError):
        raise GruppoError(
            f"{where}.until={stage.until!r} is not understood; it needs a metric, a comparison and a number, such as "
            "'eval/reward_mean > 0.5', or a metric that is to rise and no longer does, such as "
            "'eval/psnr flat 3'."
        ) from None


def _compared_gate(text: str) -> Gate:
    match = re.fullmatch(r"\s*(\S+?)\s*(>=|<=|>|<)\s*(\S+)\s*", text)
    assert match is not None
    compare, limit = _COMPARED[match[2]], float(match[3])
    assert math.isfinite(limit)
    return Gate(match[1], lambda values: bool(values) and compare(values[-1], limit))


def _flat_gate(text: str) -> Gate | None:
    """METRIC flat N by D: the last N values exceed the best of those before them by no more than D."""
    match = re.fullmatch(r"\s*(\S+)\s+flat\s+(\d+)(?:\s+by\s+(\S+))?\s*", text)
    if match is None:
        return None
    count, by = int(match[2]), float(match[3] or 0)
    assert count >= 1 and 0 <= by < math.inf and not match[1].startswith(("loss/", "sup/"))  # which are to fall

    def is_open(values: Sequence[float]) -> bool:
        return len(values) > count and max(values[-count:]) <= max(values[:-count]) + by

    return Gate(match[1], is_open)


class StageSchedule:
    """A run's way through its stages. What it holds changes at step boundaries alone."""

    def __init__(self, config: Config, sampling: Sampling | None = None) -> None:
        """``sampling``: what each step samples from, at its own temperature; of a text model without it."""
        self.config, self.plan = config, config.plan
        self.sampling = config.rollout.sampling if sampling is None else sampling
        self._said: list[dict[str, Schedule | Controller]] = []
        for index, stage in enumerate(self.plan):
            self._said.append(_parsed(stage, stage_path(config, index)))
        self._gates = [gate_of(stage, stage_path(config, index)) for index, stage in enumerate(self.plan)]
        self.index = 0
        self.began = 0
        """Step at which the stage began."""
        self.lr_scale = 1.0
        """Of the learning rate: less after each return to the best weights."""
        self.settled = -1
        """Step whose gates have been looked at."""
        self._sampled_since: int | None = None
        self._seen: list[float] = []
        """The values of the gate's metric in the stage."""

    @property
    def stage(self) -> Stage:
        return self.plan[self.index]

    @property
    def names(self) -> list[str]:
        """Of all stages, in order."""
        return [stage.name or f"stage {number}" for number, stage in enumerate(self.plan, start=1)]

    @property
    def name(self) -> str:
        return self.names[self.index]

    def length(self) -> int:
        """Steps that the stage lasts, as far as it is known; the last one has what gates before it have saved too."""
        left, is_last = self.config.steps - self.began, self.index + 1 == len(self.plan)
        return left if is_last or not self.stage.steps else min(self.stage.steps, left)

    def step_params(self, step: int) -> StepParams:
        """The knobs of step 0, 1, ..., which is in the stage that the run is in."""
        rollout = self.config.rollout
        now = {name: self._value(name, step) for name in SCHEDULED}
        temperature, group_size = now["temperature"], now["group_size"]
        lr = self._run_lr(step) if now["lr"] is None else now["lr"]
        lr *= self._warmth(step) * self.lr_scale
        own, peak = self.config.critic.lr, peak_lr(self.config, self.index)
        step_params = StepParams(
            lr=lr,
            critic_lr=lr if own is None or own == peak else lr * (own / peak) if peak else 0.0,
            rl_coef=_of(now["rl_coef"]),
            sup_coef=_of(now["sup_coef"]),
            kl_coef=_of(now["kl_coef"]),
            entropy_coef=_of(now["entropy_coef"]),
            value_coef=_of(now["value_coef"]),
            is_critic_alone=False,
            group_size=rollout.group_size if group_size is None else round(group_size),
            sampling=self.sampling if temperature is None else replace(self.sampling, temperature=temperature),
            difficulty=_of(now["difficulty"]),
            cons_coef=_of(now["cons_coef"]),
            weight_decay=self.config.optim.weight_decay if now["weight_decay"] is None else now["weight_decay"],
        )
        if not self.config.objective.has_critic or not step_params.samples:
            return step_params
        since = step if self._sampled_since is None else min(self._sampled_since, step)
        rests = step - since < self.config.critic.warmup_steps
        return replace(step_params, is_critic_alone=rests)

    def metrics(self, step_params: StepParams) -> dict[str, float]:
        """What is not the same in every step: the knobs that some stage sets by schedule or controller, or otherwise
        than another stage."""
        changing = {name for name in SCHEDULED if len({str(getattr(stage, name)) for stage in self.plan}) > 1}
        changing |= {name for stage in self.plan for name in SCHEDULED if isinstance(getattr(stage, name), str)}
        now = {"temperature": step_params.sampling.temperature}
        said = {
            f"stage/{name}": float(now.get(name, getattr(step_params, name, math.nan)))
            for name in SCHEDULED
            if name in changing and name != "lr"
        }
        return said | ({"stage/number": self.index + 1.0} if len(self.plan) > 1 else {})

    def measure(self, step: int, metrics: Mapping[str, float], *, rows: float = 0.0) -> None:
        """After step ``step``'s update: controllers move on, and gates remember."""
        if rows and self._sampled_since is None:
            self._sampled_since = step
        for said in self._said[self.index].values():
            if not isinstance(said, Schedule) and said.metric in metrics:
                said.update(metrics[said.metric], rows=rows)
        gate = self._gates[self.index]
        if gate is not None and (value := agreed(metrics, gate.metric)) is not None:
            self._seen.append(value)

    def advance(self, step: int, known: Mapping[str, float]) -> str | None:
        """At the boundary after ``step`` steps: whether the next stage begins, and why. ``known``: metrics there are.

        A gate that did not open within the stage's steps is a warning, with what its metric was.
        """
        if self.settled >= step:
            return None
        self.settled = step
        if self.index + 1 >= len(self.plan):
            return None
        gate, name = self._gates[self.index], self.name
        if gate and gate.is_open(self._seen):
            why = f"{gate.metric} is {self._seen[-1]:.4g}, and {name} lasts until {self.stage.until}"
        elif self.stage.steps and step - self.began >= self.stage.steps:
            why = f"{name} has had its {self.stage.steps} steps"
            if gate:
                log.warning("%s", _never_opened(name, self.stage, gate, self._seen, known))
        else:
            return None
        self.index, self.began, self._seen = self.index + 1, step, []
        return f"step {step}: {self.name} begins ({why})."

    def state_dict(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "began": self.began,
            "lr_scale": self.lr_scale,
            "settled": self.settled,
            "sampled_since": self._sampled_since,
            "seen": list(self._seen),
            "controllers": [
                {name: said.state_dict() for name, said in stage.items() if not isinstance(said, Schedule)}
                for stage in self._said
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.index, self.began, self.lr_scale = int(state["index"]), int(state["began"]), float(state["lr_scale"])
        self.settled, self._sampled_since = int(state["settled"]), state["sampled_since"]
        self._seen = list(state["seen"])
        for stage, saved in zip(self._said, state["controllers"], strict=True):
            for name, numbers in saved.items():
                said = stage[name]
                assert not isinstance(said, Schedule)
                said.load_state_dict(numbers)

    def _value(self, name: str, step: int) -> float | None:
        said = self._said[self.index].get(name)
        if said is None:
            return None
        return said.at(step - self.began, length=self.length()) if isinstance(said, Schedule) else said.value

    def _run_lr(self, step: int) -> float:
        optim = self.config.optim
        return warmup_decay(
            step,
            peak=optim.lr,
            warmup=optim.warmup_steps,
            total=self.config.steps,
            decay=optim.decay,
            final_frac=optim.final_lr_frac,
        )

    def _warmth(self, step: int) -> float:
        """The share of lr in the first steps of a stage."""
        return min((step - self.began + 1) / self.stage.warmup_steps, 1.0) if self.stage.warmup_steps else 1.0


def step_params_at(config: Config, step: int) -> StepParams:
    """The knobs of step 0, 1, ... in the first stage, where it samples from the beginning."""
    stage_schedule = StageSchedule(config)
    stage_schedule._sampled_since = 0
    return stage_schedule.step_params(step)


def _of(value: float | None) -> float:
    assert value is not None, "this field may not be left out of a stage"
    return value


def _parsed(stage: Stage, where: str) -> dict[str, Schedule | Controller]:
    said: dict[str, Schedule | Controller] = {}
    for name in (field.name for field in fields(stage) if field.name in SCHEDULED):
        if (given := getattr(stage, name)) is not None:
            meant = parse_schedule(given, f"{where}.{name}")
            said[name] = make_controller(name, meant, f"{where}.{name}") if isinstance(meant, AdaptiveSpec) else meant
    return said


def agreed(metrics: Mapping[str, float], name: str) -> float | None:
    """The mean over the ranks that have a number there, so that all go the same way; None where none has."""
    value = metrics.get(name, math.nan)
    is_there = math.isfinite(value)
    total, count = dist.all_sum(torch.tensor([value if is_there else 0.0, float(is_there)], dtype=torch.float64))
    return float(total / count) if count else None


def nearest_metric(name: str, known: Mapping[str, float]) -> str:
    """The metric that was probably meant; nothing where there is none."""
    return next(iter(difflib.get_close_matches(name, [other for other in known if other != name], 1)), "")


def _never_opened(name: str, stage: Stage, gate: Gate, seen: Sequence[float], known: Mapping[str, float]) -> str:
    what = f"{gate.metric} was {seen[-1]:.4g} at last" if seen else f"{gate.metric} was never measured"
    near = "" if seen else nearest_metric(gate.metric, known)
    hint = f" Did you mean {near}?" if near else ""
    return f"{name} ends after its {stage.steps} steps, and its gate {stage.until!r} never opened: {what}.{hint}"
