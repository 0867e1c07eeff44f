"""How a batch of denoising steps is cut: into pieces of so many evaluations of the network."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from gruppo.types import MicroBatch


def micro_batches_by_evaluations(
    evaluated: Bool[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"], cost: Int[Tensor, "B"], budget: int
) -> list[MicroBatch]:
    """Every kept action in exactly one piece.

    ``evaluated``: what a forward over a row covers, at ``cost`` evaluations each. Rows in their order, as many as fit
    ``budget``; the columns of a row that alone does not fit are cut, one evaluated action to a piece at least.
    """
    columns = int(loss_mask.any(dim=0).nonzero()[:, 0].max()) + 1 if loss_mask.any() else 0
    micro_batches: list[MicroBatch] = []
    rows: list[int] = []
    left = budget
    for row in loss_mask.any(dim=1).nonzero()[:, 0].tolist():
        needs = int(evaluated[row].sum()) * int(cost[row])
        if rows and needs > left:
            micro_batches.append(MicroBatch(torch.tensor(rows), slice(0, columns)))
            rows, left = [], budget
        if needs > budget:
            micro_batches += _cut(row, evaluated[row], loss_mask[row], max(budget // int(cost[row]), 1))
            continue
        rows.append(row)
        left -= needs
    return micro_batches + ([MicroBatch(torch.tensor(rows), slice(0, columns))] if rows else [])


def _cut(row: int, evaluated: Bool[Tensor, "T"], loss_mask: Bool[Tensor, "T"], most: int) -> list[MicroBatch]:
    parts = evaluated.nonzero()[:, 0].split(most)
    bounds = [slice(int(part[0]), int(part[-1]) + 1) for part in parts]
    return [MicroBatch(torch.tensor([row]), cols) for cols in bounds if loss_mask[cols].any()]
