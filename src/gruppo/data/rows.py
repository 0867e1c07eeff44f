"""An endless, resumable stream of prompts over a list of rows."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from gruppo.data.cursor import Cursor
from gruppo.data.errors import check_fraction, nearest
from gruppo.data.messages import checked_inputs
from gruppo.data.split import hash_unit, prompt_key
from gruppo.seeds import generator_at
from gruppo.types import DataError, Prompt

TARGET_COLUMNS = ("answer", "target", "solution", "label")
PROMPT_LIKE = ("question", "problem", "instruction", "query", "text", "input", "messages")


class RowSource:
    """Prompts from rows; each epoch is a new order, and held-out prompts never enter the stream.

    ``target_column``: the first of answer, target, solution and label that there is, unless named. ``meta`` holds every
    column, those of prompt and target included, so that reward functions find them under the data set's own names.
    ``held_out_fraction`` keeps that share of all prompts for evaluation, and above 0 one of two or more different
    prompts in any case. It goes by the prompt's content, so duplicates fall on one side.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        seed: int,
        prompt_column: str = "prompt",
        target_column: str | None = None,
        held_out_fraction: float = 0.1,
        name: str = "the data",
    ) -> None:
        self.name, self.seed, self.prompt_column = name, seed, prompt_column
        self._rows = _checked_rows(rows, name)
        self.columns = tuple(dict.fromkeys(column for row in self._rows for column in row))
        for column in (prompt_column, target_column):
            if column is not None:
                _check_column(column, self.columns, name)
        self.target_column = target_column or next((c for c in TARGET_COLUMNS if c in self.columns), None)
        self._split(held_out_fraction)
        self._epoch, self._order = -1, torch.empty(0)

    @property
    def epoch_size(self) -> int:
        """Draws in which each row that is trained on comes once."""
        return len(self._train)

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts of the stream."""
        first = self._cursor.position
        self._cursor.position += n
        return [self._drawn(draw) for draw in range(first, first + n)]

    def held_out(self, n: int) -> list[Prompt]:
        """At most n evaluation prompts, the same ones in the same order in every run."""
        return [self._prompt(index, place) for place, index in enumerate(self._held_out[:n])]

    def all_prompts(self) -> Iterator[Prompt]:
        """Every row once, held out or not, in the order of the data; the stream does not move."""
        return (self._prompt(index, 0) for index in range(len(self._rows)))

    def fingerprint(self) -> str:
        """SHA-256 of all rows, in their order."""
        return self._fingerprint

    def state_dict(self) -> dict[str, Any]:
        return self._cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._cursor.load_state_dict(state)

    def _split(self, fraction: float) -> None:
        check_fraction(fraction)
        hashes = [hash_unit(prompt_key(self._inputs(index))) for index in range(len(self._rows))]
        distinct = sorted(set(hashes))
        is_short = fraction > 0 and len(distinct) > 1 and distinct[0] >= fraction
        limit = distinct[1] if is_short else fraction
        self._train = [index for index, x in enumerate(hashes) if x >= limit]
        self._held_out = sorted((index for index, x in enumerate(hashes) if x < limit), key=lambda i: (hashes[i], i))
        if not self._train:
            raise DataError(
                f"all {len(hashes)} rows of {self.name} are held out for evaluation, which leaves none to learn from; "
                "lower --prompts.held-out-fraction, or add prompts."
            )

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for row in self._rows:
            digest.update(json.dumps(row, default=_stable_text).encode() + b"\n")
        return digest.hexdigest()

    @cached_property
    def _cursor(self) -> Cursor:
        identity = {"fingerprint": self._fingerprint, "seed": self.seed, "prompt_column": self.prompt_column}
        return Cursor(self.name, {**identity, "held_out_rows": len(self._held_out)})

    def _drawn(self, draw: int) -> Prompt:
        epoch, place = divmod(draw, len(self._train))
        if self._epoch != epoch:
            generator = generator_at(self.seed, "epoch", epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self._train), generator=generator)
        return self._prompt(self._train[int(self._order[place])], draw)

    def _prompt(self, index: int, draw: int) -> Prompt:
        row = self._rows[index]
        own_copy = {self.prompt_column: self._inputs(index)}  # a reward that edits it edits no prompt
        meta = {column: row.get(column) for column in self.columns} | own_copy
        target = None if self.target_column is None else row.get(self.target_column)
        name = index if row.get("id") is None else row["id"]
        return Prompt(str(name), self._inputs(index), target, meta, draw)

    def _inputs(self, index: int) -> str | list[dict[str, Any]]:
        return checked_inputs(self._rows[index].get(self.prompt_column), f"row {index + 1} of {self.name}")


def _checked_rows(rows: Sequence[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    if not rows:
        raise DataError(f"{name} has no rows; it needs at least one prompt to learn from.")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise DataError(f"row {number} of {name} is of type {type(row).__name__}; it needs a dict of columns.")
    return list(rows)


def _check_column(column: str, columns: tuple[str, ...], name: str) -> None:
    if column in columns:
        return
    near = nearest(column, columns)
    usual = next((c for c in PROMPT_LIKE if c in columns), None)
    if not near and column == "prompt" and usual is not None:
        near = f"; the nearest is {usual!r}"
    raise DataError(
        f"{name} has no column {column!r}; its columns are {', '.join(map(repr, columns))}{near}. "
        "Name the right one with --prompts.column or --prompts.target-column."
    )


def _stable_text(value: Any) -> str:
    """Text of a value that JSON does not know, without the memory address that some objects print."""
    return f"{type(value).__name__}:{re.sub(r' at 0x[0-9a-fA-F]+', '', str(value))}"
