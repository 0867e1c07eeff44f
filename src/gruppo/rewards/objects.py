"""Objects with the Reward protocol among functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from gruppo.protocols import Reward
from gruppo.rewards.failures import Answer, Outcome, score_rows
from gruppo.rewards.functions import checked_timeout, entries_of
from gruppo.rewards.steps import Read, StepScores
from gruppo.timeouts import Unanswered
from gruppo.types import DataError, Rollouts


class ObjectReward:
    """An object with the Reward protocol, under the same rules for failures as a function.

    It returns [B]; or with an attribute ``gives_steps = True`` [B, T]: a score at each action that ends a step, NaN
    elsewhere.
    """

    is_async = False

    def __init__(self, reward: Reward, timeout_s: float | None) -> None:
        self.reward, self.name, self.timeout_s = reward, reward.name, checked_timeout(timeout_s)
        self.gives_steps = bool(getattr(reward, "gives_steps", False))
        self.read: Read | None = None

    def asks(self, column: str) -> bool:
        """Whether the object says that it reads a column."""
        return column in getattr(self.reward, "columns", ())

    def check(self, columns: Collection[str]) -> None:
        check = getattr(self.reward, "check", None)
        if check is not None:
            check(columns)

    def score(self, rollouts: Rollouts, *, rows: Sequence[int] | None, step: int, max_steps: int) -> Outcome:
        rows = range(len(rollouts)) if rows is None else rows
        return score_rows(partial(self._ask, rollouts), rows, len(rollouts), reward=self.name, timeout_s=self.timeout_s)

    def _ask(self, rollouts: Rollouts, rows: Sequence[int]) -> Answer:
        raw = self.reward(rollouts if len(rows) == len(rollouts) else rollouts.take(list(rows)))
        if self.gives_steps:
            return Answer(self._steps(raw, rollouts, rows))
        if isinstance(raw, Tensor) and raw.ndim == 2:
            raise DataError(
                f"reward {self.name!r} returned {tuple(raw.shape)}: a score for each action, which needs to be said"
                " before. Give the object gives_steps = True, or return one score for each row, [B]."
            )
        return Answer([None if value != value else value for value in entries_of(raw, len(rows))])

    def _steps(self, raw: Any, rollouts: Rollouts, rows: Sequence[int]) -> list[StepScores | Unanswered]:
        """[rows, T]: NaN where no step ends. What is not of the policy's own choosing is NaN or 0."""
        mask = rollouts.mask[list(rows)]
        if not isinstance(raw, Tensor) or raw.shape != mask.shape:
            what = f"shape {tuple(raw.shape)}" if isinstance(raw, Tensor) else f"a {type(raw).__name__}"
            raise Unanswered(
                "count", f"returned {what}; of {tuple(mask.shape)} actions it must score each, NaN for none"
            )
        raw = raw.detach().cpu()
        is_step = ~raw.isnan() & mask
        astray = (~mask & ~raw.isnan() & (raw != 0)).any(dim=1).tolist()
        why = Unanswered("exception", "has a score at an action that the policy did not choose; it must be NaN or 0")
        columns = [own.nonzero()[:, 0] for own in is_step]
        return [
            why if is_astray else StepScores(at.tolist(), row[at].tolist())
            for row, at, is_astray in zip(raw, columns, astray, strict=True)
        ]
