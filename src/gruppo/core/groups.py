"""What is said of the rewards in each group. Rewards that are not finite are not scored, and enter nothing."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gruppo.core.advantages import group_advantages, has_no_spread


def per_group(
    rewards: Float[Tensor, "B"], group_ids: Int[Tensor, "B"], how: Literal["mean", "amax", "amin"]
) -> Float[Tensor, "groups"]:
    """Mean, best or worst of each group's scored rewards, float64; NaN for a group without any."""
    scored, groups = rewards.isfinite(), int(group_ids.max()) + 1 if len(group_ids) else 0
    nothing = torch.full((groups,), torch.nan, dtype=torch.float64, device=rewards.device)
    return nothing.scatter_reduce(0, group_ids[scored], rewards[scored].double(), how, include_self=False)


def deviations(rewards: Float[Tensor, "B"], group_ids: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """r - mean of its group, float64: exactly 0 in a group without spread; NaN where not scored."""
    from_mean = rewards.double() - per_group(rewards, group_ids, "mean")[group_ids]
    is_silent = has_no_spread(rewards, group_ids)[group_ids] & rewards.isfinite()
    return torch.where(is_silent, 0.0, torch.where(rewards.isfinite(), from_mean, torch.nan))


def normalised(rewards: Float[Tensor, "B"], group_ids: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """(r - mean of its group) / standard deviation of its group (ddof 1): GRPO's advantage without an eps.

    Exactly 0 in a group without spread; NaN where not scored. Its mean over a group is 0, so the extremes tell: one
    row apart from G - 1 equal ones is at (G - 1) / sqrt(G).
    """
    each = torch.ones(len(rewards), 1, dtype=torch.bool, device=rewards.device)
    score, _ = group_advantages(rewards, group_ids, each, baseline="mean", scale="group", eps=0.0)
    return torch.where(rewards.isfinite(), score[:, 0], torch.nan)
