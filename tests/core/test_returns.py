"""Credit in time, against sums written from the definitions."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tests.core.ranks import on_ranks
from torch import Tensor

from gruppo.core.returns import gae, overlong_penalty, place_score, returns_to_go, whiten

NAN = float("nan")


def f64(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def where_true(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.bool)


def gae_by_sums(rewards, values, mask, *, gamma, lam, bootstrap=None) -> Tensor:
    """The definition, row by row: list the kept actions, then A_i = sum over j >= i of (gamma
    lam)^(j - i) delta_j."""
    advantages = torch.zeros_like(values)
    for row in range(len(mask)):
        kept = mask[row].nonzero()[:, 0].tolist()
        after = [
            *(values[row, t].item() for t in kept[1:]),
            0.0 if bootstrap is None else bootstrap[row].item(),
        ]
        for i in range(len(kept)):
            for j in range(i, len(kept)):
                delta = rewards[row, kept[j]] + gamma * after[j] - values[row, kept[j]]
                advantages[row, kept[i]] += (gamma * lam) ** (j - i) * delta
    return advantages


@st.composite
def episodes(draw):
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    rewards, values = torch.randn(2, rows, columns, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, columns, generator=generator) < 0.7  # holes anywhere, whole rows too
    bootstrap = draw(
        st.sampled_from([None, torch.randn(rows, generator=generator, dtype=torch.float64)])
    )
    return rewards, values, mask, bootstrap


fractions = st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0])


@pytest.mark.silent_bug(30)
@settings(max_examples=80)
@given(episodes(), fractions, fractions)
def test_gae_equals_the_sums_of_its_definition(episode, gamma, lam):
    rewards, values, mask, bootstrap = episode
    by_sums = gae_by_sums(rewards, values, mask, gamma=gamma, lam=lam, bootstrap=bootstrap)
    filled = (x.masked_fill(~mask, NAN) for x in (rewards, values))
    advantages, returns = gae(*filled, mask, gamma=gamma, lam=lam, bootstrap=bootstrap)
    torch.testing.assert_close(advantages, by_sums, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        returns, torch.where(mask, by_sums + values, 0), rtol=1e-10, atol=1e-12
    )


@pytest.mark.silent_bug(30)
def test_the_exercise_gae_by_hand():
    """Rewards 1, 0, 2 and values 0.5, 1, 1.5, at gamma 0.9 and lambda 0.8; the episode ends with
    the third action.

    delta_3 = 2 + 0.9 * 0   - 1.5 =  0.5       A_3 = 0.5
    delta_2 = 0 + 0.9 * 1.5 - 1   =  0.35      A_2 =  0.35 + 0.72 * 0.5  = 0.71
    delta_1 = 1 + 0.9 * 1   - 0.5 =  1.4       A_1 =  1.4  + 0.72 * 0.71 = 1.9112
    Returns A + V: 2.4112, 1.71, 2.
    """
    rewards, values = f64([1, 0, 2]), f64([0.5, 1, 1.5])
    mask = where_true([1, 1, 1])
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    torch.testing.assert_close(advantages, f64([1.9112, 0.71, 0.5]), rtol=1e-12, atol=0)
    torch.testing.assert_close(returns, f64([2.4112, 1.71, 2.0]), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        gae_by_sums(rewards, values, mask, gamma=0.9, lam=0.8), advantages, rtol=1e-12, atol=0
    )


@pytest.mark.silent_bug(30)
def test_a_row_that_was_cut_goes_on_with_the_bootstrap_and_one_that_ended_does_not():
    """The exercise's row, cut where V would be 10: delta_3 = 2 + 9 - 1.5; A_2 = 0.35 + 6.84; A_1 =
    1.4 + 5.1768."""
    rewards, values = f64([1, 0, 2], [1, 0, 2]), f64([0.5, 1, 1.5], [0.5, 1, 1.5])
    mask, after = where_true([1, 1, 1], [1, 1, 1]), torch.tensor([10.0, 0.0], dtype=torch.float64)
    advantages, _ = gae(rewards, values, mask, gamma=0.9, lam=0.8, bootstrap=after)
    torch.testing.assert_close(
        advantages, f64([6.5768, 7.19, 9.5], [1.9112, 0.71, 0.5]), rtol=1e-12, atol=0
    )


@pytest.mark.silent_bug(30)
def test_a_hole_in_a_row_neither_decays_nor_counts_where_multiplying_by_the_mask_errs():
    """A tool's output between the actions, whose slots hold rewards and values of no meaning."""
    mask = where_true([1, 0, 0, 1, 1])
    rewards, values = f64([1, 7, -7, 0, 2]), f64([0.5, 9, -9, 1, 1.5])
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    torch.testing.assert_close(advantages, f64([1.9112, 0, 0, 0.71, 0.5]), rtol=1e-12, atol=0)
    torch.testing.assert_close(returns, f64([2.4112, 0, 0, 1.71, 2]), rtol=1e-12, atol=0)
    every = torch.ones_like(mask)
    naive, _ = gae(rewards * mask, values * mask, every, gamma=0.9, lam=0.8)
    assert (naive - advantages)[mask].abs().max() > 0.5  # so that this batch tells the two apart


