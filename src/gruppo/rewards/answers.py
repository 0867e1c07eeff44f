"""What one call of a reward function returns and logs. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gruppo.timeouts import CallError


@dataclass(frozen=True)
class TrainerState:
    """Progress of the run, as TRL's reward functions read it."""

    global_step: int = 0
    max_steps: int = 0
    epoch: float | None = None
    """Passes over the training prompts before this step; None where the data have no end."""


@dataclass
class Answer:
    """Values that one call returned and logged for its rows."""

    size: int | None = None  # None: the number of values is checked elsewhere
    values: Sequence[Any] = ()
    """For each row a number or None, ``StepScores``, or the error that makes it a failure."""
    metrics: list[tuple[str, float]] = field(default_factory=list)
    extras: list[tuple[str, Sequence[Any]]] = field(default_factory=list)

    def log_metric(self, name: str, value: float) -> None:
        self.metrics.append((name, float(value)))

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        values = list(values)
        if self.size is not None and len(values) != self.size:
            got = f"got {len(values)} values for {self.size} completions"
            raise ValueError(f"log_extra({column!r}) {got}")
        self.extras.append((column, values))


def as_list(returned: Any, size: int | None) -> list[Any]:
    """Convert the returned values to a list of ``size`` values, if that is known; else
    CallError."""
    is_array = hasattr(returned, "tolist") and hasattr(returned, "ndim")  # of numpy or torch
    if is_array and returned.ndim != 1:
        got = f"returned shape {tuple(returned.shape)}"
        raise CallError("count", f"{got}; it needs one number per completion")
    if not is_array and not isinstance(returned, (list, tuple)):
        kind = type(returned).__name__
        need = "it needs a list of one number per completion"
        raise CallError("exception", f"returned {returned!r:.60} ({kind}); {need}", kind)
    if size is not None and len(returned) != size:
        raise CallError("count", f"returned {len(returned)} rewards for {size} completions")
    return returned.tolist() if is_array else list(returned)
