"""Rewards to advantages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Baseline = Literal["none", "mean", "leave_one_out", "batch_mean"]
Scale = Literal["none", "group", "batch"]
AllSum = Callable[[Tensor], Tensor]


def identity(x: Tensor) -> Tensor:
    """The sum over one process."""
    return x


def group_advantages(
    rewards: Float[Tensor, "B"],
    group_ids: Int[Tensor, "B"],
    mask: Bool[Tensor, "B T"],
    *,
    baseline: Baseline,
    scale: Scale,
    eps: float = 1e-4,
    state: Mapping[str, Any] | None = None,
    all_sum: AllSum = identity,
) -> tuple[Float[Tensor, "B T"], Mapping[str, Any]]:
    """One advantage a row, spread over its actions.

    A = (r - baseline) / (scale + eps); without a scale, A = r - baseline.

    Baselines: the group's mean; ``leave_one_out``, the mean of the group's *other* rows, G / (G - 1) (r - mean)
    (RLOO, arXiv 2402.14740); ``batch_mean``, over the rows of all ranks; ``none``. Scales: standard deviation with
    ddof 1 of the group's rewards (GRPO, arXiv 2402.03300), or of all raw rewards of the batch on all ranks.

    Rewards that are not finite are not scored: they enter no statistic and get 0. A group with fewer than two scored
    rows has nothing to compare and gets 0 under the group baselines. So does, exactly, a group without spread; under
    the batch scale a batch without; and under the batch's mean a row equal to it. A difference counts as none when it
    is rounding residue, which no eps tells apart from signal. ``eps`` 1e-4 is TRL's.
    Computed in float64, returned in float32. ``state`` is carried for running statistics (none yet).
    """
    scored = rewards.isfinite()
    r = torch.where(scored, rewards, 0).double()
    groups = int(group_ids.max()) + 1 if group_ids.numel() else 0
    count = _per_group(scored.double(), group_ids, groups)  # [groups]
    base = BASELINES[baseline](r, scored, group_ids, count, all_sum)
    centred = r - base  # [B]
    silent = ~scored
    if baseline == "batch_mean":
        silent = silent | (centred.abs() <= _residue(rewards, base))  # row by row, so every rank decides alone
    if scale == "group":
        centred = centred / (group_std(rewards, group_ids)[group_ids] + eps)
    if scale == "batch":
        mean, std = _batch_mean_std(r, scored, all_sum)
        centred = centred / (std + eps)
        silent = silent | (std <= _residue(rewards, mean))
    if baseline in ("mean", "leave_one_out") or scale == "group":
        silent = silent | has_no_spread(rewards, group_ids)[group_ids]
    advantages = torch.where(silent, 0.0, centred).to(torch.float32)
    return torch.where(mask, advantages[:, None], 0.0), dict(state or {})


def group_std(rewards: Float[Tensor, "B"], group_ids: Int[Tensor, "B"]) -> Float[Tensor, "groups"]:
    """Standard deviation (ddof 1) of each group's scored rewards, float64; NaN for a group with fewer than two."""
    scored = rewards.isfinite()
    r = torch.where(scored, rewards, 0).double()
    count = _per_group(scored.double(), group_ids, int(group_ids.max()) + 1 if group_ids.numel() else 0)
    deviation = torch.where(scored, r - _mean(r, scored, group_ids, count, identity), 0.0)
    return (_per_group(deviation.square(), group_ids, len(count)) / (count - 1).where(count > 1, torch.nan)).sqrt()


def has_no_spread(rewards: Float[Tensor, "B"], group_ids: Int[Tensor, "B"]) -> Bool[Tensor, "groups"]:
    """Groups with fewer than two scored rewards, or whose rewards are equal up to 4 rounding errors of their dtype."""
    scored = rewards.isfinite()
    groups = int(group_ids.max()) + 1 if group_ids.numel() else 0
    high = _reduce(torch.where(scored, rewards, -torch.inf), group_ids, groups, "amax")
    low = _reduce(torch.where(scored, rewards, torch.inf), group_ids, groups, "amin")
    count = _per_group(scored.double(), group_ids, groups)
    return (count < 2) | (high - low <= _residue(rewards, torch.maximum(high.abs(), low.abs())))


def _residue(rewards: Tensor, size: Tensor) -> Tensor:
    """What rounding alone can make of equal rewards of that size."""
    return 4 * torch.finfo(rewards.dtype).eps * size.abs()


def _per_group(x: Tensor, group_ids: Tensor, groups: int) -> Tensor:
    return x.new_zeros(groups).index_add(0, group_ids, x)


def _reduce(x: Tensor, group_ids: Tensor, groups: int, how: str) -> Tensor:
    return x.new_zeros(groups).scatter_reduce(0, group_ids, x, how, include_self=False)


def _mean(r: Tensor, scored: Tensor, group_ids: Tensor, count: Tensor, all_sum: AllSum) -> Tensor:
    return (_per_group(r, group_ids, len(count)) / count.clamp(min=1))[group_ids]


def _leave_one_out(r: Tensor, scored: Tensor, group_ids: Tensor, count: Tensor, all_sum: AllSum) -> Tensor:
    others = _per_group(r, group_ids, len(count))[group_ids] - r
    return others / (count[group_ids] - 1).clamp(min=1)


def _batch_mean(r: Tensor, scored: Tensor, group_ids: Tensor, count: Tensor, all_sum: AllSum) -> Tensor:
    total = all_sum(torch.stack([r.sum(), scored.sum().double()]))
    return total[0] / total[1].clamp(min=1)


def _none(r: Tensor, scored: Tensor, group_ids: Tensor, count: Tensor, all_sum: AllSum) -> Tensor:
    return torch.zeros_like(r)


BASELINES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, AllSum], Tensor]] = {
    "none": _none,
    "mean": _mean,
    "leave_one_out": _leave_one_out,
    "batch_mean": _batch_mean,
}


def _batch_mean_std(r: Tensor, scored: Tensor, all_sum: AllSum) -> tuple[Tensor, Tensor]:
    total = all_sum(torch.stack([r.sum(), scored.sum().double()]))
    mean = total[0] / total[1].clamp(min=1)
    deviation = torch.where(scored, r - mean, 0.0)
    return mean, (all_sum(deviation.square().sum()) / (total[1] - 1).clamp(min=1)).sqrt()
