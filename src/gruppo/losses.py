"""Losses for other training loops: modules without weights, thin wrappers of ``core``.

    loss_fn = GRPOLoss(kl_beta=0.04)
    loss = loss_fn(logprobs, old_logprobs, rewards, ref_logprobs, mask)  # [B, T], rewards [P, G]
    loss.backward()

A call is one update: its means are over the rows that it gets. Accumulating micro-batches of
unequal length gives another gradient than one batch does; ``gruppo.train`` fixes the denominator
over the whole update.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gruppo.core.advantages import group_advantages
from gruppo.core.loss import LossInputs, policy_loss
from gruppo.core.objective import GRPO, PPO, PRESETS, Objective
from gruppo.core.returns import gae
from gruppo.core.weights import loss_total, loss_weights
from gruppo.types import GruppoError, Likelihood, Stat

__all__ = ["GRPOLoss", "PPOLoss", "compute_gae"]

FloatRows = Float[Tensor, "*rows"]
Terms = tuple[dict[str, Tensor], dict[str, Stat]]
"""Terms of a loss, coefficients included, so that their sum is the loss; and statistics of its
actions."""


class _PolicyLoss(nn.Module):
    """An objective whose terms have coefficients; one call is one update."""

    terms: Callable[..., Terms]
    max_length: int | None = None

    def __init__(self, objective: Objective, **coefficients: float) -> None:
        super().__init__()
        self.objective = objective
        for name, value in coefficients.items():
            _check_range(name, value, math.inf)
            setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Float[Tensor, ""]:
        """Loss to be minimized: the sum of ``terms``, which takes the same arguments."""
        return torch.stack(list(self.terms(*args, **kwargs)[0].values())).sum()

    def _terms(
        self,
        likelihood: Likelihood,
        loss_mask: Bool[Tensor, "B T"],
        coefficients: dict[str, float],
        group_ids: Int[Tensor, "B"] | None = None,
        **inputs: Any,
    ) -> Terms:
        """``policy_loss`` with this batch as the whole update, and its terms times their
        coefficients."""
        average = self.objective.average
        total = loss_total(
            loss_mask, average=average, max_length=self.max_length or 1, group_ids=group_ids
        )
        weights = loss_weights(loss_mask, average=average, total=total, group_ids=group_ids)
        batch = LossInputs(loss_mask=loss_mask, weights=weights, **inputs)
        terms, stats = policy_loss(likelihood, batch, self.objective)
        weighted = {name: coefficients.get(name, 1) * term for name, term in terms.items()}
        return weighted, Stat.read(stats)


class GRPOLoss(_PolicyLoss):
    """Group relative policy optimization (arXiv 2402.03300): a clipped surrogate and a KL to a
    reference.

    L = -mean(min(r A, clip(r, 1 - e, 1 + e) A)) + kl_beta KL(policy || reference),  r = exp(logp -
    old_logp), A = (reward - mean of its group) / (std of its group + 1e-4).

    The KL is k3 times the ratio, in nats. A plain mean(logp - ref_logp), as in sketches of GRPO,
    has a gradient of zero in expectation and no effect. ``objective`` is the name of a preset or an
    ``Objective``: "dr_grpo" does not divide by the standard deviation, "rloo" compares with the
    other members of the group.
    """

    kl_beta: float

    def __init__(
        self,
        clip_epsilon: float | None = None,
        kl_beta: float = 0.1,
        *,
        objective: Objective | str = GRPO,
        max_length: int | None = None,
    ) -> None:
        """``clip_epsilon``: both sides of the clip; None keeps the objective's own, 0.2 for GRPO.

        ``max_length``: the longest rollout allowed, which average='constant' (Dr.GRPO) divides by.
        """
        if isinstance(objective, str):
            if objective not in PRESETS:
                raise GruppoError(
                    f"objective={objective!r} is none of {', '.join(PRESETS)}. Use one, or an "
                    f"Objective."
                )
            objective = PRESETS[objective]
        if clip_epsilon is not None:
            objective = replace(objective, clip_low=clip_epsilon, clip_high=clip_epsilon)
        super().__init__(objective, kl_beta=kl_beta)
        self.max_length = max_length
        objective.check(group_size=2, kl_coef=kl_beta)
        if objective.average == "constant" and (max_length is None or max_length < 1):
            raise GruppoError(
                f"average='constant' divides by max_length={max_length}. Set it to the longest "
                f"rollout."
            )
        of_each_action = objective.credit != "outcome" or objective.kl_in == "reward"
        needs = {
            "values; use PPOLoss": objective.has_critic,
            "statistics of earlier steps": {"running", "prompt"}
            & {objective.baseline, objective.scale},
            "credit of each action": of_each_action or objective.whiten or objective.adv_clip,
            "the sampler's log-probs": objective.correction != "none",
            "to know which rows were truncated": objective.mask_truncated or objective.overlong,
        }
        for need, is_needed in needs.items():
            if is_needed:
                raise GruppoError(f"this objective, which gruppo.train supports, needs {need}.")

    def terms(
        self,
        policy_logprobs: FloatRows,
        old_policy_logprobs: FloatRows | None,
        rewards: Tensor,
        reference_logprobs: FloatRows | None = None,
        mask: Bool[Tensor, "B T"] | None = None,
        group_ids: Int[Tensor, "B"] | None = None,
    ) -> Terms:
        """``policy`` and, with a KL in the loss, ``kl``; and statistics of ratio, clip, KL and
        rewards.

        Without a mask, log-probs are of whole sequences, in the shape of the rewards: [prompts,
        group]. A ratio is then that of a sequence, which leaves the clip range sooner than that of
        a token. With a mask (True where the policy chose the token), log-probs are [B, T] and
        rewards [prompts, group], prompt after prompt, with prompts * group = B; or rewards are [B],
        and ``group_ids`` [B] says which rows share a prompt. ``old_policy_logprobs`` None: the
        policy itself sampled the rows. Surrogates without a ratio (rloo, reinforce, nanochat) do
        not read them, and need rows of the policy itself. Rewards that are not finite are not
        scored: their rows leave numerator and denominator, and are counted.
        """
        o = self.objective
        _check(
            policy_logprobs,
            old_policy_logprobs=old_policy_logprobs,
            reference_logprobs=reference_logprobs,
        )
        rewards, group_ids, mask = _rows(policy_logprobs, rewards, mask, group_ids)
        if o.needs_groups and group_ids.numel() and int(group_ids.bincount().max()) < 2:
            raise GruppoError("""every group has one row; GRPO needs at least 2. Sample more of each
                prompt, or use GRPOLoss(objective='reinforce').""")
        if self.kl_beta > 0 and reference_logprobs is None:
            raise GruppoError(
                f"kl_beta={self.kl_beta:g} needs reference_logprobs. Pass them, or set kl_beta=0."
            )
        # A failed reward is not a reward of 0: its row is left out of the mean, as in training.
        is_scored = rewards.isfinite()
        loss_mask = mask & is_scored[:, None]
        old = policy_logprobs if old_policy_logprobs is None else old_policy_logprobs
        ref = None
        if reference_logprobs is not None:
            ref = Likelihood(reference_logprobs.detach().reshape(mask.shape))
        row, _ = group_advantages(
            rewards, group_ids, baseline=o.baseline, scale=o.scale, eps=o.scale_eps
        )
        terms, stats = self._terms(
            Likelihood(policy_logprobs.reshape(mask.shape)),
            loss_mask,
            {"kl": self.kl_beta},
            group_ids,
            advantages=torch.where(loss_mask, row[:, None], 0),
            old_logprobs=old.detach().reshape(mask.shape),
            ref=ref,
        )
        own = {"reward": Stat.of(rewards, is_scored)}
        own["reward/unscored_frac"] = Stat.of((~is_scored).double())
        return terms, stats | Stat.read(own)


def compute_gae(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    gamma: float = 0.99,
    lam: float = 0.95,
    mask: Bool[Tensor, "B T"] | None = None,
    bootstrap: Float[Tensor, "B"] | None = None,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Advantages and returns (advantages + values) of each action, without gradient; see
    ``core.returns.gae``.

    Every action has one, the last included: what comes after it is worth ``bootstrap`` [B], 0 by
    default. (A ``values[:, 1:]`` without it drops the last step.) Time is the second dimension and
    skips columns where ``mask`` is False.
    """
    if mask is None:
        mask = torch.ones_like(rewards, dtype=torch.bool)
    if rewards.ndim != 2:
        raise GruppoError(f"""rewards are {list(rewards.shape)}; they need [B, T]. For one sequence
            pass rewards[None].""")
    if values.shape == (len(rewards), rewards.shape[1] + 1):
        raise GruppoError(
            f"values have {values.shape[1]} columns for {rewards.shape[1]} rewards",
            advice="Pass values[:, :-1], and the last column as bootstrap=values[:, -1].",
        )
    _check_range("gamma", gamma, 1)
    _check_range("lam", lam, 1)
    _check(rewards, mask, is_finite=True, rewards=rewards, values=values)
    _check(rewards[:, 0], is_finite=True, bootstrap=bootstrap)
    with torch.no_grad():
        return gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap=bootstrap)


