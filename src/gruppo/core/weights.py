"""Every denominator of the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Average = Literal["sequence", "token", "constant", "sequence_sum", "sum"]
AllSum = Callable[[Tensor], Tensor]


def identity(x: Tensor) -> Tensor:
    """The sum over one process."""
    return x


def loss_total(loss_mask: Bool[Tensor, "B T"], *, average: Average, max_length: int) -> Float[Tensor, ""]:
    """The denominator of one update, to be summed over all ranks: float64.

    ``token``: kept actions. ``sequence``, ``sequence_sum``: non-empty rows. ``constant``: non-empty rows times
    ``max_length``, the longest rollout allowed. ``sum``: not used.
    Rows without a kept action count nowhere, so that unscored and masked rows leave numerator and denominator together.
    """
    count = TOTALS[average](loss_mask, max_length)
    return torch.as_tensor(count, dtype=torch.float64, device=loss_mask.device)


def loss_weights(loss_mask: Bool[Tensor, "B T"], *, average: Average, total: Tensor | float) -> Float[Tensor, "B T"]:
    """The weight of each action, so that ``loss = (weights * per_action).sum()``.

    sequence      1 / (length of the row * rows)       GRPO, arXiv 2402.03300
    token         1 / kept actions                     DAPO, arXiv 2503.14476
    constant      1 / (rows * max_length)              Dr.GRPO, arXiv 2503.20783
    sequence_sum  1 / rows                             RLOO, arXiv 2402.14740: a sequence is one action
    sum           1

    ``total`` is ``loss_total`` of the whole update over all ranks; ``keep`` may be any rows of it. The weights of an
    update's parts are those of the whole: pieces, padding and ranks cannot change a gradient. A total of 0 (nothing
    kept anywhere) gives weights 0.
    """
    kept = loss_mask.double()
    if average == "sequence":
        kept = kept / loss_mask.sum(dim=1, keepdim=True).clamp(min=1)
    if average == "sum":
        return kept
    total = torch.as_tensor(total, dtype=torch.float64, device=loss_mask.device)
    return torch.where(total > 0, kept / total.clamp(min=1), 0.0)


def _rows(loss_mask: Tensor, max_length: int) -> Tensor:
    return loss_mask.any(dim=1).sum()


TOTALS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sequence": _rows,
    "token": lambda loss_mask, max_length: loss_mask.sum(),
    "constant": lambda loss_mask, max_length: _rows(loss_mask, max_length) * max_length,
    "sequence_sum": _rows,
    "sum": lambda loss_mask, max_length: loss_mask.new_ones((), dtype=torch.long),
}
