"""The losses for other people's loops: numbers by hand, and the same as the core they are shells
of."""

from __future__ import annotations

import math
import textwrap
from dataclasses import replace

import pytest
import torch
from tests.core.four_rows import A0, A1, GROUP_IDS, KEEP, LOGPROBS, OLD, REF, REWARDS
from torch import Tensor

import gruppo
from gruppo import losses
from gruppo.core.loss import LossInputs, policy_loss
from gruppo.core.objective import GRPO, PRESETS, Objective
from gruppo.core.weights import loss_total, loss_weights
from gruppo.losses import GRPOLoss, PPOLoss, compute_gae
from gruppo.types import GruppoError, Likelihood

NAN = float("nan")
BY_PROMPT = REWARDS.view(2, 2)


def f64(x) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def slope_of(loss_of, logprobs: Tensor, *inputs, **named) -> Tensor:
    leaf = logprobs.clone().requires_grad_()
    return torch.autograd.grad(loss_of(leaf, *inputs, **named), leaf)[0]


# --- GRPO by hand ---------------------------------------------------------------------------------


@pytest.mark.silent_bug(1)
def test_grpo_of_whole_sequences_by_hand_in_value_and_gradient():
    """Ratios 1.5 (clipped), 0.5 (clipped) for A0, -A0 and 1, 2 for A1, -A1: -1.2 A0 + 0.8 A0 - A1 +
    2 A1, over 4."""
    old = f64([[-1.0, -2.0], [-3.0, -4.0]])
    logprobs = old + f64([[1.5, 0.5], [1.0, 2.0]]).log()
    loss_of = GRPOLoss(clip_epsilon=0.2, kl_beta=0.0)
    by_hand = (-1.2 * A0 + 0.8 * A0 - A1 + 2 * A1) / 4
    assert loss_of(logprobs, old, BY_PROMPT).item() == pytest.approx(by_hand, rel=1e-6)
    torch.testing.assert_close(
        slope_of(loss_of, logprobs, old, BY_PROMPT),
        f64([[0, 0], [-A1 / 4, 2 * A1 / 4]]),
        rtol=1e-6,
        atol=0,
    )


@pytest.mark.silent_bug(17)
def test_the_kl_holds_in_expectation_where_the_sketched_mean_of_log_ratios_does_not():
    """Four outcomes, each weighted by its chance: the sketch's gradient is 0, ours is that of the
    KL."""
    theta, ref = (
        f64([0.4, -0.3, 0.9, 0.1]).requires_grad_(),
        f64([-0.2, 0.6, 0.3, 0.0]).log_softmax(0),
    )
    log_p = theta.log_softmax(0)
    chance = log_p.detach().exp()
    true = torch.autograd.grad((log_p.exp() * (log_p - ref)).sum(), theta, retain_graph=True)[0]
    sketch = torch.autograd.grad((chance * (log_p - ref)).sum(), theta, retain_graph=True)[0]
    torch.testing.assert_close(sketch, torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-12)
    loss_of, ours = GRPOLoss(kl_beta=1.0), torch.zeros(4, dtype=torch.float64)
    for n in range(4):  # a group of two equal rows with equal rewards: the KL alone
        pair = log_p[n].expand(1, 2)
        loss = loss_of(pair, pair, torch.ones(1, 2), ref[n].expand(1, 2))
        ours += chance[n] * torch.autograd.grad(loss, theta, retain_graph=True)[0]
    torch.testing.assert_close(ours, true, rtol=1e-10, atol=1e-12)


def test_without_old_logprobs_or_with_the_undetached_own_the_ratio_is_one_and_the_gradient_alive():
    logprobs = f64([[-1.0, -2.0]]).requires_grad_()
    loss_of = GRPOLoss(kl_beta=0.0)
    by_hand = f64([[-A0 / 2, A0 / 2]])
    for old in (None, logprobs, logprobs.detach()):
        slope = torch.autograd.grad(loss_of(logprobs, old, f64([[1.0, 0.0]])), logprobs)[0]
        torch.testing.assert_close(slope, by_hand, rtol=1e-6, atol=0)


