"""Statistics of groups: unequal sizes, rewards that are missing, groups without spread."""

from __future__ import annotations

import math

import pytest
import torch

from gruppo.core.advantages import normalized_rewards
from gruppo.core.groups import group_deviations, group_reduce

NAN = float("nan")
REWARDS = torch.tensor([2.0, 1.0, 0.35, NAN, 4.0, 0.35, NAN, 0.35, math.inf, 3.0])
GROUP_IDS = torch.tensor([0, 0, 1, 2, 0, 1, 3, 1, 0, 2])
"""2, 1, 4 and one infinite; 0.35 three times; 3 and one missing; one missing alone."""


def close(got: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(
        got, torch.tensor(expected, dtype=torch.float64), rtol=1e-7, atol=0, equal_nan=True
    )


@pytest.mark.silent_bug(22)
@pytest.mark.silent_bug(41)
def test_mean_best_and_worst_are_of_the_scored_rows_of_each_group():
    close(group_reduce(REWARDS, GROUP_IDS, "mean"), [7 / 3, 0.35, 3.0, NAN])
    close(group_reduce(REWARDS, GROUP_IDS, "amax"), [4.0, 0.35, 3.0, NAN])
    close(group_reduce(REWARDS, GROUP_IDS, "amin"), [1.0, 0.35, 3.0, NAN])


@pytest.mark.silent_bug(20)
def test_deviations_are_from_the_groups_mean_and_exactly_zero_without_spread():
    got = group_deviations(REWARDS, GROUP_IDS)
    close(got, [2 - 7 / 3, 1 - 7 / 3, 0.0, NAN, 4 - 7 / 3, 0.0, NAN, 0.0, NAN, 0.0])
    assert (got[GROUP_IDS == 1] == 0).all()


@pytest.mark.silent_bug(20)
@pytest.mark.silent_bug(41)
def test_normalised_is_the_deviation_over_the_groups_standard_deviation():
    std = math.sqrt(((2 - 7 / 3) ** 2 + (1 - 7 / 3) ** 2 + (4 - 7 / 3) ** 2) / 2)
    got = normalized_rewards(REWARDS, GROUP_IDS).double()
    expected = [
        (2 - 7 / 3) / std,
        (1 - 7 / 3) / std,
        0.0,
        NAN,
        (4 - 7 / 3) / std,
        0.0,
        NAN,
        0.0,
        NAN,
        0.0,
    ]
    torch.testing.assert_close(
        got, torch.tensor(expected).double(), rtol=1e-6, atol=0, equal_nan=True
    )


@pytest.mark.silent_bug(20)
def test_rewards_that_are_equal_up_to_rounding_do_not_stand_out():
    rewards = torch.tensor([0.3, 0.3, 0.3, 1.0])
    rewards[1] = torch.nextafter(rewards[1], torch.tensor(1.0))
    group_ids = torch.tensor([0, 0, 0, 1])
    for deviations in (
        group_deviations(rewards, group_ids),
        normalized_rewards(rewards, group_ids),
    ):
        assert deviations.tolist() == [0.0] * 4
