"""Likelihoods to the terms of a loss. Reads the choices of an objective, never the name of an
algorithm."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gruppo.core import surrogates
from gruppo.core.kl import kl_penalty, masked_gaussian_kl
from gruppo.core.objective import Objective
from gruppo.core.surrogates import OwnSurrogate, log_ratio, value_loss
from gruppo.core.weights import correction_weights
from gruppo.types import Gaussian, GruppoError, Likelihood, Stat


@dataclass(frozen=True, eq=False)
class LossInputs:
    """Inputs of the loss of a micro-batch besides the likelihood."""

    advantages: Float[Tensor, "B T"]
    loss_mask: Bool[Tensor, "B T"]
    weights: Float[Tensor, "B T"]
    """``loss_weights`` of the whole update, cut to the micro-batch."""
    old_logprobs: Float[Tensor, "B T"] | None = None
    """None: the current ones, detached (every row enters exactly one update)."""
    ref: Likelihood | None = None
    sampler_logprobs: Float[Tensor, "B T"] | None = None
    """For a correction."""
    old_values: Float[Tensor, "B T"] | None = None
    """The critic's, stored when the batch was collected."""
    returns: Float[Tensor, "B T"] | None = None
    dims: int = 1
    """Dimensions of one action."""
    old_gaussian: Gaussian | None = None
    """The old policy's, for an exact KL to it; without it, that KL is estimated."""


def policy_loss(
    likelihood: Likelihood,
    batch: LossInputs,
    objective: Objective,
    own_surrogate: OwnSurrogate | None = None,
) -> tuple[dict[str, Float[Tensor, ""]], dict[str, Stat]]:
    """Terms of one micro-batch, each weighted and summed, and the statistics of its kept actions by
    metric name.

    Terms: ``policy``; ``kl`` where there is a reference and the KL is in the loss; ``value`` where
    there are values and returns; ``entropy`` (to be maximized) where the likelihood holds it. The
    caller multiplies each by its coefficient and adds them up. ``own_surrogate``: the function that
    the objective names as its surrogate.
    """
    o, loss_mask, logprobs = objective, batch.loss_mask, likelihood.logprobs
    old_logprobs = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    advantages = torch.where(loss_mask, batch.advantages, 0)
    token_ratio = log_ratio(logprobs, old_logprobs, loss_mask)
    dims = batch.dims if o.dims == "mean" else 1
    level: surrogates.RatioLevel = o.ratio
    if level == "sequence" and o.credit != "outcome":
        level = "sequence_token"  # advantages that differ within a row need each action's gradient
    ratio = log_ratio(logprobs, old_logprobs, loss_mask, level=level, dims=dims)
    # Only "vespo" reads the ratio of tokens whatever the objective's level.
    read = token_ratio if o.surrogate == "vespo" else ratio
    per_action = _surrogate_losses(o, read, logprobs, advantages, loss_mask, own_surrogate)

    # Distance to the policy that sampled the batch, and the fraction of actions that the clip
    # stops.
    low, high = clip_range(o)
    drift, size = token_ratio.detach(), ratio.detach().exp()
    kl_old = drift.expm1() - drift
    too_high, too_low = size > 1 + high, size < 1 - low
    if o.surrogate == "clip":  # the minimum keeps the gradient where the clip would raise the loss
        too_high, too_low = too_high & (advantages > 0), too_low & (advantages < 0)
    clips = o.surrogate in ("clip", "cispo")
    stats = {
        "ratio": Stat.of(size, loss_mask),
        "kl/old_nats": Stat.of(-drift, loss_mask),
        "kl/old_k3_nats": Stat.of(kl_old, loss_mask),
        "clip/high_frac": Stat.of((too_high & clips).double(), loss_mask),
        "clip/low_frac": Stat.of((too_low & clips).double(), loss_mask),
    }

    # Correct for a sampler whose arithmetic differs from the trainer's.
    if o.correction != "none":
        if batch.sampler_logprobs is None:
            raise GruppoError(
                f"correction={o.correction!r} compares with the sampler's log-probs, and there are "
                f"none",
                advice="Use an engine that reports them, or set $objective.correction none",
            )
        weight = correction_weights(
            old_logprobs,
            batch.sampler_logprobs,
            loss_mask,
            mode=o.correction,
            level=o.correction_level,
            low=o.correction_low,
            high=o.correction_high,
        )
        per_action = weight * per_action
        stats["correction/weight"] = Stat.of(weight, loss_mask)

    if likelihood.gaussian is not None and batch.old_gaussian is not None:
        # exact, in place of estimates
        kl_old = masked_gaussian_kl(likelihood.gaussian, batch.old_gaussian, loss_mask).detach()
        stats |= dict.fromkeys(("kl/old_nats", "kl/old_k3_nats"), Stat.of(kl_old, loss_mask))
    if o.kl_mask:
        # drop actions beyond the trust region whose update would move further away: A log r > 0
        is_masked = loss_mask & (kl_old > o.kl_mask) & (advantages * drift > 0)
        per_action = torch.where(is_masked, 0, per_action)
        stats["clip/kl_mask_frac"] = Stat.of(is_masked.double(), loss_mask)
    terms = {"policy": _weighted_sum(batch.weights, loss_mask, per_action)}

    # KL to the reference: always a metric, and a term where the objective has it in the loss.
    if batch.ref is not None:
        ref_logprobs, is_exact = batch.ref.logprobs.detach(), o.kl == "exact"
        if likelihood.gaussian is not None and batch.ref.gaussian is not None:
            # a metric needs no gradient
            with torch.set_grad_enabled(torch.is_grad_enabled() and is_exact):
                kl = masked_gaussian_kl(likelihood.gaussian, batch.ref.gaussian, loss_mask)
        elif is_exact:
            raise GruppoError(
                "kl='exact' needs the policy's and the reference's Gaussian",
                option="objective.kl",
                advice="k3",
            )
        else:  # the plain estimate: a ratio belongs to the loss, not to the metric
            kl = kl_penalty(
                logprobs.detach(), ref_logprobs, drift, loss_mask, estimator="k3", gradient="naive"
            )
        stats["kl/ref_nats"] = Stat.of(kl, loss_mask)
        if o.kl_in == "loss":
            if not is_exact:
                kl = kl_penalty(
                    logprobs,
                    ref_logprobs,
                    token_ratio,
                    loss_mask,
                    estimator=o.kl,
                    gradient=o.kl_gradient,
                )
            terms["kl"] = _weighted_sum(batch.weights, loss_mask, kl)
    if likelihood.values is not None and batch.returns is not None:
        terms["value"], stats["value/clip_frac"] = critic_loss(likelihood.values, batch, o)
    if likelihood.entropy is not None:
        terms["entropy"] = _weighted_sum(batch.weights, loss_mask, likelihood.entropy)
        stats["entropy/nats"] = Stat.of(likelihood.entropy, loss_mask)
    return terms, stats


