"""From scored rollouts to a batch: what is kept, and the credit of each action."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gruppo import distributed as dist
from gruppo.core.advantages import group_advantages, normalized_sum, position_advantages, step_advantages
from gruppo.core.returns import broadcast_step_values, gae, overlong_penalty, place_score, returns_to_go, whiten
from gruppo.environments import completion_lengths
from gruppo.rewards.scoring import Scores
from gruppo.trainer.minibatches import asks_before_updates, evaluated, has_kl_in_reward
from gruppo.trainer.run import Run
from gruppo.trainer.stages import StepParams
from gruppo.types import Batch, GruppoError, Rollouts

OVERLONG = "overlong penalty"
"""Its name among the rewards that are normalised, and among their moving statistics. No function has it."""


def assemble(run: Run, step_params: StepParams, rollouts: Rollouts, scores: Scores) -> Batch:
    """A batch with advantages, and with what the weights of now say of it where an update needs that."""
    limit, loss_mask = run.config.objective.adv_clip, kept_actions(run, rollouts, scores)
    _check_sampler(run, rollouts, loss_mask)
    batch = Batch(rollouts, None, scores.rewards, scores.parts, torch.zeros(loss_mask.shape), loss_mask)
    if run.critic is not None or has_kl_in_reward(run, step_params):  # advantages are made of values or log-probs
        batch = evaluated(run, batch, step_params)
    batch = with_advantages(run, step_params, batch, scores)
    if limit:
        batch = replace(batch, advantages=batch.advantages.clamp(-limit, limit))
    if batch.old_logprobs is None and batch.ref is None and asks_before_updates(run):
        batch = evaluated(run, batch, step_params)
    return batch


def kept_actions(run: Run, rollouts: Rollouts, scores: Scores) -> Bool[Tensor, "B T"]:
    """Chosen by the policy, in a row that is scored, not an error, and not masked out for its length."""
    usable = scores.rewards.isfinite() & torch.tensor([finish != "error" for finish in rollouts.finish])
    if run.config.objective.mask_truncated:
        usable &= torch.tensor([finish != "length" for finish in rollouts.finish])
    return rollouts.mask & usable[:, None]


def with_advantages(run: Run, step_params: StepParams, batch: Batch, scores: Scores) -> Batch:
    """The batch with the objective's advantages, and with returns where there is a critic."""
    objective, returns = run.config.objective, None
    assert batch.rollouts is not None
    score, penalty = scores.rewards + overlong(run, batch.rollouts), kl_penalty(run, step_params, batch)
    if objective.credit != "outcome" and (names := step_names(run, scores)):
        if objective.has_critic:
            advantages, returns = _by_critic(run, batch, action_rewards(run, batch, scores, names) - penalty)
        else:
            advantages = credit_of_steps(run, batch, scores, names, penalty)
    elif objective.has_critic:
        advantages, returns = _by_critic(run, batch, place_score(score, batch.loss_mask) - penalty)
    elif objective.credit == "return_to_go":
        row = row_advantages(run, batch.rollouts, score, scores)
        advantages = returns_to_go(place_score(row, batch.loss_mask) - penalty, batch.loss_mask, gamma=objective.gamma)
    else:
        of_row = penalty.sum(dim=1)  # 0 of a row that is not learned from: it is compared by its score alone
        row = row_advantages(run, batch.rollouts, score - of_row, scores)
        row = torch.where(of_row.isfinite(), row, torch.nan)  # no row without a score: the update is to be skipped
        advantages = torch.where(batch.rollouts.mask, row[:, None], 0)
    if objective.whiten:
        advantages = whiten(advantages, batch.loss_mask, all_sum=dist.all_sum)
    return replace(batch, advantages=advantages, returns=returns)


def _by_critic(run: Run, batch: Batch, rewards: Float[Tensor, "B T"]) -> tuple[Tensor, Tensor]:
    """A row that was cut is scored as it stands: its end is an end, so nothing is bootstrapped."""
    assert batch.old_values is not None
    objective = run.config.objective
    return gae(rewards, batch.old_values, batch.loss_mask, gamma=objective.gamma, lam=objective.lam)


