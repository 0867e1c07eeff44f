"""Rewards to advantages, by hand and by invariance."""

from __future__ import annotations

from itertools import product
from typing import get_args

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from gruppo.core.advantages import Baseline, Scale, group_advantages
from gruppo.core.objective import PRESETS

BASELINES_OF_REWARDS = [name for name in get_args(Baseline) if name != "critic"]
KINDS = list(product(BASELINES_OF_REWARDS, get_args(Scale)))
every_kind = pytest.mark.parametrize(("baseline", "scale"), KINDS)
NAN, INF = float("nan"), float("inf")


def advantages_of(
    rewards, groups, *, baseline="mean", scale="none", eps=0.0, dtype=torch.float64
) -> Tensor:
    """One number a row: [B]."""
    rewards = torch.as_tensor(rewards, dtype=dtype)
    mask = torch.ones(len(rewards), 1, dtype=torch.bool)
    ids = torch.tensor(groups)
    prompt_ids = [f"prompt {n}" for n in range(int(ids.max()) + 1)]
    advantages, _ = group_advantages(
        rewards, ids, mask, baseline=baseline, scale=scale, eps=eps, prompt_ids=prompt_ids
    )
    return advantages[:, 0].double()


def assert_close(got: Tensor, by_hand: list[float]) -> None:
    torch.testing.assert_close(
        got, torch.tensor(by_hand, dtype=torch.float64), rtol=1e-6, atol=1e-9
    )


# --- by hand --------------------------------------------------------------------------------------


def test_baselines_by_hand():
    rewards, groups = [1, 2, 6, 10, 20], [0, 0, 0, 1, 1]
    assert_close(advantages_of(rewards, groups, baseline="none"), [1, 2, 6, 10, 20])
    assert_close(advantages_of(rewards, groups, baseline="mean"), [-2, -1, 3, -5, 5])
    assert_close(advantages_of(rewards, groups, baseline="leave_one_out"), [-3, -1.5, 4.5, -10, 10])
    assert_close(
        advantages_of(rewards, groups, baseline="batch_mean"), [-6.8, -5.8, -1.8, 2.2, 12.2]
    )


@pytest.mark.silent_bug(21)
def test_two_groups_of_different_scale_by_hand():
    """Rewards 1, 3 and 10, 30: stds (ddof 1) are sqrt(2) and sqrt(200) within groups, sqrt(526 / 3)
    of the batch."""
    rewards, groups = [1, 3, 10, 30], [0, 0, 1, 1]
    half, batch = 0.5**0.5, (526 / 3) ** 0.5
    assert_close(advantages_of(rewards, groups, scale="group"), [-half, half, -half, half])
    assert_close(
        advantages_of(rewards, groups, scale="batch"),
        [-1 / batch, 1 / batch, -10 / batch, 10 / batch],
    )
    assert_close(
        advantages_of(rewards, groups, baseline="batch_mean", scale="batch"),
        [-10 / batch, -8 / batch, -1 / batch, 19 / batch],
    )


@pytest.mark.silent_bug(21)
def test_eps_is_added_to_the_spread_not_to_the_variance():
    assert_close(
        advantages_of([0, 2], [0, 0], scale="group", eps=0.5),
        [-1 / (2**0.5 + 0.5), 1 / (2**0.5 + 0.5)],
    )


@settings(max_examples=30)
@given(st.lists(st.integers(-50, 50), min_size=2, max_size=8))
def test_rloo_is_group_mean_times_g_over_g_minus_1(rewards):
    size, groups = len(rewards), [0] * len(rewards)
    by_mean = advantages_of(rewards, groups) * size / (size - 1)
    torch.testing.assert_close(
        advantages_of(rewards, groups, baseline="leave_one_out"), by_mean, rtol=1e-6, atol=1e-6
    )


def test_one_advantage_a_row_spread_over_its_actions_alone():
    mask = torch.tensor([[True, True, False], [True, False, True]])
    rewards, group_ids = torch.tensor([1.0, 3.0]), torch.tensor([0, 0])
    advantages, state = group_advantages(
        rewards, group_ids, mask, baseline="mean", scale="none", state={"carried": 7}
    )
    assert advantages.tolist() == [[-1, -1, 0], [1, 0, 1]]
    assert advantages.dtype == torch.float32
    assert state == {"carried": 7}


# --- nothing to compare ---------------------------------------------------------------------------


@pytest.mark.silent_bug(20)
@every_kind
def test_constant_rewards_have_advantages_of_exactly_zero(baseline, scale):
    for reward, eps, rows in product([0.0, 1.0, 0.35, -7.3, 1e-6, 1e6], [0.0, 1e-4], [7, 8]):
        rewards, groups = [reward] * rows, [0] * rows
        got = advantages_of(
            rewards, groups, baseline=baseline, scale=scale, eps=eps, dtype=torch.float32
        )
        if (baseline, scale) == ("none", "none"):
            assert (
                got.tolist() == torch.tensor(rewards).tolist()
            )  # nothing to subtract: the reward itself
        else:
            assert got.tolist() == [0] * rows, (reward, eps, rows)


