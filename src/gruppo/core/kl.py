"""KL divergence to a reference policy: estimated from samples, and exact for Gaussians."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gruppo.core.distributions import like_events, sum_events
from gruppo.core.surrogates import importance_ratio
from gruppo.types import Gaussian

Estimator = Literal["k1", "k2", "k3", "exact"]
KlGradient = Literal["unbiased", "naive"]


def kl_penalty(
    logprobs: Float[Tensor, "B T"],
    ref_logprobs: Float[Tensor, "B T"],
    log_ratio: Float[Tensor, "B T"],
    loss_mask: Bool[Tensor, "B T"],
    *,
    estimator: Estimator,
    gradient: KlGradient = "unbiased",
) -> Float[Tensor, "B T"]:
    """KL(policy || reference) of each kept action in nats, given its prefix; 0 where not kept.

    With delta = ref_logprobs - logprobs (Schulman 2020, "Approximating KL divergence"):

        k1  -delta                   unbiased, of either sign
        k2  delta^2 / 2              biased, low variance; its own gradient is right on-policy
        k3  exp(delta) - delta - 1   unbiased, low variance, never negative

    ``naive`` differentiates the estimator itself. In expectation that is zero for k1, and for k3
    the gradient of KL(reference || policy); for k2 it is right where the policy itself sampled the
    actions. ``unbiased`` multiplies by the ratio to the sampling policy and is right for any
    sampling policy: r k1 and r k3 with a differentiable ratio, k2 with a detached one. TRL 1.16
    does the same; k3 in the loss is GRPO's (arXiv 2402.03300). ``log_ratio`` is each action's own,
    with its gradient, whatever ratio the surrogate uses.
    """
    delta = torch.where(loss_mask, ref_logprobs, 0) - torch.where(loss_mask, logprobs, 0)
    if estimator == "k1":
        estimate = -delta
    elif estimator == "k2":
        estimate = delta.square() / 2
    elif estimator == "k3":
        # exp(delta) - 1 would lose the digits of a small delta.
        estimate = delta.expm1() - delta
    else:
        raise ValueError(f"estimator={estimator!r} has no estimate from samples; use gaussian_kl.")
    if gradient == "naive":
        return estimate
    return importance_ratio(log_ratio.detach() if estimator == "k2" else log_ratio) * estimate


def gaussian_kl(
    mean: Float[Tensor, "b t ..."], std: Tensor, ref_mean: Float[Tensor, "b t ..."], ref_std: Tensor
) -> Float[Tensor, "B T"]:
    """KL(policy || reference) of diagonal normals, exact, in nats, summed over event dimensions in
    float64.

    log(s' / s) + (s^2 + (m - m')^2) / (2 s'^2) - 1/2. ``std`` has the shape of ``mean``, or its
    first two dimensions. Its gradient is right for any sampling policy, because no sample enters
    it.
    """
    variance = like_events(std, mean).square()
    ref_std = like_events(ref_std, mean)
    square = variance + (mean.double() - ref_mean.double()).square()
    log_ratio = (ref_std / like_events(std, mean)).log()
    return sum_events(log_ratio + square / (2 * ref_std.square()) - 0.5, mean)


def masked_gaussian_kl(
    policy: Gaussian, reference: Gaussian, loss_mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """``gaussian_kl`` of each kept action, 0 elsewhere; with a gradient for the policy alone."""

    def kept(x: Tensor, fill: float) -> Tensor:
        # Masked entries may be NaN, and NaN * 0 would reach the gradient: put a standard normal
        # there first.
        return torch.where(loss_mask.reshape(*loss_mask.shape, *[1] * (x.ndim - 2)), x, fill)

    reference_mean, reference_std = reference.mean.detach(), reference.std.detach()
    return gaussian_kl(
        kept(policy.mean, 0.0),
        kept(policy.std, 1.0),
        kept(reference_mean, 0.0),
        kept(reference_std, 1.0),
    )