class PPOLoss(_PolicyLoss):
    """Proximal policy optimization (arXiv 1707.06347) with a critic and an entropy bonus.

    L = -mean(min(r A, clip(r, 1 - e, 1 + e) A)) + c1 mean((V - R)^2) - c2 mean(entropy).

    The squared error is not halved, as in ``F.mse_loss``; ``core`` and ``gruppo.train`` halve it,
    so their value_coef is 2 c1. ``value_clip`` above 0 bounds the change of V from ``old_values``,
    those stored with the batch.
    """

    value_loss_coef: float
    entropy_coef: float
    compute_gae = staticmethod(compute_gae)

    def __init__(
        self,
        clip_epsilon: float = 0.2,
        value_loss_coef: float = 0.5,
        entropy_coef: float = 0.01,
        value_clip: float = 0.0,
    ) -> None:
        objective = replace(
            PPO, clip_low=clip_epsilon, clip_high=clip_epsilon, value_clip=value_clip
        )
        super().__init__(objective, value_loss_coef=value_loss_coef, entropy_coef=entropy_coef)

    def terms(
        self,
        policy_logprobs: FloatRows,
        old_policy_logprobs: FloatRows,
        values: FloatRows,
        returns: FloatRows,
        advantages: FloatRows,
        entropy: FloatRows | None = None,
        mask: Bool[Tensor, "*rows"] | None = None,
        old_values: FloatRows | None = None,
    ) -> Terms:
        """``policy``, ``value`` and, with an entropy, ``entropy``; and statistics of ratio, clip
        and values.

        All inputs are [batch], or all [B, T] with a mask, True where the policy chose the action.
        ``entropy`` may be left out if entropy_coef is 0. Advantages are used as they are: whiten
        them first, over the whole batch and not over a part of it (``core.returns.whiten``).
        """
        if mask is None:
            mask = torch.ones_like(policy_logprobs, dtype=torch.bool)
        if self.entropy_coef > 0 and entropy is None:
            raise GruppoError(
                f"entropy_coef={self.entropy_coef:g} needs entropy; pass it, or set entropy_coef=0."
            )
        if self.objective.value_clip and old_values is None:
            clip = self.objective.value_clip
            raise GruppoError(
                f"value_clip={clip:g} needs old_values. Pass them, or set value_clip=0."
            )
        _check(policy_logprobs, mask, values=values, entropy=entropy, old_values=old_values)
        _check(
            policy_logprobs,
            mask,
            is_finite=True,
            advantages=advantages,
            old_policy_logprobs=old_policy_logprobs,
            returns=returns,
        )

        def columns(x: Tensor | None) -> Any:
            return x[:, None] if x is not None and x.ndim == 1 else x  # [batch]: one action a row

        return self._terms(
            Likelihood(columns(policy_logprobs), columns(entropy), values=columns(values)),
            columns(mask),
            # core halves the square
            {"value": 2 * self.value_loss_coef, "entropy": -self.entropy_coef},
            advantages=columns(advantages.detach()),
            old_logprobs=columns(old_policy_logprobs.detach()),
            returns=columns(returns.detach()),
            old_values=columns(None if old_values is None else old_values.detach()),
        )


