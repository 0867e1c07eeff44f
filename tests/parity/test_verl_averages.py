"""verl 0.9.1 by hand: its five ``loss_agg_mode``s, dual clip, whitening, GAE and advantages, in
float64.

verl is not imported: it needs Ray and a GPU engine. The numbers below follow from its formulas in
``verl/trainer/ppo/core_algos.py`` and ``verl/utils/torch_functional.py``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gruppo.core.advantages import group_advantages, normalized_sum
from gruppo.core.kl import kl_penalty
from gruppo.core.loss import LossInputs, policy_loss
from gruppo.core.objective import CISPO, GRPO, RLOO, Objective
from gruppo.core.returns import gae, place_score, returns_to_go, whiten
from gruppo.core.schedules import AdaptiveKl
from gruppo.core.surrogates import clip_surrogate, value_loss
from gruppo.core.weights import correction_weights, loss_total, loss_weights
from gruppo.types import Likelihood

X = 1e9
"""What stands in a slot that is masked."""


def f64(*rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def close(ours: Tensor, by_hand: Tensor) -> bool:
    return torch.allclose(ours.double(), by_hand.double(), rtol=1e-6, atol=1e-12)


# --- loss_agg_mode --------------------------------------------------------------------------------

LOSSES = f64([1, 2, 3, 4], [10, X, X, X], [5, 7, X, X])
LENGTHS = torch.tensor([4, 1, 2])
KEEP = torch.arange(4) < LENGTHS[:, None]

MODES = [
    ("token-mean", "token", 32 / 7),
    ("seq-mean-token-sum", "sequence_sum", (10 + 10 + 12) / 3),
    ("seq-mean-token-mean", "sequence", (2.5 + 10 + 6) / 3),
    (
        "seq-mean-token-sum-norm",
        "constant",
        (10 + 10 + 12) / 3 / 4,
    ),  # loss_scale_factor 4, the longest response
    ("token-sum", "sum", 32),
]


def averaged(average: Any, loss_mask: Tensor = KEEP, losses: Tensor = LOSSES) -> float:
    weights = loss_weights(
        loss_mask, average=average, total=loss_total(loss_mask, average=average, max_length=4)
    )
    return float((weights * torch.where(loss_mask, losses, 0)).sum())


@pytest.mark.silent_bug(29)
@pytest.mark.parametrize(("mode", "average", "by_hand"), MODES, ids=[mode for mode, _, _ in MODES])
def test_each_loss_agg_mode_is_one_of_our_averages(mode: str, average: Any, by_hand: float):
    assert averaged(average) == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize(("mode", "average", "by_hand"), MODES, ids=[mode for mode, _, _ in MODES])
def test_a_row_that_is_masked_whole_changes_no_average(mode: str, average: Any, by_hand: float):
    """As in ``agg_loss`` by itself; verl's trainer passes it the rows of the batch, masked ones
    too."""
    loss_mask, losses = torch.cat([KEEP, KEEP[:1] & False]), torch.cat([LOSSES, LOSSES[:1] + X])
    assert averaged(average, loss_mask, losses) == pytest.approx(by_hand, rel=1e-12)


# --- policy losses --------------------------------------------------------------------------------

RATIOS = [0.5, 1.0, 1.25, 2.0, 4.0]


def losses_at(ratios: list[float], advantage: float, objective: Objective) -> Tensor:
    """The loss of one action at each ratio; its old log-prob is 0."""
    one = torch.ones(1, 1, dtype=torch.float64)
    inputs = LossInputs(advantage * one, one.bool(), one, old_logprobs=0 * one)
    return torch.stack(
        [policy_loss(Likelihood(f64([r]).log()), inputs, objective)[0]["policy"] for r in ratios]
    )


def test_dual_clip_3_bounds_the_loss_of_negative_advantages_and_no_other():
    """clip_ratio 0.2, clip_ratio_c 3: for A = -1, min(3, max(r, clip(r))); for A = 1, max(-r,
    -clip(r))."""
    dual = replace(GRPO, dual_clip=3.0)
    assert close(losses_at(RATIOS, -1.0, dual), f64(0.8, 1.0, 1.25, 2.0, 3.0))
    assert close(losses_at(RATIOS, 1.0, dual), f64(-0.5, -1.0, -1.2, -1.2, -1.2))


def test_an_action_beyond_the_dual_clip_has_no_gradient():
    log_ratio = f64([0.0, 1.0, 1.2]).requires_grad_()  # ratios 1, 2.72, 3.32
    clip_surrogate(log_ratio, -torch.ones(1, 3), low=0.2, high=0.2, dual=3.0).sum().backward()
    assert log_ratio.grad is not None
    assert close(log_ratio.grad, f64([1.0, 2.718281828459045, 0.0]))


def test_cispo_of_verl_clamps_at_both_ends_of_its_clip_range():
    """-clamp(r, 0.8, 1.2) A logp, with logp = log r here."""
    by_hand = -f64(0.8, 1.0, 1.2, 1.2, 1.2) * f64(*RATIOS).log()
    assert close(losses_at(RATIOS, 1.0, replace(CISPO, clip_low=0.2, clip_high=0.2)), by_hand)


@pytest.mark.silent_bug(32)
def test_the_value_loss_takes_the_larger_of_plain_and_clipped_and_halves_it():
    """cliprange_value 0.5: (2 - 0)^2 over (1.5 - 0)^2; 0.2^2 either way; (1.5 - 3)^2 over (3 -
    3)^2."""
    values, old, returns = f64([2.0, 1.2, 3.0, X]), f64([1.0, 1.0, 1.0, X]), f64([0.0, 1.0, 3.0, X])
    loss_mask = f64([1, 1, 1, 0]).bool()
    losses = value_loss(values, old, returns, loss_mask, clip=0.5)
    assert close(losses, f64([2.0, 0.02, 1.125, 0.0]))


# --- advantages -----------------------------------------------------------------------------------


@pytest.mark.silent_bug(31)
def test_masked_whiten_has_mean_0_and_unbiased_variance_1_over_the_mask():
    """Kept 1, 2, 3, 6: mean 3, variance 14 / 3."""
    x, loss_mask = f64([1, 2, X], [3, X, 6]), f64([1, 1, 0], [1, 0, 1]).bool()
    by_hand = f64([-2, -1, 0], [0, 0, 3]) / (14 / 3 + 1e-8) ** 0.5
    assert close(whiten(x, loss_mask), by_hand)


@pytest.mark.silent_bug(30)
def test_gae_steps_over_a_tools_tokens():
    """gamma 0.9, lam 0.5. Row 0: A_2 = 1 - 0.2 = 0.8; A_0 = 0.9 0.2 - 0.5 + 0.45 0.8 = 0.04. Row 1:
    2 - 0.4."""
    rewards, values = f64([0, X, 1], [2, X, X]), f64([0.5, X, 0.2], [0.4, X, X])
    mask = f64([1, 0, 1], [1, 0, 0]).bool()
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.5)
    assert close(advantages, f64([0.04, 0, 0.8], [1.6, 0, 0]))
    assert close(returns, f64([0.54, 0, 1.0], [2.0, 0, 0]))


REWARDS, GROUP_IDS = f64(1, 0, 3, 0), torch.tensor([0, 0, 1, 1])
MASK = torch.arange(3) < torch.tensor([3, 1, 1, 1])[:, None]


def of_rows(**choices: Any) -> Tensor:
    advantages, _ = group_advantages(REWARDS, GROUP_IDS, MASK, **choices)
    return advantages


def test_grpo_divides_by_the_groups_unbiased_deviation_and_1e_6():
    by_hand = f64(
        0.5 / (0.5**0.5 + 1e-6),
        -0.5 / (0.5**0.5 + 1e-6),
        1.5 / (4.5**0.5 + 1e-6),
        -1.5 / (4.5**0.5 + 1e-6),
    )
    assert close(of_rows(baseline="mean", scale="group", eps=1e-6)[:, 0], by_hand)
    assert close(
        of_rows(baseline="mean", scale="none")[:, 0], f64(0.5, -0.5, 1.5, -1.5)
    )  # norm_adv_by_std_in_grpo off


def test_rloo_is_the_reward_less_the_mean_of_the_others():
    assert close(of_rows(baseline=RLOO.baseline, scale=RLOO.scale)[:, 0], f64(1, -1, 3, -3))


def test_reinforce_plus_plus_baseline_whitens_group_centred_rewards_over_tokens():
    """Tokens 0.5 three times, -0.5, 1.5, -1.5: mean 1 / 6, squares sum to 5.5, so variance (5.5 - 6
    / 36) / 5."""
    whitened = whiten(of_rows(baseline="mean", scale="none"), MASK)
    by_hand = (f64(0.5, -0.5, 1.5, -1.5) - 1 / 6) / ((5.5 - 1 / 6) / 5) ** 0.5
    assert close(whitened[:, 0], by_hand)
    assert close(whitened[0], by_hand[0].expand(3))


def test_reinforce_plus_plus_whitens_returns_to_go_so_that_our_batch_mean_drops_out():
    """Scores 3 and 1 over 2 and 1 tokens: 3, 3, 1, mean 7 / 3, variance 4 / 3."""
    mask = torch.tensor([[True, True], [True, False]])
    by_hand = f64([2 / 3, 2 / 3], [-4 / 3, 0]) / (4 / 3) ** 0.5
    for baseline in (0.0, 2.0):
        returns = returns_to_go(place_score(f64(3, 1) - baseline, mask), mask, gamma=1.0)
        assert close(whiten(returns, mask), by_hand)


def test_reinforce_pp_is_verls_below_gamma_1_without_a_baseline():
    """Scores 3 and 1 over 2 and 1 tokens, gamma 0.5: verl's returns are 1.5, 3 and 1, with variance
    13 / 12."""
    mask = torch.tensor([[True, True], [True, False]])
    verl = f64([-1 / 3, 7 / 6], [-5 / 6, 0]) / (13 / 12) ** 0.5
    ours = {}
    for baseline in ("none", "batch_mean"):
        scores, _ = group_advantages(
            f64(3, 1), torch.tensor([0, 1]), mask, baseline=baseline, scale="none"
        )
        ours[baseline] = whiten(
            returns_to_go(place_score(scores[:, 0], mask), mask, gamma=0.5), mask
        )
    assert close(ours["none"], verl)
    assert close(ours["batch_mean"], f64([1 / 3, 5 / 6], [-7 / 6, 0]) / (13 / 12) ** 0.5)


@pytest.mark.parametrize("lam", [1.0, 0.95])
def test_openrlhf_decays_across_tool_tokens_and_is_equal_at_gamma_and_lambda_1(lam: float):
    """Its loop over the columns: values and rewards of a tool's tokens are 0, and gamma lambda acts
    at each of them."""
    mask = torch.tensor([[True, *[False] * 100, True]])
    values, rewards = (
        torch.where(mask, 0.25, 0.0).double(),
        torch.zeros(1, 102, dtype=torch.float64),
    )
    rewards[0, -1] = 1.0
    there, carry = torch.zeros_like(values), 0.0
    for t in reversed(range(102)):
        carry = (
            float(rewards[0, t] + (values[0, t + 1] if t < 101 else 0) - values[0, t]) + lam * carry
        )
        there[0, t] = carry
    ours, _ = gae(rewards, values, mask, gamma=1.0, lam=lam)
    assert close(ours[mask][1], there[mask][1])
    first, by_hand = ours[mask][0], {1.0: 0.75, 0.95: 0.25 - 0.25 + 0.95 * 0.75}[lam]
    assert float(first) == pytest.approx(by_hand)
    assert close(first, there[0, 0]) == (lam == 1.0)
    assert lam == 1.0 or (
        0.95**100 < 0.006 and float(there[0, 0]) < -0.23
    )  # nearly nothing but -V is left


@pytest.mark.parametrize("count", [4, 16, 100])
def test_ddof_0_makes_advantages_larger_by_a_factor_of_the_count_alone(count: int):
    x = torch.randn(1, count, dtype=torch.float64, generator=torch.manual_seed(0))
    ddof_0 = (x - x.mean()) / x.std(correction=0)
    assert close(
        ddof_0 / whiten(x, torch.ones(1, count, dtype=torch.bool)),
        (count / (count - 1)) ** 0.5 * x.new_ones(1),
    )


def test_gdpo_whitens_the_sum_over_tokens_so_that_our_normalisation_over_rows_drops_out():
    """Weights 3 and 1. By itself each gives +-0.5^0.5, the second the reverse of the first in the
    second group."""
    of_one = {
        "group_ids": GROUP_IDS,
        "mask": MASK[:, :1],
        "baseline": "mean",
        "scale": "group",
        "eps": 0.0,
    }
    each = [group_advantages(rewards, **of_one)[0][:, 0] for rewards in (REWARDS, f64(5, 3, 0, 8))]
    ours = normalized_sum(each, [3.0, 1.0], torch.ones(4, dtype=torch.bool), eps=1e-6)
    summed = 0.5**0.5 * f64(4, -4, 2, -2)
    centred = (summed - summed @ f64(3, 1, 1, 1) / 6)[:, None].where(MASK, 0)
    by_hand = centred / (centred.square().sum() / 5) ** 0.5
    assert torch.allclose(whiten(ours[:, None].where(MASK, 0), MASK).double(), by_hand, rtol=1e-5)


# --- KL, and rows of an engine --------------------------------------------------------------------


@pytest.mark.parametrize(("verl", "estimator"), [("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3")])
def test_kl_loss_type_is_our_estimator_with_the_naive_gradient(verl: str, estimator: Any):
    """At ref - logp = log 2: k1 -log 2, k2 log(2)^2 / 2, k3 1 - log 2; slopes 1, -log 2, -1."""
    log2 = 0.6931471805599453
    value = {"k1": -log2, "k2": log2**2 / 2, "k3": 1 - log2}[estimator]
    slope = {"k1": 1.0, "k2": -log2, "k3": -1.0}[estimator]
    logprobs, loss_mask = f64([-2.0]).requires_grad_(), torch.ones(1, 1, dtype=torch.bool)
    estimate = kl_penalty(
        logprobs,
        logprobs.detach() + log2,
        logprobs - 5.0,
        loss_mask,
        estimator=estimator,
        gradient="naive",
    )
    estimate.sum().backward()
    assert logprobs.grad is not None
    assert close(estimate.detach(), f64([value])) and close(logprobs.grad, f64([slope]))


@pytest.mark.parametrize("delta", [2.6, 5.0, -10.9, -12.0])
def test_verl_caps_k3_at_10_nats_where_its_gradient_ends(delta: float):
    """delta = ref - logp: both are exp(delta) - delta - 1 as long as that is at most 10."""
    logprobs, loss_mask = f64([-20.0]).requires_grad_(), torch.ones(1, 1, dtype=torch.bool)
    gap = logprobs.detach() + delta - logprobs
    verl = (gap.clamp(-20, 20).exp() - gap.clamp(-20, 20) - 1).clamp(-10, 10)
    ours = kl_penalty(
        logprobs,
        logprobs.detach() + delta,
        0 * logprobs,
        loss_mask,
        estimator="k3",
        gradient="naive",
    )
    slopes = [torch.autograd.grad(kl.sum(), logprobs)[0] for kl in (ours, verl)]
    assert close(slopes[0], f64([1 - math.exp(delta)]))
    is_capped = delta in (5.0, -12.0)
    assert close(ours.detach(), verl.detach()) == close(*slopes) == (not is_capped)
    assert not is_capped or (verl.item(), slopes[1].item()) == (10.0, 0.0)


def test_the_adaptive_coefficient_grows_by_at_most_a_fifth_in_a_horizon():
    """kl_ctrl: target_kl 0.1, horizon 10000, 256 rows."""
    for kl, expected in ((0.3, 0.001 * 1.00512), (0.09, 0.001 * 0.99744)):
        controller = AdaptiveKl(0.001, target=0.1, horizon=10000)
        controller.update(kl, rows=256)
        assert controller.value == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("threshold", "level", "mode", "low", "high", "by_hand"),
    [
        (2.0, "token", "truncate", 0.0, 2.0, [0.25, 1.5, 2.0]),
        ("0.5_5.0", "token", "mask", 0.5, 5.0, [0.0, 1.5, 4.0]),
        (2.0, "sequence", "truncate", 0.0, 2.0, [1.5, 1.5, 1.5]),  # 0.25 1.5 4 = 1.5
        ("2.0_5.0", "sequence", "mask", 2.0, 5.0, [0.0, 0.0, 0.0]),
    ],
)
def test_rollout_is_and_its_threshold_are_our_correction(
    threshold: Any, level: Any, mode: Any, low: float, high: float, by_hand: list[float]
):
    old, loss_mask = f64([0.25, 1.5, 4.0, X]).log(), f64([1, 1, 1, 0]).bool()
    weights = correction_weights(
        old, torch.zeros(1, 4), loss_mask, mode=mode, level=level, low=low, high=high
    )
    assert close(weights, f64([*by_hand, 0.0]))
