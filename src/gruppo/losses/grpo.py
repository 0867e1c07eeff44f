"""GRPO and its relatives: each row is compared with the others of its prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gruppo.core.advantages import group_advantages
from gruppo.core.loss import LossInputs, policy_loss
from gruppo.core.objective import GRPO, PRESETS, Objective
from gruppo.core.returns import place_score, returns_to_go, whiten
from gruppo.losses.inputs import Terms, batch_weights, check_coefficient, check_finite, check_shapes
from gruppo.types import GruppoError, Likelihood, Stat


class GRPOLoss(nn.Module):
    """Group relative policy optimization (arXiv 2402.03300): a clipped surrogate and a KL to a reference.

    L = -mean(min(r A, clip(r, 1 - e, 1 + e) A)) + kl_beta KL(policy || reference),  r = exp(logp - old_logp),
    A = (reward - mean of its group) / (std of its group + 1e-4).

    The KL is k3 times the ratio, in nats. A plain mean(logp - ref_logp), as in sketches of GRPO, has a gradient of zero
    in expectation and no effect. ``objective`` is the name of a preset or an ``Objective``: "dr_grpo" does not divide
    by the standard deviation, "rloo" compares with the other members of the group.
    """

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
        super().__init__()
        if isinstance(objective, str):
            if objective not in PRESETS:
                raise GruppoError(f"objective={objective!r} is none of {', '.join(PRESETS)}. Use one, or an Objective.")
            objective = PRESETS[objective]
        if clip_epsilon is not None:
            objective = replace(objective, clip_low=clip_epsilon, clip_high=clip_epsilon)
        self.objective, self.max_length = objective, max_length
        self.kl_beta = check_coefficient("kl_beta", kl_beta)
        objective.check(group_size=2, kl_coef=kl_beta)
        if objective.average == "constant" and (max_length is None or max_length < 1):
            raise GruppoError(
                f"average='constant' divides by the longest rollout allowed, and max_length={max_length}. Set "
                "GRPOLoss(max_length=...), in tokens."
            )
        for is_unsupported, why in (
            (objective.has_critic, "baseline='critic' needs values. Use PPOLoss."),
            (
                bool({"running", "prompt"} & {objective.baseline, objective.scale}),
                "moving statistics need memory between steps. Use baseline='mean' and scale='group', or gruppo.train.",
            ),
            (
                objective.correction != "none",
                "a correction needs the sampler's log-probs. Set correction='none', or use gruppo.train.",
            ),
            (
                objective.mask_truncated or objective.overlong > 0,
                "mask_truncated and overlong need to know which rows were truncated. Apply them to mask and rewards.",
            ),
        ):
            if is_unsupported:
                raise GruppoError(f"GRPOLoss does not support this objective: {why}")

    def forward(self, *args: Any, **kwargs: Any) -> Float[Tensor, ""]:
        """Loss to be minimized: the sum of ``terms``, which takes the same arguments."""
        terms, _ = self.terms(*args, **kwargs)
        return torch.stack(list(terms.values())).sum()

    def terms(
        self,
        policy_logprobs: Float[Tensor, "*rows"],
        old_policy_logprobs: Float[Tensor, "*rows"] | None,
        rewards: Tensor,
        reference_logprobs: Float[Tensor, "*rows"] | None = None,
        mask: Bool[Tensor, "B T"] | None = None,
        group_ids: Int[Tensor, "B"] | None = None,
    ) -> Terms:
        """``policy`` and, with a KL in the loss, ``kl``; and statistics of ratio, clip, KL and rewards.

        Without a mask, log-probs are of whole sequences, in the shape of the rewards: [prompts, group]. A ratio is then
        that of a sequence, which leaves the clip range sooner than that of a token. With a mask (True where the policy
        chose the token), log-probs are [B, T] and rewards [prompts, group], prompt after prompt, with
        prompts * group = B; or rewards are [B], and ``group_ids`` [B] says which rows share a prompt.
        ``old_policy_logprobs`` None: the policy itself sampled the rows. Surrogates without a ratio (rloo, reinforce,
        nanochat) do not read them, and need rows of the policy itself.
        Rewards that are not finite are not scored: their rows leave numerator and denominator, and are counted.
        """
        o = self.objective
        check_shapes(policy_logprobs, old_policy_logprobs=old_policy_logprobs, reference_logprobs=reference_logprobs)
        rewards, group_ids, mask = _rows(policy_logprobs, rewards, mask, group_ids)
        if o.needs_groups and group_ids.numel() and int(group_ids.bincount().max()) < 2:
            raise GruppoError(
                "every group has one row, and nothing to compare it with; GRPO needs at least 2 samples per prompt. "
                "Sample more of each, or use GRPOLoss(objective='reinforce')."
            )
        if self.kl_beta > 0 and reference_logprobs is None:
            raise GruppoError(
                f"kl_beta={self.kl_beta:g} needs reference_logprobs. Pass the reference model's log-probs of the same "
                "tokens, or set kl_beta=0."
            )
        is_scored = rewards.isfinite()
        loss_mask, logprobs = mask & is_scored[:, None], policy_logprobs.reshape(mask.shape)
        old = (policy_logprobs if old_policy_logprobs is None else old_policy_logprobs).detach().reshape(mask.shape)
        ref = None if reference_logprobs is None else reference_logprobs.detach().reshape(mask.shape)
        batch = LossInputs(
            advantages=self._advantages(rewards, group_ids, loss_mask, old, ref),
            loss_mask=loss_mask,
            weights=batch_weights(loss_mask, o, self.max_length or 1),
            old_logprobs=old,
            ref=None if ref is None else Likelihood(ref),
        )
        terms, stats = policy_loss(Likelihood(logprobs), batch, o)
        if "kl" in terms:
            terms["kl"] = self.kl_beta * terms["kl"]
        stats |= {"reward": Stat.of(rewards, is_scored), "reward/unscored_frac": Stat.of((~is_scored).double())}
        return terms, stats

    def _advantages(
        self, rewards: Tensor, group_ids: Tensor, loss_mask: Tensor, old: Tensor, ref: Tensor | None
    ) -> Float[Tensor, "B T"]:
        o, penalty = self.objective, torch.zeros_like(old)
        if o.kl_in == "reward" and ref is not None:
            check_finite(loss_mask, old_policy_logprobs=old, reference_logprobs=ref)
            penalty = self.kl_beta * torch.where(loss_mask, old - ref, 0)
        score = rewards - penalty.sum(dim=1) if o.credit == "outcome" else rewards
        row, _ = group_advantages(score, group_ids, baseline=o.baseline, scale=o.scale, eps=o.scale_eps)
        if o.credit == "outcome":
            advantages = torch.where(loss_mask, row[:, None], 0)
        else:
            advantages = returns_to_go(place_score(row, loss_mask) - penalty, loss_mask, gamma=o.gamma)
        advantages = whiten(advantages, loss_mask) if o.whiten else advantages
        return advantages.clamp(-o.adv_clip, o.adv_clip) if o.adv_clip else advantages


def _rows(
    logprobs: Tensor, rewards: Tensor, mask: Tensor | None, group_ids: Tensor | None
) -> tuple[Float[Tensor, "B"], Int[Tensor, "B"], Bool[Tensor, "B T"]]:
    """Rewards of rows, group ids from 0, and the mask."""
    if mask is None:
        if logprobs.shape != rewards.shape:
            raise GruppoError(
                f"policy_logprobs are {list(logprobs.shape)} and rewards {list(rewards.shape)}; without a mask "
                "both are [prompts, group], of whole sequences. For log-probs of tokens [B, T] pass mask [B, T]."
            )
        mask = torch.ones(rewards.numel(), 1, dtype=torch.bool, device=rewards.device)
    else:
        check_shapes(logprobs, mask=mask)
    rows = len(mask)
    if (mask.ndim, rewards.numel()) != (2, rows) or rewards.ndim != (2 if group_ids is None else 1):
        raise GruppoError(
            f"rewards are {list(rewards.shape)} for {rows} rows; they need [prompts, group] with prompts * group = "
            f"{rows}, prompt after prompt. For groups of other sizes pass rewards [{rows}] and group_ids [{rows}]."
        )
    if group_ids is None:
        group_ids = torch.arange(len(rewards), device=rewards.device).repeat_interleave(rewards.shape[1])
    check_shapes(rewards.flatten(), group_ids=group_ids)
    rewards = rewards.detach().flatten()
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    return rewards, group_ids.unique(return_inverse=True)[1], mask
