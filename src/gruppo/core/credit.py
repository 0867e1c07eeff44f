"""Rewards in time: which action of a row gets credit for what came after it.

The next action is the next *kept* one. Columns that are not kept (a tool's output, padding) neither decay nor count.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gruppo.core.weights import AllSum, identity


def place_score(score: Float[Tensor, "B"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """A row's score as the reward of its last kept action, 0 elsewhere. A score that is not finite is not placed."""
    later = mask.flip(1).cumsum(dim=1).flip(1)  # kept actions from here on
    last = mask & (later == 1)
    return torch.where(last & score.isfinite()[:, None], score[:, None], 0.0).to(score.dtype)


def of_own_step(
    steps: Float[Tensor, "B T"], is_step: Bool[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Each kept action gets the number at the end of the step that it is in: of the first end from here on.

    Actions after the last end are in the last step; a row without steps, and what is not kept, gets 0.
    """
    columns = torch.arange(is_step.shape[1], device=steps.device)
    never = is_step.shape[1]
    ends = torch.where(is_step, columns, never).flip(1).cummin(dim=1).values.flip(1)  # [B, T] the next end
    last = torch.where(is_step, columns, -1).amax(dim=1, keepdim=True)  # [B, 1]; -1 without steps
    ends = torch.where(ends == never, last, ends)
    return torch.where(mask & (ends >= 0), steps.gather(1, ends.clamp(min=0)), 0.0)


def returns_to_go(
    rewards: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], *, gamma: float = 1.0
) -> Float[Tensor, "B T"]:
    """R_t = r_t + gamma R_(t+1); 0 where not kept. Computed in float64, returned in the rewards' dtype."""
    carry = torch.zeros(len(mask), dtype=torch.float64, device=rewards.device)
    columns = []
    for r, kept in zip(rewards.double().flip(1).unbind(1), mask.flip(1).unbind(1), strict=True):
        carry = torch.where(kept, torch.where(kept, r, 0) + gamma * carry, carry)
        columns.append(torch.where(kept, carry, 0))
    return _joined(columns, rewards)


def gae(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap: Float[Tensor, "B"] | None = None,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Generalised advantage estimates, and the returns A + V that the critic learns.

    delta_t = r_t + gamma V_(t+1) - V_t;  A_t = delta_t + gamma lam A_(t+1);  0 where not kept.
    ``bootstrap`` is the value after the last kept action: 0 where a row ended by itself (and where it is not given);
    the critic's estimate only where it was cut and would have gone on.
    Schulman et al. 2015 (arXiv 1506.02438), eq. 16. Returns are those of the advantages before any whitening.
    Computed in float64, returned in the values' dtype.
    """
    next_value = torch.zeros(len(mask), dtype=torch.float64, device=values.device)
    if bootstrap is not None:
        next_value = bootstrap.double()
    carry = torch.zeros_like(next_value)
    columns = []
    backwards = (x.flip(1).unbind(1) for x in (rewards.double(), values.double(), mask))
    for r, value, kept in zip(*backwards, strict=True):
        delta = torch.where(kept, r + gamma * next_value - value, 0)
        carry = torch.where(kept, delta + gamma * lam * carry, carry)
        next_value = torch.where(kept, value, next_value)
        columns.append(torch.where(kept, carry, 0))
    advantages = _joined(columns, values)
    return advantages, torch.where(mask, advantages + torch.where(mask, values, 0), 0)


def whiten(
    x: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"], *, all_sum: AllSum = identity, eps: float = 1e-8
) -> Float[Tensor, "B T"]:
    """Mean 0 and variance 1 (ddof 1) over the kept actions of all ranks; 0 where not kept.

    (x - mean) / sqrt(var + eps), as TRL and verl. Fewer than two kept actions, or all equal up to rounding, give 0.
    """
    kept = torch.where(loss_mask, x, 0).double()
    total = all_sum(torch.stack([kept.sum(), loss_mask.sum().double(), kept.abs().sum()]))
    mean = total[0] / total[1].clamp(min=1)
    centred = torch.where(loss_mask, kept - mean, 0)
    var = all_sum(centred.square().sum()) / (total[1] - 1).clamp(min=1)
    size = total[2] / total[1].clamp(min=1)
    is_residue = var.sqrt() <= 4 * torch.finfo(x.dtype).eps * size  # False where one is NaN, which must not become 0
    return torch.where(loss_mask & ~is_residue, centred / (var + eps).sqrt(), 0).to(x.dtype)


def _joined(columns_backwards: list[Tensor], like: Tensor) -> Tensor:
    if not columns_backwards:
        return torch.zeros_like(like)
    return torch.stack(columns_backwards[::-1], dim=1).to(like.dtype)