# --- rewards of steps ------------------------------------------------------------------------------------------------


def step_names(run: Run, scores: Scores) -> list[str]:
    """Rewards of steps that weigh something: the same on all ranks."""
    return [name for name in scores.steps if run.rewards.weight_of[name]]


def credit_of_steps(
    run: Run, batch: Batch, scores: Scores, names: Sequence[str], penalty: Float[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Advantages of single actions: of all steps that end from there on, or of the own step; and the row's beside.

    Steps are compared with all steps of the group (DeepSeekMath, arXiv 2402.03300, section 4.1.3), rows with rows.
    Rewards that are each normalised first have their sum normalised over the kept actions of all ranks (``whiten``),
    in place of the rows of all ranks, before the KL is taken off.
    """
    objective, loss_mask = run.config.objective, batch.loss_mask
    each_apart = objective.combine == "normalize_then_sum"
    row, steps, is_step = (_each_normalised if each_apart else _sums_normalised)(run, batch, scores, names)
    steps, later = torch.where(loss_mask, steps, 0), partial(returns_to_go, mask=loss_mask, gamma=objective.gamma)
    if objective.credit == "return_to_go":
        advantages, penalty = later(place_score(row, loss_mask) + steps), later(penalty)
    else:
        advantages = broadcast_step_values(steps, is_step, loss_mask) + torch.where(loss_mask, row[:, None], 0)
    if each_apart:
        advantages = whiten(advantages, loss_mask, all_sum=dist.all_sum)
    return advantages - penalty


def action_rewards(run: Run, batch: Batch, scores: Scores, names: Sequence[str]) -> Float[Tensor, "B T"]:
    """For a critic: each step's reward at its end, those of rows and the penalty at the last kept action."""
    assert batch.rollouts is not None
    row = score_of_rows(run, scores, names) + overlong(run, batch.rollouts)
    return place_score(row, batch.loss_mask) + rewards_of_steps(run, scores, names).nan_to_num(0)


def score_of_rows(run: Run, scores: Scores, names: Sequence[str]) -> Float[Tensor, "B"]:
    """The weighted sum of the rewards of whole rows; NaN where the row is not scored."""
    parts = {name: part.nan_to_num(0) for name, part in scores.parts.items() if name not in names}
    total = sum((run.rewards.weight_of[name] * part for name, part in parts.items()), torch.zeros_like(scores.rewards))
    return torch.where(scores.rewards.isfinite(), total, torch.nan)


def rewards_of_steps(run: Run, scores: Scores, names: Sequence[str]) -> Float[Tensor, "B T"]:
    """Their weighted sum at the actions that end a step; NaN elsewhere, and in rows that are not scored."""
    each = torch.stack([run.rewards.weight_of[name] * scores.steps[name] for name in names])
    is_step = each.isfinite().any(0) & scores.rewards.isfinite()[:, None]
    return torch.where(is_step, each.nan_to_num(0).sum(0), torch.nan)


def _sums_normalised(run: Run, batch: Batch, scores: Scores, names: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
    """Advantages of rows [B] and of steps [B, T], and where steps end. The penalty is the row's, or the last step's."""
    assert batch.rollouts is not None
    late, rewards = overlong(run, batch.rollouts), rewards_of_steps(run, scores, names)
    if run.rewards.has_outcome_rewards:
        row = _of_one(run, batch.rollouts, score_of_rows(run, scores, names) + late, "sum")
    else:
        row, rewards = torch.zeros_like(late), rewards + place_score(late, rewards.isfinite())
    return row, _of_steps(run, batch.rollouts, rewards, "steps"), rewards.isfinite()


def _each_normalised(run: Run, batch: Batch, scores: Scores, names: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
    """As ``_sums_normalised``, each reward by itself and the penalty as one more; their weighted sums."""
    assert batch.rollouts is not None
    is_scored, weights = scores.rewards.isfinite(), run.rewards.weight_of
    row, steps = torch.zeros_like(scores.rewards), torch.zeros(batch.loss_mask.shape)
    is_step = rewards_of_steps(run, scores, names).isfinite()
    parts = {name: part for name, part in scores.parts.items() if weights[name]}
    if run.config.objective.overlong:
        parts, weights = parts | {OVERLONG: overlong(run, batch.rollouts)}, weights | {OVERLONG: 1.0}
    for name, part in parts.items():
        if name in names:
            own = scores.steps[name].where(is_scored[:, None], torch.nan)
            steps = steps + weights[name] * _of_steps(run, batch.rollouts, own, name)
        else:
            row = row + weights[name] * _of_one(run, batch.rollouts, part.where(is_scored, torch.nan), name)
    return row, steps, is_step


def _of_steps(run: Run, rollouts: Rollouts, rewards: Float[Tensor, "B T"], name: str) -> Float[Tensor, "B T"]:
    """Compared with all steps of the group; a patch of a picture, whose columns are places, with the same patch."""
    choices = _choices(run, name)
    if run.policy.actions_are_positions:
        advantages, state = position_advantages(rewards, rollouts.group_ids, rewards.isfinite(), **choices)
    else:
        advantages, state = step_advantages(rewards, rollouts.group_ids, **choices)
    _remember(run, name, state)
    return advantages


# --- rewards of rows -------------------------------------------------------------------------------------------------


def overlong(run: Run, rollouts: Rollouts) -> Float[Tensor, "B"]:
    cache, longest = run.config.objective.overlong, run.config.rollout.max_new_tokens
    return (
        overlong_penalty(completion_lengths(rollouts), max_length=longest, cache=cache)
        if cache
        else torch.zeros(len(rollouts))
    )


def kl_penalty(run: Run, step_params: StepParams, batch: Batch) -> Float[Tensor, "B T"]:
    """kl_coef (logprob - ref_logprob) of each kept action, where the KL is in the reward."""
    if not has_kl_in_reward(run, step_params):
        return torch.zeros(batch.loss_mask.shape)
    assert batch.old_logprobs is not None and batch.ref is not None
    return step_params.kl_coef * torch.where(batch.loss_mask, batch.old_logprobs - batch.ref.logprobs, 0)


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
    once, ids = torch.ones(len(rollouts), 1, dtype=torch.bool), [prompt.id for prompt in rollouts.prompts]
    choices = _choices(run, name) | {"prompt_ids": ids}
    advantages, state = group_advantages(rewards, rollouts.group_ids, once, **choices)
    _remember(run, name, state)
    return advantages[:, 0]


def _choices(run: Run, name: str) -> dict[str, Any]:
    """What the objective compares rewards with, and the moving statistics of this one."""
    objective = run.config.objective
    return {
        "baseline": objective.baseline,
        "scale": objective.scale,
        "eps": objective.scale_eps,
        "decay": objective.running_decay,
        "state": run.state.running.get(name),
        "all_sum": dist.all_sum,
        "all_gather": _share,
    }


def _remember(run: Run, name: str, state: Mapping[str, Any]) -> None:
    if state:
        run.state.running = {**run.state.running, name: state}  # a new one: a boundary may hold the old


def _share(data: Any) -> list[Any]:
    return [json.loads(part) for part in dist.all_gather(json.dumps(data).encode())]


def _check_sampler(run: Run, rollouts: Rollouts, loss_mask: Tensor) -> None:
    if run.config.objective.correction == "none":
        return
    is_missing = ~rollouts.sampler_logprobs[loss_mask].isfinite()
    missing, count = dist.all_sum(torch.tensor([int(is_missing.sum()), len(is_missing)])).tolist()
    if missing:
        raise GruppoError(
            f"correction={run.config.objective.correction!r} needs the sampler's log-prob of each action; "
            f"{missing} of the {count} from {type(run.engine).__name__} are not numbers. Use an engine that reports "
            "them, or set --objective.correction none."
        )
