"""The order of a finite set in an endless stream, and which of it is held out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gruppo.data.errors import check_fraction
from gruppo.data.split import hash_unit
from gruppo.seeds import generator_at
from gruppo.types import DataError


class Epochs:
    """Which of ``count`` items a draw is: each once an epoch, every epoch in an order of its own."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed
        self._epoch, self._order = -1, torch.empty(0)

    def at(self, draw: int) -> int:
        epoch, place = divmod(draw, self.count)
        if self._epoch != epoch:
            generator = generator_at(self.seed, "epoch", epoch)
            self._epoch, self._order = epoch, torch.randperm(self.count, generator=generator)
        return int(self._order[place])


def split_by_hash(keys: Sequence[str], fraction: float, name: str) -> tuple[list[int], list[int]]:
    """Items to learn from, in their order; and those held out, in the order of their hashes. Equal keys stay together.

    Above 0, one of two or more different keys is held out in any case.
    """
    check_fraction(fraction)
    hashes = [hash_unit(key) for key in keys]
    distinct = sorted(set(hashes))
    is_short = fraction > 0 and len(distinct) > 1 and distinct[0] >= fraction
    limit = distinct[1] if is_short else fraction
    train = [index for index, x in enumerate(hashes) if x >= limit]
    if not train:
        raise DataError(
            f"all {len(hashes)} images of {name} are held out for evaluation, which leaves none to learn from; lower "
            "--prompts.held-out-fraction, or add images."
        )
    held_out = [index for index, x in enumerate(hashes) if x < limit]
    return train, sorted(held_out, key=lambda index: (hashes[index], index))
