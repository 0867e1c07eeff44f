"""Surrogate losses of policy gradients, and the value loss. Per action and unreduced: multiply by
``loss_weights``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

RatioLevel = Literal["token", "sequence", "sequence_token"]
SURROGATES = ("clip", "cispo", "sapo", "vespo", "reinforce")
OwnSurrogate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Loss of each action [b, t], unreduced, of ``log_ratio``, ``advantages``, ``logprobs`` and
``mask`` [b, t].

Called per micro-batch, which may hold some rows and columns of an update; the weights of the
average follow. Entries where ``mask`` is False are 0 and what is returned there is not used.
"""
MAX_LOG_RATIO = 20.0
"""Nats. exp of more than 88 is inf in float32, whose gradient is NaN even where the clip has chosen
its other side."""
VESPO_MIN_LOG_WEIGHT = -18.420680743952367
"""log 1e-8, as in TRL."""


def importance_ratio(log_ratio: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """exp(log_ratio), at most e^20 and without a gradient there: an action half a billion times
    likelier is stopped."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def log_ratio(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    loss_mask: Bool[Tensor, "B T"],
    *,
    level: RatioLevel = "token",
    dims: int = 1,
) -> Float[Tensor, "B T"]:
    """``logprobs - old_logprobs`` where kept, 0 elsewhere. Masked entries may hold anything, NaN
    included.

    ``sequence``: mean over the row's kept actions, for each of them (GSPO, arXiv 2507.18071, eq.
    7). ``sequence_token``: the same number, with the gradient of the action's own log-prob
    (GSPO-token, eq. 14), for advantages that differ from action to action. ``dims``: dimensions of
    a continuous action, by which its log-ratio is divided; 1 leaves the joint density.
    """
    ratio = (torch.where(loss_mask, logprobs, 0) - torch.where(loss_mask, old_logprobs, 0)) / dims
    if level == "token":
        return ratio
    mean = ratio.sum(dim=1, keepdim=True) / loss_mask.sum(dim=1, keepdim=True).clamp(min=1)
    if level == "sequence_token":
        mean = mean.detach() + ratio - ratio.detach()
    return torch.where(loss_mask, mean, 0)


def clip_surrogate(
    log_ratio: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    *,
    low: float,
    high: float,
    dual: float | None = None,
) -> Float[Tensor, "B T"]:
    """Clipped surrogate of PPO, per action.

    L = -min(r A, clip(r, 1 - low, 1 + high) A),  r = exp(log_ratio). Schulman et al. 2017 (arXiv
    1707.06347), eq. 7; ``high`` above ``low`` is DAPO's clip-higher (arXiv 2503.14476). ``dual``
    bounds the loss where A < 0: L = min(L, -dual A) (dual clip, Ye et al. 2019, arXiv 1912.09729,
    dual 3).
    """
    ratio = importance_ratio(log_ratio)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if dual is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual * advantages), loss)


def cispo_surrogate(
    log_ratio: Float[Tensor, "B T"],
    logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    loss_mask: Bool[Tensor, "B T"],
    *,
    low: float,
    high: float,
) -> Float[Tensor, "B T"]:
    """L = -stopgrad(clip(r, 1 - low, 1 + high)) A logprobs: every action keeps its gradient, with a
    bounded weight.

    MiniMax-M1 (arXiv 2506.13585), eq. 4, which leaves the lower side open (low 1). TRL's
    epsilon_high is 1 + high.
    """
    weight = importance_ratio(log_ratio.detach()).clamp(1 - low, 1 + high)
    return -weight * advantages * torch.where(loss_mask, logprobs, 0)


def sapo_surrogate(
    log_ratio: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> Float[Tensor, "B T"]:
    """L = -sigmoid(tau (r - 1)) 4 / tau A, a soft gate with slope 1 at r = 1; tau_pos where A > 0.

    SAPO (arXiv 2511.20347).
    """
    tau = torch.where(advantages > 0, tau_pos, tau_neg).to(log_ratio.dtype)
    return -torch.sigmoid(tau * (importance_ratio(log_ratio) - 1)) * 4 / tau * advantages


def vespo_surrogate(
    log_ratio: Float[Tensor, "B T"],
    logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    loss_mask: Bool[Tensor, "B T"],
) -> Float[Tensor, "B T"]:
    """L = -stopgrad(phi(w)) A logprobs,  phi(w) = w^k exp(lam (1 - w)),  w = exp(sum of the row's
    log-ratios).

    (k, lam) is (2, 3) where A >= 0 and (3, 2) elsewhere; phi(1) = 1. ``log_ratio`` is at token
    level. VESPO (arXiv 2602.10693), with the constants and bounds of TRL 1.16.
    """
    log_w = log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).sum(dim=1, keepdim=True)
    log_w = log_w.clamp(VESPO_MIN_LOG_WEIGHT, MAX_LOG_RATIO)  # [B, 1]
    is_pos = advantages >= 0
    k, lam = (torch.where(is_pos, p, n).to(log_w.dtype) for p, n in ((2.0, 3.0), (3.0, 2.0)))
    phi = (lam + k * log_w - lam * log_w.exp()).exp()
    return -phi * advantages * torch.where(loss_mask, logprobs, 0)


def reinforce_surrogate(
    logprobs: Float[Tensor, "B T"], advantages: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """L = -A logprobs, with 0 where not kept. Williams 1992; no correction for data of an older
    policy."""
    return -advantages * torch.where(loss_mask, logprobs, 0)


def value_loss(
    values: Float[Tensor, "B T"],
    old_values: Float[Tensor, "B T"] | None,
    returns: Float[Tensor, "B T"],
    loss_mask: Bool[Tensor, "B T"],
    *,
    clip: float = 0.0,
) -> Float[Tensor, "B T"]:
    """L = 0.5 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2), with 0 where not kept.

    ``old_values`` are those stored when the batch was collected; ``clip`` 0 gives the plain squared
    error. The clip is that of OpenAI Baselines (Huang et al. 2022, "The 37 implementation details
    of PPO", 9).
    """
    target = torch.where(loss_mask, returns, 0)
    values = torch.where(loss_mask, values, 0)
    plain = (values - target).square()
    if not clip or old_values is None:
        return plain / 2
    old = torch.where(loss_mask, old_values, 0)
    clipped = torch.minimum(torch.maximum(values, old - clip), old + clip)
    return torch.maximum(plain, (clipped - target).square()) / 2
