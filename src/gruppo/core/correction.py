"""Sampler and trainer disagree: weights that put the sampled actions right, and bound what one can weigh."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Correction = Literal["none", "truncate", "mask"]
CorrectionLevel = Literal["token", "sequence"]


def correction_weights(
    old_logprobs: Float[Tensor, "B T"],
    sampler_logprobs: Float[Tensor, "B T"],
    loss_mask: Bool[Tensor, "B T"],
    *,
    mode: Correction,
    level: CorrectionLevel = "token",
    low: float = 0.0,
    high: float = 3.0,
) -> Float[Tensor, "B T"]:
    """w = exp(old_logprobs - sampler_logprobs), detached; 0 where not kept. For the policy term only.

    ``truncate``: w kept within [low, high] (truncated importance sampling). ``mask``: 0 outside [low, high] (IcePop,
    arXiv 2510.18855, token level with 0.5 and 5). ``sequence``: the differences of a row are *summed* first, for each
    of its actions; a mean would be another distribution's weight. Masked actions stay in every denominator.
    """
    difference = torch.where(loss_mask, old_logprobs - sampler_logprobs, 0).detach()
    if level == "sequence":
        difference = difference.sum(dim=1, keepdim=True).expand_as(difference)
    weight = difference.exp()
    if mode == "truncate":
        weight = weight.clamp(low, high)
    if mode == "mask":
        weight = torch.where((weight >= low) & (weight <= high), weight, 0)
    return torch.where(loss_mask, weight, 0)
