"""Records: taking, joining and adding them up loses and mixes nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from gruppo.protocols import DescriptionMixin
from gruppo.types import (
    GruppoError,
    Likelihood,
    MicroBatch,
    Prompt,
    Rollouts,
    Sampling,
    Stat,
    TrainBatch,
)


def rollouts_of(
    groups: list[int], lengths: list[int], *, first: int = 0, columns: int | None = None
) -> Rollouts:
    """Row i holds the numbers 100 (first + i) + column; prompt g is pg, with a number and ragged
    ids of its own."""
    rows, columns = len(groups), max(lengths) if columns is None else columns
    mask = torch.arange(columns)[None] < torch.tensor(lengths)[:, None]
    numbers = 100 * (first + torch.arange(rows))[:, None] + torch.arange(columns)
    prompts = range(max(groups) + 1)
    return Rollouts(
        prompts=tuple(Prompt(f"p{g}", f"ask {g}") for g in prompts),
        group_ids=torch.tensor(groups),
        actions=torch.where(mask, numbers, 0),
        mask=mask,
        lengths=torch.tensor(lengths),
        completions=tuple(f"out {first + i}" for i in range(rows)),
        sampler_logprobs=torch.where(mask, -numbers.float() - 1, 0),
        policy_version=torch.where(mask, numbers + 7, 0),
        temperature=(first + torch.arange(rows)) / 10 + 0.5,
        finish=tuple("stop" if (first + i) % 2 else "length" for i in range(rows)),
        shared={
            "number": torch.tensor([10.0 * g for g in prompts]),
            "ids": tuple(torch.arange(g + 1) for g in prompts),
        },
        per_row={
            "latent": 5.0 * (first + torch.arange(rows)),
            "note": tuple(f"n{first + i}" for i in range(rows)),
        },
    )


def rows_of(rollouts: Rollouts) -> list[tuple]:
    """Every row with all that belongs to it, in plain Python, without its padding."""
    rows = []
    for i, group in enumerate(rollouts.group_ids.tolist()):
        there = int(rollouts.lengths[i])
        assert not rollouts.mask[i, there:].any()
        assert not rollouts.sampler_logprobs[i, there:].any()
        rows.append(
            (
                (rollouts.prompts[group].id, rollouts.prompts[group].draw),
                rollouts.shared["number"][group].item(),
                tuple(rollouts.shared["ids"][group].tolist()),
                tuple(rollouts.actions[i, :there].tolist()),
                tuple(rollouts.mask[i, :there].tolist()),
                tuple(rollouts.sampler_logprobs[i, :there].tolist()),
                tuple(rollouts.policy_version[i, :there].tolist()),
                rollouts.completions[i],
                rollouts.temperature[i].item(),
                rollouts.finish[i],
                rollouts.per_row["latent"][i].item(),
                rollouts.per_row["note"][i],
            )
        )
    return rows


# --- rollouts -------------------------------------------------------------------------------------


@pytest.mark.silent_bug(24)
@settings(max_examples=30)
@given(data=st.data())
def test_take_moves_each_row_with_all_that_belongs_to_it(data):
    rollouts = rollouts_of([0, 2, 1, 1, 0, 2], [1, 3, 2, 4, 1, 2])
    rows = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=8))
    index = torch.tensor(rows) if data.draw(st.booleans()) else rows
    taken = rollouts.take(index)
    assert rows_of(taken) == [rows_of(rollouts)[i] for i in rows]
    assert len(taken) == len(rows)


@pytest.mark.silent_bug(24)
@settings(max_examples=30)
@given(order=st.permutations(range(6)), cuts=st.sets(st.integers(1, 5)))
def test_cat_of_the_parts_of_a_split_is_the_whole(order, cuts):
    """Ragged parts too: each is first cut to its own width."""
    whole = rollouts_of([0, 2, 1, 1, 0, 2], [1, 3, 2, 4, 1, 2])
    parts = [narrow(whole.take(part)) for part in torch.tensor(order).tensor_split(sorted(cuts))]
    joined = Rollouts.cat(parts)
    assert rows_of(joined) == [rows_of(whole)[i] for i in order]
    assert len(joined.prompts) == 3  # a group that was split is one group again
    assert joined.actions.shape == (6, 4)


def narrow(rollouts: Rollouts) -> Rollouts:
    width = int(rollouts.lengths.max())
    names = ("actions", "mask", "sampler_logprobs", "policy_version")
    return replace(rollouts, **{name: getattr(rollouts, name)[:, :width] for name in names})


@pytest.mark.silent_bug(25)
def test_cat_makes_one_group_of_the_same_prompt_and_draw_and_two_of_two_draws():
    first, second = rollouts_of([0, 0], [1, 2]), rollouts_of([0, 0], [3, 1], first=2)
    assert Rollouts.cat([first, second]).group_ids.tolist() == [0, 0, 0, 0]
    later = replace(second, prompts=(replace(second.prompts[0], draw=1),))
    joined = Rollouts.cat([first, later])
    assert joined.group_ids.tolist() == [0, 0, 1, 1]
    assert rows_of(joined) == rows_of(first) + rows_of(later)


def test_cat_pads_continuous_actions_with_event_dimensions():
    short, long = rollouts_of([0], [1]), rollouts_of([0], [3], first=1)
    short, long = (
        replace(r, actions=r.actions[..., None, None].expand(-1, -1, 2, 5).float())
        for r in (short, long)
    )
    joined = Rollouts.cat([short, long])
    assert joined.actions.shape == (2, 3, 2, 5)
    assert torch.equal(joined.actions[1], long.actions[0])
    assert not joined.actions[0, 1:].any()


# --- batches and pieces ---------------------------------------------------------------------------


@pytest.mark.silent_bug(24)
def test_a_batch_takes_the_same_rows_of_everything():
    rollouts = rollouts_of([0, 1, 1, 0], [1, 2, 3, 2])

    def numbers(start: int) -> Tensor:
        return start + torch.arange(12.0).reshape(4, 3)

    whole = TrainBatch(
        rollouts=rollouts,
        demos=None,
        rewards=torch.tensor([1.0, 2.0, 3.0, 4.0]),
        advantages=numbers(100),
        loss_mask=rollouts.mask,
        old_logprobs=numbers(200),
        ref=Likelihood(numbers(300)),
        old_values=numbers(400),
        returns=numbers(500),
    )
    rows = torch.tensor([2, 0])
    part = whole.take(rows)
    assert rows_of(part.rollouts) == [rows_of(rollouts)[i] for i in (2, 0)]
    for name in ("rewards", "advantages", "loss_mask", "old_logprobs", "old_values", "returns"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[rows]), name
    assert torch.equal(part.ref.logprobs, whole.ref.logprobs[rows])


def test_a_micro_batch_cuts_rows_and_columns():
    x = torch.arange(24).reshape(3, 4, 2)
    assert MicroBatch(torch.tensor([2, 0]), slice(1, 3)).of(x).tolist() == [
        [[18, 19], [20, 21]],
        [[2, 3], [4, 5]],
    ]


# --- statistics -----------------------------------------------------------------------------------


def test_a_statistic_by_hand():
    stat = Stat.of(
        torch.tensor([[1.0, 2.0], [6.0, 100.0]]), torch.tensor([[True, True], [True, False]])
    )
    assert stat == Stat(3, 9, 41, 1, 6)
    assert stat.mean == 3
    assert stat.std == pytest.approx((14 / 3) ** 0.5, rel=1e-12)


@settings(max_examples=30)
@given(st.lists(st.lists(st.floats(-1e3, 1e3, width=32), max_size=5), max_size=5))
def test_adding_statistics_is_the_statistic_of_everything(parts):
    added = sum((Stat.of(torch.tensor(part)) for part in parts), Stat())
    whole = Stat.of(torch.tensor([x for part in parts for x in part]))
    assert (added.count, added.min, added.max) == (whole.count, whole.min, whole.max)
    assert (added.sum, added.sum_sq) == pytest.approx((whole.sum, whole.sum_sq), rel=1e-9, abs=1e-6)


def test_the_statistic_of_nothing_is_unknown_and_adds_nothing():
    assert Stat.of(torch.zeros(3), torch.zeros(3, dtype=torch.bool)) == Stat()
    assert str((Stat().mean, Stat().std)) == "(nan, nan)"
    assert Stat() + Stat(1, 2, 4, 2, 2) == Stat(1, 2, 4, 2, 2)


def test_statistics_of_integers_booleans_and_low_precision_are_summed_in_float64():
    assert Stat.of(torch.tensor([1, 2, 3])) == Stat(3, 6, 14, 1, 3)
    assert Stat.of(torch.tensor([True, False])) == Stat(2, 1, 1, 0, 1)
    assert Stat.of(torch.ones(3000, dtype=torch.bfloat16)).sum == 3000
    assert Stat.of(torch.full((4,), 0.1)).std < 1e-8


# --- sampling -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": float("nan")}, "top_p=nan"),
        ({"max_actions": 0}, "max_actions=0"),
        ({"stop": "###"}, "stop='###'"),
    ],
)
def test_sampling_that_means_nothing_is_refused(choices, says):
    with pytest.raises(GruppoError, match=says):
        Sampling(**choices)


def test_the_group_that_is_shown_is_the_first_whose_scored_rewards_differ():
    group_ids = torch.tensor([0, 0, 1, 1, 1, 2, 2])
    rewards = torch.tensor([5.0, math.nan, 1.0, math.nan, 0.0, 3.0, 2.0])
    assert DescriptionMixin().rows_to_show(group_ids, rewards) == [2, 4, 3]
    assert DescriptionMixin().rows_to_show(group_ids[:0], rewards[:0]) == []
