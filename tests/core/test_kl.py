"""Estimators of the KL, by hand and against enumeration."""

from __future__ import annotations

import math

import pytest
import torch
from tests.core.enumeration import (
    LOGITS,
    OTHER,
    SEQUENCES,
    gradient,
    probabilities,
    terms_of,
)
from torch import Tensor

from gruppo.core.kl import gaussian_kl, kl_penalty
from gruppo.core.objective import Objective

ESTIMATORS = ("k1", "k2", "k3")
ONE = torch.ones(1, 1, dtype=torch.bool)
POLICY = torch.tensor([0.4, -0.3, 0.9, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([-0.2, 0.6, 0.3, 0.0], dtype=torch.float64)
SAMPLER = torch.tensor([0.1, 0.1, 0.5, -0.6], dtype=torch.float64)


@pytest.mark.silent_bug(17)
@pytest.mark.parametrize(
    ("estimator", "nats"),
    [("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", 0.5 - 1 + math.log(2))],
)
def test_estimators_by_hand_at_half_against_a_quarter(estimator, nats):
    policy, reference = torch.tensor([[0.5]]).double().log(), torch.tensor([[0.25]]).double().log()
    value = kl_penalty(policy, reference, torch.zeros_like(policy), ONE, estimator=estimator)
    assert value.item() == pytest.approx(nats, rel=1e-12)


def expected(compute_module: Tensor, estimator: str, choice: str) -> tuple[Tensor, Tensor]:
    """The estimate and its gradient in the policy's logits, over the four outcomes that the sampler
    draws from."""

    def estimate(logits: Tensor) -> Tensor:
        logprobs, old = logits.log_softmax(0)[None], compute_module.log_softmax(0)[None]
        loss_mask = torch.ones(1, 4, dtype=torch.bool)
        values = kl_penalty(
            logprobs,
            REFERENCE.log_softmax(0)[None],
            logprobs - old,
            loss_mask,
            estimator=estimator,
            gradient=choice,
        )
        return (compute_module.softmax(0) * values[0]).sum()

    return estimate(POLICY), gradient(estimate, POLICY)


def true_kl(first: Tensor, second: Tensor) -> Tensor:
    return (first.softmax(0) * (first.log_softmax(0) - second.log_softmax(0))).sum()


TRUE = gradient(lambda logits: true_kl(logits, REFERENCE), POLICY)
REVERSE = gradient(lambda logits: true_kl(REFERENCE, logits), POLICY)


@pytest.mark.silent_bug(17)
@pytest.mark.parametrize("compute_module", [POLICY, SAMPLER], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_unbiased_gradient_is_right_whoever_drew(estimator, compute_module):
    value, slope = expected(compute_module, estimator, "unbiased")
    torch.testing.assert_close(slope, TRUE, rtol=1e-10, atol=1e-12)
    if estimator != "k2":
        torch.testing.assert_close(value, true_kl(POLICY, REFERENCE), rtol=1e-10, atol=1e-12)


@pytest.mark.silent_bug(17)
def test_naive_gradients_are_zero_for_k1_right_for_k2_and_reversed_for_k3():
    torch.testing.assert_close(
        expected(POLICY, "k1", "naive")[1], torch.zeros_like(TRUE), rtol=0, atol=1e-12
    )
    torch.testing.assert_close(expected(POLICY, "k2", "naive")[1], TRUE, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(expected(POLICY, "k3", "naive")[1], REVERSE, rtol=1e-10, atol=1e-12)
    assert (REVERSE - TRUE).norm() > 0.1 * TRUE.norm()  # so that the line above tells the two apart


@pytest.mark.silent_bug(17)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_naive_gradients_are_wrong_where_another_policy_drew(estimator):
    assert (expected(SAMPLER, estimator, "naive")[1] - TRUE).norm() > 0.05 * TRUE.norm()


@pytest.mark.silent_bug(17)
@pytest.mark.parametrize("drawn_by", [LOGITS, OTHER], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_over_two_steps_the_kl_term_has_the_gradient_of_the_kl_at_each_visited_prefix(
    estimator, drawn_by
):
    reference = LOGITS.flip(1)
    objective = Objective(average="sequence_sum", kl=estimator)

    def true_per_token_kl(logits: Tensor) -> Tensor:
        each = (logits.softmax(1) * (logits.log_softmax(1) - reference.log_softmax(1))).sum(
            dim=1
        )  # [prefix]
        visits = torch.tensor([1.0, *drawn_by[0].softmax(0)[1:]], dtype=torch.float64)
        return (visits * each).sum()

    def expected_term(logits: Tensor) -> Tensor:
        chance = probabilities(drawn_by).detach()
        return sum(
            chance[row]
            * terms_of(
                logits,
                torch.tensor([row]),
                torch.zeros(1, 2),
                objective,
                old=drawn_by,
                ref=reference,
            )["kl"]
            for row in range(len(SEQUENCES))
        )

    torch.testing.assert_close(
        gradient(expected_term), gradient(true_per_token_kl), rtol=1e-10, atol=1e-12
    )


# --- exact, for Gaussian policies -----------------------------------------------------------------


@pytest.mark.silent_bug(35)
@pytest.mark.parametrize("event", [(), (3,), (2, 2, 3)])
@pytest.mark.parametrize("std_kind", ["per action", "like the mean"])
def test_gaussian_kl_equals_that_of_torch_distributions_in_value_and_gradient(event, std_kind):
    torch.manual_seed(0)
    mean, ref_mean = torch.randn(2, 2, 4, *event, dtype=torch.float64)
    shape = (2, 4) if std_kind == "per action" else (2, 4, *event)
    std, ref_std = torch.rand(2, *shape, dtype=torch.float64) + 0.1
    leaves = [mean.requires_grad_(), std.requires_grad_()]
    got = gaussian_kl(mean, std, ref_mean, ref_std)
    wide = [
        x.reshape(*x.shape, *[1] * (mean.ndim - x.ndim)).expand(mean.shape) for x in (std, ref_std)
    ]
    normals = (
        torch.distributions.Normal(mean, wide[0]),
        torch.distributions.Normal(ref_mean, wide[1]),
    )
    other = torch.distributions.kl_divergence(*normals).reshape(2, 4, -1).sum(-1)
    torch.testing.assert_close(got, other, rtol=1e-12, atol=1e-14)
    for mine, theirs in zip(
        torch.autograd.grad(got.sum(), leaves),
        torch.autograd.grad(other.sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.silent_bug(17)
def test_equal_gaussians_have_neither_kl_nor_pull_and_many_dimensions_are_summed_in_float64():
    mean = torch.randn(1, 1, 10_000, generator=torch.manual_seed(0)).requires_grad_()
    std = torch.full((1, 1), 0.3)
    same = gaussian_kl(mean, std, mean.detach(), std)
    assert same.item() == 0 and not torch.autograd.grad(same.sum(), mean)[0].any()
    got = gaussian_kl(
        torch.full_like(mean, 0.1), torch.ones(1, 1), torch.zeros_like(mean), torch.ones(1, 1)
    )
    by_hand = 10_000 * torch.tensor(0.1).double().item() ** 2 / 2
    assert got.dtype == torch.float64 and got.item() == pytest.approx(by_hand, rel=1e-12)