@pytest.mark.silent_bug(30)
@settings(max_examples=30)
@given(episodes(), fractions)
def test_lambda_1_is_the_discounted_return_less_the_value_and_lambda_0_the_temporal_difference(
    episode, gamma
):
    rewards, values, mask, _ = episode
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=1.0)
    to_go = returns_to_go(rewards, mask, gamma=gamma)
    torch.testing.assert_close(returns, to_go, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        advantages, torch.where(mask, to_go - values, 0), rtol=1e-10, atol=1e-12
    )
    one_step, _ = gae(rewards, values, mask, gamma=gamma, lam=0.0)
    torch.testing.assert_close(one_step, gae_by_sums(rewards, values, mask, gamma=gamma, lam=0.0))


def test_float32_values_have_float32_advantages_computed_in_float64():
    """A thousand rewards of 0.1, whose float32 sum is 99.999."""
    rewards, mask = torch.full((1, 1000), 0.1), torch.ones(1, 1000, dtype=torch.bool)
    to_go = returns_to_go(rewards, mask)
    assert to_go.dtype == torch.float32 and to_go[0, 0].item() == pytest.approx(100, rel=1e-7)
    advantages, _ = gae(rewards, torch.zeros_like(rewards), mask, gamma=1.0, lam=1.0)
    assert torch.equal(advantages, to_go)


# --- returns to go, and where a score goes --------------------------------------------------------


def test_returns_to_go_by_hand():
    """gamma 0.5 over kept rewards 1, 2, 4: 1 + 0.5 (2 + 0.5 * 4) = 3, 4, 4; the hole neither decays
    nor counts."""
    got = returns_to_go(f64([1, NAN, 2, 4, NAN]), where_true([1, 0, 1, 1, 0]), gamma=0.5)
    assert got.tolist() == [[3, 0, 4, 4, 0]]


@pytest.mark.silent_bug(30)
def test_a_score_is_the_reward_of_the_last_kept_action_and_of_no_other():
    mask = where_true([1, 1, 0, 0], [0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0])
    placed = place_score(torch.tensor([1.0, 2.0, 3.0, 4.0]), mask)
    assert placed.tolist() == [[0, 1, 0, 0], [0, 0, 0, 2], [3, 0, 0, 0], [0, 0, 0, 0]]


@pytest.mark.silent_bug(22)
def test_a_score_that_is_no_number_is_placed_nowhere():
    mask = where_true([1, 1], [1, 1], [1, 1])
    placed = place_score(torch.tensor([NAN, float("inf"), 2.0], dtype=torch.float64), mask)
    assert placed.tolist() == [[0, 0], [0, 0], [0, 2]] and placed.dtype == torch.float64


# --- whitening ------------------------------------------------------------------------------------


