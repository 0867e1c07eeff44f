"""Dynamic sampling: groups with equal rewards are resampled with new prompts (DAPO), groups with
spread grow.

A step has ``prompts`` slots over all ranks; a slot keeps its rank and its place. Which slots are
empty is agreed on by all ranks and new prompts are taken by all of them in one order, so that the
number of ranks changes no batch.

Growth: a few samples of each prompt first, and more where their rewards differ. A step has a budget
of prompts x group_size samples over all ranks. What the first samples leave of it goes to the
groups with spread, up to a maximum size; groups without spread stay as they are and have no
advantage. New samples continue the numbering of their group's, so that a sample is the same however
its group came to its size.

Selection by the first rewards is not neutral. A group stays small where its first samples happened
to be equal, which a further sample might have changed: prompts that are nearly always or nearly
never answered are learned from less often than if all were sampled to the end. And a row is a row
in the loss: a group weighs as much as it has grown. For rewards of two values this changes how much
a prompt weighs and not in which direction it pulls: given its rewards, a group's expected gradient
is n m (1 - m) times the same vector, m being their mean and n their number, before any scale. For
other rewards the direction may change too. Reinforce-Ada (Xiong et al. 2025, arXiv 2510.04996)
samples in rounds until a group has what it needs, and then learns from as many rows of each;
GVM-RAFT (Yao et al. 2025, arXiv 2505.02391) sizes groups by the share of right answers that a first
round estimates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gruppo import distributed as dist
from gruppo.config.schema import RolloutConfig
from gruppo.core.groups import allocate_samples, group_std, has_no_spread
from gruppo.environments.conversation import completion_lengths, join_rollouts, shifted
from gruppo.rewards.scoring import Scores, applies_to_group
from gruppo.trainer.stages import StepParams
from gruppo.types import Prompt, Request, Rollouts, Stat


@dataclass(frozen=True, eq=False)
class Round:
    """What one round of generation gave this rank."""

    rollouts: Rollouts
    scores: Scores
    slots: list[int]
    """Of all ranks' slots, the one of each prompt."""
    reward_s: float

    def spread(self) -> Float[Tensor, "P"]:
        """Standard deviation of each group's rewards, 0 where they are equal or fewer than two rows
        are scored.

        Of the sum of all rewards, before it is shaped.
        """
        rewards, group_ids = self.scores.rewards, self.rollouts.group_ids
        # equal but for rounding, which a standard deviation would show
        return torch.where(has_no_spread(rewards, group_ids), 0.0, group_std(rewards, group_ids))


@dataclass(frozen=True, eq=False)
class Sampled:
    """All rounds of a step, on this rank."""

    rollouts: Rollouts
    scores: Scores
    rows: list[int]
    """Rows of the batch: each slot's last group, in order of the slots."""
    is_filled: Bool[Tensor, "b"]
    """Whether each of them is in a group to learn from."""

    def batch(self) -> tuple[Rollouts, Scores]:
        """The rows of the batch. Those of an unfilled slot are in no statistic: they have no
        reward."""
        rollouts, scores = self.rollouts, self.scores
        if self.rows != list(range(len(rollouts))):
            rollouts, scores = rollouts.take(self.rows), scores.take(self.rows)
        return rollouts, replace(
            scores, rewards=torch.where(self.is_filled, scores.rewards, torch.nan)
        )

    def thrown(self) -> dict[str, float]:
        """What no update learns from, on all ranks: discarded, or the last group of a slot left
        unfilled."""
        # all rows, without those of the batch whose slot was filled
        is_thrown = torch.ones(len(self.rollouts), dtype=torch.bool)
        is_thrown[torch.tensor(self.rows)[self.is_filled]] = False
        groups = len(self.rollouts.group_ids[is_thrown].unique())
        total = dist.all_sum(
            torch.tensor([groups, int(completion_lengths(self.rollouts)[is_thrown].sum())])
        )
        return {
            "refill/thrown_groups_count": float(total[0]),
            "refill/thrown_tokens_count": float(total[1]),
        }


