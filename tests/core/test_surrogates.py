"""Surrogates per action, by hand."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from gruppo.core.surrogates import (
    cispo_surrogate,
    clip_surrogate,
    log_ratio,
    reinforce_surrogate,
    sapo_surrogate,
    value_loss,
    vespo_surrogate,
)
from gruppo.core.weights import loss_weights

NAN = float("nan")


def row(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def test_clip_by_hand_in_value_and_gradient():
    """Ratios inside, above and below [0.8, 1.3] for advantages of both signs. The gradient is -r A
    where unclipped."""
    ratio = row(1.1, 1.5, 0.5, 1.1, 1.5, 0.5)
    advantages = row(2, 2, 2, -2, -2, -2)
    leaf = ratio.log().requires_grad_()
    loss = clip_surrogate(leaf, advantages, low=0.2, high=0.3)
    torch.testing.assert_close(loss, row(-2.2, -2.6, -1.0, 2.2, 3.0, 1.6))
    torch.testing.assert_close(
        torch.autograd.grad(loss.sum(), leaf)[0], row(-2.2, 0, -1.0, 2.2, 3.0, 0)
    )


def test_reinforce_by_hand():
    logprobs = row(-1.0, -2.0, NAN).requires_grad_()
    loss = reinforce_surrogate(logprobs, row(3, -0.5, 1), torch.tensor([[True, True, False]]))
    torch.testing.assert_close(loss, row(3.0, -1.0, 0.0))
    assert torch.autograd.grad(loss.sum(), logprobs)[0].tolist() == [[-3, 0.5, 0]]


@pytest.mark.silent_bug(5)
@pytest.mark.parametrize("filling", [NAN, 1e6, -1e6, float("inf"), -float("inf")])
def test_log_ratio_is_zero_with_zero_gradient_where_not_kept(filling):
    logprobs, old = row(-1.0, filling, -3.0).requires_grad_(), row(-2.0, 5.0, filling)
    ratio = log_ratio(logprobs, old, torch.tensor([[True, False, False]]))
    assert ratio.tolist() == [[1, 0, 0]]
    assert torch.autograd.grad(ratio.exp().sum(), logprobs)[0].tolist() == [
        [pytest.approx(torch.e), 0, 0]
    ]


# --- the levels of a ratio ------------------------------------------------------------------------

HOLES = torch.tensor([[True, False, True, True], [False, True, False, False]])


@pytest.mark.silent_bug(1)
def test_the_sequence_ratio_by_hand_is_the_geometric_mean_of_the_kept():
    """Ratios 2, (9), 4, 1 of the first row: the cube root of 8. The second row has one action,
    3."""
    ratio = torch.tensor([[2, 9, 4, 1], [9, 3, NAN, 9]], dtype=torch.float64)
    old = torch.full_like(ratio, -1.0)
    got = log_ratio(old + ratio.log(), old, HOLES, level="sequence").exp()
    torch.testing.assert_close(got, torch.tensor([[2, 1, 2, 2], [1, 3, 1, 1]], dtype=torch.float64))


@pytest.mark.silent_bug(1)
def test_the_token_form_of_the_sequence_ratio_has_its_value_and_the_gradient_of_each_tokens_own():
    logprobs, old = row(-1.0, -2.0, -3.0).requires_grad_(), row(-1.5, -2.2, -3.2)
    loss_mask, weight = torch.ones(1, 3, dtype=torch.bool), row(1.0, 10.0, 100.0)
    whole = log_ratio(logprobs, old, loss_mask, level="sequence")
    token = log_ratio(logprobs, old, loss_mask, level="sequence_token")
    torch.testing.assert_close(whole, row(0.3, 0.3, 0.3))
    torch.testing.assert_close(token, whole)
    torch.testing.assert_close(
        torch.autograd.grad((weight * whole).sum(), logprobs)[0], row(37, 37, 37)
    )
    torch.testing.assert_close(torch.autograd.grad((weight * token).sum(), logprobs)[0], weight)


@pytest.mark.silent_bug(1)
def test_both_forms_of_the_sequence_ratio_have_one_gradient_where_a_row_has_one_advantage():
    """Under the sequence average, clipped or not: equation 14 of GSPO reduces to 7."""
    logprobs = (
        torch.tensor([[-1.0, -2.0, -0.5, -1.0], [-1.0, -2.0, -0.5, -1.0]]).double().requires_grad_()
    )
    old = logprobs.detach() - torch.tensor([[0.3, 9.0, -0.1, 0.2], [9.0, 0.5, 9.0, 9.0]])
    advantages = torch.tensor([[2.0], [-1.0]], dtype=torch.float64).expand(2, 4)
    weights = loss_weights(HOLES, average="sequence", total=2)

    def slope(level: str) -> Tensor:
        loss = clip_surrogate(
            log_ratio(logprobs, old, HOLES, level=level), advantages, low=0.2, high=0.3
        )
        return torch.autograd.grad((weights * loss).sum(), logprobs)[0]

    torch.testing.assert_close(slope("sequence_token"), slope("sequence"), rtol=1e-12, atol=1e-15)
    assert slope("sequence")[HOLES].all()


@pytest.mark.silent_bug(37)
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
def test_dims_divides_the_log_ratio_of_a_continuous_action(level):
    loss_mask = torch.ones(1, 2, dtype=torch.bool)
    joint = log_ratio(row(3.0, 5.0), row(1.0, 1.0), loss_mask, level=level)
    torch.testing.assert_close(
        log_ratio(row(3.0, 5.0), row(1.0, 1.0), loss_mask, level=level, dims=4), joint / 4
    )


# --- the other surrogates -------------------------------------------------------------------------


@pytest.mark.silent_bug(1)
def test_dual_clip_by_hand_bounds_the_loss_of_negative_advantages_alone():
    """Ratios 5, 2 and 0.5 at A = -2 and A = 2, clip 0.2, dual 3: -min gives 10, 4, 1.6, of which 10
    becomes 6."""
    leaf = row(5, 2, 0.5, 5, 2, 0.5).log().requires_grad_()
    advantages = row(-2, -2, -2, 2, 2, 2)
    loss = clip_surrogate(leaf, advantages, low=0.2, high=0.2, dual=3.0)
    torch.testing.assert_close(loss, row(6, 4, 1.6, -2.4, -2.4, -1))
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), leaf)[0], row(0, 4, 0, 0, 0, -1))


@pytest.mark.silent_bug(1)
def test_cispo_by_hand_has_a_bounded_weight_and_no_gradient_through_it():
    """Ratios 8, 2 and 0.1 kept in [0.5, 5], log-probs -1, -2, -3: every action keeps a gradient,
    clipped or not."""
    logprobs = row(-1, -2, -3).requires_grad_()
    loss_mask, advantages = torch.ones(1, 3, dtype=torch.bool), row(1, -1, 2)
    ratio = log_ratio(logprobs, logprobs.detach() - row(8, 2, 0.1).log(), loss_mask)
    loss = cispo_surrogate(ratio, logprobs, advantages, loss_mask, low=0.5, high=4.0)
    torch.testing.assert_close(loss, row(5, -4, 3))
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), logprobs)[0], row(-5, 2, -1))


@pytest.mark.silent_bug(1)
def test_sapo_by_hand_with_a_slope_of_the_advantage_at_ratio_one():
    """-4 / tau sigmoid(tau (r - 1)) A; its slope at r = 1 is -4 / tau (1 / 4) tau A = -A, whatever
    tau."""
    leaf = row(0.0, 0.0, math.log(3)).requires_grad_()
    advantages = row(2, -2, -1)
    loss = sapo_surrogate(leaf, advantages, tau_pos=0.5, tau_neg=2.0)
    torch.testing.assert_close(
        loss, row(-4 / 0.5 / 2 * 2, 4 / 2 / 2 * 2, 4 / 2 / (1 + math.exp(-4)))
    )
    gate = 1 / (1 + math.exp(-4))
    slope = torch.autograd.grad(loss.sum(), leaf)[0]
    torch.testing.assert_close(slope, row(-2, 2, 4 * gate * (1 - gate) * 3))  # d/dr times r


@pytest.mark.silent_bug(1)
def test_vespo_by_hand():
    """w = 2 * 1.5 = 3, not counting the hole. phi: 3^2 e^(3 (1 - 3)) for A >= 0, and 3^3 e^(2 (1 -
    3)) elsewhere."""
    logprobs = row(-1, 7, -2).requires_grad_()
    loss_mask = torch.tensor([[True, False, True]])
    token = log_ratio(logprobs, logprobs.detach() - row(2, 9, 1.5).log(), loss_mask)
    loss = vespo_surrogate(token, logprobs, row(1, 1, -1), loss_mask)
    up, down = 9 * math.exp(-6), 27 * math.exp(-4)
    torch.testing.assert_close(loss, row(up, 0, -2 * down))
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), logprobs)[0], row(-up, 0, down))


def test_vespos_weight_is_one_where_the_policy_drew_the_row_and_finite_where_it_would_not_have():
    logprobs, loss_mask = row(-1, -2), torch.ones(1, 2, dtype=torch.bool)
    for advantages in (row(3, 3), row(-3, -3)):
        on_policy = vespo_surrogate(row(0, 0), logprobs, advantages, loss_mask)
        assert torch.equal(on_policy, reinforce_surrogate(logprobs, advantages, loss_mask))
        for far in (1e4, -1e4):
            assert vespo_surrogate(row(far, far), logprobs, advantages, loss_mask).isfinite().all()


# --- the critic's ---------------------------------------------------------------------------------


@pytest.mark.silent_bug(32)
def test_value_loss_by_hand_takes_the_larger_error_of_the_value_and_its_clip_about_the_stored_one():
    """Stored 1, clip 0.5, so V is kept in [0.5, 1.5].  R 2: V 3 -> max(1, 0.25); V 1.2 -> 0.64
    both; V 1.8 -> max(0.04, 0.25), where the clip is the larger and stops the gradient; V 0 ->
    max(4, 2.25)."""
    values, old, returns = row(3, 1.2, 1.8, 0).requires_grad_(), row(1, 1, 1, 1), row(2, 2, 2, 2)
    loss = value_loss(values, old, returns, torch.ones(1, 4, dtype=torch.bool), clip=0.5)
    torch.testing.assert_close(loss, row(0.5, 0.32, 0.125, 2))
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), values)[0], row(1, -0.8, 0, -2))


@pytest.mark.silent_bug(32)
@pytest.mark.parametrize(("old", "clip"), [(row(1, 1), 0.0), (None, 0.5)])
def test_value_loss_without_a_clip_or_stored_values_is_half_the_squared_error(old, clip):
    values = row(3, 0.5).requires_grad_()
    loss = value_loss(values, old, row(1, 1), torch.ones(1, 2, dtype=torch.bool), clip=clip)
    assert loss.tolist() == [[2, 0.125]]
    assert torch.autograd.grad(loss.sum(), values)[0].tolist() == [[2, -0.5]]


@pytest.mark.silent_bug(5)
@pytest.mark.parametrize("filling", [NAN, 1e6, float("inf")])
def test_no_surrogate_and_no_value_loss_reads_what_is_not_kept(filling):
    loss_mask = torch.tensor([[True, False]])
    logprobs, advantages = row(-1.0, filling).requires_grad_(), row(2.0, 0.0)
    ratio = log_ratio(logprobs, row(-1.5, filling), loss_mask)
    losses = [
        cispo_surrogate(ratio, logprobs, advantages, loss_mask, low=0.2, high=0.2),
        vespo_surrogate(ratio, logprobs, advantages, loss_mask),
        reinforce_surrogate(logprobs, advantages, loss_mask),
        sapo_surrogate(ratio, advantages),
        clip_surrogate(ratio, advantages, low=0.2, high=0.2),
        value_loss(logprobs, row(0.0, filling), row(0.0, filling), loss_mask, clip=0.1),
    ]
    for loss in losses:
        slope = torch.autograd.grad(loss.sum(), logprobs, retain_graph=True)[0]
        assert loss.isfinite().all() and slope.isfinite().all() and slope[0, 1] == 0


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize(
    "surrogate", [partial(clip_surrogate, low=0.2, high=0.2, dual=3.0), sapo_surrogate]
)
def test_a_ratio_past_the_largest_number_has_a_finite_gradient(surrogate, advantage):
    """exp(100) is inf in float32, and its gradient NaN where the minimum chose the other side."""
    rho = torch.tensor([[100.0]], requires_grad=True)
    loss = surrogate(rho, torch.tensor([[advantage]]))
    assert loss.isfinite() and torch.autograd.grad(loss.sum(), rho)[0].tolist() == [[0.0]]
