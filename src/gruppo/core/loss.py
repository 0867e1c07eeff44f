"""From likelihoods to the terms of a loss. It reads the objective's choices and no name of an algorithm."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gruppo.core.correction import correction_weights
from gruppo.core.divergence import gaussian_kl, kl
from gruppo.core.objective import Objective
from gruppo.core.surrogates import (
    Level,
    cispo_surrogate,
    clip_surrogate,
    log_ratio,
    reinforce_surrogate,
    sapo_surrogate,
    value_loss,
    vespo_surrogate,
)
from gruppo.types import Gaussian, GruppoError, Likelihood, Stat


@dataclass(frozen=True, eq=False)
class LossInputs:
    """One piece of a batch: what the loss needs beside the likelihood."""

    advantages: Float[Tensor, "b t"]
    loss_mask: Bool[Tensor, "b t"]
    weights: Float[Tensor, "b t"]
    """``loss_weights`` of the whole update, cut to the piece."""
    old_logprobs: Float[Tensor, "b t"] | None = None
    """None: the current ones, detached (every row enters exactly one update)."""
    ref: Likelihood | None = None
    sampler_logprobs: Float[Tensor, "b t"] | None = None
    """For a correction."""
    old_values: Float[Tensor, "b t"] | None = None
    """The critic's, stored when the batch was collected."""
    returns: Float[Tensor, "b t"] | None = None
    dims: int = 1
    """Dimensions of one action."""
    old_gaussian: Gaussian | None = None
    """The old policy's, for an exact KL to it; without it, that KL is estimated."""


def policy_loss(
    likelihood: Likelihood, batch: LossInputs, objective: Objective
) -> tuple[dict[str, Float[Tensor, ""]], dict[str, Stat]]:
    """The terms of one piece, each already weighted and summed, and the statistics of its kept actions.

    Terms: ``policy``; ``kl`` where there is a reference and the KL is in the loss; ``value`` where there are values
    and returns; ``entropy`` (to be maximised) where it was asked for. The caller multiplies each by its coefficient.
    Statistics are named by their metric.
    """
    step = _Step.of(likelihood, batch, objective)
    per_action = SURROGATES[objective.surrogate](objective, step)
    terms, stats = (
        {},
        ratio_stats(step.ratio.detach(), step.token.detach(), step.advantages, batch.loss_mask, objective),
    )
    if objective.correction != "none":
        weight = _correction(objective, step, batch)
        per_action = weight * per_action
        stats["correction/weight"] = Stat.of(weight, batch.loss_mask)
    if likelihood.gaussian is not None and batch.old_gaussian is not None:  # in place of estimates
        kl_old = exact_kl(likelihood.gaussian, batch.old_gaussian, batch.loss_mask).detach()
        stats |= dict.fromkeys(("kl/old_nats", "kl/old_k3_nats"), Stat.of(kl_old, batch.loss_mask))
    if objective.kl_mask:
        is_left_out = _moves_too_far(objective, likelihood, step, batch)
        per_action = torch.where(is_left_out, 0, per_action)
        stats["clip/kl_mask_frac"] = Stat.of(is_left_out.double(), batch.loss_mask)
    terms["policy"] = _weighted(batch.weights, batch.loss_mask, per_action)
    if batch.ref is not None:
        exact = _exact_ref_kl(objective, likelihood, batch.ref, batch.loss_mask)
        if objective.kl_in == "loss":
            kl_ref = (
                exact if exact is not None and objective.kl == "exact" else _estimated_kl(objective, step, batch.ref)
            )
            terms["kl"] = _weighted(batch.weights, batch.loss_mask, kl_ref)
        stats["kl/ref_nats"] = (
            _ref_stat(likelihood, step, batch.ref) if exact is None else Stat.of(exact, batch.loss_mask)
        )
    if likelihood.values is not None and batch.returns is not None:
        terms["value"], stats["value/clip_frac"] = critic_loss(likelihood.values, batch, objective)
    if likelihood.entropy is not None:
        terms["entropy"] = _weighted(batch.weights, batch.loss_mask, likelihood.entropy)
        stats["entropy/nats"] = Stat.of(likelihood.entropy, batch.loss_mask)
    return terms, stats