def join_rounds(rounds: Sequence[Round], *, refills: bool, grown: Round | None = None) -> Sampled:
    """All that was sampled in a step, and which of it is the batch. ``grown``: more samples of
    slots' last groups."""
    rollouts, scores = rounds[0].rollouts, rounds[0].scores
    if not refills and grown is None:
        every = torch.ones(len(rollouts), dtype=torch.bool)
        return Sampled(rollouts, scores, rollouts.group_ids.argsort(stable=True).tolist(), every)
    every_round = [*rounds, grown] if grown is not None else list(rounds)
    starts = accumulate((len(one.rollouts) for one in every_round), initial=0)
    last: dict[int, tuple[list[int], bool]] = {}
    for one, first in zip(every_round, starts, strict=False):
        is_empty = (
            [False] * len(one.slots)
            if one is grown or not refills
            else (one.spread() == 0).tolist()
        )
        sizes = one.rollouts.group_ids.bincount(minlength=len(one.slots))
        rows_by_group = one.rollouts.group_ids.argsort(stable=True).split(sizes.tolist())
        for slot, own, is_alike in zip(one.slots, rows_by_group, is_empty, strict=True):
            before = last[slot][0] if one is grown else []
            last[slot] = before + (own + first).tolist(), not is_alike
    slots = list(
        last.values()
    )  # in order: the first round has all of them, and a slot keeps its place
    is_filled = [is_good for own, is_good in slots for _ in own]
    if len(every_round) > 1:
        lengths = torch.cat([one.rollouts.lengths for one in every_round])
        rollouts = join_rollouts([one.rollouts for one in every_round])
        scores = Scores.cat([one.scores for one in every_round])
        if (
            moved := rollouts.lengths - lengths
        ).any():  # environments began the rows of a group differently
            steps = {
                name: shifted(x, moved, rollouts.mask.shape[1], torch.nan)
                for name, x in scores.steps.items()
            }
            scores = replace(scores, steps=steps)
        is_error = torch.tensor(
            [finish == "error" for finish in rollouts.finish]
        )  # some only since they were joined
        scores = replace(scores, rewards=scores.rewards.where(~is_error, torch.nan))
    return Sampled(
        rollouts, scores, [row for own, _ in slots for row in own], torch.tensor(is_filled)
    )


# --- growth ---------------------------------------------------------------------------------------


def max_group_size(rollout: RolloutConfig, group_size: int) -> int:
    """The largest size of a group in a step whose groups have ``group_size`` samples on average at
    most."""
    return 2 * group_size if rollout.first_samples else group_size


def further_requests(
    rounds: Sequence[Round], rollout: RolloutConfig, step_params: StepParams, *, sampled: int
) -> dict[int, Request]:
    """What this rank samples beyond the rounds so far, by slot; all ranks agree on the shares.

    ``sampled``: rows of all ranks so far, those that refilling has discarded included: they too are
    of the budget.
    """
    spread = torch.zeros(rollout.prompts, dtype=torch.float64)
    prompts: dict[int, Prompt] = {}
    for one in rounds:  # a later round's group takes the place of the slot's earlier one
        spread[torch.tensor(one.slots)] = one.spread()
        prompts |= dict(zip(one.slots, one.rollouts.prompts, strict=True))
    sizes = torch.full((rollout.prompts,), rollout.first_samples)
    budget = max(rollout.prompts * step_params.group_size - sampled, 0)
    first, largest = rollout.first_samples, max_group_size(rollout, step_params.group_size)
    more = allocate_samples(dist.all_sum(spread), sizes, budget=budget, cap=largest).tolist()
    return {
        slot: Request(prompt, more[slot], first=first)
        for slot, prompt in prompts.items()
        if more[slot]
    }


def rescore_whole_groups(scores: Scores, group_ids: Tensor, weights: Sequence[float]) -> Scores:
    """The scores of groups that were scored in two calls, as if in one: a row is unscored where it
    lacks a part.

    A part applies to a group where it scores any of its rows. A call that saw only some of them may
    have found that it does not, and have left it out of their sum.
    """
    counted = [
        part for part, weight in zip(scores.parts.values(), weights, strict=True) if weight != 0
    ]
    if not counted:
        return scores
    scored = torch.stack([part.isfinite() for part in counted])  # [parts, B]
    is_missing = (applies_to_group(scored, group_ids) & ~scored).any(dim=0)
    return replace(scores, rewards=scores.rewards.where(~is_missing, torch.nan))


def growth_metrics(
    rounds: Sequence[Round], grown: Round | None, rollout: RolloutConfig, step_params: StepParams
) -> dict[str, float]:
    """What growing did, over all ranks.

    ``growth/first_reward_mean`` is of the first samples alone: groups that grow are those that are
    neither always nor never right, so that the mean of all rows says less of the policy.
    """
    first = torch.cat([one.scores.rewards for one in rounds])
    rows = 0 if grown is None else len(grown.rollouts)
    counts = {"first": len(first), "rows": rows, "groups": 0 if grown is None else len(grown.slots)}
    stats = {name: Stat(1, value) for name, value in counts.items()}
    stats = dist.merge_stats(stats | {"reward": Stat.of(first, first.isfinite())})
    sampled = stats["first"].sum + stats["rows"].sum
    metrics = {"growth/first_reward_mean": stats["reward"].mean}
    metrics["growth/grown_groups_count"] = stats["groups"].sum
    metrics["growth/grown_rows_count"] = stats["rows"].sum
    return metrics | {
        "growth/unspent_rows_count": max(rollout.prompts * step_params.group_size - sampled, 0.0)
    }
