"""Groups that grow: a few samples of each prompt first, and more where their rewards differ.

A step has a budget of prompts x group_size samples over all ranks. What the first samples leave of it goes to the
groups with spread, up to a largest size; groups without spread stay as they are and have no advantage. New samples
continue the numbering of their group's, so that a sample is the same however its group came to its size.

Choosing by the first rewards is not neutral. A group is kept small where its first samples happened to be alike, which
a further sample might have changed: of prompts that are nearly always or nearly never answered, fewer are learned from
than if all were sampled to the end. And a row is a row in the loss: a group weighs as much as it has grown. For rewards
of two values this changes how much a prompt weighs and not in which direction it pulls: given its rewards, a group's
expected gradient is n m (1 - m) times the same vector, m being their mean and n their number, before any scale. For
other rewards the direction may change too. Reinforce-Ada (Xiong et al. 2025, arXiv 2510.04996) samples in rounds until
a group has what it needs, and then learns from as many rows of each; GVM-RAFT (Yao et al. 2025, arXiv 2505.02391) sizes
groups by the share of right answers that a first round estimates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gruppo import distributed as dist
from gruppo.config.schema import RolloutConfig
from gruppo.core.groups import allocate_samples, group_std
from gruppo.rewards.scoring import Scores, applies_to_group
from gruppo.trainer.refill import Round, alike, decisive
from gruppo.trainer.stages import StepParams
from gruppo.types import Prompt, Request, Stat


def first_size(rollout: RolloutConfig, step_params: StepParams) -> int:
    """Samples of each prompt in a round that may leave a group to grow."""
    return rollout.first_samples or step_params.group_size


def cap_of(rollout: RolloutConfig, group_size: int) -> int:
    """The largest size of a group in a step whose groups have ``group_size`` samples on average at most."""
    return (rollout.max_group_size or 2 * group_size) if rollout.first_samples else group_size


def further(
    rounds: Sequence[Round], rollout: RolloutConfig, step_params: StepParams, *, sampled: int
) -> dict[int, Request]:
    """What this rank samples beyond the rounds there were, by slot; all ranks agree on the shares.

    ``sampled``: rows of all ranks so far, those that refilling has thrown away included: they too are of the budget.
    """
    spread = torch.zeros(rollout.prompts, dtype=torch.float64)
    prompts: dict[int, Prompt] = {}
    for one in rounds:  # a later round's group takes the place of the slot's earlier one
        spread[torch.tensor(one.slots)] = spread_of(one, rollout.refill_by)
        prompts |= dict(zip(one.slots, one.rollouts.prompts, strict=True))
    sizes = torch.full((rollout.prompts,), rollout.first_samples)
    budget = max(rollout.prompts * step_params.group_size - sampled, 0)
    more = allocate_samples(
        dist.all_sum(spread), sizes, budget=budget, cap=cap_of(rollout, step_params.group_size)
    ).tolist()
    first = rollout.first_samples
    return {slot: Request(prompt, more[slot], first=first) for slot, prompt in prompts.items() if more[slot]}


def spread_of(one: Round, by: str) -> Tensor:
    """[P] the spread of each group in the reward that decides; exactly 0 where it has none."""
    spread = group_std(decisive(one, by), one.rollouts.group_ids)
    return torch.where(alike(one, by), 0.0, spread)


def over_whole_groups(scores: Scores, group_ids: Tensor, weights: Sequence[float]) -> Scores:
    """The scores of groups that were scored in two calls, as if in one: a row is unscored where it lacks a part.

    A part applies to a group where it scores any of its rows. A call that saw only some of them may have found that it
    does not, and have left it out of their sum.
    """
    counted = [part for part, weight in zip(scores.parts.values(), weights, strict=True) if weight != 0]
    if not counted:
        return scores
    scored = torch.stack([part.isfinite() for part in counted])  # [parts, B]
    is_missing = (applies_to_group(scored, group_ids) & ~scored).any(dim=0)
    return replace(scores, rewards=scores.rewards.where(~is_missing, torch.nan))


def metrics(
    rounds: Sequence[Round], grown: Round | None, rollout: RolloutConfig, step_params: StepParams
) -> dict[str, float]:
    """What growing did, over all ranks.

    ``growth/first_reward_mean`` is of the first samples alone: groups that grow are those that are neither always nor
    never right, so that the mean of all rows says less of the policy.
    """
    first = torch.cat([one.scores.rewards for one in rounds])
    rows = 0 if grown is None else len(grown.rollouts)
    counts = {"first": len(first), "rows": rows, "groups": 0 if grown is None else len(grown.slots)}
    stats = {name: Stat(1, value) for name, value in counts.items()}
    stats = dist.merge_stats(stats | {"reward": Stat.of(first, first.isfinite())})
    sampled = stats["first"].sum + stats["rows"].sum
    return {
        "growth/first_reward_mean": stats["reward"].mean,
        "growth/grown_groups_count": stats["groups"].sum,
        "growth/grown_rows_count": stats["rows"].sum,
        "growth/unspent_rows_count": max(rollout.prompts * step_params.group_size - sampled, 0.0),
    }
