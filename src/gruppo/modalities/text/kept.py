"""Keys and values of conversations, kept between turns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from gruppo.platforms import free_bytes

if TYPE_CHECKING:
    from gruppo.modalities.text.decoding import FusedDecoder

KEPT_FRAC = 0.5
"""Share of the free memory that the rows of one batch may keep. Each is copied once more while it is decoded."""
UNMEASURED_BYTES = 2**30
"""Kept at most where free memory cannot be measured."""


@dataclass(eq=False)
class KeptRow:
    """Keys and values of a row between two turns; the decoding that goes on from them takes their memory."""

    fused: FusedDecoder | None
    """None: of the model's own cache."""
    prompt: list[Tensor]
    """Of each layer, [2, K, P, D]; one list for all rows of a group. Empty if ``suffix`` holds the prompt too."""
    suffix: list[Tensor]
    """Of each layer, what follows the prompt, [2, K, h, D]; of the model's own cache keys [K, L, D], then values. Empty
    once a decoding has taken it."""
    ids: Int[Tensor, "L"] = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    """Tokens that have been read."""
    weights: Any = None
    """The policy and the versions of its weights under which they were read (``generate_locally``)."""

    def fits(self, ids: Int[Tensor, "T"], weights: Any) -> bool:
        """Whether a row of these tokens can go on from here: with the same weights, and something left to read."""
        read = len(self.ids)
        is_same = self.weights == weights and read < len(ids) and torch.equal(ids[:read], self.ids)
        return is_same and bool(self.suffix)


class Keeper:
    """Keeps rows as they leave a decoding, while there is memory; the others are read again in their next turn."""

    def __init__(self, decoding: Any, rows: int) -> None:
        self.decoding, self.rows = decoding, list[KeptRow | None]([None] * rows)
        free = free_bytes(decoding.logits.device)
        self.room = UNMEASURED_BYTES if free is None else int(KEPT_FRAC * free)

    def keep(self, row: int, slot: int, tokens: int) -> None:
        """Keep the row in this slot, of whose sampled tokens the first ``tokens`` have been read."""
        needed = self.decoding.kept_bytes(slot, tokens)
        if needed is not None and needed <= self.room:
            self.room -= needed
            self.rows[row] = KeptRow(*self.decoding.keep(slot, tokens))
