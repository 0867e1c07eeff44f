"""The loss of each preset on one small batch by hand, and what no padding, split or filling may change."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any, get_args, get_type_hints

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from gruppo.core.advantages import group_advantages
from gruppo.core.divergence import ESTIMATORS
from gruppo.core.objective import PRESETS, LossInputs, Objective, describe, policy_loss
from gruppo.core.weights import Average, loss_total, loss_weights
from gruppo.types import GruppoError, Likelihood

AVERAGES = get_args(Average)
MAX_LENGTH = 4
LENGTHS = [1, 3, 2, 2]
REWARDS = torch.tensor([1.0, 0.0, 3.0, 0.0], dtype=torch.float64)
GROUP_IDS = torch.tensor([0, 0, 1, 1])
KEEP = torch.arange(3)[None] < torch.tensor(LENGTHS)[:, None]
LOGPROBS = torch.tensor([[-1, 0, 0], [-1, -2, -1], [-2, -1, 0], [-3, -1, 0]], dtype=torch.float64) * math.log(2)
RATIO = torch.tensor([[1.5, 1, 1], [0.5, 1, 1], [1, 1.1, 1], [2, 1, 1]], dtype=torch.float64)
OLD = LOGPROBS - RATIO.log()
REF = LOGPROBS + torch.tensor([[0.3, 0, 0], [-0.2, 0.1, 0], [0, 0.5, 0], [-1, 0.2, 0]], dtype=torch.float64)


def advantages_of(objective: Objective, keep: Tensor = KEEP, rewards: Tensor = REWARDS) -> Tensor:
    choices = {"baseline": objective.baseline, "scale": objective.scale, "eps": objective.scale_eps}
    return group_advantages(rewards, GROUP_IDS, keep, **choices)[0]


def loss_of(
    objective: Objective,
    logprobs: Tensor = LOGPROBS,
    *,
    keep: Tensor = KEEP,
    advantages: Tensor | None = None,
    old: Tensor | None = OLD,
    ref: Tensor | None = None,
    entropy: Tensor | None = None,
):
    total = loss_total(keep, average=objective.average, max_length=MAX_LENGTH)
    inputs = LossInputs(
        advantages=advantages_of(objective, keep) if advantages is None else advantages,
        keep=keep,
        weights=loss_weights(keep, average=objective.average, total=total),
        old_logprobs=old,
        ref=None if ref is None else Likelihood(ref),
    )
    return policy_loss(Likelihood(logprobs, entropy), inputs, objective)


def sum_of(terms: dict[str, Tensor]) -> Tensor:
    """A loss with a coefficient of its own for each term."""
    return sum({"policy": 1.0, "kl": 0.3, "entropy": -0.1}[name] * term for name, term in terms.items())


# --- the presets by hand ---------------------------------------------------------------------------------------------

A0, A1 = 0.5 / (0.5**0.5 + 1e-4), 1.5 / (4.5**0.5 + 1e-4)
"""GRPO's advantages are +-A0 in the first group (rewards 1, 0) and +-A1 in the second (3, 0): ddof 1, eps 1e-4."""


@pytest.mark.silent_bug(1)
@pytest.mark.parametrize(
    ("name", "by_hand"),
    [
        # per action, in units of the row's |A|: row 0 clipped -1.2 (DAPO -1.28); row 1 clipped 0.8, then 1, 1;
        # row 2 -1, -1.1; row 3 unclipped 2, then 1
        ("grpo", (-1.2 * A0 + (0.8 + 1 + 1) / 3 * A0 - (1 + 1.1) / 2 * A1 + (2 + 1) / 2 * A1) / 4),
        ("dapo", ((-1.28 + 0.8 + 1 + 1) * A0 + (-1 - 1.1 + 2 + 1) * A1) / 8),
        ("dr_grpo", ((-1.2 + 0.8 + 1 + 1) * 0.5 + (-1 - 1.1 + 2 + 1) * 1.5) / (4 * MAX_LENGTH)),
        # leave-one-out advantages 1, -1, 3, -3; log-probs of the rows -1, -4, -3, -4 times log 2
        ("rloo", -(1 * -1 - 1 * -4 + 3 * -3 - 3 * -4) * math.log(2) / 4),
        # the batch's mean is 1: advantages 0, -1, 2, -1
        ("reinforce", -(0 * -1 - 1 * -4 + 2 * -3 - 1 * -4) * math.log(2) / 4),
    ],
)
def test_loss_of_each_preset_by_hand(name, by_hand):
    terms, _ = loss_of(PRESETS[name])
    assert set(terms) == {"policy"}
    assert terms["policy"].item() == pytest.approx(by_hand, rel=1e-6)  # advantages are float32


