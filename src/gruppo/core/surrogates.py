"""What a policy-gradient step descends, per action and unreduced: multiply by ``loss_weights``."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def log_ratio(
    logprobs: Float[Tensor, "B T"], old_logprobs: Float[Tensor, "B T"], keep: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """``logprobs - old_logprobs`` where kept and 0 elsewhere, so that masked slots may hold anything, NaN included."""
    return torch.where(keep, logprobs, 0) - torch.where(keep, old_logprobs, 0)


def clip_surrogate(
    log_ratio: Float[Tensor, "B T"], advantages: Float[Tensor, "B T"], *, low: float, high: float
) -> Float[Tensor, "B T"]:
    """Clipped surrogate of PPO, per action.

    L = -min(r A, clip(r, 1 - low, 1 + high) A),  r = exp(log_ratio).
    Schulman et al. 2017 (arXiv 1707.06347), eq. 7; ``high`` above ``low`` is DAPO's clip-higher (arXiv 2503.14476).
    """
    ratio = log_ratio.exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def reinforce_surrogate(
    logprobs: Float[Tensor, "B T"], advantages: Float[Tensor, "B T"], keep: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """L = -A logprobs, with 0 where not kept. Williams 1992; no correction for data of an older policy."""
    return -advantages * torch.where(keep, logprobs, 0)
