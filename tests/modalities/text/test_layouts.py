"""Groups as one row: the layout by hand, and pieces within their budget."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gruppo.modalities.text.layouts import pack, split_rows


def packed_example():
    """Prompt 10 11 with completions 1 2 and 3; prompt 20 with 4 5 6."""
    prompts = [torch.tensor([10, 11]), torch.tensor([20])]
    completions = [torch.tensor([1, 2]), torch.tensor([4, 5, 6]), torch.tensor([3])]
    return pack(prompts, completions, torch.tensor([0, 1, 0]))


def test_a_prompt_is_laid_out_once_and_positions_restart_at_its_end():
    packed = packed_example()
    assert packed.ids.tolist() == [[10, 11, 1, 2, 3], [20, 4, 5, 6, 0]]
    assert packed.positions[0].tolist() == [0, 1, 2, 3, 2] and packed.positions[1, :4].tolist() == [
        0,
        1,
        2,
        3,
    ]


def test_each_completion_sees_the_prompt_and_its_own_past_and_no_padding():
    visible = packed_example().visible()
    assert visible[0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],  # 3 does not see 1 and 2
    ]
    assert not visible[1, :4, 4].any() and visible[1, 4, 4], (
        "padding is seen by itself alone: a softmax is never empty"
    )


@pytest.mark.silent_bug(16)
def test_an_action_is_predicted_by_the_token_before_it_and_the_first_by_the_prompts_last():
    completion, column = torch.tensor([0, 0, 1, 1, 1, 2]), torch.tensor([0, 1, 0, 1, 2, 0])
    assert packed_example().before(completion, column).tolist() == [1, 2, 5, 6, 7, 1], (
        "rows of 5 tokens"
    )


@st.composite
def batches(draw):
    groups = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))  # prompt lengths
    owners = draw(st.lists(st.integers(0, len(groups) - 1), min_size=1, max_size=12))
    lengths = draw(st.lists(st.integers(0, 9), min_size=len(owners), max_size=len(owners)))
    return groups, owners, lengths, draw(st.integers(1, 60))


@pytest.mark.parametrize("layout", ["stream", "packed", "padded"])
@given(batch=batches())
def test_micro_batches_hold_each_row_once_and_keep_to_the_budget(layout, batch):
    groups, owners, lengths, budget = batch
    prompt_lengths = torch.tensor(groups)[torch.tensor(owners)]
    rows = range(len(owners))
    micro_batches = split_rows(
        prompt_lengths, torch.tensor(lengths), torch.tensor(owners), rows, budget, layout
    )
    assert sorted(row for micro_batch in micro_batches for row in micro_batch) == list(rows)
    for micro_batch in micro_batches:
        sizes = {}
        for row in micro_batch:
            unit = row if layout == "padded" else owners[row]
            sizes[unit] = sizes.get(unit, groups[owners[row]]) + lengths[row]
        cost = sum(sizes.values()) if layout == "stream" else len(sizes) * max(sizes.values())
        assert cost <= budget or len(micro_batch) == 1


@pytest.mark.parametrize("layout", ["stream", "packed"])
def test_a_group_that_fits_is_one_micro_batch_and_another_is_cut_into_micro_batches_of_like_size(
    layout,
):
    lengths, group_ids = torch.tensor([5, 5, 5, 5]), torch.tensor([0, 0, 0, 0])
    of = (torch.full((4,), 10), lengths, group_ids, range(4))
    assert split_rows(*of, 30, layout) == [[0, 1, 2, 3]]
    assert split_rows(*of, 29, layout) == [[0, 1], [2, 3]], "not three rows and one"


def test_unequal_groups_share_a_micro_batch_at_their_sum_where_there_is_no_padding():
    lengths, group_ids = torch.tensor([20, 1]), torch.tensor([0, 1])
    of = (torch.tensor([10, 1]), lengths, group_ids, range(2))
    assert split_rows(*of, 32, "stream") == [[0, 1]]
    assert split_rows(*of, 32, "packed") == [[0], [1]]