# --- GRPO: the same as the core -------------------------------------------------------------------

SERVED = [name for name in PRESETS if name not in ("ppo", "reinforce_pp")]


@pytest.mark.parametrize("name", SERVED)
def test_tokens_with_a_mask_give_the_loss_and_gradient_of_policy_loss(name):
    objective = PRESETS[name]
    advantages = gruppo_advantages(objective)
    total = loss_total(KEEP, average=objective.average, max_length=4, group_ids=GROUP_IDS)
    weights = loss_weights(KEEP, average=objective.average, total=total, group_ids=GROUP_IDS)
    batch = LossInputs(advantages, KEEP, weights, OLD, Likelihood(REF))

    def by_core(logprobs: Tensor) -> Tensor:
        terms, _ = policy_loss(Likelihood(logprobs), batch, objective)
        return terms["policy"] + 0.3 * terms.get("kl", 0.0)

    inputs = (OLD, BY_PROMPT, REF, KEEP)
    loss_of = GRPOLoss(kl_beta=0.3, objective=name, max_length=4)
    torch.testing.assert_close(loss_of(LOGPROBS, *inputs), by_core(LOGPROBS), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        slope_of(loss_of, LOGPROBS, *inputs), slope_of(by_core, LOGPROBS), rtol=1e-12, atol=0
    )


def gruppo_advantages(objective: Objective) -> Tensor:
    """Spelled out: of these rewards, (1, 0) and (3, 0)."""
    mean = {
        "mean": f64([0.5, 0.5, 1.5, 1.5]),
        "leave_one_out": f64([0, 1, 0, 3]),
        "batch_mean": f64([1] * 4),
    }
    std = (
        f64([0.5**0.5, 0.5**0.5, 4.5**0.5, 4.5**0.5]) + 1e-4
        if objective.scale == "group"
        else f64([1.0] * 4)
    )
    row = ((REWARDS - mean[objective.baseline]) / std).float()
    return torch.where(KEEP, row[:, None], 0)


@pytest.mark.silent_bug(24)
@pytest.mark.parametrize("name", SERVED)
def test_group_ids_in_any_order_and_of_any_numbers_give_the_same_loss(name):
    loss_of = GRPOLoss(kl_beta=0.3, objective=name, max_length=4)
    order = torch.tensor([2, 0, 3, 1])
    ids = torch.tensor([70, 70, -5, -5])[order]
    shuffled = loss_of(LOGPROBS[order], OLD[order], REWARDS[order], REF[order], KEEP[order], ids)
    torch.testing.assert_close(
        shuffled, loss_of(LOGPROBS, OLD, BY_PROMPT, REF, KEEP), rtol=1e-10, atol=1e-12
    )


@pytest.mark.silent_bug(22)
@pytest.mark.parametrize("name", SERVED)
def test_a_reward_that_is_no_number_takes_its_row_out_of_everything_and_is_counted(name):
    """Rows 4 and 5 are of the second prompt; without them the loss is that of the four others."""
    loss_of = GRPOLoss(kl_beta=0.3, objective=name, max_length=4)
    more = torch.tensor([0, 1, 2, 3, 1, 2])
    rewards = torch.cat([REWARDS, f64([NAN, math.inf])])
    ids = torch.cat([GROUP_IDS, torch.tensor([1, 1])])
    inputs = (OLD[more], rewards, REF[more], KEEP[more], ids)
    torch.testing.assert_close(
        loss_of(LOGPROBS[more], *inputs),
        loss_of(LOGPROBS, OLD, BY_PROMPT, REF, KEEP),
        rtol=1e-10,
        atol=1e-12,
    )
    assert not slope_of(loss_of, LOGPROBS[more], *inputs)[4:].any()
    _, stats = loss_of.terms(LOGPROBS[more], *inputs)
    assert (stats["reward/unscored_frac"].sum, stats["reward/unscored_frac"].count) == (2, 6)
    assert stats["reward"].mean == 1


