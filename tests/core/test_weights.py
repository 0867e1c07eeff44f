"""Every denominator: formulas, and that no split of a batch can change a weight."""

from __future__ import annotations

from typing import get_args

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from gruppo.core.weights import Average, loss_total, loss_weights

AVERAGES = get_args(Average)
MAX_LENGTH = 8


def keep_of(lengths: list[int], columns: int | None = None) -> Tensor:
    return (
        torch.arange(max([*lengths, 1]) if columns is None else columns)[None]
        < torch.tensor(lengths)[:, None]
    )


def pairs(loss_mask: Tensor) -> Tensor:
    """Group ids where each two rows share a prompt."""
    return torch.arange(len(loss_mask)) // 2


def total_of(loss_mask: Tensor, average: str, group_ids: Tensor | None = None) -> Tensor:
    group_ids = pairs(loss_mask) if group_ids is None else group_ids
    return loss_total(loss_mask, average=average, max_length=MAX_LENGTH, group_ids=group_ids)


def weights_of(
    loss_mask: Tensor, average: str, total: Tensor | None = None, group_ids: Tensor | None = None
) -> Tensor:
    group_ids = pairs(loss_mask) if group_ids is None else group_ids
    total = total_of(loss_mask, average, group_ids) if total is None else total
    return loss_weights(loss_mask, average=average, total=total, group_ids=group_ids)


@pytest.mark.silent_bug(29)
@pytest.mark.parametrize(
    ("average", "weight"),
    [
        ("sequence", lambda length, lengths: 1 / (length * len(lengths))),
        ("token", lambda length, lengths: 1 / sum(lengths)),
        ("prompt", lambda length, lengths: {1: 1 / 3, 2: 1 / 3, 5: 1 / 12, 7: 1 / 12}[length] / 2),
        ("constant", lambda length, lengths: 1 / (len(lengths) * MAX_LENGTH)),
        ("sequence_sum", lambda length, lengths: 1 / len(lengths)),
        ("sum", lambda length, lengths: 1.0),
    ],
)
def test_weight_of_a_token_by_the_length_of_its_row(average, weight):
    lengths = [1, 2, 5, 7]
    weights = weights_of(keep_of([*lengths, 0]), average)
    for row, length in enumerate(lengths):
        by_hand = torch.tensor(
            [weight(length, lengths)] * length + [0.0] * (7 - length), dtype=torch.float64
        )
        torch.testing.assert_close(weights[row], by_hand, rtol=1e-12, atol=0)
    assert not weights[4].any()


def test_prompt_without_group_ids_is_refused():
    with pytest.raises(ValueError, match="needs group_ids"):
        loss_total(keep_of([1]), average="prompt", max_length=MAX_LENGTH)


@pytest.mark.silent_bug(11)
@pytest.mark.parametrize("average", AVERAGES)
@settings(max_examples=25)
@given(data=st.data())
def test_the_weights_of_a_part_are_those_of_the_whole(average, data):
    lengths = data.draw(st.lists(st.integers(0, MAX_LENGTH), min_size=1, max_size=8))
    cut = data.draw(st.integers(0, len(lengths)))
    cut -= cut % 2 if average == "prompt" else 0  # its parts are whole groups
    loss_mask = keep_of(lengths, MAX_LENGTH)
    parts = [loss_mask[:cut], loss_mask[cut:]]
    total = sum(total_of(part, average) for part in parts)
    if average != "sum":  # its total is not used
        assert float(total) == float(total_of(loss_mask, average))
    whole = weights_of(loss_mask, average)
    assert torch.equal(torch.cat([weights_of(part, average, total) for part in parts]), whole)


@pytest.mark.silent_bug(13)
@pytest.mark.parametrize("average", AVERAGES)
def test_rows_that_are_not_kept_leave_numerator_and_denominator_together(average):
    kept, with_dropped = keep_of([2, 4], 5), keep_of([2, 0, 4, 0], 5)
    weights = weights_of(with_dropped, average)
    assert torch.equal(weights[[0, 2]], weights_of(kept, average, group_ids=torch.arange(2)))
    assert not weights[[1, 3]].any()


@pytest.mark.silent_bug(13)
@pytest.mark.parametrize("average", AVERAGES)
def test_actions_of_the_environment_inside_a_row_count_nowhere(average):
    """A tool's output in columns 1 and 2 leaves a row of two actions."""
    inside = torch.tensor([[True, False, False, True], [True, True, True, False]])
    plain = torch.tensor([[True, True, False, False], [True, True, True, False]])
    weights = weights_of(inside, average)
    assert not weights[0, 1:3].any()
    assert torch.equal(weights[inside], weights_of(plain, average)[plain])


@pytest.mark.parametrize("average", AVERAGES)
def test_nothing_kept_anywhere_gives_weights_of_zero(average):
    assert not weights_of(torch.zeros(3, 4, dtype=torch.bool), average).any()
    assert weights_of(torch.zeros(0, 4, dtype=torch.bool), average).shape == (0, 4)