@pytest.mark.silent_bug(1)
def test_three_tokens_by_hand_in_value_and_gradient():
    """One row, A = 2, ratios 1.25 (clipped), 0.5 and 1: loss -(2.4 + 1 + 2) / 3 and gradients 0, -1 / 3, -2 / 3."""
    logprobs = torch.tensor([[0.5, 0.25, 0.8]]).double().log().requires_grad_()
    old = torch.tensor([[0.4, 0.5, 0.8]]).double().log()
    keep = torch.ones(1, 3, dtype=torch.bool)
    terms, _ = loss_of(PRESETS["grpo"], logprobs, keep=keep, advantages=torch.full((1, 3), 2.0), old=old)
    assert terms["policy"].item() == pytest.approx(-5.4 / 3, rel=1e-12)
    slope = torch.autograd.grad(terms["policy"], logprobs)[0]
    torch.testing.assert_close(slope, torch.tensor([[0.0, -1 / 3, -2 / 3]], dtype=torch.float64))


def test_kl_and_entropy_terms_by_hand():
    """One row of two tokens, ref - logprob = log 2 and 0, ratio 1: k3 is 2 - log 2 - 1 and 0; entropies 0.7 and 0.1."""
    keep = torch.ones(1, 2, dtype=torch.bool)
    logprobs, entropy = torch.tensor([[[-1.0, -2.0]], [[0.7, 0.1]]], dtype=torch.float64)
    ref = logprobs + math.log(2) * torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    choices = {"keep": keep, "advantages": torch.zeros(1, 2), "old": None}
    terms, stats = loss_of(PRESETS["grpo"], logprobs, ref=ref, entropy=entropy, **choices)
    assert terms["kl"].item() == pytest.approx((1 - math.log(2)) / 2, rel=1e-12)
    assert terms["entropy"].item() == pytest.approx(0.4, rel=1e-12)
    assert stats["kl/ref_nats"].mean == pytest.approx((1 - math.log(2)) / 2, rel=1e-12)
    assert (stats["entropy/nats"].mean, stats["entropy/nats"].count) == (pytest.approx(0.4), 2)


@pytest.mark.silent_bug(41)
def test_statistics_by_hand():
    """Of eight kept actions the ratios are 1.5, 0.5, 1, 1, 1, 1.1, 2 and 1; 1.5 is clipped above and 0.5 below."""
    _, stats = loss_of(PRESETS["grpo"])
    assert {name: stat.count for name, stat in stats.items()} == dict.fromkeys(
        ["ratio", "kl/old_nats", "clip/high_frac", "clip/low_frac"], 8
    )
    assert stats["ratio"].mean == pytest.approx(9.1 / 8, rel=1e-12)
    assert (stats["ratio"].min, stats["ratio"].max) == (pytest.approx(0.5), pytest.approx(2.0))
    log_ratios = [math.log(r) for r in (1.5, 0.5, 1.1, 2.0)]
    assert stats["kl/old_nats"].mean == pytest.approx(-sum(log_ratios) / 8, rel=1e-12)
    assert (stats["clip/high_frac"].mean, stats["clip/low_frac"].mean) == (1 / 8, 1 / 8)
    _, unclipped = loss_of(PRESETS["rloo"])
    assert (unclipped["clip/high_frac"].mean, unclipped["clip/low_frac"].mean) == (0, 0)


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.silent_bug(1)
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("surrogate", ["clip", "reinforce"])
@pytest.mark.parametrize(
    ("estimator", "choice"),
    [("k1", "naive"), ("k1", "unbiased"), ("k2", "naive"), ("k3", "naive"), ("k3", "unbiased")],
)
def test_gradients_equal_finite_differences(average, surrogate, estimator, choice):
    """k2 with its detached ratio is missing: its gradient is on purpose not that of its value (see test_divergence)."""
    torch.manual_seed(0)
    objective = Objective(surrogate=surrogate, average=average, kl=estimator, kl_gradient=choice)
    logits = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
    actions = torch.randint(5, (4, 3, 1))
    start = logits.detach().log_softmax(-1)
    old = start.gather(-1, actions)[..., 0] + 0.15 * torch.randn(4, 3, dtype=torch.float64)
    ref = start.gather(-1, actions)[..., 0] + 0.5 * torch.randn(4, 3, dtype=torch.float64)

    def loss(logits: Tensor) -> Tensor:
        log_p = logits.log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return sum_of(loss_of(objective, log_p.gather(-1, actions)[..., 0], old=old, ref=ref, entropy=entropy)[0])

    assert torch.autograd.gradcheck(loss, (logits,), eps=1e-6, atol=1e-8, rtol=1e-6)


