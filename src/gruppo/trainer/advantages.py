"""From scored rows to a batch: which actions are kept, and the advantage of each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gruppo import distributed as dist
from gruppo.core.advantages import normalized_sum, step_advantages
from gruppo.core.returns import (
    broadcast_step_values,
    gae,
    overlong_penalty,
    place_score,
    returns_to_go,
    whiten,
)
from gruppo.environments import completion_lengths
from gruppo.errors import GruppoError
from gruppo.rewards.scoring import Scores
from gruppo.trainer.forward import active_actions, evaluate_before_update, has_kl_in_reward
from gruppo.trainer.run import Run
from gruppo.trainer.stages import StepParams
from gruppo.types import Before, Rollouts, TrainBatch

OVERLONG = "overlong penalty"
"""Name of the penalty among normalized rewards; no reward function has it."""


@dataclass(frozen=True, eq=False)
class Scored:
    """Rows of a step with their rewards."""

    run: Run
    rollouts: Rollouts
    scores: Scores

    @property
    def is_scored(self) -> Bool[Tensor, "B"]:
        return self.scores.rewards.isfinite()

    @cached_property
    def loss_mask(self) -> Bool[Tensor, "B T"]:
        """Actions that the policy chose, in rows that are scored, not an error, and not masked out
        for their length."""
        left_out = {"error"}
        if self.run.config.objective.mask_truncated:
            left_out.add("length")
        is_usable = torch.tensor([finish not in left_out for finish in self.rollouts.finish])
        return self.rollouts.mask & (self.is_scored & is_usable)[:, None]

    @cached_property
    def overlong(self) -> Float[Tensor, "B"]:
        """Soft overlong penalty of each row (DAPO), 0 without one."""
        config = self.run.config
        cache = config.objective.overlong
        if not cache:
            return torch.zeros(len(self.rollouts))
        lengths = completion_lengths(self.rollouts)
        return overlong_penalty(lengths, max_length=config.rollout.max_new_tokens, cache=cache)

    @property
    def step_rewards(self) -> list[str]:
        """Names of the step rewards with a weight."""
        return [name for name in self.scores.steps if self.run.rewards.weight_of[name]]

    def weighted_parts(self) -> dict[str, tuple[Float[Tensor, "B"], float]]:
        """Return each reward of scored rows with its weight; the overlong penalty is one more."""
        parts, weights = dict(self.scores.parts), dict(self.run.rewards.weight_of)
        if self.run.config.objective.overlong:
            parts[OVERLONG], weights[OVERLONG] = self.overlong, 1.0
        return {
            name: (part.where(self.is_scored, torch.nan), weights[name])
            for name, part in parts.items()
        }

    def weighted_sums(self) -> tuple[Float[Tensor, "B"], Float[Tensor, "B T"]]:
        """Return the weighted sum of the rewards of whole rows, and that of step rewards at the
        actions that end a step.

        NaN where a row is not scored, and where no step ends.
        """
        weights = self.run.rewards.weight_of
        row = torch.zeros(len(self.rollouts))
        for name, part in self.scores.parts.items():
            if name not in self.step_rewards:
                row = row + weights[name] * part.nan_to_num(0)
        steps = torch.stack([weights[name] * self.scores.steps[name] for name in self.step_rewards])
        is_step = steps.isfinite().any(0) & self.is_scored[:, None]  # [B, T]
        row = row.where(self.is_scored, torch.nan)
        return row, steps.nan_to_num(0).sum(0).where(is_step, torch.nan)


def assemble(step_params: StepParams, scored: Scored) -> TrainBatch:
    """Return a batch with advantages, and with the old log-probs, values and reference log-probs
    that an update needs."""
    run, rollouts, loss_mask = scored.run, scored.rollouts, scored.loss_mask
    if run.config.objective.correction != "none":
        check_sampler_logprobs(run, rollouts.sampler_logprobs[loss_mask])
    before = Before()
    if run.critic is not None or has_kl_in_reward(run, step_params):
        # advantages are made of values or log-probs
        before = evaluate_before_update(run, rollouts, loss_mask, step_params)
    advantages, returns = credit(step_params, scored, before)
    if limit := run.config.objective.adv_clip:
        advantages = advantages.clamp(-limit, limit)
    # several updates need one set of old log-probs; a reference that is kept elsewhere comes to the
    # device once for the batch, not for each update
    is_shared = run.config.updates_per_batch > 1
    is_offloaded = run.reference is not None and run.reference.is_offloaded
    if before.old_logprobs is None and before.ref is None and (is_shared or is_offloaded):
        active = active_actions(run, loss_mask, advantages, step_params)
        before = evaluate_before_update(run, rollouts, active, step_params)
    return TrainBatch(
        **vars(before),
        rollouts=rollouts,
        rewards=scored.scores.rewards,
        loss_mask=loss_mask,
        advantages=advantages,
        returns=returns,
    )


def check_sampler_logprobs(run: Run, logprobs: Float[Tensor, "N"]) -> None:
    """Refuse, on all ranks alike, an engine that reported no log-probs for a correction."""
    missing, count = dist.all_sum(
        torch.tensor([int((~logprobs.isfinite()).sum()), len(logprobs)])
    ).tolist()
    if missing:
        raise GruppoError(
            f"""correction={run.config.objective.correction!r} needs the sampler's log-prob of each
                action; {missing} of the {count} from {type(run.engine).__name__} are not
                numbers""",
            advice="Use an engine that reports them, or set $objective.correction none",
        )


def credit(
    step_params: StepParams, scored: Scored, before: Before
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"] | None]:
    """Return the objective's advantages, and the returns if there is a critic.

    Rewards minus KL go to a critic's GAE, to single steps, to what follows each action, or to whole
    rows.
    """
    run, loss_mask = scored.run, scored.loss_mask
    objective = run.config.objective
    penalty = torch.zeros(loss_mask.shape)
    if has_kl_in_reward(run, step_params):
        assert before.old_logprobs is not None and before.ref is not None
        distance = before.old_logprobs - before.ref.logprobs
        penalty = step_params.kl_coef * torch.where(loss_mask, distance, 0)
    score = scored.scores.rewards + scored.overlong
    by_step = objective.credit != "outcome" and bool(scored.step_rewards)
    returns = None
    if objective.has_critic:
        rewards = place_score(score, loss_mask)
        if by_step:
            row, steps = scored.weighted_sums()
            rewards = place_score(row + scored.overlong, loss_mask) + steps.nan_to_num(0)
        assert before.old_values is not None
        rewards = rewards - penalty
        # a truncated row is scored as it stands, so nothing is bootstrapped
        advantages, returns = gae(
            rewards, before.old_values, loss_mask, gamma=objective.gamma, lam=objective.lam
        )
    elif by_step:
        advantages = credit_of_steps(scored, penalty)
    elif objective.credit == "return_to_go":
        rewards = place_score(row_advantages(scored, score), loss_mask) - penalty
        advantages = returns_to_go(rewards, loss_mask, gamma=objective.gamma)
    else:
        # 0 in a row that is not learned from: it is compared by its score alone
        row_penalty = penalty.sum(dim=1)
        row = row_advantages(scored, score - row_penalty)
        # a KL that is not finite makes no unscored row: the update is to be skipped
        row = row.where(row_penalty.isfinite(), torch.nan)
        advantages = torch.where(scored.rollouts.mask, row[:, None], 0)
    if objective.whiten:
        advantages = whiten(advantages, loss_mask, all_sum=dist.all_sum)
    return advantages, returns


def row_advantages(scored: Scored, score: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Return one advantage per row."""
    run = scored.run
    if run.config.objective.combine == "sum_then_normalize":
        return _compared(scored, score[:, None], "sum")[:, 0]
    parts = scored.weighted_parts()
    advantages = [_compared(scored, part[:, None], name)[:, 0] for name, (part, _) in parts.items()]
    weights = [weight for _, weight in parts.values()]
    eps = run.config.objective.scale_eps
    return normalized_sum(advantages, weights, scored.is_scored, eps=eps, all_sum=dist.all_sum)


