"""How a batch of denoising steps is cut: into pieces of so many evaluations of the network."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from gruppo.types import Piece


def pieces_by_evaluations(
    evaluated: Bool[Tensor, "B T"], keep: Bool[Tensor, "B T"], cost: Int[Tensor, "B"], budget: int
) -> list[Piece]:
    """Every kept action in exactly one piece.

    ``evaluated``: what a forward over a row covers, at ``cost`` evaluations each. Rows in their order, as many as fit
    ``budget``; the columns of a row that alone does not fit are cut, one evaluated action to a piece at least.
    """
    columns = int(keep.any(dim=0).nonzero()[:, 0].max()) + 1 if keep.any() else 0
    pieces: list[Piece] = []
    rows: list[int] = []
    left = budget
    for row in keep.any(dim=1).nonzero()[:, 0].tolist():
        needs = int(evaluated[row].sum()) * int(cost[row])
        if rows and needs > left:
            pieces.append(Piece(torch.tensor(rows), slice(0, columns)))
            rows, left = [], budget
        if needs > budget:
            pieces += _cut(row, evaluated[row], keep[row], max(budget // int(cost[row]), 1))
            continue
        rows.append(row)
        left -= needs
    return pieces + ([Piece(torch.tensor(rows), slice(0, columns))] if rows else [])


def _cut(row: int, evaluated: Bool[Tensor, "T"], keep: Bool[Tensor, "T"], most: int) -> list[Piece]:
    parts = evaluated.nonzero()[:, 0].split(most)
    bounds = [slice(int(part[0]), int(part[-1]) + 1) for part in parts]
    return [Piece(torch.tensor([row]), cols) for cols in bounds if keep[cols].any()]
