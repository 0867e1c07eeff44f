"""A budget of samples, shared out over groups."""

from __future__ import annotations

import heapq

import torch
from jaxtyping import Float, Int
from torch import Tensor


def allocate(
    spread: Float[Tensor, "groups"], sizes: Int[Tensor, "groups"], *, budget: int, cap: int
) -> Int[Tensor, "groups"]:
    """How many samples more each group gets, ``budget`` in all; none grows beyond ``cap``.

    One after another, each to the group where it lowers sum_g s_g^2 / n_g the most: where s_g^2 / (n_g (n_g + 1)) is
    largest, among equals to the first. s_g is the spread (standard deviation) of the group's rewards and n_g its size,
    so that the sum is the variance of the groups' mean rewards, each of its own samples. For such a sum of convex terms
    the greedy choice is the best one (Fox 1966, "Discrete optimization via marginal analysis"); without a cap it tends
    to sizes in proportion to the spreads (Neyman 1934). Groups without spread get nothing, and where all groups that
    have some are at the cap, the rest of the budget is left.
    """
    scored = zip(spread.double().tolist(), sizes.tolist(), strict=True)
    waiting = [(-_gain(s, n), group, s, n) for group, (s, n) in enumerate(scored) if s > 0 and n < cap]
    heapq.heapify(waiting)
    more = torch.zeros_like(sizes)
    for _ in range(budget):
        if not waiting:
            break
        _, group, s, n = waiting[0]
        more[group] += 1
        if n + 1 < cap:
            heapq.heapreplace(waiting, (-_gain(s, n + 1), group, s, n + 1))
        else:
            heapq.heappop(waiting)
    return more


def _gain(spread: float, size: int) -> float:
    """By how much one sample more lowers s^2 / n."""
    return spread**2 / (size * (size + 1))