def test_rewards_of_low_precision_that_differ_are_told_apart():
    """1 and 1 - 2^-7 are neighbours in bfloat16, and no rounding of one reward."""
    rewards = torch.tensor([[1.0, 1 - 2**-7]], dtype=torch.bfloat16)
    slope = slope_of(GRPOLoss(kl_beta=0.0), f64([[-1.0, -2.0]]), None, rewards)
    assert slope[0, 0] < -0.3 < 0.3 < slope[0, 1]


def test_clip_epsilon_bounds_both_sides_of_any_preset_and_zero_is_a_bound():
    """DAPO's own are 0.2 and 0.28. Ratios 1.5 and 0.5 of advantages 0.7 and -0.7 are clipped to 1
    +- epsilon."""
    old = f64([[-1.0, -2.0]])
    logprobs = old + f64([[1.5, 0.5]]).log()
    for epsilon in (0.0, 0.1, 0.4):
        loss = GRPOLoss(epsilon, kl_beta=0.0, objective="dapo")(logprobs, old, f64([[1.0, 0.0]]))
        assert loss.item() == pytest.approx(
            (-(1 + epsilon) + (1 - epsilon)) * A0 / 2, rel=1e-6, abs=1e-9
        )
    loss = GRPOLoss(kl_beta=0.0, objective="dapo")(logprobs, old, f64([[1.0, 0.0]]))
    assert loss.item() == pytest.approx((-1.28 + 0.8) * A0 / 2, rel=1e-6)


# --- PPO ------------------------------------------------------------------------------------------


@pytest.mark.silent_bug(1)
def test_ppo_by_hand_in_every_term_and_gradient():
    """Two actions: ratios 1.5 (A 1, clipped to 1.2) and 0.5 (A 2); V - R is 1 and -3; entropies 0.7
    and 0.1.

    policy -(1.2 + 1) / 2 = -1.1;  value 0.5 (1 + 9) / 2 = 2.5;  entropy -0.01 (0.8) / 2 = -0.004.
    """
    old = f64([-1.0, -2.0])
    logprobs = (old + f64([1.5, 0.5]).log()).requires_grad_()
    values, entropy = f64([3.0, 1.0]).requires_grad_(), f64([0.7, 0.1]).requires_grad_()
    inputs = (logprobs, old, values, f64([2.0, 4.0]), f64([1.0, 2.0]), entropy)
    terms, _ = PPOLoss().terms(*inputs)
    assert {name: term.item() for name, term in terms.items()} == pytest.approx(
        {"policy": -1.1, "value": 2.5, "entropy": -0.004}, rel=1e-12
    )
    slopes = torch.autograd.grad(PPOLoss()(*inputs), [logprobs, values, entropy])
    torch.testing.assert_close(slopes[0], f64([0.0, -0.5]))  # -r A / 2 where it is not clipped
    torch.testing.assert_close(slopes[1], f64([0.5, -1.5]))  # 0.5 * 2 (V - R) / 2
    torch.testing.assert_close(slopes[2], f64([-0.005, -0.005]))


def ppo_sketch(logprobs, old, values, returns, advantages, entropy) -> Tensor:
    """The textbook's lines, with F.mse_loss and plain means."""
    ratio = (logprobs - old).exp()
    policy = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    return policy + 0.5 * torch.nn.functional.mse_loss(values, returns) - 0.01 * entropy.mean()


