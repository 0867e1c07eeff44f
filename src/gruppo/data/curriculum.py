"""Easy prompts first: a stream without the prompts above a level of difficulty."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from gruppo.data.source import SourceWrapper, nearest
from gruppo.types import DataError, Prompt

PROBED = 1000
"""Draws of an endless source from which the quantiles of the difficulty are computed."""
MAX_PASSED_OVER = 10_000
"""Consecutive prompts that are too hard and end the run: the level leaves next to nothing."""


class Curriculum(SourceWrapper):
    """A source whose ``take`` passes over prompts that are harder than ``level`` allows.

    ``level`` is a share of the prompts, easiest first, by the number in ``column``; higher is harder. All prompts as
    hard as the hardest of that share belong to it too, so a level is never empty, and has more than its share where
    many prompts are equally hard. The share is exact over the training items of a finite source, and over the first
    ``PROBED`` draws of an endless one. A prompt that is passed over is not deferred: it comes again in the next epoch.
    Held-out prompts do not depend on the level. The level itself is a parameter of the stage, not part of the state.
    """

    def __init__(self, source: Any, column: str) -> None:
        super().__init__(source)
        self.column, self.level = column, 1.0
        self.passed_over = 0
        """Prompts that were too hard, since the run was started or resumed."""
        if self.columns is not None and column not in self.columns:
            columns = f"its columns are {', '.join(map(repr, self.columns))}{nearest(column, self.columns)}"
            text = "Name one with a number, higher is harder, with --prompts.difficulty-column."
            raise DataError(f"{self.name} has no column {column!r}; {columns}. {text}")
        before = source.state_dict()
        self._sorted = sorted(map(self.difficulty, source.take(self.epoch_size or PROBED)))
        source.load_state_dict(before)
        self._digest = hashlib.sha256(json.dumps(self._sorted).encode()).hexdigest()

    @property
    def hardest(self) -> float:
        """The greatest difficulty that the level allows; infinite at level 1."""
        if self.level >= 1:
            return math.inf
        # the quantile itself, not interpolated: a level always contains at least its hardest prompt
        return self._sorted[max(math.ceil(self.level * len(self._sorted)), 1) - 1]

    def difficulty(self, prompt: Prompt) -> float:
        """The number in the prompt's column."""
        value = prompt.meta.get(self.column)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            text = "every prompt needs a difficulty. Fix the data, or set another --prompts.difficulty-column."
            problem = f"{self.column}={value!r:.60}, which is not a number"
            raise DataError(f"prompt {prompt.id!r} of {self.name} has {problem}; {text}")
        return float(value)

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts of the stream that are not too hard."""
        prompts: list[Prompt] = []
        hardest, limit, too_hard = self.hardest, max(MAX_PASSED_OVER, 2 * self.epoch_size), 0
        while len(prompts) < n:
            prompt = self.source.take(1)[0]  # one at a time, so that the position stays right behind the last prompt
            if self.difficulty(prompt) <= hardest:
                prompts.append(prompt)
                too_hard = 0
                continue
            self.passed_over += 1
            too_hard += 1
            if too_hard >= limit:
                text = f"above {hardest:g}, the hardest at difficulty={self.level:g}. Raise the stage's difficulty."
                raise DataError(f"{limit} prompts of {self.name} in a row have {self.column} {text}")
        return prompts

    def state_dict(self) -> dict[str, Any]:
        return {"source": self.source.state_dict(), "column": self.column, "difficulties": self._digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if (state.get("column"), state.get("difficulties")) != (self.column, self._digest):
            text = f"the column was {state.get('column')!r} and is {self.column!r}, or its numbers have changed"
            advice = "Resume with the same data and column, or start a new run."
            raise DataError(f"the difficulties of {self.name} differ from those of the saved run: {text}. {advice}")
        self.source.load_state_dict(state["source"])
