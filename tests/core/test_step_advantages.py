"""Rewards of steps as advantages: compared with all steps of the group, and whose actions they are;
by hand."""

from __future__ import annotations

import pytest
import torch
from tests.core.ranks import on_ranks

from gruppo.core.advantages import step_advantages
from gruppo.core.returns import broadcast_step_values, returns_to_go

NAN = float("nan")
ROWS = torch.tensor(
    [[NAN, 1.0, NAN, NAN, 0.0], [1.0, NAN, 1.0, NAN, NAN], [NAN, NAN, NAN, NAN, NAN]]
)
"""Two steps in each of two rows, a row without any; the four are 1, 0, 1, 1: mean 0.75, deviation
(ddof 1) 0.5."""
KEEP = torch.arange(5) < torch.tensor([[5], [3], [4]])
GROUP = torch.tensor([0, 0, 0])


def advantages(rewards=ROWS, group_ids=GROUP, *, baseline="mean", scale="group", eps=0.0, **rest):
    return step_advantages(rewards, group_ids, baseline=baseline, scale=scale, eps=eps, **rest)


def close(got, expected):
    return torch.allclose(got, torch.tensor(expected), rtol=1e-6, atol=1e-7)


def test_steps_are_compared_with_all_steps_of_the_group_by_hand():
    """DeepSeekMath 4.1.3: (r - mean R) / std R; 0 where no step ends."""
    got, state = advantages()
    assert close(got, [[0, 0.5, 0, 0, -1.5], [0.5, 0, 0.5, 0, 0], [0] * 5]) and state == {}
    got, _ = advantages(eps=0.5)
    assert close(got, [[0, 0.25, 0, 0, -0.75], [0.25, 0, 0.25, 0, 0], [0] * 5])


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ({"scale": "none"}, [[0, 0.25, 0, 0, -0.75], [0.25, 0, 0.25, 0, 0]]),
        ({"baseline": "none", "scale": "none"}, [[0, 1.0, 0, 0, 0.0], [1.0, 0, 1.0, 0, 0]]),
        (
            {"baseline": "leave_one_out", "scale": "none"},
            [[0, 0.0, 0, 0, -1.0], [0.5, 0, 0.5, 0, 0]],
        ),
        ({"baseline": "batch_mean", "scale": "batch"}, [[0, 0.5, 0, 0, -1.5], [0.5, 0, 0.5, 0, 0]]),
    ],
)
def test_baselines_and_scales_of_steps_by_hand(choices, expected):
    """Leave-one-out leaves out all steps of the own row: the first row is compared with 1, the
    second with 0.5."""
    got, _ = advantages(ROWS[:2], GROUP[:2], **choices)
    assert close(got, expected)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_steps_of_a_group_in_which_one_row_alone_has_any_get_nothing(baseline):
    got, _ = advantages(ROWS, torch.tensor([0, 1, 0]), baseline=baseline, scale="none")
    assert not got.any()


def test_no_steps_at_all_are_no_error_and_move_no_statistic():
    for choices in (
        {},
        {"baseline": "batch_mean", "scale": "batch"},
        {"baseline": "running", "scale": "running"},
    ):
        got, state = advantages(torch.full((3, 5), NAN), **choices)
        assert not got.any() and all(
            entry == [0.0, 0.0] or not any(entry) for entry in state.values()
        )
    assert step_advantages(
        torch.zeros(0, 4), torch.zeros(0, dtype=torch.long), baseline="mean", scale="group"
    )[0].shape


@pytest.mark.silent_bug(12)
def test_two_ranks_compare_steps_with_those_of_all():
    rewards = torch.tensor([[1.0, NAN, 3.0], [NAN, 2.0, NAN], [8.0, 4.0, NAN]])
    parts = [(rewards[:1], GROUP[:1]), (rewards[1:], GROUP[1:])]
    whole, _ = advantages(rewards, baseline="batch_mean", scale="batch")

    def of(part):
        return lambda all_sum, all_gather: advantages(
            *part, baseline="batch_mean", scale="batch", all_sum=all_sum
        )[0]

    assert torch.allclose(torch.cat(on_ranks(*map(of, parts))), whole, rtol=1e-6)


def test_from_each_action_on_the_steps_that_end_are_summed():
    steps, _ = advantages()
    got = returns_to_go(steps, KEEP)
    assert close(got, [[-1.0, -1.0, -1.5, -1.5, -1.5], [1.0, 0.5, 0.5, 0, 0], [0] * 5])


def test_actions_after_the_last_end_are_in_the_last_step_and_what_is_not_kept_is_in_none():
    is_step = torch.tensor([[False, True, False, False]])
    loss_mask = torch.tensor([[True, True, False, True]])
    assert broadcast_step_values(
        torch.tensor([[9.0, 2.0, 9.0, 9.0]]), is_step, loss_mask
    ).tolist() == [[2.0, 2.0, 0.0, 2.0]]
    assert broadcast_step_values(
        torch.ones(1, 4), torch.zeros(1, 4, dtype=torch.bool), loss_mask
    ).tolist() == [[0.0] * 4]