def test_ppo_equals_the_textbook_lines_in_value_and_gradient_with_and_without_a_mask():
    torch.manual_seed(0)
    six = [torch.randn(7, dtype=torch.float64) for _ in range(6)]
    six[0] = six[1] + 0.3 * six[0]
    loss_mask = torch.tensor(
        [[True, True, False, True], [False, True, False, True], [True, True, False, False]]
    )

    def ragged(x: Tensor) -> Tensor:
        return torch.full(loss_mask.shape, NAN, dtype=torch.float64).masked_scatter(loss_mask, x)

    for n in (0, 2, 5):  # log-probs, values, entropy

        def textbook(leaf: Tensor, n: int = n) -> Tensor:
            return ppo_sketch(*six[:n], leaf, *six[n + 1 :])

        def flat(leaf: Tensor, n: int = n) -> Tensor:
            return PPOLoss()(*six[:n], leaf, *six[n + 1 :])

        def masked(leaf: Tensor, n: int = n) -> Tensor:
            return PPOLoss()(*map(ragged, [*six[:n], leaf, *six[n + 1 :]]), mask=loss_mask)

        for ours in (flat, masked):
            torch.testing.assert_close(ours(six[n]), textbook(six[n]), rtol=1e-12, atol=0)
            torch.testing.assert_close(
                slope_of(ours, six[n]), slope_of(textbook, six[n]), rtol=1e-12, atol=1e-15
            )
    assert torch.autograd.gradcheck(flat, (six[5].requires_grad_(),))


@pytest.mark.silent_bug(32)
def test_the_value_clip_is_around_the_stored_values():
    """V 3, stored 1, clip 0.5: V counts as 1.5. R 2: max(1, 0.25); R 4: max(1, 6.25). c1 0.5:
    halved."""
    nothing, values, old = f64([0.0, 0.0]), f64([3.0, 3.0]), f64([1.0, 1.0])
    inputs = (nothing, nothing, values, f64([2.0, 4.0]), nothing)
    loss_of = PPOLoss(entropy_coef=0.0, value_clip=0.5)
    terms, stats = loss_of.terms(*inputs, old_values=old)
    assert terms["value"].item() == pytest.approx(0.5 * (1 + 6.25) / 2, rel=1e-12)
    assert stats["value/clip_frac"].mean == 1
    terms, _ = loss_of.terms(*inputs, old_values=values)
    assert terms["value"].item() == pytest.approx(0.5 * (1 + 1) / 2, rel=1e-12)


def test_what_was_stored_gets_no_gradient():
    """Returns made from the critic's own values, not detached, as loops have them: the critic
    learns from V alone."""
    values = f64([[1.0, 2.0]]).requires_grad_()
    logprobs = f64([[-1.0, -1.0]]).requires_grad_()
    rewards = values * 2 + 1
    advantages, returns = rewards - values, rewards * 1
    loss = PPOLoss(entropy_coef=0.0)(logprobs, logprobs, values, returns, advantages)
    slopes = torch.autograd.grad(loss, [logprobs, values])
    torch.testing.assert_close(slopes[0], f64([[-1.0, -1.5]]))  # -A / 2, with A 2 and 3
    torch.testing.assert_close(slopes[1], f64([[-1.0, -1.5]]))  # (V - R) / 2, with V - R -2 and -3


@pytest.mark.silent_bug(30)
def test_gae_by_hand_with_the_last_step_and_the_defaults_of_the_method():
    """gamma 0.5, lam 0.5; rewards 1, 2, values 4, 2, after the end 8: deltas -2, 4; advantages -2 +
    4 / 4 = -1, 4."""
    rewards, values, after = f64([[1.0, 2.0]]), f64([[4.0, 2.0]]), f64([8.0])
    advantages, returns = compute_gae(rewards, values, 0.5, 0.5, bootstrap=after)
    assert (advantages.tolist(), returns.tolist()) == ([[-1, 4]], [[3, 6]])
    ended, _ = compute_gae(rewards, values, 0.5, 0.5)
    assert ended.tolist() == [[-2, 0]]  # 2 - 2 = 0 at the end
    by_default = PPOLoss().compute_gae(rewards, values)
    last = 2 - 2
    first = 1 + 0.99 * 2 - 4 + 0.99 * 0.95 * last
    torch.testing.assert_close(by_default[0], f64([[first, last]]))
    assert gruppo.compute_gae is compute_gae