def critic_loss(
    values: Float[Tensor, "b t"], batch: LossInputs, objective: Objective
) -> tuple[Float[Tensor, ""], Stat]:
    """The weighted and summed loss of the critic, and how many of its values are outside their clip."""
    assert batch.returns is not None
    loss = value_loss(values, batch.old_values, batch.returns, batch.loss_mask, clip=objective.value_clip)
    is_outside = torch.zeros_like(values, dtype=torch.bool)
    if objective.value_clip and batch.old_values is not None:
        is_outside = (values.detach() - batch.old_values).abs() > objective.value_clip
    return _weighted(batch.weights, batch.loss_mask, loss), Stat.of(is_outside.double(), batch.loss_mask)


@dataclass(frozen=True, eq=False)
class _Step:
    """What surrogates read. Entries that are not kept are 0."""

    logprobs: Tensor
    old: Tensor
    token: Tensor
    """Log-ratio of each action's joint density."""
    ratio: Tensor
    """Log-ratio at the objective's level."""
    advantages: Tensor
    loss_mask: Tensor

    @classmethod
    def of(cls, likelihood: Likelihood, batch: LossInputs, objective: Objective) -> _Step:
        logprobs = likelihood.logprobs
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        dims = batch.dims if objective.dims == "mean" else 1
        ratio = token = log_ratio(logprobs, old, batch.loss_mask)
        if (level := _level(objective)) != "token" or dims != 1:
            ratio = log_ratio(logprobs, old, batch.loss_mask, level=level, dims=dims)
        return cls(logprobs, old, token, ratio, torch.where(batch.loss_mask, batch.advantages, 0), batch.loss_mask)


def _level(objective: Objective) -> Level:
    if objective.ratio == "sequence":
        return "sequence_token" if objective.has_credit_in_time else "sequence"
    return "token"


def clip_range(objective: Objective) -> tuple[float, float]:
    """How far the ratio may go below and above 1."""
    if objective.clip_unit == "nats":
        return -math.expm1(-objective.clip_low), math.expm1(objective.clip_high)
    return objective.clip_low, objective.clip_high


def _clip(objective: Objective, step: _Step) -> Tensor:
    low, high = clip_range(objective)
    return clip_surrogate(step.ratio, step.advantages, low=low, high=high, dual=objective.dual_clip or None)


def _cispo(objective: Objective, step: _Step) -> Tensor:
    low, high = clip_range(objective)
    return cispo_surrogate(step.ratio, step.logprobs, step.advantages, step.loss_mask, low=low, high=high)


def _sapo(objective: Objective, step: _Step) -> Tensor:
    return sapo_surrogate(step.ratio, step.advantages, tau_pos=objective.tau_pos, tau_neg=objective.tau_neg)


SURROGATES: Mapping[str, Callable[[Objective, _Step], Tensor]] = {
    "clip": _clip,
    "cispo": _cispo,
    "sapo": _sapo,
    "vespo": lambda objective, step: vespo_surrogate(step.token, step.logprobs, step.advantages, step.loss_mask),
    "reinforce": lambda objective, step: reinforce_surrogate(step.logprobs, step.advantages, step.loss_mask),
}


def _correction(objective: Objective, step: _Step, batch: LossInputs) -> Tensor:
    if batch.sampler_logprobs is None:
        raise GruppoError(
            f"correction={objective.correction!r} compares with the sampler's log-probs, and there are none. Use an "
            "engine that reports them, or set --objective.correction none."
        )
    return correction_weights(
        step.old,
        batch.sampler_logprobs,
        step.loss_mask,
        mode=objective.correction,
        level=objective.correction_level,
        low=objective.correction_low,
        high=objective.correction_high,
    )


