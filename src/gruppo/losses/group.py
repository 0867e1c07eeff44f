"""GRPO and its relatives: a row is compared with the others of its prompt."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gruppo.core.advantages import group_advantages
from gruppo.core.credit import place_score, returns_to_go, whiten
from gruppo.core.loss import LossInputs, policy_loss
from gruppo.core.objective import GRPO, PRESETS, Objective
from gruppo.losses.inputs import Rows, Terms, coefficient, refuse_nan, same_shape, weights
from gruppo.types import GruppoError, Likelihood, Stat


class GRPOLoss(nn.Module):
    """Group relative policy optimisation (arXiv 2402.03300): a clipped surrogate and a KL to a reference.

    L = -mean(min(r A, clip(r, 1 - e, 1 + e) A)) + kl_beta KL(policy || reference),  r = exp(logp - old_logp),
    A = (reward - mean of its group) / (std of its group + 1e-4).

    The KL is k3 times the ratio, in nats. A plain mean(logp - ref_logp), as sketches of GRPO have it, has a gradient of
    zero in expectation and holds nothing. ``objective`` is a preset's name or an ``Objective``: "dr_grpo" leaves
    out the division by the spread, "rloo" compares with the other members of the group.
    """

    def __init__(
        self,
        clip_epsilon: float | None = None,
        kl_beta: float = 0.1,
        *,
        objective: Objective | str = GRPO,
        max_length: int | None = None,
    ) -> None:
        """``clip_epsilon``: both sides of the clip; None leaves the objective's own, which is 0.2 for GRPO.

        ``max_length``: the longest rollout allowed, which average='constant' (Dr.GRPO) divides by.
        """
        super().__init__()
        objective = _named(objective)
        if clip_epsilon is not None:
            objective = replace(objective, clip_low=clip_epsilon, clip_high=clip_epsilon)
        self.objective, self.max_length = objective, max_length
        self.kl_beta = coefficient("kl_beta", kl_beta)
        objective.check(group_size=2, kl_coef=kl_beta)
        _refuse_what_needs_more(objective, max_length)

    def forward(
        self,
        policy_logprobs: Float[Tensor, "*rows"],
        old_policy_logprobs: Float[Tensor, "*rows"] | None,
        rewards: Tensor,
        reference_logprobs: Float[Tensor, "*rows"] | None = None,
        mask: Bool[Tensor, "B T"] | None = None,
        group_ids: Int[Tensor, "B"] | None = None,
    ) -> Float[Tensor, ""]:
        """The loss, to be minimised.

        Without a mask, log-probs are of whole sequences, in the shape of the rewards: [prompts, group]. A ratio is then
        a sequence's, and leaves the clip sooner than a token's. With a mask (True where the policy chose the token),
        log-probs are [B, T] and rewards [prompts, group], prompt after prompt, with prompts * group = B.
        ``group_ids`` [B] with rewards [B] says instead which rows share a prompt.
        ``old_policy_logprobs`` None: the policy itself drew the rows. Surrogates without a ratio (rloo, reinforce,
        nanochat) do not read them: there the rows have to be the policy's own.
        Rewards that are not finite are not scored: their rows leave numerator and denominator, and are counted.
        """
        terms, _ = self.terms(policy_logprobs, old_policy_logprobs, rewards, reference_logprobs, mask, group_ids)
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
        """``policy`` and, where the KL is in the loss, ``kl``; with statistics of ratio, clip, KL and rewards."""
        old, ref = old_policy_logprobs, reference_logprobs
        same_shape(policy_logprobs, old_policy_logprobs=old, reference_logprobs=ref)
        rows = Rows.of(policy_logprobs, rewards, mask, group_ids)
        self._check(rows, ref)
        logprobs = policy_logprobs.reshape(rows.mask.shape)
        old = logprobs.detach() if old is None else old.detach().reshape(rows.mask.shape)
        ref = None if ref is None else ref.detach().reshape(rows.mask.shape)
        batch = LossInputs(
            advantages=self._advantages(rows, old, ref),
            loss_mask=rows.loss_mask,
            weights=weights(rows.loss_mask, self.objective, self.max_length),
            old_logprobs=old,
            ref=None if ref is None else Likelihood(ref),
        )
        terms, stats = policy_loss(Likelihood(logprobs), batch, self.objective)
        if "kl" in terms:
            terms["kl"] = self.kl_beta * terms["kl"]
        unscored = ~rows.rewards.isfinite()
        stats |= {"reward": Stat.of(rows.rewards, ~unscored), "reward/unscored_frac": Stat.of(unscored.double())}
        return terms, stats

    def _advantages(self, rows: Rows, old: Tensor, ref: Tensor | None) -> Float[Tensor, "B T"]:
        o, loss_mask = self.objective, rows.loss_mask
        penalty = torch.zeros_like(old)
        if o.kl_in == "reward" and ref is not None:
            refuse_nan(loss_mask, old_policy_logprobs=old, reference_logprobs=ref)
            penalty = self.kl_beta * torch.where(loss_mask, old - ref, 0)
        if o.credit == "outcome":
            advantages = torch.where(loss_mask, _row_advantages(rows, rows.rewards - penalty.sum(dim=1), o)[:, None], 0)
        else:
            placed = place_score(_row_advantages(rows, rows.rewards, o), loss_mask)
            advantages = returns_to_go(placed - penalty, loss_mask, gamma=o.gamma)
        advantages = whiten(advantages, loss_mask) if o.whiten else advantages
        return advantages.clamp(-o.adv_clip, o.adv_clip) if o.adv_clip else advantages

    def _check(self, rows: Rows, ref: Tensor | None) -> None:
        if self.objective.needs_groups and rows.group_ids.numel() and int(rows.group_ids.bincount().max()) < 2:
            raise GruppoError(
                "every group has one row, and nothing to be compared with; GRPO needs at least 2 samples of a prompt. "
                "Sample more of each, or use GRPOLoss(objective='reinforce')."
            )
        if self.kl_beta > 0 and ref is None:
            raise GruppoError(
                f"kl_beta={self.kl_beta:g} needs reference_logprobs, and there are none. Give the reference model's "
                "log-probs of the same tokens, or set kl_beta=0."
            )


def _row_advantages(rows: Rows, score: Float[Tensor, "B"], o: Objective) -> Float[Tensor, "B"]:
    once = torch.ones(len(score), 1, dtype=torch.bool, device=score.device)
    advantages, _ = group_advantages(score, rows.group_ids, once, baseline=o.baseline, scale=o.scale, eps=o.scale_eps)
    return advantages[:, 0]


def _named(objective: Objective | str) -> Objective:
    if isinstance(objective, Objective):
        return objective
    if objective not in PRESETS:
        raise GruppoError(f"objective={objective!r} is none of {', '.join(PRESETS)}. Use one, or an Objective.")
    return PRESETS[objective]


def _refuse_what_needs_more(o: Objective, max_length: int | None) -> None:
    """Choices that need what this loss is never given."""
    if o.average == "constant" and (max_length is None or max_length < 1):
        raise GruppoError(
            f"average='constant' divides by the longest rollout allowed, and max_length={max_length}. Give "
            "GRPOLoss(max_length=...), in tokens."
        )
    lacks = {
        "baseline='critic' needs values. Use PPOLoss.": o.has_critic,
        "moving statistics need memory from step to step. Use baseline='mean' and scale='group', or gruppo.train.": (
            o.baseline in ("running", "prompt") or o.scale in ("running", "prompt")
        ),
        "a correction needs the sampler's log-probs. Set correction='none', or use gruppo.train.": (
            o.correction != "none"
        ),
        "mask_truncated and overlong need to know which rows were cut. Leave these out of mask and rewards.": (
            o.mask_truncated or o.overlong > 0
        ),
    }
    for why, is_asked in lacks.items():
        if is_asked:
            raise GruppoError(f"GRPOLoss cannot follow this objective: {why}")
