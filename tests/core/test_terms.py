"""KL and value terms of the loss: which ratio multiplies them, whom they pull, and what is reported
of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.core.four_rows import KEEP, LOGPROBS, MAX_LENGTH, OLD, REF, loss_of

from gruppo.core.loss import LossInputs, policy_loss
from gruppo.core.objective import GSPO, PRESETS, Objective
from gruppo.core.weights import loss_total, loss_weights
from gruppo.types import Gaussian, Likelihood

DELTA = torch.where(KEEP, REF - LOGPROBS, 0)
K3 = DELTA.exp() - DELTA - 1
TOKEN_RATIO = torch.where(KEEP, LOGPROBS - OLD, 0).exp()


@pytest.mark.silent_bug(17)
def test_the_kl_is_weighed_by_the_tokens_ratio_also_where_the_surrogate_takes_the_sequences():
    terms, _ = loss_of(GSPO, ref=REF)
    total = loss_total(KEEP, average=GSPO.average, max_length=MAX_LENGTH)
    weights = loss_weights(KEEP, average=GSPO.average, total=total)
    by_hand = (weights * TOKEN_RATIO * K3).sum()
    row_ratio = (TOKEN_RATIO.log().sum(1, keepdim=True) / KEEP.sum(1, keepdim=True)).exp()
    assert abs(float((weights * row_ratio * K3).sum() - by_hand)) > 1e-3, (
        "the two differ, so the test can see it"
    )
    assert terms["kl"].item() == pytest.approx(float(by_hand), rel=1e-10)


@pytest.mark.silent_bug(18)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_pulls_the_policy_and_never_the_reference(estimator):
    logprobs, ref = LOGPROBS.clone().requires_grad_(), REF.clone().requires_grad_()
    weights = KEEP.double() / KEEP.sum()
    inputs = LossInputs(torch.zeros_like(LOGPROBS), KEEP, weights, OLD, Likelihood(ref))
    terms, _ = policy_loss(Likelihood(logprobs), inputs, replace(PRESETS["grpo"], kl=estimator))
    ours, theirs = torch.autograd.grad(terms["kl"], [logprobs, ref], allow_unused=True)
    assert theirs is None and ours is not None and ours[KEEP].abs().max() > 1e-3


@pytest.mark.silent_bug(41)
def test_the_reported_kl_is_the_plain_estimate_also_off_policy():
    _, stats = loss_of(PRESETS["grpo"], ref=REF)
    assert abs(float((TOKEN_RATIO * K3)[KEEP].mean() - K3[KEEP].mean())) > 1e-3
    assert stats["kl/ref_nats"].mean == pytest.approx(float(K3[KEEP].mean()), rel=1e-10)


@pytest.mark.silent_bug(41)
def test_values_that_moved_out_of_their_clip_are_counted_over_the_kept_alone():
    """Of three kept values one has moved by more than 0.5; what fills the padding has, too."""
    loss_mask = torch.tensor([[True, True, False], [True, False, False]])
    old = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]).double()
    values = torch.tensor([[1.2, 1.9, 9.0], [1.0, 9.0, 9.0]]).double()
    inputs = LossInputs(old, loss_mask, loss_mask.double(), old_values=old, returns=old)
    _, stats = policy_loss(
        Likelihood(old, values=values), inputs, replace(PRESETS["ppo"], value_clip=0.5)
    )
    assert (stats["value/clip_frac"].count, stats["value/clip_frac"].sum) == (3, 1)


@pytest.mark.silent_bug(5)
def test_the_exact_kl_takes_neither_value_nor_gradient_from_masked_slots():
    loss_mask = torch.tensor([[True, False]])
    mean = torch.tensor(
        [[[1.0, 2.0], [torch.nan, torch.inf]]], dtype=torch.float64, requires_grad=True
    )
    std = torch.tensor([[2.0, 0.0]], dtype=torch.float64, requires_grad=True)
    zeros = torch.zeros(1, 2, dtype=torch.float64)
    reference = Likelihood(
        zeros, gaussian=Gaussian(torch.zeros(1, 2, 2).double(), torch.ones(1, 2).double())
    )
    inputs = LossInputs(
        advantages=zeros, loss_mask=loss_mask, weights=loss_mask.double(), ref=reference
    )
    terms, _ = policy_loss(
        Likelihood(zeros, gaussian=Gaussian(mean, std)), inputs, Objective(kl="exact")
    )
    by_hand = (
        2 * (-math.log(2) - 0.5) + (2 * 4 + 1 + 4) / 2
    )  # two dimensions of mean 1 and 2, std 2, to a unit normal
    torch.testing.assert_close(terms["kl"].item(), by_hand)
    of_mean, of_std = torch.autograd.grad(terms["kl"], (mean, std))
    assert of_mean.tolist() == [[[1.0, 2.0], [0.0, 0.0]]] and of_std.tolist() == [
        [3.0, 0.0]
    ]  # 2 (s - 1 / s)