def _surrogate_losses(
    o: Objective,
    ratio: Float[Tensor, "B T"],
    logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    loss_mask: Bool[Tensor, "B T"],
    own_surrogate: OwnSurrogate | None,
) -> Float[Tensor, "B T"]:
    """The surrogate of each action, unreduced; ``ratio`` is its logarithm."""
    low, high = clip_range(o)
    if o.surrogate == "clip":
        return surrogates.clip_surrogate(
            ratio, advantages, low=low, high=high, dual=o.dual_clip or None
        )
    if o.surrogate == "cispo":
        return surrogates.cispo_surrogate(
            ratio, logprobs, advantages, loss_mask, low=low, high=high
        )
    if o.surrogate == "sapo":
        return surrogates.sapo_surrogate(ratio, advantages)
    if o.surrogate == "vespo":
        return surrogates.vespo_surrogate(ratio, logprobs, advantages, loss_mask)
    if o.surrogate == "reinforce":
        return surrogates.reinforce_surrogate(logprobs, advantages, loss_mask)
    if own_surrogate is None:
        problem = f"surrogate={o.surrogate!r} is a function's name, and only a run loads it"
        raise GruppoError(problem, option="objective.surrogate", advice="clip")
    losses = own_surrogate(ratio, advantages, torch.where(loss_mask, logprobs, 0), loss_mask)
    shape = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
    if shape != list(loss_mask.shape):
        raise GruppoError(
            f"""the surrogate {o.surrogate} returned {shape}; it needs the loss of each action,
                {list(loss_mask.shape)}""",
            option="objective.surrogate",
        )
    return losses


def critic_loss(
    values: Float[Tensor, "B T"], batch: LossInputs, objective: Objective
) -> tuple[Float[Tensor, ""], Stat]:
    """Weighted and summed ``value_loss``, and the fraction of values outside the value clip."""
    assert batch.returns is not None
    loss = value_loss(
        values, batch.old_values, batch.returns, batch.loss_mask, clip=objective.value_clip
    )
    is_outside = torch.zeros_like(values, dtype=torch.bool)
    if objective.value_clip and batch.old_values is not None:
        is_outside = (values.detach() - batch.old_values).abs() > objective.value_clip
    return _weighted_sum(batch.weights, batch.loss_mask, loss), Stat.of(
        is_outside.double(), batch.loss_mask
    )


def clip_range(objective: Objective) -> tuple[float, float]:
    """Largest distances of the clipped ratio below and above 1."""
    if objective.clip_unit == "nats":
        return -math.expm1(-objective.clip_low), math.expm1(objective.clip_high)
    return objective.clip_low, objective.clip_high


def _weighted_sum(weights: Tensor, loss_mask: Tensor, per_action: Tensor) -> Float[Tensor, ""]:
    return (weights.to(per_action.dtype) * torch.where(loss_mask, per_action, 0)).sum()
