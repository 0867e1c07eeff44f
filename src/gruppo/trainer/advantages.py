"""From scored rollouts to a batch: which actions are kept, and the advantage of each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gruppo import distributed as dist
from gruppo.config.schema import Config
from gruppo.core.advantages import (
    group_advantages,
    normalized_sum,
    position_advantages,
    step_advantages,
)
from gruppo.core.objective import Objective
from gruppo.core.returns import (
    broadcast_step_values,
    gae,
    overlong_penalty,
    place_score,
    returns_to_go,
    whiten,
)
from gruppo.environments import completion_lengths
from gruppo.rewards.scoring import RewardSet, Scores
from gruppo.trainer.minibatches import evaluated, has_kl_in_reward
from gruppo.trainer.run import Run
from gruppo.trainer.stages import StepParams
from gruppo.types import Batch, GruppoError, Rollouts

OVERLONG = "overlong penalty"
"""Name of the penalty among normalized rewards and their moving statistics; no reward function has
it."""


def assemble(run: Run, step_params: StepParams, rollouts: Rollouts, scores: Scores) -> Batch:
    """A batch with advantages, and with the old log-probs, values and reference log-probs that an
    update needs."""
    objective, loss_mask = (
        run.config.objective,
        kept_actions(run.config.objective, rollouts, scores),
    )
    if objective.correction != "none":
        is_missing = ~rollouts.sampler_logprobs[loss_mask].isfinite()
        missing, count = dist.all_sum(
            torch.tensor([int(is_missing.sum()), len(is_missing)])
        ).tolist()
        if missing:
            raise GruppoError(
                f"""correction={objective.correction!r} needs the sampler's log-prob of each action;
                    {missing} of the {count} from {type(run.engine).__name__} are not numbers""",
                advice="Use an engine that reports them, or set $objective.correction none",
            )
    batch = Batch(
        rollouts, None, scores.rewards, scores.parts, torch.zeros(loss_mask.shape), loss_mask
    )
    if run.critic is not None or has_kl_in_reward(
        run, step_params
    ):  # advantages are made of values or log-probs
        batch = evaluated(run, batch, step_params)
    batch = with_advantages(run, step_params, batch, scores)
    if limit := objective.adv_clip:
        batch = replace(batch, advantages=batch.advantages.clamp(-limit, limit))
    is_shared = (
        run.config.updates_per_batch > 1
    )  # several updates then need one set of old log-probs
    # a reference that is kept elsewhere comes to the device once for the batch, not for each update
    is_offloaded = run.reference is not None and run.reference.is_offloaded
    if batch.old_logprobs is None and batch.ref is None and (is_shared or is_offloaded):
        batch = evaluated(run, batch, step_params)
    return batch


def kept_actions(objective: Objective, rollouts: Rollouts, scores: Scores) -> Bool[Tensor, "B T"]:
    """Actions chosen by the policy, in a row that is scored, not an error, and not masked out for
    its length."""
    usable = scores.rewards.isfinite() & torch.tensor(
        [finish != "error" for finish in rollouts.finish]
    )
    if objective.mask_truncated:
        usable &= torch.tensor([finish != "length" for finish in rollouts.finish])
    return rollouts.mask & usable[:, None]


def with_advantages(run: Run, step_params: StepParams, batch: Batch, scores: Scores) -> Batch:
    """The batch with the objective's advantages, and with returns where there is a critic."""
    # Rewards minus KL go to a critic's GAE, to single steps, to what follows each action, or to
    # whole rows.
    objective, returns = run.config.objective, None
    assert batch.rollouts is not None
    penalty = torch.zeros(batch.loss_mask.shape)
    if has_kl_in_reward(run, step_params):
        assert batch.old_logprobs is not None and batch.ref is not None
        penalty = step_params.kl_coef * torch.where(
            batch.loss_mask, batch.old_logprobs - batch.ref.logprobs, 0
        )
    score = scores.rewards + overlong(run.config, batch.rollouts)
    names = [
        name for name in scores.steps if run.rewards.weight_of[name]
    ]  # step rewards with a weight
    by_step = objective.credit != "outcome" and bool(names)
    if objective.has_critic:
        rewards = (
            action_rewards(run, batch, scores, names)
            if by_step
            else place_score(score, batch.loss_mask)
        )
        assert (
            batch.old_values is not None
        )  # a truncated row is scored as it stands, so nothing is bootstrapped
        gamma, lam = objective.gamma, objective.lam
        advantages, returns = gae(
            rewards - penalty, batch.old_values, batch.loss_mask, gamma=gamma, lam=lam
        )
    elif by_step:
        advantages = credit_of_steps(run, batch, scores, names, penalty)
    elif objective.credit == "return_to_go":
        row = row_advantages(run, batch.rollouts, score, scores)
        advantages = returns_to_go(
            place_score(row, batch.loss_mask) - penalty, batch.loss_mask, gamma=objective.gamma
        )
    else:
        row_penalty = penalty.sum(
            dim=1
        )  # 0 in a row that is not learned from: it is compared by its score alone
        row = row_advantages(run, batch.rollouts, score - row_penalty, scores)
        row = torch.where(
            row_penalty.isfinite(), row, torch.nan
        )  # not an unscored row: the update is to be skipped
        advantages = torch.where(batch.rollouts.mask, row[:, None], 0)
    if objective.whiten:
        advantages = whiten(advantages, batch.loss_mask, all_sum=dist.all_sum)
    return replace(batch, advantages=advantages, returns=returns)


