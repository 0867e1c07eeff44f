"""Micro-batches within their budget."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gruppo.modalities.text.layouts import split_rows


@st.composite
def batches(draw):
    groups = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))  # prompt lengths
    owners = draw(st.lists(st.integers(0, len(groups) - 1), min_size=1, max_size=12))
    lengths = draw(st.lists(st.integers(0, 9), min_size=len(owners), max_size=len(owners)))
    return groups, owners, lengths, draw(st.integers(1, 60))


@pytest.mark.parametrize("is_padded", [False, True])
@given(batch=batches())
def test_micro_batches_hold_each_row_once_and_keep_to_the_budget(is_padded, batch):
    groups, owners, lengths, budget = batch
    prompt_lengths = torch.tensor(groups)[torch.tensor(owners)]
    rows = range(len(owners))
    micro_batches = split_rows(
        prompt_lengths,
        torch.tensor(lengths),
        torch.tensor(owners),
        rows,
        budget,
        is_padded=is_padded,
    )
    assert sorted(row for micro_batch in micro_batches for row in micro_batch) == list(rows)
    for micro_batch in micro_batches:
        sizes = {}
        for row in micro_batch:
            unit = row if is_padded else owners[row]
            sizes[unit] = sizes.get(unit, groups[owners[row]]) + lengths[row]
        cost = len(sizes) * max(sizes.values()) if is_padded else sum(sizes.values())
        assert cost <= budget or len(micro_batch) == 1


def test_a_group_that_fits_is_one_micro_batch_and_another_is_cut_into_micro_batches_of_like_size():
    lengths, group_ids = torch.tensor([5, 5, 5, 5]), torch.tensor([0, 0, 0, 0])
    of = (torch.full((4,), 10), lengths, group_ids, range(4))
    assert split_rows(*of, 30, is_padded=False) == [[0, 1, 2, 3]]
    assert split_rows(*of, 29, is_padded=False) == [[0, 1], [2, 3]], "not three rows and one"


def test_unequal_groups_share_a_micro_batch_at_their_sum_where_there_is_no_padding():
    lengths, group_ids = torch.tensor([20, 1]), torch.tensor([0, 1])
    of = (torch.tensor([10, 1]), lengths, group_ids, range(2))
    assert split_rows(*of, 32, is_padded=False) == [[0, 1]]
    assert split_rows(*of, 32, is_padded=True) == [[0], [1]]
