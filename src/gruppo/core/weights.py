"""Weights of actions in the loss: its denominators, and corrections for a sampler that differs from
the trainer."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Average = Literal["sequence", "token", "prompt", "constant", "sequence_sum", "sum"]
Correction = Literal["none", "truncate", "mask"]
CorrectionLevel = Literal["token", "sequence"]


def loss_total(
    loss_mask: Bool[Tensor, "B T"],
    *,
    average: Average,
    max_length: int,
    group_ids: Int[Tensor, "B"] | None = None,
) -> Float[Tensor, ""]:
    """Denominator of one update, to be summed over all ranks. float64.

    ``token``: kept actions. ``prompt``: groups (``group_ids``) with a non-empty row. ``sequence``,
    ``sequence_sum``: non-empty rows. ``constant``: non-empty rows times ``max_length``, the longest
    rollout allowed. ``sum``: 1, not used. Rows without a kept action do not count, so unscored and
    masked rows leave numerator and denominator together.
    """
    is_kept = loss_mask.any(dim=1)
    rows = is_kept.sum()
    if average == "token":
        total = loss_mask.sum()
    elif average == "prompt":
        total = rows.new_tensor(len(_groups(group_ids)[is_kept].unique()))
    elif average == "sum":
        total = torch.ones_like(rows)
    else:
        total = rows * max_length if average == "constant" else rows
    return total.double()


def loss_weights(
    loss_mask: Bool[Tensor, "B T"],
    *,
    average: Average,
    total: Tensor | float,
    group_ids: Int[Tensor, "B"] | None = None,
) -> Float[Tensor, "B T"]:
    """Weight of each action, so that ``loss = (weights * per_action).sum()``. float64.

    sequence      1 / (length of the row * rows)       GRPO, arXiv 2402.03300
    token         1 / kept actions                     DAPO, arXiv 2503.14476
    prompt        1 / (kept actions of the prompt's rows * prompts)   nanochat's chat_rl.py
    constant      1 / (rows * max_length)              Dr.GRPO, arXiv 2503.20783
    sequence_sum  1 / rows                             RLOO, arXiv 2402.14740: a sequence is one
                                                       action
    sum           1

    ``total`` is ``loss_total`` of the whole update over all ranks; ``loss_mask`` may be any rows of
    it, under ``prompt`` whole groups (``group_ids``). Micro-batches, padding and ranks then cannot
    change a gradient. A total of 0 (nothing kept anywhere) gives weights of 0.
    """
    kept = loss_mask.double()
    if average == "sequence":
        kept = kept / loss_mask.sum(dim=1, keepdim=True).clamp(min=1)
    if average == "prompt":
        _, group = _groups(group_ids).unique(return_inverse=True)
        actions = torch.zeros_like(group).index_add(0, group, loss_mask.sum(dim=1))
        kept = kept / actions[group][:, None].clamp(min=1)
    if average == "sum":
        return kept
    total = torch.as_tensor(total, dtype=torch.float64, device=loss_mask.device)
    return torch.where(total > 0, kept / total.clamp(min=1), 0.0)


def _groups(group_ids: Tensor | None) -> Int[Tensor, "B"]:
    if group_ids is None:
        raise ValueError("average='prompt' needs group_ids [B], the prompt of each row.")
    return group_ids


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
    """Importance weights w = exp(old_logprobs - sampler_logprobs) of the policy term, detached; 0
    where not kept.

    ``truncate``: w clamped to [low, high] (truncated importance sampling). ``mask``: 0 outside
    [low, high] (IcePop, arXiv 2510.18855, token level with 0.5 and 5). Masked actions stay in every
    denominator. ``level="sequence"`` *sums* the differences of a row, for each of its actions: the
    weight of the joint distribution. Their mean would be the weight of another one.
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
