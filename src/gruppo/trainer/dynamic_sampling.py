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

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gruppo import distributed as dist
from gruppo.config.schema import RolloutConfig
from gruppo.core.groups import allocate_samples, group_std, has_no_spread
from gruppo.rewards.scoring import Scores, applies_to_group
from gruppo.trainer.stages import StepParams
from gruppo.types import Prompt, Request, Rollouts


@dataclass(frozen=True, eq=False)
class Round:
    """What one round of generation gave this rank."""

    rollouts: Rollouts
    scores: Scores
    slots: list[int]
    """Slot of each prompt, among those of all ranks."""

    def reward_std(self) -> Float[Tensor, "P"]:
        """Return the standard deviation of each group's rewards, 0 if they are equal or fewer than
        two rows are scored.

        Of the sum of all rewards, before it is shaped.
        """
        rewards, group_ids = self.scores.rewards, self.rollouts.group_ids
        # equal but for rounding, which a standard deviation would show
        return torch.where(has_no_spread(rewards, group_ids), 0.0, group_std(rewards, group_ids))


@dataclass(frozen=True, eq=False)
class Sampled:
    """All rounds of a step, on this rank."""

    rollouts: Rollouts
    """All samples: the batch's rows, and those that were discarded."""
    scores: Scores
    rows: list[int]
    """Rows of the batch: each slot's last group, in order of the slots."""
    is_filled: Bool[Tensor, "b"]
    """Whether each of them is in a group to learn from."""
    rounds: Sequence[Round]
    grown: Round | None
    """More samples of slots' last groups."""

    def batch(self) -> tuple[Rollouts, Scores]:
        """Return the rows of the batch. Those of an unfilled slot are in no statistic: they have no
        reward."""
        rollouts, scores = self.rollouts, self.scores
        if self.rows != list(range(len(rollouts))):
            rollouts, scores = rollouts.take(self.rows), scores.take(self.rows)
        rewards = scores.rewards.where(self.is_filled, torch.nan)
        return rollouts, replace(scores, rewards=rewards)


def join_rounds(
    rounds: Sequence[Round], grown: Round | None, weights: Sequence[float], *, refills: bool
) -> Sampled:
    """Join all that was sampled in a step, and find which of it is the batch.

    ``weights``: of the rewards. ``refills``: whether groups without spread are discarded.
    """
    every_round = list(rounds) if grown is None else [*rounds, grown]
    rows_of: dict[int, list[int]] = {}  # by slot, in order: the first round has all of them
    is_filled: dict[int, bool] = {}
    first = 0
    for one in every_round:
        has_spread = one.reward_std() != 0
        for group, slot in enumerate(one.slots):
            own = (first + (one.rollouts.group_ids == group).nonzero()[:, 0]).tolist()
            if one is grown:
                rows_of[slot] = rows_of[slot] + own
            else:
                rows_of[slot] = own
                is_filled[slot] = not refills or bool(has_spread[group])
        first += len(one.rollouts)
    rollouts, scores = _join(every_round)
    if grown is not None:
        scores = rescore_whole_groups(scores, rollouts.group_ids, weights)
    rows = [row for own in rows_of.values() for row in own]
    filled = torch.tensor([is_filled[slot] for slot, own in rows_of.items() for _ in own])
    return Sampled(rollouts, scores, rows, filled, rounds, grown)


def _join(rounds: Sequence[Round]) -> tuple[Rollouts, Scores]:
    if len(rounds) == 1:
        return rounds[0].rollouts, rounds[0].scores
    rollouts = Rollouts.cat([one.rollouts for one in rounds])
    return rollouts, Scores.cat([one.scores for one in rounds])


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
    reward_std = torch.zeros(rollout.prompts, dtype=torch.float64)
    prompts: dict[int, Prompt] = {}
    for one in rounds:  # a later round's group takes the place of the slot's earlier one
        reward_std[torch.tensor(one.slots)] = one.reward_std()
        prompts |= dict(zip(one.slots, one.rollouts.prompts, strict=True))
    sizes = torch.full((rollout.prompts,), rollout.first_samples)
    budget = max(rollout.prompts * step_params.group_size - sampled, 0)
    first, largest = rollout.first_samples, max_group_size(rollout, step_params.group_size)
    more = allocate_samples(dist.all_sum(reward_std), sizes, budget=budget, cap=largest).tolist()
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