def overlong(config: Config, rollouts: Rollouts) -> Float[Tensor, "B"]:
    """The soft overlong penalty of each row (DAPO), 0 without one."""
    cache, longest = config.objective.overlong, config.rollout.max_new_tokens
    if not cache:
        return torch.zeros(len(rollouts))
    return overlong_penalty(completion_lengths(rollouts), max_length=longest, cache=cache)


# --- rewards of rows ------------------------------------------------------------------------------


def row_advantages(
    run: Run, rollouts: Rollouts, score: Float[Tensor, "B"], scores: Scores
) -> Float[Tensor, "B"]:
    """One advantage per row. Updates the run's moving statistics."""
    if run.config.objective.combine == "sum_then_normalize":
        return _compared(run, rollouts, score[:, None], "sum")[:, 0]
    is_scored = scores.rewards.isfinite()
    parts, weights = dict(scores.parts), list(run.rewards.weights)
    if run.config.objective.overlong:  # as one more reward
        parts, weights = parts | {OVERLONG: overlong(run.config, rollouts)}, [*weights, 1.0]
    columns = {
        name: part.where(is_scored, torch.nan)[:, None] for name, part in parts.items()
    }  # each [B, 1]
    advantages = [_compared(run, rollouts, column, name)[:, 0] for name, column in columns.items()]
    return normalized_sum(
        advantages, weights, is_scored, eps=run.config.objective.scale_eps, all_sum=dist.all_sum
    )


def _compared(
    run: Run, rollouts: Rollouts, rewards: Float[Tensor, "B T"], name: str, *, steps: bool = False
) -> Float[Tensor, "B T"]:
    """Rewards compared with those of the group, as the objective says; the moving statistics of
    this reward move on.

    ``steps``: single steps are compared with all steps of the group; where columns are positions,
    as the patches of an image, with the steps at the same position. Else rows [B, 1] are compared
    with rows.
    """
    objective = run.config.objective
    # a group is on one rank; moving statistics are those of all ranks
    options: dict[str, Any] = {
        "baseline": objective.baseline,
        "scale": objective.scale,
        "eps": objective.scale_eps,
    }
    options |= {
        "state": run.state.running.get(name),
        "all_sum": dist.all_sum,
    }
    options["all_gather"] = lambda data: list(
        map(json.loads, dist.all_gather(json.dumps(data).encode()))
    )
    if not steps:
        once, ids = (
            torch.ones(len(rollouts), 1, dtype=torch.bool),
            [prompt.id for prompt in rollouts.prompts],
        )
        advantages, state = group_advantages(
            rewards[:, 0], rollouts.group_ids, once, **options, prompt_ids=ids
        )
    elif run.policy.actions_are_positions:
        advantages, state = position_advantages(
            rewards, rollouts.group_ids, rewards.isfinite(), **options
        )
    else:
        advantages, state = step_advantages(rewards, rollouts.group_ids, **options)
    if state:
        run.state.running = {
            **run.state.running,
            name: state,
        }  # a new one: a boundary may hold the old
    return advantages


