"""An algorithm is a bundle of choices. The trainer is blind to its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Literal, get_args, get_type_hints

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gruppo.core.advantages import Baseline, Scale
from gruppo.core.divergence import Estimator, KlGradient, kl
from gruppo.core.surrogates import clip_surrogate, log_ratio, reinforce_surrogate
from gruppo.core.weights import Average
from gruppo.types import GruppoError, Likelihood, Stat


@dataclass(frozen=True)
class Objective:
    """What is maximised. Presets are instances; any field can be changed with ``dataclasses.replace``."""

    baseline: Baseline = "mean"
    """What a reward is compared with."""
    scale: Scale = "group"
    """What the difference is divided by."""
    scale_eps: float = 1e-4
    """Added to the scale. TRL 1e-4, verl 1e-6; groups without spread are found by comparison, never by eps."""
    surrogate: Literal["clip", "reinforce"] = "clip"
    clip_low: float = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above 1 + clip_high."""
    average: Average = "sequence"
    """How actions are averaged into one loss."""
    kl: Estimator = "k3"
    """Estimator of the KL to the reference; used where kl_coef > 0."""
    kl_gradient: KlGradient = "unbiased"
    mask_truncated: bool = False
    """Do not learn from rollouts that were cut at max_actions."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            choices = get_args(hints[field.name])
            value = getattr(self, field.name)
            if choices and value not in choices:
                raise GruppoError(f"objective.{field.name}={value!r} is not one of {', '.join(map(repr, choices))}.")
        if not (0 <= self.clip_low <= 1 and self.clip_high >= 0):
            raise GruppoError(
                f"objective.clip_low={self.clip_low}, clip_high={self.clip_high}: needs 0 <= clip_low <= 1 and "
                "clip_high >= 0, since the ratio is kept in [1 - clip_low, 1 + clip_high]. PPO uses 0.2 and 0.2."
            )
        if not 0 <= self.scale_eps < float("inf"):
            raise GruppoError(f"objective.scale_eps={self.scale_eps} is not a number from 0 on; use 1e-4.")

    def check(self, *, group_size: int, updates_per_row: int = 1, kl_coef: float = 0.0) -> None:
        """Refuse what cannot learn, with the reason and the nearest valid choice.

        ``updates_per_row``: in how many optimiser steps a rollout's data is used after others have moved the weights.
        """
        if group_size < 2 and self.needs_groups:
            why = "baseline" if self.baseline in GROUP_BASELINES else "spread to scale by"
            raise GruppoError(
                f"group_size={group_size} gives no {why} for baseline={self.baseline!r}, scale={self.scale!r}; it "
                "needs at least 2. Set --rollout.group-size 2 or --objective reinforce."
            )
        if self.surrogate == "reinforce" and updates_per_row > 1:
            raise GruppoError(
                f"surrogate='reinforce' has no correction for data of older weights, but a batch is used for "
                f"{updates_per_row} updates. Set --optim.epochs 1 --optim.minibatches 1 or --objective.surrogate clip."
            )
        if kl_coef > 0 and self.kl == "k1" and self.kl_gradient == "naive":
            raise GruppoError(
                f"kl='k1' with kl_gradient='naive' has a gradient of zero in expectation, so kl_coef={kl_coef:g} holds "
                "nothing. Set --objective.kl-gradient unbiased, or --objective.kl k2 or k3."
            )

    @property
    def needs_groups(self) -> bool:
        return self.baseline in GROUP_BASELINES or self.scale == "group"


GROUP_BASELINES = ("mean", "leave_one_out")

GRPO = Objective()
"""DeepSeekMath, arXiv 2402.03300: (r - mean) / std in the group, clip, mean over tokens then over sequences."""
DR_GRPO = Objective(scale="none", average="constant")
"""arXiv 2503.20783: no division by the spread nor by the length; one constant denominator."""
DAPO = Objective(clip_high=0.28, average="token")
"""arXiv 2503.14476: clip-higher and the token average (its loss; dynamic sampling and overlong shaping are apart)."""
RLOO = Objective(baseline="leave_one_out", scale="none", surrogate="reinforce", average="sequence_sum")
"""arXiv 2402.14740: each rollout against the mean of its group-mates, the whole sequence as one action."""
REINFORCE = Objective(baseline="batch_mean", scale="none", surrogate="reinforce", average="sequence_sum")
"""Williams 1992, with the batch's mean reward as the baseline; works with a group of one."""

PRESETS: Mapping[str, Objective] = {
    "grpo": GRPO,
    "dr_grpo": DR_GRPO,
    "dapo": DAPO,
    "rloo": RLOO,
    "reinforce": REINFORCE,
}


@dataclass(frozen=True, eq=False)
class LossInputs:
    """One piece of a batch: what the loss needs beside the likelihood."""

    advantages: Float[Tensor, "b t"]
    keep: Bool[Tensor, "b t"]
    weights: Float[Tensor, "b t"]
    """``loss_weights`` of the whole update, cut to the piece."""
    old_logprobs: Float[Tensor, "b t"] | None = None
    """None: the current ones, detached (every row enters exactly one update)."""
    ref: Likelihood | None = None