def slope_of(objective: Objective, logprobs: Tensor = LOGPROBS, **choices: Any) -> Tensor:
    leaf = logprobs.clone().requires_grad_()
    terms, _ = loss_of(objective, leaf, **choices)
    return torch.autograd.grad(sum_of(terms), leaf)[0]


@pytest.mark.silent_bug(2)
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("old", [None, LOGPROBS], ids=["detached", "stored"])
def test_on_policy_the_ratio_is_one_and_the_gradient_is_that_of_reinforce(name, average, old):
    objective = replace(PRESETS[name], average=average)
    _, stats = loss_of(objective, old=old)
    assert (stats["ratio"].min, stats["ratio"].max, stats["ratio"].std) == (1, 1, 0)
    assert (stats["clip/high_frac"].sum, stats["clip/low_frac"].sum, stats["kl/old_nats"].sum) == (0, 0, 0)
    slope = slope_of(objective, old=old)
    assert torch.equal(slope, slope_of(replace(objective, surrogate="reinforce"), old=old))
    total = loss_total(KEEP, average=average, max_length=MAX_LENGTH)
    by_hand = -loss_weights(KEEP, average=average, total=total) * advantages_of(objective)
    torch.testing.assert_close(slope, by_hand, rtol=1e-12, atol=0)


# --- invariances -----------------------------------------------------------------------------------------------------

ALL = [replace(PRESETS[name], average=average, kl=kl) for name in PRESETS for average in AVERAGES for kl in ESTIMATORS]
everything = pytest.mark.parametrize("objective", ALL, ids=lambda o: f"{o.baseline}-{o.surrogate}-{o.average}-{o.kl}")


