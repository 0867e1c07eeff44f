"""The sum of normalized rewards (GDPO), by hand."""

from __future__ import annotations

import pytest
import torch
from tests.core.ranks import on_ranks
from torch import Tensor

from gruppo.core.advantages import group_advantages, normalized_sum

NAN = float("nan")


EVERY = torch.ones(4, dtype=torch.bool)


def f64(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def assert_close(got: Tensor, by_hand: Tensor) -> None:
    torch.testing.assert_close(got.double(), by_hand.double(), rtol=1e-6, atol=1e-7)


def test_the_sum_of_normalised_rewards_by_hand():
    """2 (1, -1, 1, -1) + (1, 1, -1, -1) = 3, -1, 1, -3, whose variance is 20 / 3 with ddof 1."""
    got = normalized_sum([f64(1, -1, 1, -1), f64(1, 1, -1, -1)], [2.0, 1.0], EVERY, eps=0.0)
    assert_close(got, f64(3, -1, 1, -3) / (20 / 3) ** 0.5)


@pytest.mark.silent_bug(20)
@pytest.mark.parametrize("value", [0.0, 0.35, 1e5])
@pytest.mark.parametrize("eps", [0.0, 1e-4])
def test_equal_sums_have_advantages_of_exactly_zero(value, eps):
    part = torch.full((7,), value)
    scored = torch.ones(7, dtype=torch.bool)
    assert not normalized_sum([part, part], [0.3, 0.7], scored, eps=eps).any()
    assert not normalized_sum([part], [1.0], ~scored, eps=eps).any()


@pytest.mark.silent_bug(12)
def test_a_small_spread_among_many_rows_is_normalised_and_not_taken_for_rounding():
    """Sums of 1 +- 1e-4, 200 times the rounding of float32, in rows enough that a total would hide
    them."""
    total = f64(1 - 1e-4, 1 + 1e-4).repeat(200)
    got = normalized_sum([total], [1.0], torch.ones(400, dtype=torch.bool), eps=0.0)
    assert got.abs().min() > 0.99 and torch.equal(got.sign().double(), (total - 1).sign())


def test_two_ranks_normalise_the_sum_as_one():
    parts, weights = [f64(1, 5, 2, 9), f64(0, 1, 1, 0)], [0.5, 2.0]
    together = on_ranks(
        lambda all_sum, all_gather: normalized_sum(
            [p[:1] for p in parts], weights, EVERY[:1], all_sum=all_sum
        ),
        lambda all_sum, all_gather: normalized_sum(
            [p[1:] for p in parts], weights, EVERY[1:], all_sum=all_sum
        ),
    )
    assert_close(torch.cat(together), normalized_sum(parts, weights, EVERY))


# --- two rewards, such as PSNR / 40 and SSIM ------------------------------------------------------

PSNR, SSIM = f64(20, 30, 24, 28), f64(0.90, 0.84, 0.88, 0.96)


def row_advantages(rewards: Tensor, eps: float = 0.0) -> Tensor:
    mask, ids = torch.ones(4, 1, dtype=torch.bool), torch.tensor([0, 0, 1, 1])
    return group_advantages(rewards, ids, mask, baseline="mean", scale="group", eps=eps)[0][:, 0]


def test_normalised_before_the_sum_no_unit_of_a_reward_decides_what_it_weighs():
    def combined(psnr_unit: float, ssim_unit: float) -> Tensor:
        parts = [row_advantages(PSNR * psnr_unit), row_advantages(SSIM * ssim_unit)]
        return normalized_sum(parts, [0.5, 0.25], EVERY, eps=0.0)

    for units in ((1 / 40, 1.0), (100.0, 1.0), (1.0, 1000.0)):
        assert_close(combined(*units), combined(1.0, 1.0))


def test_normalised_after_the_sum_the_reward_with_the_larger_spread_weighs_more():
    """Group 0 has PSNR up and SSIM down: the two cancel or not by their units alone."""
    assert row_advantages(PSNR + SSIM)[1] > 0.7 and row_advantages(PSNR / 1000 + SSIM)[1] < -0.7
    before = normalized_sum(
        [row_advantages(PSNR), row_advantages(SSIM)], [1.0, 1.0], EVERY, eps=0.0
    )
    assert_close(before[:2], f64(0, 0))  # here they cancel, as two rewards of one weight should