# --- rewards of steps -----------------------------------------------------------------------------


def credit_of_steps(
    run: Run, batch: Batch, scores: Scores, names: Sequence[str], penalty: Float[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Advantages of single actions: of all steps that end from there on, or of the own step; plus
    the row's.

    Steps are compared with all steps of the group (DeepSeekMath, arXiv 2402.03300, section 4.1.3),
    rows with rows. Rewards that are each normalized first have their sum normalized over the kept
    actions of all ranks (``whiten``), in place of the rows of all ranks, before the KL is
    subtracted.
    """
    objective, rollouts = run.config.objective, batch.rollouts
    loss_mask, weights = batch.loss_mask, run.rewards.weight_of
    assert rollouts is not None
    late, (of_rows, rewards) = (
        overlong(run.config, rollouts),
        weighted_sums(run.rewards, scores, names),
    )
    each_apart = objective.combine == "normalize_then_sum"
    row, is_step = torch.zeros_like(late), rewards.isfinite()
    if each_apart:  # each reward by itself, the penalty as one more; then their weighted sums
        is_scored, steps = scores.rewards.isfinite(), torch.zeros(loss_mask.shape)
        parts = {name: part for name, part in scores.parts.items() if weights[name]}
        if objective.overlong:
            parts, weights = parts | {OVERLONG: late}, weights | {OVERLONG: 1.0}
        for name, part in parts.items():
            own = (scores.steps[name] if name in names else part[:, None]).where(
                is_scored[:, None], torch.nan
            )
            compared = weights[name] * _compared(run, rollouts, own, name, steps=name in names)
            if name in names:
                steps = steps + compared
            else:
                row = row + compared[:, 0]
    else:  # the penalty is the row's, or the last step's
        if run.rewards.has_outcome_rewards:
            row = _compared(run, rollouts, (of_rows + late)[:, None], "sum")[:, 0]
        else:
            rewards = rewards + place_score(late, is_step)
        steps, is_step = _compared(run, rollouts, rewards, "steps", steps=True), rewards.isfinite()
    steps = torch.where(loss_mask, steps, 0)
    if objective.credit == "return_to_go":
        advantages = returns_to_go(
            place_score(row, loss_mask) + steps, loss_mask, gamma=objective.gamma
        )
        penalty = returns_to_go(penalty, loss_mask, gamma=objective.gamma)
    else:
        advantages = broadcast_step_values(steps, is_step, loss_mask) + torch.where(
            loss_mask, row[:, None], 0
        )
    if each_apart:
        advantages = whiten(advantages, loss_mask, all_sum=dist.all_sum)
    return advantages - penalty


def action_rewards(
    run: Run, batch: Batch, scores: Scores, names: Sequence[str]
) -> Float[Tensor, "B T"]:
    """Rewards for a critic: each step's at its end, those of rows and the overlong penalty at the
    last kept action."""
    assert batch.rollouts is not None
    row, steps = weighted_sums(run.rewards, scores, names)
    return place_score(
        row + overlong(run.config, batch.rollouts), batch.loss_mask
    ) + steps.nan_to_num(0)


def weighted_sums(
    rewards: RewardSet, scores: Scores, names: Sequence[str]
) -> tuple[Float[Tensor, "B"], Float[Tensor, "B T"]]:
    """The weighted sum of the rewards of whole rows, and that of step rewards at the actions that
    end a step.

    NaN where a row is not scored, and where no step ends.
    """
    parts = {name: part.nan_to_num(0) for name, part in scores.parts.items() if name not in names}
    total = sum(
        (rewards.weight_of[name] * part for name, part in parts.items()),
        torch.zeros_like(scores.rewards),
    )
    each = torch.stack(
        [rewards.weight_of[name] * scores.steps[name] for name in names]
    )  # [names, B, T]
    is_step = each.isfinite().any(0) & scores.rewards.isfinite()[:, None]
    row = torch.where(scores.rewards.isfinite(), total, torch.nan)
    return row, torch.where(is_step, each.nan_to_num(0).sum(0), torch.nan)