@pytest.mark.silent_bug(20)
@pytest.mark.parametrize(
    "preset", [name for name in PRESETS if name != "ppo"]
)  # a critic's are not of rewards alone
@pytest.mark.parametrize("other", [0.35, 0.36])
def test_constant_rewards_are_silent_under_every_preset_and_the_batch_mean_only_over_all_ranks(
    preset, other
):
    """Three rows of 0.35 here and four on another rank: their mean is 0.35 and a rounding error, or
    above it."""
    objective, there = PRESETS[preset], torch.full((4,), other).double()
    mean = (3 * torch.tensor(0.35).double() + there.sum()) / 7

    def all_sum(mine: Tensor) -> Tensor:
        return mine + torch.stack([there.sum(), torch.tensor(4.0)])

    rewards, mask = torch.full((3,), 0.35), torch.ones(3, 1, dtype=torch.bool)
    kinds = {"baseline": objective.baseline, "scale": objective.scale}
    got, _ = group_advantages(
        rewards, torch.zeros(3, dtype=torch.long), mask, **kinds, all_sum=all_sum
    )
    by_hand = (
        (torch.tensor(0.35).double() - mean).item()
        if objective.baseline == "batch_mean" and other == 0.36
        else 0.0
    )
    assert_close(got[:, 0].double(), [by_hand] * 3)
    assert by_hand or got.count_nonzero() == 0


@pytest.mark.silent_bug(20)
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "batch_mean"])
@pytest.mark.parametrize("scale", get_args(Scale))
def test_rounding_residue_is_no_spread(baseline, scale):
    """0.1 + 0.2 and 0.3 are one reward, and so are 0.35 and its neighbour in float32."""
    near = torch.nextafter(torch.tensor(0.35), torch.tensor(1.0))
    rewards = torch.stack([torch.tensor(0.35), near] * 4)
    assert rewards[0] != rewards[1]
    got = advantages_of(rewards, [0] * 8, baseline=baseline, scale=scale, dtype=torch.float32)
    assert got.tolist() == [0] * 8
    got = advantages_of([0.1 + 0.2, 0.3], [0, 0], baseline=baseline, scale=scale)
    assert got.tolist() == [0, 0]


@pytest.mark.silent_bug(20)
def test_a_small_true_spread_is_no_residue():
    assert (
        advantages_of([1.0, 1.0001], [0, 0], scale="group", dtype=torch.float32).abs().min() > 0.7
    )


@pytest.mark.silent_bug(20)
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", get_args(Scale))
def test_a_group_of_one_has_advantage_zero_and_leaves_the_others_alone(baseline, scale):
    alone = advantages_of([5, 1, 3], [1, 0, 0], baseline=baseline, scale=scale)
    assert alone[0] == 0
    if scale != "batch":
        assert torch.equal(alone[1:], advantages_of([1, 3], [0, 0], baseline=baseline, scale=scale))


# --- rewards that are no numbers ------------------------------------------------------------------


@pytest.mark.silent_bug(22)
@every_kind
@pytest.mark.parametrize("broken", [NAN, INF, -INF])
def test_rewards_that_are_not_finite_enter_no_statistic_and_get_zero(baseline, scale, broken):
    kinds = {"baseline": baseline, "scale": scale, "eps": 1e-4}
    whole = advantages_of([broken, 1, 4, 2, broken, 7, 3], [0, 0, 0, 1, 1, 1, 1], **kinds)
    assert whole[[0, 4]].tolist() == [0, 0]
    without = advantages_of([1, 4, 2, 7, 3], [0, 0, 1, 1, 1], **kinds)
    assert torch.equal(whole[[1, 2, 3, 5, 6]], without)


@pytest.mark.silent_bug(22)
@every_kind
def test_nothing_scored_gives_zeros(baseline, scale):
    assert (
        advantages_of([NAN, INF, -INF, NAN], [0, 0, 1, 1], baseline=baseline, scale=scale).tolist()
        == [0] * 4
    )


# --- invariances ----------------------------------------------------------------------------------


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "batch_mean"])
@settings(max_examples=15)
@given(shift=st.integers(-20, 20), stretch=st.sampled_from([0.5, 2.0, 8.0]))
def test_a_shift_of_all_rewards_changes_nothing_and_a_stretch_only_what_has_no_scale(
    baseline, shift, stretch
):
    rewards, groups = torch.tensor([1.0, 2.0, 4.0, -3.0, 0.5]).double(), [0, 0, 0, 1, 1]
    moved = rewards * stretch + shift
    for scale, factor in (("none", stretch), ("group", 1.0), ("batch", 1.0)):
        before = advantages_of(rewards, groups, baseline=baseline, scale=scale)
        if (baseline, scale) == ("batch_mean", "group"):
            continue  # two different units
        after = advantages_of(moved, groups, baseline=baseline, scale=scale)
        torch.testing.assert_close(after, before * factor, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_groups_do_not_see_each_other(baseline):
    first = advantages_of([1, 2, 5, 9], [0, 0, 1, 1], baseline=baseline, scale="group")
    other = advantages_of([1, 2, 500, -9], [0, 0, 1, 1], baseline=baseline, scale="group")
    assert torch.equal(first[:2], other[:2])
    assert first[:2].abs().min() > 0
