"""Coefficients that follow what the last step measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from gruppo.core.schedules import Adaptive, adaptive_coef
from gruppo.types import GruppoError


class Controller(Protocol):
    """A value, and the metric that moves it. Its numbers are its fields, which a save holds."""

    reads: ClassVar[str]

    @property
    def value(self) -> float: ...

    def update(self, measured: float, *, rows: float) -> None:
        """What a step of ``rows`` samples measured; NaN leaves the value."""
        ...

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: Mapping[str, float]) -> None: ...


class _Numbers:
    """Saves and restores all fields."""

    def state_dict(self) -> dict[str, float]:
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        vars(self).update({name: float(state[name]) for name in vars(self)})


@dataclass
class AdaptiveKl(_Numbers):
    """A KL coefficient that holds the KL to the reference, in nats an action, near a target; see ``adaptive_coef``."""

    reads: ClassVar[str] = "kl/ref_nats"
    coef: float
    target: float
    horizon: float = 10_000.0

    @property
    def value(self) -> float:
        return self.coef

    def update(self, measured: float, *, rows: float) -> None:
        self.coef = adaptive_coef(self.coef, measured, target=self.target, horizon=self.horizon, n=rows)


@dataclass
class AdaptiveEntropy(_Numbers):
    """An entropy coefficient that grows while the entropy, in nats an action, is below a target, and else is 0.

    c <- max(c + delta, 0) where the entropy is below the target, max(c - delta, 0) where it is not; c acts only where
    the last entropy was at or below the target. He et al. 2025 (Skywork-OR1, arXiv 2505.22312), section 4.3.
    """

    reads: ClassVar[str] = "entropy/mean_nats"
    coef: float
    target: float
    delta: float = 0.005
    measured: float = -math.inf
    """The last entropy; before the first step the coefficient acts."""

    @property
    def value(self) -> float:
        return self.coef if self.measured <= self.target else 0.0

    def update(self, measured: float, *, rows: float) -> None:
        if math.isfinite(measured):
            self.coef = max(self.coef + (self.delta if measured < self.target else -self.delta), 0.0)
            self.measured = measured


@dataclass
class AdaptiveDifficulty(_Numbers):
    """The share of the prompts that are drawn, the easiest first, which grows while the reward is above a target.

    level <- min(max(level + rate (reward - target), first), 1).
    """

    reads: ClassVar[str] = "reward/mean"
    level: float
    target: float
    rate: float = 0.05
    first: float = -1.0
    """Never below this; where it began, unless said otherwise."""

    def __post_init__(self) -> None:
        if self.first < 0:
            self.first = self.level

    @property
    def value(self) -> float:
        return self.level

    def update(self, measured: float, *, rows: float) -> None:
        if math.isfinite(measured):
            self.level = min(max(self.level + self.rate * (measured - self.target), self.first), 1.0)


CONTROLLERS = {"kl_coef": AdaptiveKl, "entropy_coef": AdaptiveEntropy, "difficulty": AdaptiveDifficulty}
"""By the field of a stage that may be adaptive."""
_SETTINGS = {"kl_coef": ("target", "horizon"), "entropy_coef": ("target", "delta"), "difficulty": ("target", "rate")}


def controller(field: str, adaptive: Adaptive, name: str) -> Controller:
    """A new controller of a stage's field. ``name``: how the refusal calls the field."""
    if field not in CONTROLLERS:
        raise GruppoError(
            f"{name} cannot be adaptive; {', '.join(CONTROLLERS)} can. Give it a schedule, such as linear:FROM,TO."
        )
    settings, known = dict(adaptive.settings), _SETTINGS[field]
    if "target" not in settings or not set(settings) <= set(known):
        given = ", ".join(settings) or "none"
        raise GruppoError(
            f"{name}: adaptive takes {' and '.join(known)}, and needs target; it has {given}. Write "
            f"adaptive:{adaptive.first:g},target=X,{known[1]}=Y."
        )
    for setting, value in settings.items():
        is_reward = field == "difficulty" and setting == "target"
        if not (math.isfinite(value) if is_reward else 0 < value < math.inf):
            needs = "a number" if is_reward else "a number above 0"
            raise GruppoError(f"{name}: {setting}={value:g} is out of range; it needs {needs}. Set {setting}=X.")
    if field == "kl_coef" and not adaptive.first > 0:
        raise GruppoError(
            f"{name}: an adaptive coefficient is multiplied, and from {adaptive.first:g} it never moves. Begin above 0:"
            f" adaptive:0.05,target={settings['target']:g}."
        )
    return CONTROLLERS[field](adaptive.first, **settings)
