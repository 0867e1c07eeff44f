"""From scored rollouts to a batch: what is kept, and the credit of each action."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gruppo import dist
from gruppo.core.advantages import group_advantages
from gruppo.core.credit import gae, place_score, returns_to_go, whiten
from gruppo.core.shaping import normalized_sum, overlong_penalty
from gruppo.rewards.score import Scores
from gruppo.training.minibatches import evaluated, has_kl_in_reward
from gruppo.training.run import Knobs, Run
from gruppo.types import Batch, GruppoError, Rollouts

OVERLONG = "overlong penalty"
"""Its name among the rewards that are normalised, and among their moving statistics. No function has it."""


def assemble(run: Run, knobs: Knobs, rollouts: Rollouts, scores: Scores) -> Batch:
    """A batch with advantages, and with what the weights of now say of it where an update needs that."""
    limit, keep = run.config.objective.adv_clip, kept_actions(run, rollouts, scores)
    _check_sampler(run, rollouts, keep)
    batch = Batch(rollouts, None, scores.rewards, scores.parts, torch.zeros(keep.shape), keep)
    if run.critic is not None or has_kl_in_reward(run, knobs):  # advantages are made of values or log-probs
        batch = evaluated(run, batch, knobs)
    batch = with_advantages(run, knobs, batch, scores)
    if limit:
        batch = replace(batch, advantages=batch.advantages.clamp(-limit, limit))
    if batch.old_logprobs is None and run.config.updates_per_batch > 1:
        batch = evaluated(run, batch, knobs)
    return batch


def kept_actions(run: Run, rollouts: Rollouts, scores: Scores) -> Bool[Tensor, "B T"]:
    """Chosen by the policy, in a row that is scored, not an error, and not masked out for its length."""
    usable = scores.rewards.isfinite() & torch.tensor([finish != "error" for finish in rollouts.finish])
    if run.config.objective.mask_truncated:
        usable &= torch.tensor([finish != "length" for finish in rollouts.finish])
    return rollouts.mask & usable[:, None]


def with_advantages(run: Run, knobs: Knobs, batch: Batch, scores: Scores) -> Batch:
    """The batch with the objective's advantages, and with returns where there is a critic."""
    objective, returns = run.config.objective, None
    assert batch.rollouts is not None
    score, penalty = scores.rewards + overlong(run, batch.rollouts), kl_penalty(run, knobs, batch)
    if objective.has_critic:
        advantages, returns = _by_critic(run, batch, place_score(score, batch.keep) - penalty)
    elif objective.credit == "return_to_go":
        row = row_advantages(run, batch.rollouts, score, scores)
        advantages = returns_to_go(place_score(row, batch.keep) - penalty, batch.keep, gamma=objective.gamma)
    else:
        of_row = penalty.sum(dim=1)  # 0 of a row that is not learned from: it is compared by its score alone
        row = row_advantages(run, batch.rollouts, score - of_row, scores)
        row = torch.where(of_row.isfinite(), row, torch.nan)  # no row without a score: the update is to be skipped
        advantages = torch.where(batch.rollouts.mask, row[:, None], 0)
    if objective.whiten:
        advantages = whiten(advantages, batch.keep, all_sum=dist.all_sum)
    return replace(batch, advantages=advantages, returns=returns)


def _by_critic(run: Run, batch: Batch, rewards: Float[Tensor, "B T"]) -> tuple[Tensor, Tensor]:
    """A row that was cut is scored as it stands: its end is an end, so nothing is bootstrapped."""
    assert batch.old_values is not None
    objective = run.config.objective
    return gae(rewards, batch.old_values, batch.keep, gamma=objective.gamma, lam=objective.lam)


def overlong(run: Run, rollouts: Rollouts) -> Float[Tensor, "B"]:
    cache, longest = run.config.objective.overlong, run.config.rollout.max_new_tokens
    return overlong_penalty(rollouts.lengths, max_length=longest, cache=cache) if cache else torch.zeros(len(rollouts))


def kl_penalty(run: Run, knobs: Knobs, batch: Batch) -> Float[Tensor, "B T"]:
    """kl_coef (logprob - ref_logprob) of each kept action, where the KL is in the reward."""
    if not has_kl_in_reward(run, knobs):
        return torch.zeros(batch.keep.shape)
    assert batch.old_logprobs is not None and batch.ref is not None
    return knobs.kl_coef * torch.where(batch.keep, batch.old_logprobs - batch.ref.logprobs, 0)


def row_advantages(run: Run, rollouts: Rollouts, score: Float[Tensor, "B"], scores: Scores) -> Float[Tensor, "B"]:
    """One advantage a row. The run's moving statistics move on."""
    if run.config.objective.combine == "sum_then_normalize":
        return _of_one(run, rollouts, score, "sum")
    is_scored = scores.rewards.isfinite()
    parts, weights = dict(scores.parts), list(run.rewards.weights)
    if run.config.objective.overlong:  # as one reward more
        parts, weights = parts | {OVERLONG: overlong(run, rollouts)}, [*weights, 1.0]
    advantages = [_of_one(run, rollouts, part.where(is_scored, torch.nan), name) for name, part in parts.items()]
    return normalized_sum(advantages, weights, is_scored, eps=run.config.objective.scale_eps, all_sum=dist.all_sum)


def _of_one(run: Run, rollouts: Rollouts, rewards: Float[Tensor, "B"], name: str) -> Float[Tensor, "B"]:
    objective = run.config.objective
    advantages, state = group_advantages(
        rewards,
        rollouts.group_ids,
        torch.ones(len(rollouts), 1, dtype=torch.bool),
        baseline=objective.baseline,
        scale=objective.scale,
        eps=objective.scale_eps,
        decay=objective.running_decay,
        state=run.running.get(name),
        prompt_ids=[prompt.id for prompt in rollouts.prompts],
        all_sum=dist.all_sum,
        share=_share,
    )
    if state:
        run.running = {**run.running, name: state}  # a new one: a boundary may hold the old
    return advantages[:, 0]


def _share(data: Any) -> list[Any]:
    return [json.loads(part) for part in dist.gather(json.dumps(data).encode())]


def _check_sampler(run: Run, rollouts: Rollouts, keep: Tensor) -> None:
    if run.config.objective.correction == "none":
        return
    is_missing = ~rollouts.sampler_logprobs[keep].isfinite()
    missing, count = dist.all_sum(torch.tensor([int(is_missing.sum()), len(is_missing)])).tolist()
    if missing:
        raise GruppoError(
            f"correction={run.config.objective.correction!r} needs the sampler's log-prob of each action; "
            f"{missing} of the {count} from {type(run.engine).__name__} are not numbers. Use an engine that reports "
            "them, or set --objective.correction none."
        )