def _rows(
    logprobs: Tensor, rewards: Tensor, mask: Tensor | None, group_ids: Tensor | None
) -> tuple[Float[Tensor, "B"], Int[Tensor, "B"], Bool[Tensor, "B T"]]:
    """Rewards of rows, group ids from 0, and the mask."""
    if mask is None:
        if logprobs.shape != rewards.shape:
            raise GruppoError(
                f"rewards is {list(rewards.shape)} and needs to be {list(logprobs.shape)}",
                advice="Log-probs of tokens [B, T] need a mask [B, T].",
            )
        mask = torch.ones(rewards.numel(), 1, dtype=torch.bool, device=rewards.device)
    else:
        _check(logprobs, mask)
    rows, dimensions = len(mask), 2 if group_ids is None else 1
    if (mask.ndim, rewards.ndim, rewards.numel()) != (2, dimensions, rows):
        raise GruppoError(f"""rewards are {list(rewards.shape)} for {rows} rows; they need [prompts,
            group], prompt after prompt. For groups of other sizes pass rewards [{rows}] and
            group_ids [{rows}].""")
    if group_ids is None:  # prompt after prompt: a row of rewards is a group
        group_ids = torch.arange(rows, device=rewards.device) // max(rewards.shape[1], 1)
    rewards = rewards.detach().flatten()
    _check(rewards, group_ids=group_ids)
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    return rewards, group_ids.unique(return_inverse=True)[1], mask


def _check_range(name: str, value: float, highest: float) -> None:
    if not 0 <= value <= highest or math.isinf(value):  # written so that NaN fails
        raise GruppoError(f"{name}={value} is out of range; it needs to be in [0, {highest}]")


def _check(
    like: Tensor, mask: Tensor | None = None, *, is_finite: bool = False, **inputs: Tensor | None
) -> None:
    """Refuse shapes that differ from that of ``like``, masks that are not boolean, and with
    ``is_finite`` numbers that are not finite where the mask is True."""
    if mask is not None and mask.dtype != torch.bool:
        raise GruppoError(
            f"mask is {mask.dtype}; it needs True where the policy chose. Use mask.bool()."
        )
    for name, x in {"mask": mask, **inputs}.items():
        if x is not None and x.shape != like.shape:
            raise GruppoError(f"{name} is {list(x.shape)} and needs to be {list(like.shape)}")
        if x is None or not is_finite:
            continue
        is_wrong = ~x.isfinite() if mask is None else mask & ~x.isfinite()
        if is_wrong.any():
            raise GruppoError(f"""{name} holds numbers that are not finite where mask is True. Leave
                those rows out of the mask; a failed reward is not a reward of 0.""")
