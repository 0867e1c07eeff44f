"""Values that change from step to step: schedules, and controllers that follow a metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

Decay = Literal["constant", "linear", "cosine"]

SYNTAX = "a number, linear:FROM,TO or linear:FROM,TO,STEPS, cosine:FROM,TO or steps:FROM,50=X,100=Y"


def warmup_decay(
    step: int, *, peak: float, warmup: int, total: int, decay: Decay, final_frac: float = 0.0
) -> float:
    """Value at step 0, 1, ..., total - 1: linear warm-up, then constant, linear or cosine decay.

    Warm-up is peak (step + 1) / warmup, so the first step already learns. Decay goes to
    ``final_frac * peak``, which the step after the last would reach.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if decay == "constant":
        return peak
    return peak * (final_frac + (1 - final_frac) * _remaining(step - warmup, total - warmup, decay))


def _remaining(step: int, steps: int, kind: str) -> float:
    """Remaining fraction of a linear or cosine decay: 1 at step 0, 0 from step ``steps`` on."""
    done = min(step / max(steps, 1), 1.0)
    return 1 - done if kind == "linear" else (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True)
class Schedule:
    """A value that is a function of the step."""

    initial: float
    final: float
    kind: str = "steps"
    """linear, cosine or steps; without milestones, steps is a constant."""
    steps: int = 0
    """Steps from initial to final; 0 for the length of the stage."""
    milestones: tuple[tuple[int, float], ...] = ()
    """For kind "steps": from this step on, this value."""

    def at(self, step: int, *, length: int) -> float:
        """Value at step 0, 1, ... of a stage of ``length`` steps. Step ``steps`` is the first at
        ``final``."""
        if self.kind == "steps":
            reached = [value for start, value in self.milestones if step >= start]
            return reached[-1] if reached else self.initial
        # Without steps of its own, a schedule spans its stage.
        left = _remaining(step, self.steps or length, self.kind)
        if left in (0, 1):  # the ends exactly: final + (initial - final) is rounded
            return self.initial if left == 1 else self.final
        return self.final + (self.initial - self.final) * left

    @property
    def values(self) -> tuple[float, ...]:
        """Initial, final and milestone values. All others lie between them."""
        return (self.initial, self.final, *(value for _, value in self.milestones))


@dataclass
class Controller:
    """A value that follows a metric. Its fields are numbers, which a checkpoint holds."""

    metric: ClassVar[str]
    """Name of the metric that ``update`` is called with."""
    value: float
    target: float

    @property
    def values(self) -> tuple[float, ...]:
        """What is known of its values in advance."""
        return (self.value,)

    def at(self, step: int, *, length: int) -> float:
        """The value now, at any step."""
        return self.value

    def update(self, measured: float, *, rows: float) -> None:
        """Follow the metric of a step of ``rows`` samples. A metric that is not finite leaves the
        value."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        vars(self).update({name: float(state[name]) for name in vars(self)})


@dataclass
class AdaptiveKl(Controller):
    """KL coefficient that holds the KL to the reference, in nats per action, near a target.

    coef <- coef (1 + clip(kl / target - 1, -0.2, 0.2) rows / horizon). Ziegler et al. 2019 (arXiv
    1909.08593), section 2.2. A step of more rows than the horizon counts as one horizon: beyond
    five, the coefficient would turn negative.
    """

    metric: ClassVar[str] = "kl/ref_nats"
    horizon: float = 10_000.0

    def update(self, measured: float, *, rows: float) -> None:
        if math.isfinite(measured):
            error = min(max(measured / self.target - 1, -0.2), 0.2)
            self.value = self.value * (1 + error * min(rows / self.horizon, 1.0))


@dataclass
class AdaptiveEntropy(Controller):
    """Entropy coefficient that grows while the entropy, in nats per action, is below a target.

    c <- max(c + delta, 0) where the entropy is below the target, max(c - delta, 0) where it is not.
    The value is c where the last entropy was at or below the target, else 0; before the first step
    it is c. He et al. 2025 (Skywork-OR1, arXiv 2505.22312), section 4.3.
    """

    metric: ClassVar[str] = "entropy/mean_nats"
    delta: float = 0.005
    idle: float = 0.0
    """c while the value is 0."""

    def update(self, measured: float, *, rows: float) -> None:
        if math.isfinite(measured):
            coef = max(
                self.value + self.idle + (self.delta if measured < self.target else -self.delta),
                0.0,
            )
            self.value, self.idle = (coef, 0.0) if measured <= self.target else (0.0, coef)


CONTROLLERS = {
    "kl_coef": (AdaptiveKl, "horizon"),
    "entropy_coef": (AdaptiveEntropy, "delta"),
}
"""Controller of each adaptive field of a stage, and its setting besides the target."""


def parse_schedule(value: float | str, field: str = "") -> Schedule | Controller:
    """Parse a number or a string of a stage's field: ``0.1``, ``linear:1,0``, ``steps:1,50=0.5``,
    ``adaptive:0.1,target=6``; ValueError says what is wrong."""
    kind, _, rest = str(value).strip().partition(":")
    first, *others = rest.split(",")
    try:
        if kind in ("linear", "cosine"):
            final, *length = others
            steps = [*map(int, length)] or [0]
            if len(length) > 1 or (length and steps[0] < 1):
                raise ValueError
            return Schedule(float(first), float(final), kind, steps[0])
        if kind not in ("adaptive", "steps"):
            return Schedule(float(value), float(value))
        initial, pairs = float(first), [word.split("=") for word in others]
        if kind == "adaptive":
            settings = {name.strip(): float(number) for name, number in pairs}
        else:
            milestones = tuple((int(step), float(number)) for step, number in pairs)
            starts = [0, *(start for start, _ in milestones)]
            if len(starts) == 1 or starts != sorted(set(starts)):
                raise ValueError
            return Schedule(initial, milestones[-1][1], milestones=milestones)
    except ValueError:
        raise ValueError(f"is not understood; it needs {SYNTAX}") from None
    return _controller(field, initial, settings)


def _controller(field: str, initial: float, settings: dict[str, float]) -> Controller:
    if field not in CONTROLLERS:
        raise ValueError(f"cannot be adaptive; {', '.join(CONTROLLERS)} can")
    controller, option = CONTROLLERS[field]
    if "target" not in settings or not settings.keys() <= {"target", option}:
        raise ValueError(f"is not understood; it needs adaptive:FROM,target=X,{option}=Y")
    positive = dict(settings)
    if field == "kl_coef":  # it is multiplied: from 0 it never moves
        positive["initial"] = initial
    if not all(0 < value < math.inf for value in positive.values()):
        raise ValueError("is out of range; the settings of adaptive need to be above 0")
    return controller(initial, **settings)
