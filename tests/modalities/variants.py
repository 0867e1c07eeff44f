"""What an update is computed from otherwise, with the same gradient: cuts, orders, layouts, junk
and company."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from tests.fakes import left_padded, unpacked
from tests.modalities.updates import Case, Variant, changed, whole
from torch import Tensor

from gruppo.types import TrainBatch


def micro_batches(case: Case) -> Iterator[Variant]:
    """Every budget that cuts the batch in another way, from one row a piece to one piece;
    references made anew."""
    fresh = replace(case.batch, ref=None)
    return (Variant(fresh, case.policy, budget) for budget in budgets(case))


@cache
def budgets(case: Case) -> list[int]:
    """One budget for each cut, the smallest first."""
    cuts: dict[str, int] = {}
    for budget in range(1, 300):
        cut = [
            micro_batch.rows.tolist()
            for micro_batch in case.policy.micro_batches(
                case.batch.rollouts, case.batch.loss_mask, budget
            )
        ]
        cuts.setdefault(str(cut), budget)
    return list(cuts.values())


def a_few_micro_batches(case: Case) -> Iterator[Variant]:
    """One row a piece, and two coarser cuts; references stored beforehand."""
    cuts = budgets(case)
    return (Variant(case.batch, case.policy, cuts[place * len(cuts) // 3]) for place in range(3))


def row_order(case: Case) -> Iterator[Variant]:
    yield Variant(case.batch.take(torch.arange(9).flip(0)), case.policy)
    yield Variant(case.batch.take(torch.tensor([5, 0, 8, 3, 1, 7, 2, 6, 4])), case.policy, 60)


def columns(case: Case) -> Iterator[Variant]:
    """Seven more columns in the batch, and in every piece as well."""
    wide = widened(case.batch, 7)
    yield Variant(wide, case.policy, 60)
    yield Variant(wide, undivided(case.policy))


def layout(case: Case) -> Iterator[Variant]:
    """Padded on the left; each completion behind a prompt of its own."""
    yield Variant(case.batch, left_padded(case.policy), 60)
    yield Variant(case.batch, unpacked(case.policy), 60)


def masked_slots(case: Case) -> Iterator[Variant]:
    """1e6 and NaN by turns in every floating input where nothing is learned from."""
    filled = spoiled(case.batch)
    yield Variant(filled, case.policy, 60)
    yield Variant(filled, undivided(case.policy))


def masked_rows(case: Case) -> Iterator[Variant]:
    """Beside rows of which nothing is kept, some of them longer, in batch and piece."""
    company = spoiled(beside_masked_rows(case.batch))
    yield Variant(company, case.policy, 60)
    yield Variant(company, undivided(case.policy))


def head_chunks(case: Case) -> Iterator[Variant]:
    policy = copy.copy(case.policy)
    policy.chunk = 7
    yield Variant(case.batch, policy)


def undivided(policy: Any) -> Any:
    """The policy, which puts every row and every column into one piece, masked or not."""
    other = copy.copy(policy)
    other.micro_batches = lambda rollouts, loss_mask, budget: [whole(rollouts)]
    return other


# --- batches made of batches ----------------------------------------------------------------------


def spoiled(batch: TrainBatch) -> TrainBatch:
    junk = torch.tensor([1e6, torch.nan])[torch.arange(batch.loss_mask.numel()) % 2].reshape(
        batch.loss_mask.shape
    )
    return changed(batch, lambda x: torch.where(batch.loss_mask, x, junk.to(x.dtype)))


def widened(batch: TrainBatch, more: int) -> TrainBatch:
    """With so many columns more, or fewer."""
    assert batch.rollouts is not None

    def wider(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, more))

    names = ("actions", "mask", "policy_version")
    rollouts = replace(
        batch.rollouts, **{name: wider(getattr(batch.rollouts, name)) for name in names}
    )
    return changed(batch, wider, rollouts=rollouts, loss_mask=wider(batch.loss_mask))


def share(batch: TrainBatch, rows: Sequence[int]) -> TrainBatch:
    """The given rows, in as many columns as they need."""
    mine = batch.take(torch.tensor(rows))
    assert mine.rollouts is not None
    return widened(mine, int(mine.rollouts.lengths.max()) - mine.loss_mask.shape[1])


def beside_masked_rows(batch: TrainBatch) -> TrainBatch:
    """The batch and its first four rows again as rows that are not scored, the first of them with
    more columns."""
    rows = torch.tensor([0, 1, 2, 3])
    wide = widened(batch, 3)
    both = torch.cat([torch.arange(len(batch.rewards)), rows])
    twice = wide.take(both)
    lengths, mask = twice.rollouts.lengths.clone(), twice.rollouts.mask.clone()
    lengths[-4], mask[-4] = mask.shape[1], True
    loss_mask = twice.loss_mask.clone()
    loss_mask[-4:] = False
    rewards = twice.rewards.clone()
    rewards[-4:] = torch.nan
    return replace(
        twice,
        rollouts=replace(twice.rollouts, lengths=lengths, mask=mask),
        loss_mask=loss_mask,
        rewards=rewards,
    )