def test_gae_has_no_gradient_and_loops_over_time_not_over_rows():
    values = f64([[1.0, 2.0, 3.0]]).requires_grad_()
    advantages, returns = compute_gae(torch.zeros(1, 3, dtype=torch.float64), values, 1.0, 0.0)
    assert not advantages.requires_grad and not returns.requires_grad
    assert advantages.tolist() == [[1, 1, -3]]


# --- refused --------------------------------------------------------------------------------------

PAIR = f64([[-1.0, -2.0]])
ONES = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ({"clip_epsilon": 1.5}, r"clip_low=1\.5.*needs clip_low <= 1.*objective\.clip_low 0\.2"),
        ({"clip_epsilon": -0.1}, r"clip_low=-0\.1 is out of range"),
        ({"kl_beta": -0.1}, r"kl_beta=-0\.1 is out of range"),
        ({"kl_beta": NAN}, "kl_beta=nan is out of range"),
        ({"objective": "grpo2"}, "objective='grpo2' is none of grpo, dr_grpo.*Use one"),
        ({"objective": "ppo"}, "needs values; use PPOLoss"),
        ({"objective": "reinforce_pp"}, "needs credit of each action"),
        ({"objective": "dr_grpo"}, "average='constant'.*max_length=None. Set"),
        (
            {"objective": replace(GRPO, scale="running")},
            "needs statistics of earlier steps",
        ),
        (
            {"objective": replace(GRPO, correction="mask")},
            "needs the sampler's log-probs",
        ),
        ({"objective": replace(GRPO, overlong=3)}, "which rows were truncated"),
        (
            {"objective": replace(GRPO, kl="exact")},
            "kl='exact' is the closed form.*objective.kl k3",
        ),
        (
            {"objective": replace(GRPO, credit="position")},
            "credit='position' needs a reward for each action",
        ),
        (
            {"objective": replace(GRPO, kl="k1", kl_gradient="naive")},
            "gradient of zero in expectation",
        ),
    ],
)
def test_a_grpo_loss_that_cannot_learn_is_refused_when_it_is_made(choices, says):
    with pytest.raises(GruppoError, match=says):
        GRPOLoss(**choices)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ((PAIR, PAIR, f64([[1.0, 0.0]])), "kl_beta=0.1 needs reference_logprobs.*kl_beta=0"),
        (
            (PAIR.T, PAIR.T, f64([[1.0], [0.0]]), PAIR.T),
            "every group has one row.*at least 2.*'reinforce'",
        ),
        (
            (PAIR, PAIR[0], f64([[1.0, 0.0]]), PAIR),
            r"old_policy_logprobs is \[2\] and needs to be \[1, 2\]",
        ),
        (
            (PAIR, PAIR, f64([[1.0, 0.0]]), PAIR.T),
            r"reference_logprobs is \[2, 1\] and needs to be \[1, 2\]",
        ),
        (
            (ONES, ONES, f64([[1.0, 0.0]]), ONES),
            r"rewards is \[1, 2\] and needs to be \[2, 3\].*need a mask",
        ),
        ((ONES, ONES, f64([[1.0, 0.0]]), ONES, ONES), "mask is torch.float32.*mask.bool()"),
        (
            (ONES, ONES, f64([[1.0, 0.0]]), ONES, ONES[:1].bool()),
            r"mask is \[1, 3\] and needs to be \[2, 3\]",
        ),
        (
            (ONES, ONES, f64([[1.0, 0.0, 2.0]]), ONES, ONES.bool()),
            r"rewards are \[1, 3\] for 2 rows",
        ),
        (
            (ONES, ONES, f64([1.0, 0.0]), ONES, ONES.bool()),
            r"rewards are \[2\] for 2 rows.*pass rewards \[2\] and group_",
        ),
        (
            (ONES, ONES, f64([1.0, 0.0]), ONES, ONES.bool(), torch.zeros(3)),
            r"group_ids is \[3\] and needs to be \[2\]",
        ),
    ],
)
def test_inputs_of_the_wrong_shape_are_refused_and_never_broadcast(inputs, says):
    with pytest.raises(GruppoError, match=says):
        GRPOLoss()(*inputs)


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ({"clip_epsilon": 1.1}, "clip_low=1.1"),
        ({"value_loss_coef": -0.5}, "value_loss_coef=-0.5"),
        ({"entropy_coef": -0.01}, "entropy_coef=-0.01"),
        ({"value_clip": -0.2}, "value_clip=-0.2 is out of range"),
    ],
)
def test_a_ppo_loss_with_a_coefficient_below_zero_or_crossing_bounds_is_refused(choices, says):
    with pytest.raises(GruppoError, match=says):
        PPOLoss(**choices)


