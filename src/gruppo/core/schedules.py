"""Step to value: schedules, and controllers that read what a step measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from gruppo.types import GruppoError

Decay = Literal["constant", "linear", "cosine"]
Kind = Literal["constant", "linear", "cosine", "steps"]

FORMS = "a number, linear:FROM,TO or linear:FROM,TO,STEPS, cosine:... alike, or steps:FROM,50=X,100=Y"


def warmup_decay(step: int, *, peak: float, warmup: int, total: int, decay: Decay, final_frac: float = 0.0) -> float:
    """The value at step 0, 1, ..., total - 1.

    Rises linearly over ``warmup`` steps, peak (step + 1) / warmup, so that the first step already learns; then stays,
    or falls to ``final_frac * peak`` along a line or a half cosine, which the step after the last would reach.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if decay == "constant":
        return peak
    return peak * (final_frac + (1 - final_frac) * _left(step - warmup, total - warmup, decay))


def _left(step: int, over: int, kind: Literal["linear", "cosine"]) -> float:
    """From 1 at step 0 to 0 at step ``over`` and after."""
    done = min(step / max(over, 1), 1.0)
    return 1 - done if kind == "linear" else (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True)
class Schedule:
    """A value that changes with the step alone."""

    kind: Kind
    first: float
    last: float
    over: int = 0
    """Steps from first to last; 0 for those of the stage."""
    changes: tuple[tuple[int, float], ...] = ()
    """Of "steps": from this step on, this value."""

    def at(self, step: int, *, length: int) -> float:
        """The value at step 0, 1, ... of a stage of ``length`` steps. Step ``over`` would be the first at ``last``."""
        if self.kind == "constant":
            return self.first
        if self.kind == "steps":
            return next((value for start, value in reversed(self.changes) if step >= start), self.first)
        left = _left(step, self.over or length, self.kind)
        return self.first if left == 1 else self.last if left == 0 else self.last + (self.first - self.last) * left

    @property
    def values(self) -> tuple[float, ...]:
        """What it begins with, ends with, and changes to: all others are between them."""
        return (self.first, self.last, *(value for _, value in self.changes))


@dataclass(frozen=True)
class Adaptive:
    """What a controller was set to: where it begins, and its settings by name."""

    first: float
    settings: tuple[tuple[str, float], ...]

    @property
    def values(self) -> tuple[float, ...]:
        return (self.first,)


def parse(given: float | str, name: str) -> Schedule | Adaptive:
    """What a number or a text means: ``0.1``, ``linear:1,0``, ``steps:1,50=0.5``, ``adaptive:0.1,target=6``.

    ``name``: of the field, for the refusal of what is not understood.
    """
    if not isinstance(given, str):
        return Schedule("constant", float(given), float(given))
    kind, _, rest = given.strip().partition(":")
    words = [word.strip() for word in rest.split(",")] if rest else []
    try:
        if kind in ("linear", "cosine"):
            return _between("linear" if kind == "linear" else "cosine", words)
        if kind == "steps":
            return _in_steps(words)
        if kind == "adaptive":
            return Adaptive(float(words[0]), tuple(map(_setting, words[1:])))
        value = float(given)
        return Schedule("constant", value, value)
    except (ValueError, IndexError) as error:
        raise GruppoError(f"{name}={given!r} is not understood ({error}); it needs {FORMS}.") from None


def _between(kind: Literal["linear", "cosine"], words: list[str]) -> Schedule:
    if len(words) not in (2, 3):
        raise ValueError(f"{kind} has {len(words)} numbers")
    over = int(words[2]) if len(words) == 3 else 0
    if len(words) == 3 and over < 1:
        raise ValueError(f"{over} steps")
    return Schedule(kind, float(words[0]), float(words[1]), over)


def _in_steps(words: list[str]) -> Schedule:
    changes = tuple((int(step), value) for step, value in map(_setting, words[1:]))
    if not changes or [step for step, _ in changes] != sorted({step for step, _ in changes}) or changes[0][0] < 1:
        raise ValueError("the steps need to rise from 1")
    return Schedule("steps", float(words[0]), changes[-1][1], changes=changes)


def _setting(word: str) -> tuple[str, float]:
    name, equals, value = word.partition("=")
    if not equals:
        raise ValueError(f"{word!r} has no =")
    return name.strip(), float(value)


def adaptive_coef(coef: float, kl: float, *, target: float, horizon: float, n: float) -> float:
    """The KL coefficient after a step that drew ``n`` samples at a KL of ``kl`` nats.

    coef (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon): it grows while the KL is above its target, by at most a
    fifth in ``horizon`` samples. Ziegler et al. 2019 (arXiv 1909.08593), section 2.2. A step of more samples than the
    horizon counts as one horizon: beyond five the coefficient would turn negative. A KL that is not finite, as of a
    step that learned from nothing, leaves it.
    """
    if not math.isfinite(kl):
        return coef
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * min(n / horizon, 1.0))
