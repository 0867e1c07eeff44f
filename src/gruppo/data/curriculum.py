"""Easy prompts first: a stream that leaves out what is harder than a level."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from gruppo.data.errors import nearest
from gruppo.protocols import PromptSource
from gruppo.types import DataError, Prompt

PROBED = 1000
"""Draws of a source without an end from which the level's quantiles are taken."""
SEARCHED = 10_000
"""So many prompts in a row that are too hard end the run: a level that leaves next to nothing."""


class Curriculum:
    """A source whose ``take`` passes over prompts that are harder than ``level`` allows.

    ``level`` is a share of the prompts, the easiest first, by the number in ``column``, higher is harder. All prompts
    as hard as the hardest of that share belong to it too, so that a level always has some, and may have more than its
    share where many are equally hard. Of rows the share is exact, over all of those that are trained on; of a source
    without an end, such as arithmetic, it is over its first ``PROBED`` draws. A prompt that is passed over is not put
    off: of rows it comes again in the next epoch. Held-out prompts are all of them, whatever the level. The level
    itself is a knob of the run's stage and not of the state.
    """

    def __init__(self, source: PromptSource, column: str) -> None:
        self.source, self.column, self.level = source, column, 1.0
        self.name = getattr(source, "name", type(source).__name__)
        _check_column(column, getattr(source, "columns", None), self.name)
        self.passed_over = 0
        """Prompts that were too hard, since the run was started or resumed."""
        self._epoch: int = getattr(source, "epoch_size", 0)
        before = source.state_dict()
        self._sorted = sorted(map(self.difficulty, source.take(self._epoch or PROBED)))
        source.load_state_dict(before)
        self._digest = hashlib.sha256(json.dumps(self._sorted).encode()).hexdigest()

    def __getattr__(self, name: str) -> Any:
        """What a source may have beside its stream: columns, held_out, all_prompts, fingerprint."""
        if name == "source":  # not there yet: copies and pickles ask before __init__
            raise AttributeError(name)
        return getattr(self.source, name)

    @property
    def hardest(self) -> float:
        """The hardest number that the level allows. At level 1 none is too hard, seen before or not."""
        if self.level >= 1:
            return math.inf
        return self._sorted[max(math.ceil(self.level * len(self._sorted)), 1) - 1]

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts of the stream that are not too hard."""
        return [self._next() for _ in range(n)]

    def difficulty(self, prompt: Prompt) -> float:
        """The number in the prompt's column."""
        value = prompt.meta.get(self.column)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise DataError(
                f"prompt {prompt.id!r} of {self.name} has {self.column}={value!r:.60}, which is not a number; a "
                "difficulty is one, in every prompt, higher is harder. Mend the data, or name another column with "
                "--prompts.difficulty-column."
            )
        return float(value)

    def state_dict(self) -> dict[str, Any]:
        return {"source": self.source.state_dict(), "column": self.column, "difficulties": self._digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if (state.get("column"), state.get("difficulties")) != (self.column, self._digest):
            raise DataError(
                f"the difficulties of {self.name} are not those that the run began with: the column was "
                f"{state.get('column')!r} and is {self.column!r}, or its numbers are others. Resume with the data and "
                "column of before, or start a new run."
            )
        self.source.load_state_dict(state["source"])

    def _next(self) -> Prompt:
        hardest, limit = self.hardest, max(SEARCHED, 2 * self._epoch)
        for _ in range(limit):
            prompt = self.source.take(1)[0]
            if self.difficulty(prompt) <= hardest:
                return prompt
            self.passed_over += 1
        raise DataError(
            f"{limit} prompts of {self.name} in a row have {self.column} above {hardest:g}, the hardest at "
            f"difficulty={self.level:g}. Raise the stage's difficulty, or use data with more easy prompts."
        )


def _check_column(column: str, columns: tuple[str, ...] | None, name: str) -> None:
    if columns is not None and column not in columns:
        raise DataError(
            f"{name} has no column {column!r}; its columns are {', '.join(map(repr, columns))}"
            f"{nearest(column, columns)}. Name one with a number, higher is harder, with --prompts.difficulty-column."
        )