TWO = f64([0.0, 0.0])


@pytest.mark.parametrize(
    ("choices", "inputs", "named", "says"),
    [
        ({}, (TWO,) * 5, {}, "entropy_coef=0.01 needs entropy"),
        ({"value_clip": 0.2}, (TWO,) * 6, {}, "value_clip=0.2 needs old_values"),
        (
            {},
            (TWO, TWO, TWO[:, None], TWO, TWO, TWO),
            {},
            r"values is \[2, 1\] and needs to be \[2\]",
        ),
        (
            {},
            (TWO, TWO, TWO, TWO, f64([NAN, 1.0]), TWO),
            {},
            "advantages holds numbers that are not finite",
        ),
        (
            {},
            (TWO, TWO, TWO, f64([NAN, NAN]), TWO, TWO),
            {},
            "returns holds numbers that are not finite",
        ),
        ({}, (TWO,) * 6, {"mask": torch.ones(2)}, "mask is torch.float32"),
    ],
)
def test_ppo_refuses_what_would_be_broadcast_missing_or_nan(choices, inputs, named, says):
    with pytest.raises(GruppoError, match=says):
        PPOLoss(**choices)(*inputs, **named)


@pytest.mark.parametrize(
    ("inputs", "named", "says"),
    [
        (
            (ONES, torch.ones(2, 4)),
            {},
            r"values have 4 columns for 3 rewards\. .*bootstrap=values",
        ),
        ((ONES, ONES[:1]), {}, r"values is \[1, 3\] and needs to be \[2, 3\]"),
        ((ONES[0], ONES[0]), {}, r"rewards are \[3\].*rewards\[None\]"),
        ((ONES, ONES), {"bootstrap": torch.ones(3)}, r"bootstrap is \[3\]"),
        ((ONES, ONES), {"bootstrap": torch.tensor([NAN, 1])}, "bootstrap holds numbers"),
        ((ONES * NAN, ONES), {}, "rewards holds numbers that are not finite.*not a reward of 0"),
        ((ONES, ONES), {"mask": ONES}, "mask is torch.float32"),
        ((ONES, ONES, 1.5), {}, r"gamma=1.5 is out of range; .* \[0, 1\]"),
        ((ONES, ONES), {"lam": NAN}, "lam=nan is out of range"),
    ],
)
def test_gae_refuses_what_has_no_meaning(inputs, named, says):
    with pytest.raises(GruppoError, match=says):
        compute_gae(*inputs, **named)


def test_the_example_of_the_docstring_runs():
    lines = [line for line in losses.__doc__.splitlines() if line.startswith("    ")]
    logprobs = LOGPROBS.clone().requires_grad_()
    names = {"GRPOLoss": GRPOLoss, "logprobs": logprobs, "old_logprobs": OLD, "rewards": BY_PROMPT}
    exec(textwrap.dedent("\n".join(lines)), names | {"ref_logprobs": REF, "mask": KEEP})
    assert len(lines) == 3 and logprobs.grad is not None and logprobs.grad[KEEP].any()
