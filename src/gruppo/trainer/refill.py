"""DAPO's dynamic sampling: groups without spread give way to new prompts, for a stated number of rounds.

A step has ``prompts`` slots over all ranks; a slot keeps its rank and its place. Which slots are empty is agreed on by
all ranks and new prompts are drawn by all of them in one order, so that the number of ranks changes no batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gruppo import distributed as dist
from gruppo.core.groups import has_no_spread
from gruppo.environments import completion_lengths
from gruppo.rewards.scoring import Scores
from gruppo.types import Rollouts


@dataclass(frozen=True, eq=False)
class Round:
    """What one round of generation gave this rank."""

    rollouts: Rollouts
    scores: Scores
    slots: list[int]
    """Of all ranks' slots, the one of each prompt."""
    reward_s: float


def decisive(one: Round, by: str) -> Float[Tensor, "B"]:
    """The reward whose spread within a group counts: ``by``, or the sum of all before it is shaped.

    Of the rows that are scored. Where ``by`` scores no row of a group it does not apply to that group, and the sum
    decides.
    """
    rewards, group_ids = one.scores.rewards, one.rollouts.group_ids
    if not by:
        return rewards
    named = torch.where(rewards.isfinite(), one.scores.parts[by], torch.nan)
    applies = group_ids[named.isfinite()].bincount(minlength=len(one.slots)) > 0
    return torch.where(applies[group_ids], named, rewards)


def alike(one: Round, by: str) -> Bool[Tensor, "P"]:
    """Groups without spread in the decisive reward: one with fewer than two scored rows has nothing to learn from."""
    return has_no_spread(decisive(one, by), one.rollouts.group_ids)


def empty_slots(one: Round | None, by: str, slots: int) -> list[int]:
    """Slots of all ranks whose group has no spread, ascending."""
    flags = torch.zeros(slots)
    if one is not None:
        flags[torch.tensor(one.slots)] = alike(one, by).float()
    return dist.all_sum(flags).nonzero()[:, 0].tolist()


@dataclass(frozen=True, eq=False)
class Sampled:
    """All rounds of a step, on this rank."""

    rollouts: Rollouts
    scores: Scores
    rows: list[int]
    """Rows of the batch: each slot's last group, in order of the slots."""
    is_filled: Bool[Tensor, "b"]
    """Of each of them, whether its group is to be learned from."""

    def batch(self) -> tuple[Rollouts, Scores]:
        """The rows of the batch. Those of an unfilled slot are in no statistic: they have no reward."""
        rollouts, scores = self.rollouts, self.scores
        if self.rows != list(range(len(rollouts))):
            rollouts, scores = rollouts.take(self.rows), scores.take(self.rows)
        return rollouts, replace(scores, rewards=torch.where(self.is_filled, scores.rewards, torch.nan))

    def thrown(self) -> dict[str, float]:
        """What no update learns from, on all ranks: thrown away, or the last group of a slot left unfilled."""
        is_thrown = torch.ones(len(self.rollouts), dtype=torch.bool)
        is_thrown[torch.tensor(self.rows)[self.is_filled]] = False
        groups = len(self.rollouts.group_ids[is_thrown].unique())
        total = dist.all_sum(torch.tensor([groups, int(completion_lengths(self.rollouts)[is_thrown].sum())]))
        return {"refill/thrown_groups_count": float(total[0]), "refill/thrown_tokens_count": float(total[1])}


def joined(rounds: Sequence[Round], by: str, *, refills: bool, grown: Round | None = None) -> Sampled:
    """All that was sampled in a step, and which of it is the batch. ``grown``: more samples of slots' last groups."""
    rollouts, scores = rounds[0].rollouts, rounds[0].scores
    if not refills and grown is None:
        every = torch.ones(len(rollouts), dtype=torch.bool)
        return Sampled(rollouts, scores, rollouts.group_ids.argsort(stable=True).tolist(), every)
    every_round = [*rounds, grown] if grown is not None else list(rounds)
    starts = accumulate((len(one.rollouts) for one in every_round), initial=0)
    last: dict[int, tuple[list[int], bool]] = {}
    for one, first in zip(every_round, starts, strict=False):
        is_empty = [False] * len(one.slots) if one is grown or not refills else alike(one, by).tolist()
        for slot, own, is_alike in zip(one.slots, _rows_by_group(one), is_empty, strict=True):
            before = last[slot][0] if one is grown else []
            last[slot] = before + (own + first).tolist(), not is_alike
    slots = list(last.values())  # in order: the first round has all of them, and a slot keeps its place
    is_filled = [is_good for own, is_good in slots for _ in own]
    if len(every_round) > 1:
        rollouts = Rollouts.cat([one.rollouts for one in every_round])
        scores = Scores.cat([one.scores for one in every_round])
    return Sampled(rollouts, scores, [row for own, _ in slots for row in own], torch.tensor(is_filled))


def _rows_by_group(one: Round) -> Sequence[Int[Tensor, "n"]]:
    """The rows of each group, in one pass over all rows."""
    sizes = one.rollouts.group_ids.bincount(minlength=len(one.slots))
    return one.rollouts.group_ids.argsort(stable=True).split(sizes.tolist())