@pytest.mark.silent_bug(5)
@everything
@pytest.mark.parametrize("old", [None, OLD], ids=["detached", "stored"])
def test_what_fills_the_masked_slots_changes_nothing(objective, old):
    entropy = torch.rand(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def outcome(filling: float):
        def fill(x: Tensor) -> Tensor:
            return x.masked_fill(~KEEP, filling)

        leaf = fill(LOGPROBS).requires_grad_()
        filled = {"advantages": fill(advantages_of(objective)), "ref": fill(REF), "entropy": fill(entropy)}
        terms, stats = loss_of(objective, leaf, old=None if old is None else fill(old), **filled)
        values = {name: term.item() for name, term in terms.items()}
        return values, stats, torch.autograd.grad(sum_of(terms), leaf)[0].tolist()

    for filling in (1e6, -1e6, float("nan"), float("inf"), -float("inf")):
        assert outcome(filling) == outcome(0.0)


@pytest.mark.silent_bug(13)
@everything
def test_rows_that_are_not_kept_might_as_well_be_absent(objective):
    """An error or truncated row keeps its actions in the mask, but not in keep."""
    keep = KEEP & torch.tensor([True, False, True, True])[:, None]
    rows = torch.tensor([0, 2, 3])
    advantages = advantages_of(objective)
    inside = slope_of(objective, keep=keep, advantages=advantages, ref=REF)
    outside = slope_of(
        objective, LOGPROBS[rows], keep=KEEP[rows], advantages=advantages[rows], old=OLD[rows], ref=REF[rows]
    )
    torch.testing.assert_close(inside[rows], outside, rtol=1e-12, atol=0)
    assert not inside[1].any()


@pytest.mark.silent_bug(11)
@everything
@settings(max_examples=8)
@given(data=st.data())
def test_one_batch_equals_its_pieces(objective, data):
    """Rows in any order and any pieces, each padded or cut to its own width; one piece has nothing kept at all."""
    logits = torch.randn(5, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    theta = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    lengths = torch.tensor([1, 3, 4, 2, 4])
    keep = torch.arange(4)[None] < lengths[:, None]
    keep[4] = False  # an unscored row
    rewards = torch.tensor([1.0, 0.0, 3.0, 0.5, float("nan")])
    advantages, _ = group_advantages(
        rewards, torch.tensor([0, 0, 1, 1, 1]), keep, baseline=objective.baseline, scale=objective.scale
    )
    total = loss_total(keep, average=objective.average, max_length=MAX_LENGTH)
    weights = loss_weights(keep, average=objective.average, total=total)
    order = data.draw(st.permutations(range(4)))
    cuts = sorted(data.draw(st.sets(st.integers(1, 3))))
    pieces = [*torch.tensor(order).tensor_split(cuts), torch.tensor([4])]

    def run(pieces: list[Tensor], columns) -> tuple[Tensor, dict]:
        leaf = theta.clone().requires_grad_()
        whole_stats: dict = {}
        for rows in pieces:
            width = columns(rows)
            log_p = (logits[rows, :width] @ leaf).log_softmax(-1)
            entropy = -(log_p.exp() * log_p).sum(-1)
            inputs = LossInputs(
                advantages[rows, :width],
                keep[rows, :width],
                weights[rows, :width],
                log_p[..., 0].detach() - 0.1,
                Likelihood(log_p[..., 1].detach()),
            )
            terms, stats = policy_loss(Likelihood(log_p[..., 0], entropy), inputs, objective)
            sum_of(terms).backward()
            for name, stat in stats.items():
                whole_stats[name] = whole_stats[name] + stat if name in whole_stats else stat
        return leaf.grad, whole_stats

    slope, stats = run([torch.arange(5)], lambda rows: 4)
    slope_in_pieces, stats_in_pieces = run(pieces, lambda rows: int(lengths[rows].max()))
    torch.testing.assert_close(slope_in_pieces, slope, rtol=1e-10, atol=1e-14)
    for name, stat in stats.items():
        in_pieces = stats_in_pieces[name]
        assert (in_pieces.count, in_pieces.min, in_pieces.max) == (stat.count, stat.min, stat.max)
        assert (in_pieces.sum, in_pieces.sum_sq) == pytest.approx((stat.sum, stat.sum_sq), rel=1e-10, abs=1e-14)


def test_a_piece_with_nothing_kept_has_zero_loss_and_zero_gradient():
    keep = torch.zeros(4, 3, dtype=torch.bool)
    terms, stats = loss_of(PRESETS["grpo"], keep=keep, advantages=torch.ones(4, 3), ref=REF)
    assert [term.item() for term in terms.values()] == [0, 0]
    assert all(stat.count == 0 for stat in stats.values())
    assert not slope_of(PRESETS["grpo"], keep=keep, advantages=torch.ones(4, 3), ref=REF).any()


# --- choices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ({"baseline": "median"}, r"objective\.baseline='median' is not one of 'none', 'mean', 'leave_one_out'"),
        ({"scale": "std"}, r"objective\.scale='std' is not one of 'none', 'group', 'batch'"),
        ({"surrogate": "ppo"}, r"objective\.surrogate='ppo' is not one of 'clip', 'reinforce'"),
        ({"average": "mean"}, r"objective\.average='mean' is not one of .*'sequence_sum', 'sum'"),
        ({"kl": "k4"}, r"objective\.kl='k4' is not one of 'k1', 'k2', 'k3'"),
        ({"kl_gradient": "biased"}, r"objective\.kl_gradient='biased' is not one of 'unbiased', 'naive'"),
        ({"clip_low": -0.1}, r"clip_low=-0\.1.*0 <= clip_low <= 1"),
        ({"clip_low": 1.5}, r"clip_low=1\.5.*0 <= clip_low <= 1"),
        ({"clip_high": -0.1}, r"clip_high=-0\.1.*clip_high >= 0"),
        ({"clip_high": float("nan")}, r"clip_high=nan.*clip_high >= 0"),
        ({"scale_eps": -1.0}, r"scale_eps=-1\.0 .*use 1e-4"),
        ({"scale_eps": float("nan")}, r"scale_eps=nan .*use 1e-4"),
    ],
)
def test_a_choice_that_does_not_exist_is_refused_when_the_objective_is_built(choices, says):
    with pytest.raises(GruppoError, match=says):
        Objective(**choices)