def credit_of_steps(scored: Scored, penalty: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Return advantages of single actions: of all steps that end from there on, or of the own step;
    plus the row's.

    Steps are compared with all steps of the group (DeepSeekMath, arXiv 2402.03300, section 4.1.3),
    rows with rows. Rewards that are each normalized first have their sum normalized over the kept
    actions of all ranks (``whiten``), in place of the rows of all ranks, before the KL is
    subtracted.
    """
    objective, loss_mask = scored.run.config.objective, scored.loss_mask
    sums, rewards = scored.weighted_sums()
    is_step = rewards.isfinite()
    row, steps = torch.zeros_like(sums), torch.zeros(loss_mask.shape)
    if objective.combine == "normalize_then_sum":
        for name, (part, weight) in scored.weighted_parts().items():
            if name in scored.step_rewards:
                own = scored.scores.steps[name].where(scored.is_scored[:, None], torch.nan)
                steps = steps + weight * _compared(scored, own, name, are_steps=True)
            elif weight:
                row = row + weight * _compared(scored, part[:, None], name)[:, 0]
    else:
        if scored.run.rewards.has_outcome_rewards:
            row = _compared(scored, (sums + scored.overlong)[:, None], "sum")[:, 0]
        else:  # the penalty is the last step's
            rewards = rewards + place_score(scored.overlong, is_step)
        steps = _compared(scored, rewards, "steps", are_steps=True)
    steps = torch.where(loss_mask, steps, 0)
    if objective.credit == "return_to_go":
        placed = place_score(row, loss_mask) + steps
        advantages = returns_to_go(placed, loss_mask, gamma=objective.gamma)
        penalty = returns_to_go(penalty, loss_mask, gamma=objective.gamma)
    else:
        advantages = broadcast_step_values(steps, is_step, loss_mask)
        advantages = advantages + torch.where(loss_mask, row[:, None], 0)
    if objective.combine == "normalize_then_sum":
        advantages = whiten(advantages, loss_mask, all_sum=dist.all_sum)
    return advantages - penalty


def _compared(
    scored: Scored, rewards: Float[Tensor, "B T"], name: str, *, are_steps: bool = False
) -> Float[Tensor, "B T"]:
    """Return rewards compared with those of the group, as the objective says; update the moving
    statistics of this reward.

    ``are_steps``: compare single steps with those of the group that the policy compares them with;
    else rows [B, 1] with rows.
    """
    run, rollouts = scored.run, scored.rollouts
    objective, group_ids = run.config.objective, rollouts.group_ids
    if are_steps:
        group_ids = group_ids[:, None].expand(-1, rewards.shape[1])
    advantages, state = step_advantages(
        rewards,
        group_ids,
        baseline=objective.baseline,
        scale=objective.scale,
        eps=objective.scale_eps,
        state=run.state.running.get(name),
        prompt_ids=None if are_steps else [prompt.id for prompt in rollouts.prompts],
        # a group is on one rank; moving statistics are those of all ranks
        all_sum=dist.all_sum,
        all_gather=lambda x: [*map(json.loads, dist.all_gather(json.dumps(x).encode()))],
    )
    if state:  # a new dict: a saved boundary may hold the old one
        run.state.running = {**run.state.running, name: state}
    return advantages
