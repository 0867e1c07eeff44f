"""What happens when a reward call fails: only the rows that fail are unscored, and none of them is scored 0."""

from __future__ import annotations

import math
import queue
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gruppo.rewards.steps import StepScores
from gruppo.timeouts import Call, Kind, Unanswered, abandoned_count, start, within

SAME_ERRORS = 4
"""Single rows that repeat the error of the whole batch before the remaining rows count as failed too."""
POOL_THREADS = 8
MAX_ABANDONED = 32
"""With so many calls past their deadline still running, rows are not tried again."""
_MAX_FLOAT32 = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Failure:
    """A row that a reward was asked to score and could not."""

    row: int
    reward: str
    kind: Kind
    message: str


@dataclass(frozen=True)
class Answer:
    """What one call gave for its rows."""

    values: Sequence[Any]
    """A number or None; ``StepScores`` of a reward of steps; or why there is none."""
    metrics: Sequence[tuple[str, float]] = ()
    extras: Sequence[tuple[str, Sequence[Any]]] = ()


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one reward gave for all rows."""

    rewards: Float[Tensor, "B"]
    """float64; NaN = not scored. Of a reward of steps their sum."""
    failures: tuple[Failure, ...]
    metrics: dict[str, list[float]]
    extras: dict[str, tuple[Any, ...]]
    steps: Mapping[int, StepScores] = field(default_factory=dict)
    """By row, finite or None."""

    @property
    def failed(self) -> Bool[Tensor, "B"]:
        """The rows that failed, as opposed to those for which the reward returned None."""
        failed = torch.zeros(len(self.rewards), dtype=torch.bool)
        failed[[failure.row for failure in self.failures]] = True
        return failed


Ask = Callable[[Sequence[int]], Answer]
"""Scores the given rows; raises whatever the reward raises, or Unanswered."""


def score_rows(ask: Ask, rows: Sequence[int], size: int, *, reward: str, timeout_s: float | None) -> Outcome:
    """Ask for all rows at once, and where that fails for each row alone. ``size`` is B; other rows stay NaN.

    After a wrong count nobody knows which number belongs to which row: all of them fail.
    """
    sheet = _Sheet(reward, size)
    if not rows:
        return sheet.outcome()
    try:
        sheet.fill(rows, within(partial(ask, rows), timeout_s))
    except Unanswered as error:
        if len(rows) == 1 or error.kind == "count":  # alone, a function that gives one number for all would pass
            sheet.fail(rows, error)
        elif error.kind == "timeout" and timeout_s is not None:
            _retry_in_pool(ask, rows, sheet, timeout_s)
        else:
            _retry_one_by_one(ask, rows, sheet, error, timeout_s)
    return sheet.outcome()


def _retry_one_by_one(ask: Ask, rows: Sequence[int], sheet: _Sheet, first: Unanswered, timeout_s: float | None) -> None:
    """Each row alone, in order, all of them within one further timeout; one row gets half of the time left at most."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    same = 0
    for n, row in enumerate(rows):
        if same == SAME_ERRORS:
            return sheet.fail(rows[n:], first)
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return sheet.fail(rows[n:], _not_reached(timeout_s))
        try:
            sheet.fill([row], within(partial(ask, [row]), None if left is None else left / 2))
        except Unanswered as error:
            sheet.fail([row], error)
            same += error.identity == first.identity and same == n


def _retry_in_pool(ask: Ask, rows: Sequence[int], sheet: _Sheet, timeout_s: float) -> None:
    """Each row alone, a few at a time, all of them within one further timeout.

    A call that runs for more than a quarter of it gives its place to the next row, so that hung rows starve nobody.
    """
    if abandoned_count() >= MAX_ABANDONED:
        return sheet.fail(rows, Unanswered("timeout", f"not tried again: {abandoned_count()} calls are still hanging"))
    deadline, patience = time.monotonic() + timeout_s, timeout_s / 4
    waiting, running, finished = deque(rows), dict[int, Call](), queue.SimpleQueue[int]()
    while (waiting or running) and (now := time.monotonic()) < deadline:
        busy = sum(now - call.started < patience for call in running.values())
        while waiting and busy < POOL_THREADS:
            row = waiting.popleft()
            running[row] = start(partial(ask, [row]), on_done=partial(finished.put, row))
            busy += 1
        try:
            row = finished.get(timeout=min(deadline - now, patience / 4))
        except queue.Empty:
            continue
        _record(sheet, row, running.pop(row))
    for row, call in running.items():
        call.abandon()
        sheet.fail([row], Unanswered("timeout", f"no answer within {timeout_s:.3g} s, alone or in the batch"))
    sheet.fail(list(waiting), _not_reached(timeout_s))


def _record(sheet: _Sheet, row: int, call: Call) -> None:
    try:
        sheet.fill([row], call.result())
    except Unanswered as error:
        sheet.fail([row], error)


def _not_reached(timeout_s: float | None) -> Unanswered:
    return Unanswered("timeout", f"not reached: other rows used up the further {timeout_s:.3g} s")


class _Sheet:
    """What is known of every row so far."""

    def __init__(self, reward: str, size: int) -> None:
        self.reward = reward
        self.rewards = torch.full((size,), float("nan"), dtype=torch.float64)
        self.failures: dict[int, Failure] = {}
        self.metrics: dict[str, list[float]] = {}
        self.extras: dict[str, list[Any]] = {}
        self.steps: dict[int, StepScores] = {}

    def fill(self, rows: Sequence[int], answer: Answer) -> None:
        for row, value in zip(rows, answer.values, strict=True):
            try:
                self._fill_row(row, value)
            except Unanswered as error:
                self.fail([row], error)
        for name, number in answer.metrics:
            self.metrics.setdefault(name, []).append(number)
        for column, values in answer.extras:
            whole = self.extras.setdefault(column, [None] * len(self.rewards))
            for row, value in zip(rows, values, strict=True):
                whole[row] = value

    def _fill_row(self, row: int, value: Any) -> None:
        if isinstance(value, Unanswered):
            raise value
        if not isinstance(value, StepScores):
            self.rewards[row] = as_reward(value)
            return
        scores = [as_reward(score) for score in value.scores]
        known = [score for score in scores if score == score]
        self.rewards[row] = as_reward(math.fsum(known) if known else None)
        self.steps[row] = StepScores(value.columns, scores)

    def fail(self, rows: Sequence[int], error: Unanswered) -> None:
        for row in rows:
            self.failures[row] = Failure(row, self.reward, error.kind, error.message)

    def outcome(self) -> Outcome:
        return Outcome(
            rewards=self.rewards,
            failures=tuple(self.failures[row] for row in sorted(self.failures)),
            metrics=self.metrics,
            extras={column: tuple(values) for column, values in self.extras.items()},
            steps=self.steps,
        )


def as_reward(value: Any) -> float:
    """One entry of an answer: NaN for None; Unanswered for what is no finite float32."""
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1):
        value = value.item()
    if value is None:
        return float("nan")
    if not isinstance(value, (int, float)):
        hint = "; mark a function that scores each step with gruppo.rewards.step_reward" * isinstance(value, list)
        raise Unanswered(
            "exception", f"returned {value!r:.60} ({type(value).__name__}); each entry is a number or None{hint}"
        )
    if not abs(value) <= _MAX_FLOAT32:
        raise Unanswered("not_finite", f"returned {value!r:.60}; a reward is a finite float32, or None for not scored")
    return float(value)