@pytest.mark.parametrize(
    ("objective", "run", "says"),
    [
        (PRESETS["grpo"], {"group_size": 1}, "gives no baseline for baseline='mean'.*--rollout.group-size 2"),
        (PRESETS["rloo"], {"group_size": 1}, "baseline='leave_one_out'.*at least 2.*--objective reinforce"),
        (Objective(baseline="none"), {"group_size": 1}, "gives no spread to scale by.*scale='group'"),
        (PRESETS["rloo"], {"group_size": 4, "updates_per_row": 2}, "used for 2 updates.*--objective.surrogate clip"),
        (PRESETS["reinforce"], {"group_size": 1, "updates_per_row": 3}, "used for 3 updates.*--optim.epochs 1"),
        (
            Objective(kl="k1", kl_gradient="naive"),
            {"group_size": 2, "kl_coef": 0.1},
            "gradient of zero in expectation, so kl_coef=0.1 holds nothing.*--objective.kl-gradient unbiased",
        ),
    ],
)
def test_a_combination_that_cannot_learn_is_refused_with_the_way_out(objective, run, says):
    with pytest.raises(GruppoError, match=says):
        objective.check(**run)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_pass_their_own_check(name):
    PRESETS[name].check(group_size=2, kl_coef=0.1)


@pytest.mark.parametrize(
    ("objective", "run"),
    [
        (PRESETS["reinforce"], {"group_size": 1}),
        (PRESETS["grpo"], {"group_size": 2, "updates_per_row": 8}),
        (Objective(kl="k1", kl_gradient="naive"), {"group_size": 2}),  # no KL is asked for
    ],
)
def test_what_can_learn_is_let_through(objective, run):
    objective.check(**run)


def test_a_clip_that_nothing_can_reach_stops_nothing():
    """Ratios live in [0, inf): clip_low 1 and clip_high inf are the importance-weighted objective."""
    objective = replace(PRESETS["grpo"], clip_low=1.0, clip_high=float("inf"), average="sum")
    terms, stats = loss_of(objective)
    by_hand = -(RATIO * advantages_of(objective))[KEEP].sum()
    assert terms["policy"].item() == pytest.approx(by_hand.item(), rel=1e-12)
    assert stats["clip/high_frac"].sum == stats["clip/low_frac"].sum == 0


# --- in words --------------------------------------------------------------------------------------------------------


def described(objective: Objective, kl_coef: float = 0.04) -> str:
    return "\n".join(describe(objective, kl_coef=kl_coef, group_size=8, max_length=64))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "grpo",
            [
                "(reward - mean of the group) / (std of the group + 0.0001)",
                "clip(r, 0.8, 1.2) A",
                "8 rows a group",
                "mean over the tokens of a row, then over the rows",
            ],
        ),
        ("dr_grpo", ["A = (reward - mean of the group), one for all tokens", "sum over tokens / (rows x 64)"]),
        ("dapo", ["clip(r, 0.8, 1.28) A", "mean over all kept tokens of the update"]),
        (
            "rloo",
            ["mean of the group's other rows", "A logprob", "sum over the tokens of a row, then mean over the rows"],
        ),
        ("reinforce", ["A = (reward - mean of the batch)", "A logprob"]),
    ],
)
def test_describe_says_what_the_objective_is(name, says):
    text = described(PRESETS[name])
    assert [phrase for phrase in says if phrase not in text] == []
    assert "0.04 x KL(policy || reference) by k3" in text
    assert "no reference is loaded" in described(PRESETS[name], kl_coef=0.0)


def other_choices() -> list[tuple[str, Objective]]:
    """Every choice that is not the default, one at a time."""
    hints, changed = get_type_hints(Objective), []
    for field in fields(Objective):
        if choices := get_args(hints[field.name]):
            changed += [(field.name, value) for value in choices if value != field.default]
        else:
            changed.append((field.name, not field.default if field.default is False else field.default + 0.05))
    return [(name, Objective(**{name: value})) for name, value in changed]


@pytest.mark.parametrize(("field", "objective"), other_choices(), ids=lambda x: x if isinstance(x, str) else "")
def test_no_choice_goes_unmentioned(field, objective):
    assert described(objective) != described(Objective()), field
