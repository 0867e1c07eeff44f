"""Rewards before they become advantages: penalties, and several rewards in one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gruppo.core.weights import AllSum, identity


def overlong_penalty(lengths: Int[Tensor, "B"], *, max_length: int, cache: int) -> Float[Tensor, "B"]:
    """0 up to max_length - cache, then a line down to -1 at max_length. DAPO (arXiv 2503.14476), eq. 13."""
    over = lengths.double() - (max_length - cache)
    return -(over / max(cache, 1)).clamp(0, 1).float()


def normalized_sum(
    advantages: Sequence[Float[Tensor, "B"]],
    weights: Sequence[float],
    scored: Bool[Tensor, "B"],
    *,
    eps: float = 1e-4,
    all_sum: AllSum = identity,
) -> Float[Tensor, "B"]:
    """Each reward normalised by itself, then weighted and summed, then the sum normalised over the batch's rows.

    A = (S - mean S) / (std S + eps),  S = sum_k w_k A_k, with ddof 1 over the scored rows of all ranks: GDPO (arXiv
    2601.05242). So no reward's spread decides what it weighs. Rows that are not scored get 0, and so does a row that
    differs from the mean by rounding alone.
    """
    total = torch.stack([w * a.double() for w, a in zip(weights, advantages, strict=True)]).sum(0)
    total = torch.where(scored, total, 0.0)
    sums = all_sum(torch.stack([scored.sum().double(), total.sum(), total.abs().sum()]))
    count = sums[0].clamp(min=1)
    deviation = torch.where(scored, total - sums[1] / count, 0.0)
    std = (all_sum(deviation.square().sum()) / (sums[0] - 1).clamp(min=1)).sqrt()
    is_residue = deviation.abs() <= 4 * torch.finfo(torch.float32).eps * sums[2] / count
    return torch.where(is_residue, 0.0, deviation / (std + eps)).float()