@pytest.mark.silent_bug(31)
def test_whitening_by_hand():
    """1, 3 and 8 have mean 4 and variance (9 + 1 + 16) / 2 = 13, with ddof 1."""
    got = whiten(f64([1, NAN, 3], [8, NAN, NAN]), where_true([1, 0, 1], [1, 0, 0]), eps=0.0)
    torch.testing.assert_close(got, f64([-3, 0, -1], [4, 0, 0]) / 13**0.5, rtol=1e-12, atol=0)


@pytest.mark.silent_bug(31)
@settings(max_examples=40)
@given(episodes())
def test_whitened_advantages_have_mean_0_and_variance_1_over_the_kept(episode):
    x, _, loss_mask, _ = episode
    got = whiten(x * 5 + 3, loss_mask, eps=0.0)
    assert not got[~loss_mask].any()
    if loss_mask.sum() > 1:
        assert got[loss_mask].mean().item() == pytest.approx(0, abs=1e-12)
        assert got[loss_mask].var().item() == pytest.approx(1, rel=1e-9)
    else:
        assert not got.any()


@pytest.mark.silent_bug(31)
@pytest.mark.silent_bug(12)
def test_two_ranks_whiten_as_one():
    """Three kept actions here, one there."""
    x, loss_mask = f64([1, 5, 2, 10]), where_true([1, 1, 1, 1])
    together = on_ranks(
        lambda all_sum, all_gather: whiten(x[:, :3], loss_mask[:, :3], all_sum=all_sum),
        lambda all_sum, all_gather: whiten(x[:, 3:], loss_mask[:, 3:], all_sum=all_sum),
    )
    torch.testing.assert_close(torch.cat(together, dim=1), whiten(x, loss_mask), rtol=1e-12, atol=0)
    assert not torch.allclose(
        whiten(x[:, :3], loss_mask[:, :3]), together[0]
    )  # alone it would be another number


@pytest.mark.silent_bug(31)
@pytest.mark.parametrize("value", [0.0, 0.35, -7.3, 1e6])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 8])
def test_equal_advantages_are_whitened_to_exactly_zero(value, count):
    loss_mask = torch.arange(9)[None] < count
    assert not whiten(torch.full((1, 9), value), loss_mask).any()
    near = torch.nextafter(torch.tensor(value), torch.tensor(1e9)).expand(1, 9)
    mixed = torch.where(torch.arange(9)[None] % 2 == 0, torch.full((1, 9), value), near)
    if value:  # the smallest number beside 0 is no rounding of it
        assert not whiten(mixed, loss_mask).any()


def test_a_small_spread_among_many_actions_is_whitened_and_not_taken_for_rounding():
    """1 +- 1e-3: the spread is 2,000 times the rounding of float32, however many actions there
    are."""
    x = torch.tensor([[1 - 1e-3, 1 + 1e-3]]).repeat(200, 1)
    white = whiten(x, torch.ones_like(x, dtype=torch.bool))
    assert white.abs().min() > 0.99 and torch.equal(white.sign(), (x - 1).sign())


def test_whitening_hides_no_number_that_is_not_finite():
    """A batch turned to zeros would be an update without a word; NaN is skipped and counted."""
    loss_mask = torch.ones(2, 3, dtype=torch.bool)
    assert whiten(torch.tensor([[torch.nan, 1.0, 2.0], [3.0, 4.0, 5.0]]), loss_mask).isnan().all()


@pytest.mark.silent_bug(15)
def test_the_overlong_penalty_by_hand():
    """Longest 20, cache 5: nothing up to 15, then a fifth more for each action, to -1 at 20 and
    beyond."""
    lengths = torch.tensor([0, 14, 15, 16, 18, 20, 25])
    got = overlong_penalty(lengths, max_length=20, cache=5)
    torch.testing.assert_close(got, torch.tensor([0, 0, 0, -0.2, -0.6, -1, -1]))
    assert not torch.signbit(got[:3]).any() or got[:3].tolist() == [0, 0, 0]
