"""KL to a reference, from samples, with gradients that are right in expectation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gruppo.core.surrogates import ratio_of

Estimator = Literal["k1", "k2", "k3", "exact"]
KlGradient = Literal["unbiased", "naive"]


def k1(delta: Tensor) -> Tensor:
    """-delta, with delta = ref - logprobs: unbiased, of either sign."""
    return -delta


def k2(delta: Tensor) -> Tensor:
    """delta^2 / 2: biased, low variance; its gradient is the right one on-policy."""
    return delta.square() / 2


def k3(delta: Tensor) -> Tensor:
    """exp(delta) - delta - 1 >= 0: unbiased, low variance (Schulman 2020, "Approximating KL divergence")."""
    return delta.expm1() - delta


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def kl(
    logprobs: Float[Tensor, "B T"],
    ref_logprobs: Float[Tensor, "B T"],
    log_ratio: Float[Tensor, "B T"],
    loss_mask: Bool[Tensor, "B T"],
    *,
    estimator: Estimator,
    gradient: KlGradient = "unbiased",
) -> Float[Tensor, "B T"]:
    """KL(policy || reference) of each kept action in nats, visited prefixes held fixed; 0 where not kept.

    ``naive`` differentiates the estimator itself. In expectation that is zero for k1, and for k3 the gradient of
    KL(reference || policy); for k2 it is right where the policy itself drew the actions. ``unbiased`` multiplies by
    the ratio to the sampling policy and is right whoever drew them: r k1 and r k3 with a differentiable ratio, k2 with
    a detached one.
    ``log_ratio`` is each action's own, with its gradient, whatever ratio the surrogate has. Sources: GRPO (arXiv
    2402.03300) for k3 in the loss; TRL 1.16 multiplies it by the ratio too.
    """
    delta = torch.where(loss_mask, ref_logprobs, 0) - torch.where(loss_mask, logprobs, 0)
    estimate = ESTIMATORS[estimator](delta)
    if gradient == "naive":
        return estimate
    return ratio_of(log_ratio.detach() if estimator == "k2" else log_ratio) * estimate


def gaussian_kl(
    mean: Float[Tensor, "b t ..."], std: Tensor, ref_mean: Float[Tensor, "b t ..."], ref_std: Tensor
) -> Float[Tensor, "b t"]:
    """KL(policy || reference) of diagonal normals, exact, in nats, summed over event dimensions in float64.

    log(s' / s) + (s^2 + (m - m')^2) / (2 s'^2) - 1/2. ``std`` has the shape of ``mean``, or its first two dimensions.
    Its gradient is right whoever drew the actions: no sample enters it.
    """
    mean, ref_mean = mean.double(), ref_mean.double()
    std, ref_std = (s.double().reshape(*s.shape, *[1] * (mean.ndim - s.ndim)) for s in (std, ref_std))
    nats = (ref_std / std).log() + (std.square() + (mean - ref_mean).square()) / (2 * ref_std.square()) - 0.5
    return nats.expand_as(mean).flatten(2).sum(dim=-1) if mean.ndim > 2 else nats
