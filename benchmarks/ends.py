"""Rows that end at given lengths, in any library: by what is done to the logits, from outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.workloads import row_lengths


def force_ends(logits: Tensor, lengths: Tensor, written: int, ends: Sequence[int]) -> None:
    """In place: no end token for rows with tokens to come, the first one and nothing else for those
    at their last.

    The same for every library, whose rows thus end alike; it reads and writes next to nothing.
    """
    for end in ends:
        logits[:, end] = -torch.inf
    last = (lengths == written + 1).nonzero()[:, 0]
    if len(last):
        logits[last] = -torch.inf
        logits[last, ends[0]] = 0.0


class ScriptedEnds:
    """Makes rows end at given lengths, from outside of the library: in the logits of the decoding
    that it opens."""

    def __init__(self, policy: Any) -> None:
        self.ends = policy.chat.eos_ids
        self.lengths: list[int] = []
        """Of the rows that will be opened next, in their order; none: rows end where they like."""
        self._start: Callable[..., Any] = policy.backbone.start
        policy.backbone.start = self._scripted

    def script(self, spec: Mapping[str, Any], step: int) -> None:
        """Of a workload's step."""
        rows = spec["prompts"] * spec["group_size"]
        self.lengths = row_lengths(rows, step, most=spec["new_tokens"], mean=spec["mean_tokens"])

    def _scripted(self, prompts: Sequence[Tensor], owners: Tensor, *more: Any) -> Any:
        decoding = self._start(prompts, owners, *more)
        if not self.lengths:
            return decoding
        now, self.lengths = self.lengths[: len(owners)], self.lengths[len(owners) :]
        return ScriptedDecoding(
            decoding, torch.tensor(now, device=decoding.logits.device), self.ends
        )


class ScriptedDecoding:
    """A decoding whose rows can write the end token at their last position and nowhere before."""

    def __init__(self, inner: Any, lengths: Tensor, ends: Sequence[int]) -> None:
        self.inner, self.lengths, self.ends, self.written = inner, lengths, ends, 0
        self._script()

    @property
    def logits(self) -> Tensor:
        return self.inner.logits

    def advance(self, tokens: Tensor) -> None:
        self.inner.advance(tokens)
        self.written += 1
        self._script()

    def select(self, slots: Tensor) -> None:
        self.inner.select(slots)
        self.lengths = self.lengths[slots]

    def _script(self) -> None:
        force_ends(self.inner.logits, self.lengths, self.written, self.ends)