def _estimated_kl(objective: Objective, step: _Step, ref: Likelihood) -> Tensor:
    estimator, gradient = objective.kl, objective.kl_gradient
    return kl(step.logprobs, ref.logprobs.detach(), step.token, step.loss_mask, estimator=estimator, gradient=gradient)


def _exact_ref_kl(objective: Objective, likelihood: Likelihood, ref: Likelihood, loss_mask: Tensor) -> Tensor | None:
    """In closed form where both are Gaussian; None where they are not."""
    if likelihood.gaussian is not None and ref.gaussian is not None:
        with torch.set_grad_enabled(torch.is_grad_enabled() and objective.kl == "exact"):  # a metric needs none
            return exact_kl(likelihood.gaussian, ref.gaussian, loss_mask)
    if objective.kl == "exact":
        raise GruppoError("kl='exact' needs the policy's and the reference's Gaussian. Set --objective.kl k3.")
    return None


def exact_kl(ours: Gaussian, theirs: Gaussian, loss_mask: Bool[Tensor, "b t"]) -> Float[Tensor, "b t"]:
    """KL(ours || theirs) of each kept action, in nats, 0 elsewhere; with a gradient for ours alone."""

    def kept(x: Tensor, filling: float) -> Tensor:
        """A standard normal where not kept: what stands there may be NaN, and would be in the gradient."""
        return torch.where(loss_mask.reshape(*loss_mask.shape, *[1] * (x.ndim - 2)), x, filling)

    policy, reference = ((kept(of.mean, 0.0), kept(of.std, 1.0)) for of in (ours, theirs))
    return gaussian_kl(*policy, *(x.detach() for x in reference))


def _moves_too_far(objective: Objective, likelihood: Likelihood, step: _Step, batch: LossInputs) -> Bool[Tensor, "b t"]:
    """Where the KL to the old policy exceeds the mask and the update would raise it: A log r > 0.

    In closed form where both are Gaussian, else k3 of the action that the old policy drew.
    """
    log_ratio = step.token.detach()
    kl_old = log_ratio.expm1() - log_ratio
    if likelihood.gaussian is not None and batch.old_gaussian is not None:
        kl_old = exact_kl(likelihood.gaussian, batch.old_gaussian, step.loss_mask).detach()
    return step.loss_mask & (kl_old > objective.kl_mask) & (step.advantages * log_ratio > 0)


def _ref_stat(likelihood: Likelihood, step: _Step, ref: Likelihood) -> Stat:
    nothing = torch.zeros_like(step.token)
    return Stat.of(
        kl(likelihood.logprobs.detach(), ref.logprobs.detach(), nothing, step.loss_mask, estimator="k3"), step.loss_mask
    )


def ratio_stats(
    log_ratio: Float[Tensor, "b t"],
    token_log_ratio: Float[Tensor, "b t"],
    advantages: Float[Tensor, "b t"],
    loss_mask: Bool[Tensor, "b t"],
    objective: Objective,
) -> dict[str, Stat]:
    """How far the policy is from the one that drew the batch, and what the clip stops."""
    ratio, (low, high) = log_ratio.exp(), clip_range(objective)
    too_high, too_low = ratio > 1 + high, ratio < 1 - low
    if objective.surrogate == "clip":
        too_high, too_low = too_high & (advantages > 0), too_low & (advantages < 0)
    clips = objective.surrogate in ("clip", "cispo")
    return {
        "ratio": Stat.of(ratio, loss_mask),
        "kl/old_nats": Stat.of(-token_log_ratio, loss_mask),
        "kl/old_k3_nats": Stat.of(token_log_ratio.expm1() - token_log_ratio, loss_mask),
        "clip/high_frac": Stat.of((too_high & clips).double(), loss_mask),
        "clip/low_frac": Stat.of((too_low & clips).double(), loss_mask),
    }


def _weighted(weights: Tensor, loss_mask: Tensor, per_action: Tensor) -> Tensor:
    return (weights.to(per_action.dtype) * torch.where(loss_mask, per_action, 0)).sum()
