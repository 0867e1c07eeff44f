"""Credit in time: returns, generalized advantage estimates, step rewards, whitening.

Time is the second dimension, and the next action is the next *kept* one: columns whose mask is
False (a tool's output, padding) neither discount nor count.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gruppo.core.groups import AllSum, batch_moments


def place_score(score: Float[Tensor, "B"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Score of a row as the reward of its last kept action, 0 elsewhere. Scores that are not finite
    are not placed."""
    later = mask.flip(1).cumsum(dim=1).flip(1)  # kept actions from here on
    last = mask & (later == 1)
    return torch.where(last & score.isfinite()[:, None], score[:, None], 0.0).to(score.dtype)


def overlong_penalty(
    lengths: Int[Tensor, "B"], *, max_length: int, cache: int
) -> Float[Tensor, "B"]:
    """Soft overlong punishment: 0 up to max_length - cache, then linear to -1 at max_length.

    DAPO (arXiv 2503.14476), eq. 13.
    """
    over = lengths.double() - (max_length - cache)
    return -(over / max(cache, 1)).clamp(0, 1).float()


def broadcast_step_values(
    values: Float[Tensor, "B T"], is_step: Bool[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Value of its step for each kept action: that of the first step end (``is_step``) at or after
    the action.

    Actions after the last end belong to the last step. Rows without steps, and actions not kept,
    get 0.
    """
    columns = torch.arange(is_step.shape[1], device=values.device)
    never = is_step.shape[1]
    ends = (
        torch.where(is_step, columns, never).flip(1).cummin(dim=1).values.flip(1)
    )  # [B, T] the next end
    last = torch.where(is_step, columns, -1).amax(dim=1, keepdim=True)  # [B, 1]; -1 without steps
    ends = torch.where(ends == never, last, ends)
    return torch.where(mask & (ends >= 0), values.gather(1, ends.clamp(min=0)), 0.0)


def returns_to_go(
    rewards: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], *, gamma: float = 1.0
) -> Float[Tensor, "B T"]:
    """R_t = r_t + gamma R_(t+1); 0 where not kept. Computed in float64, returned in the rewards'
    dtype.

    Equal to ``gae`` with values of 0 and lambda 1.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0)[0]


def gae(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap: Float[Tensor, "B"] | None = None,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Generalized advantage estimates, and the returns A + V that the critic learns.

    delta_t = r_t + gamma V_(t+1) - V_t;  A_t = delta_t + gamma lam A_(t+1);  0 where not kept.
    ``bootstrap`` is the value after the last kept action: 0 where a row terminated (the default),
    the critic's estimate only where it was truncated and would have gone on. Schulman et al. 2015
    (arXiv 1506.02438), eq. 16. Returns use the advantages before any whitening. Computed in
    float64, returned in the values' dtype.
    """
    next_value = torch.zeros(len(mask), dtype=torch.float64, device=values.device)
    if bootstrap is not None:
        next_value = bootstrap.double()
    carry, columns = torch.zeros_like(next_value), []  # [B], and T of them
    backwards = (x.unbind(1)[::-1] for x in (rewards.double(), values.double(), mask))
    for r, value, kept in zip(*backwards, strict=True):
        delta = torch.where(kept, r + gamma * next_value - value, 0)
        carry = torch.where(kept, delta + gamma * lam * carry, carry)
        next_value = torch.where(kept, value, next_value)
        columns.append(torch.where(kept, carry, 0))
    advantages = (
        torch.stack(columns[::-1], dim=1).to(values.dtype) if columns else torch.zeros_like(values)
    )
    return advantages, torch.where(mask, advantages + torch.where(mask, values, 0), 0)


def whiten(
    x: Float[Tensor, "B T"],
    loss_mask: Bool[Tensor, "B T"],
    *,
    all_sum: AllSum = lambda x: x,
    eps: float = 1e-8,
) -> Float[Tensor, "B T"]:
    """(x - mean) / sqrt(var + eps) over the kept actions of all ranks (ddof 1), as TRL and verl; 0
    where not kept.

    Fewer than two kept actions, or actions that are equal up to rounding, give 0.
    """
    centered, var, magnitude = batch_moments(x, loss_mask, all_sum)
    # False if NaN, which must not become 0
    is_residue = var.sqrt() <= 4 * torch.finfo(x.dtype).eps * magnitude
    return torch.where(loss_mask & ~is_residue, centered / (var + eps).sqrt(), 0).to(x.dtype)