def policy_loss(
    likelihood: Likelihood, batch: LossInputs, objective: Objective
) -> tuple[dict[str, Float[Tensor, ""]], dict[str, Stat]]:
    """The terms of one piece, each already weighted and summed, and the statistics of its kept actions.

    Terms: ``policy``; ``kl`` where there is a reference; ``entropy`` (to be maximised) where it was asked for. The
    caller multiplies each by its coefficient. Statistics are named by their metric.
    """
    keep, logprobs = batch.keep, likelihood.logprobs
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    ratio = log_ratio(logprobs, old, keep)  # [b, t]
    per_action = SURROGATES[objective.surrogate](objective, logprobs, ratio, batch)
    terms = {"policy": _weighted(batch.weights, keep, per_action)}
    stats = ratio_stats(ratio.detach(), batch.advantages, keep, objective)
    if batch.ref is not None:
        ref = batch.ref.logprobs.detach()
        estimate = kl(logprobs, ref, ratio, keep, estimator=objective.kl, gradient=objective.kl_gradient)
        terms["kl"] = _weighted(batch.weights, keep, estimate)
        stats["kl/ref_nats"] = Stat.of(kl(logprobs.detach(), ref, torch.zeros_like(ratio), keep, estimator="k3"), keep)
    if likelihood.entropy is not None:
        terms["entropy"] = _weighted(batch.weights, keep, likelihood.entropy)
        stats["entropy/nats"] = Stat.of(likelihood.entropy, keep)
    return terms, stats


def ratio_stats(
    log_ratio: Float[Tensor, "b t"], advantages: Float[Tensor, "b t"], keep: Bool[Tensor, "b t"], objective: Objective
) -> dict[str, Stat]:
    """How far the policy is from the one that drew the batch, and what the clip stops."""
    ratio = log_ratio.exp()
    clips = objective.surrogate == "clip"
    too_high = (ratio > 1 + objective.clip_high) & (advantages > 0) & clips
    too_low = (ratio < 1 - objective.clip_low) & (advantages < 0) & clips
    return {
        "ratio": Stat.of(ratio, keep),
        "kl/old_nats": Stat.of(-log_ratio, keep),
        "clip/high_frac": Stat.of(too_high.double(), keep),
        "clip/low_frac": Stat.of(too_low.double(), keep),
    }


def _weighted(weights: Tensor, keep: Tensor, per_action: Tensor) -> Tensor:
    return (weights.to(per_action.dtype) * torch.where(keep, per_action, 0)).sum()


def _clip(objective: Objective, logprobs: Tensor, ratio: Tensor, batch: LossInputs) -> Tensor:
    advantages = torch.where(batch.keep, batch.advantages, 0)
    return clip_surrogate(ratio, advantages, low=objective.clip_low, high=objective.clip_high)


def _reinforce(objective: Objective, logprobs: Tensor, ratio: Tensor, batch: LossInputs) -> Tensor:
    return reinforce_surrogate(logprobs, torch.where(batch.keep, batch.advantages, 0), batch.keep)


SURROGATES: Mapping[str, Callable[[Objective, Tensor, Tensor, LossInputs], Tensor]] = {
    "clip": _clip,
    "reinforce": _reinforce,
}


def describe(objective: Objective, *, kl_coef: float, group_size: int, max_length: int) -> list[str]:
    """The effective objective in words and formula, line by line."""
    o = objective
    baseline = {
        "none": "0",
        "mean": "mean of the group",
        "leave_one_out": "mean of the group's other rows",
        "batch_mean": "mean of the batch",
    }[o.baseline]
    scale = {
        "none": "",
        "group": f" / (std of the group + {o.scale_eps:g})",
        "batch": f" / (std of the batch + {o.scale_eps:g})",
    }
    surrogate = {
        "clip": f"min(r A, clip(r, {1 - o.clip_low:g}, {1 + o.clip_high:g}) A),  r = exp(logprob - old_logprob)",
        "reinforce": "A logprob",
    }[o.surrogate]
    average = {
        "sequence": "mean over the tokens of a row, then over the rows",
        "token": "mean over all kept tokens of the update",
        "constant": f"sum over tokens / (rows x {max_length})",
        "sequence_sum": "sum over the tokens of a row, then mean over the rows",
        "sum": "sum over all tokens",
    }[o.average]
    lines = [
        f"advantage   A = (reward - {baseline}){scale[o.scale]}, one for all tokens of a row; "
        f"{group_size} rows a group",
        f"maximise    {surrogate}",
        f"averaged    {average}",
    ]
    if kl_coef > 0:
        how = "correct in expectation" if o.kl_gradient == "unbiased" else "the estimator's own gradient"
        lines.append(f"minus       {kl_coef:g} x KL(policy || reference) by {o.kl}, {how}, in nats a token")
    else:
        lines.append("KL          none: kl_coef is 0, no reference is loaded")
    if o.mask_truncated:
        lines.append("not learned rows cut at the longest length")
    return lines
