"""Statistics of the rewards of each group, and the allocation of further samples to groups.

Rewards that are not finite are not scored: they enter no statistic. ``group_ids`` numbers the
groups from 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

AllSum = Callable[[Tensor], Tensor]
"""Sum of a tensor over ranks. The identity in one process."""
AllGather = Callable[[Any], list[Any]]
"""Objects of all ranks, in order of rank. A list of one in one process."""


def group_sum(x: Float[Tensor, "B"], group_ids: Int[Tensor, "B"]) -> Float[Tensor, "P"]:
    """Sum of each group's entries."""
    return x.new_zeros(_num_groups(group_ids)).index_add(0, group_ids, x)


def group_reduce(
    rewards: Float[Tensor, "B"], group_ids: Int[Tensor, "B"], how: Literal["mean", "amax", "amin"]
) -> Float[Tensor, "P"]:
    """Mean, maximum or minimum of each group's scored rewards, float64. NaN for a group without
    any."""
    scored = rewards.isfinite()
    empty = torch.full(
        (_num_groups(group_ids),), torch.nan, dtype=torch.float64, device=rewards.device
    )
    return empty.scatter_reduce(
        0, group_ids[scored], rewards[scored].double(), how, include_self=False
    )


def group_std(rewards: Float[Tensor, "B"], group_ids: Int[Tensor, "B"]) -> Float[Tensor, "P"]:
    """Standard deviation (ddof 1) of each group's scored rewards, float64. NaN for a group with
    fewer than two."""
    scored = rewards.isfinite()
    r, count = torch.where(scored, rewards, 0).double(), group_sum(scored.double(), group_ids)
    mean = (group_sum(r, group_ids) / count.clamp(min=1))[group_ids]
    # From deviations: a mean of squares less a squared mean cancels.
    square = group_sum(torch.where(scored, r - mean, 0.0).square(), group_ids)
    return (square / (count - 1).where(count > 1, torch.nan)).sqrt()


def group_deviations(
    rewards: Float[Tensor, "B"], group_ids: Int[Tensor, "B"]
) -> Float[Tensor, "B"]:
    """r - mean of its group, float64. Exactly 0 in a group without spread; NaN where not scored."""
    deviation = rewards.double() - group_reduce(rewards, group_ids, "mean")[group_ids]
    deviation = torch.where(has_no_spread(rewards, group_ids)[group_ids], 0.0, deviation)
    return torch.where(rewards.isfinite(), deviation, torch.nan)


def has_no_spread(rewards: Float[Tensor, "B"], group_ids: Int[Tensor, "B"]) -> Bool[Tensor, "P"]:
    """Groups with fewer than two scored rewards, or whose rewards are equal up to 4 rounding errors
    of their dtype."""
    high, low = (group_reduce(rewards, group_ids, how) for how in ("amax", "amin"))
    count = group_sum(rewards.isfinite().double(), group_ids)
    magnitude = torch.maximum(high.abs(), low.abs())
    return (count < 2) | (high - low <= rounding_error(rewards, magnitude))


def batch_moments(
    x: Tensor, kept: Bool[Tensor, "..."], all_sum: AllSum
) -> tuple[Tensor, Float[Tensor, ""], Float[Tensor, ""]]:
    """Over the kept entries of all ranks, float64: x - mean (0 where not kept), variance (ddof 1),
    mean magnitude."""
    x = torch.where(kept, x, 0).double()
    count, total, magnitude = all_sum(torch.stack([kept.sum().double(), x.sum(), x.abs().sum()]))
    deviation = torch.where(kept, x - total / count.clamp(min=1), 0)
    variance = all_sum(deviation.square().sum()) / (count - 1).clamp(min=1)
    return deviation, variance, magnitude / count.clamp(min=1)


def rounding_error(rewards: Tensor, magnitude: Tensor) -> Tensor:
    """Largest difference that rounding alone makes between equal rewards of this magnitude.

    Differences below it count as zero. No eps separates them from signal: 0.1 + 0.2 and 0.3 would
    get advantages of about 1 under a scale of the group.
    """
    return 4 * torch.finfo(rewards.dtype).eps * magnitude.abs()


def allocate_samples(
    std: Float[Tensor, "P"], sizes: Int[Tensor, "P"], *, budget: int, cap: int
) -> Int[Tensor, "P"]:
    """Number of further samples of each group, ``budget`` in all, so that group means are estimated
    best.

    Minimizes sum_g s_g^2 / n_g, the variance of the groups' mean rewards, where s_g is the standard
    deviation of the group's rewards and n_g <= ``cap`` its size. Each sample goes to the group
    where it lowers the sum the most, by s_g^2 / (n_g (n_g + 1)); ties go to the first. For a sum of
    convex terms this greedy choice is optimal (Fox 1966, "Discrete optimization via marginal
    analysis"); without a cap, sizes tend to be proportional to s_g (Neyman 1934). Groups without
    spread get nothing. The budget is not used up once all others have reached the cap.
    """
    added = torch.zeros_like(sizes)
    for _ in range(budget if len(sizes) else 0):
        n = sizes + added
        gain = std.double().square() / (n * (n + 1))
        gain = torch.where((std > 0) & (n < cap), gain, 0)
        best = gain.argmax()  # the first of several
        if gain[best] == 0:
            break
        added[best] += 1
    return added


def _num_groups(group_ids: Tensor) -> int:
    return int(group_ids.max()) + 1 if group_ids.numel() else 0
