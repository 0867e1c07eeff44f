"""The loss of each preset on one small batch by hand, and what no padding, split or filling may
change."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tests.core.four_rows import (
    A0,
    A1,
    GROUP_IDS,
    KEEP,
    LENGTHS,
    LOGPROBS,
    MAX_LENGTH,
    OLD,
    RATIO,
    REF,
    advantages_of,
    loss_of,
    slope_of,
    sum_of,
)
from torch import Tensor

from gruppo.core.advantages import group_advantages
from gruppo.core.loss import LossInputs, policy_loss
from gruppo.core.objective import GRPO, GSPO, PRESETS, Objective
from gruppo.core.weights import Average, loss_total, loss_weights
from gruppo.types import GruppoError, Likelihood

AVERAGES = get_args(Average)

# --- the presets by hand --------------------------------------------------------------------------


def gate(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.silent_bug(1)
@pytest.mark.parametrize(
    ("name", "by_hand"),
    [
        # per action, in units of the row's |A|: row 0 clipped -1.2 (DAPO -1.28); row 1 clipped 0.8,
        # then 1, 1; row 2 -1, -1.1; row 3 unclipped 2, then 1
        ("grpo", (-1.2 * A0 + (0.8 + 1 + 1) / 3 * A0 - (1 + 1.1) / 2 * A1 + (2 + 1) / 2 * A1) / 4),
        ("dapo", ((-1.28 + 0.8 + 1 + 1) * A0 + (-1 - 1.1 + 2 + 1) * A1) / 8),
        ("dr_grpo", ((-1.2 + 0.8 + 1 + 1) * 0.5 + (-1 - 1.1 + 2 + 1) * 1.5) / (4 * MAX_LENGTH)),
        # leave-one-out advantages 1, -1, 3, -3; log-probs of the rows -1, -4, -3, -4 times log 2
        ("rloo", -(1 * -1 - 1 * -4 + 3 * -3 - 3 * -4) * math.log(2) / 4),
        # the batch's mean is 1: advantages 0, -1, 2, -1
        ("reinforce", -(0 * -1 - 1 * -4 + 2 * -3 - 1 * -4) * math.log(2) / 4),
        ("reinforce_pp", (0 + (0.8 + 1 + 1) - (1 + 1.1) * 2 + (2 + 1)) / 8),
        # advantages +-0.5 and +-1.5
        ("ppo", ((-1.2 + 0.8 + 1 + 1) * 0.5 + (-1 - 1.1 + 2 + 1) * 1.5) / 8),
        # each prompt's rows have four tokens
        ("nanochat", -((-1 + 4) * 0.5 / 4 + (-3 + 4) * 1.5 / 4) / 2 * math.log(2)),
        # geometric means of the rows 1.5, 0.79, 1.05 and sqrt 2: all but the last clipped
        ("gspo", (-1.0004 * A0 + 0.9997 * A0 - 1.0004 * A1 + 2**0.5 * A1) / 4),
        # ratios times log-probs, in units of -log 2
        ("cispo", ((1.5 - (0.5 + 2 + 1)) * A0 + (2 + 1.1 - (2 * 3 + 1)) * A1) * math.log(2) / 8),
        (
            "sapo",
            (
                -4 * gate(0.5) * A0
                + 4 / 1.05 * (gate(1.05 * -0.5) + 0.5 + 0.5) / 3 * A0
                - 4 * (0.5 + gate(0.1)) / 2 * A1
                + 4 / 1.05 * (gate(1.05) + 0.5) / 2 * A1
            )
            / 4,
        ),
    ],
)
def test_loss_of_each_preset_by_hand(name, by_hand):
    """What policy_loss makes of one advantage a row; test_credit has those of REINFORCE++ and
    PPO."""
    terms, _ = loss_of(PRESETS[name])
    assert set(terms) == {"policy"}
    assert terms["policy"].item() == pytest.approx(by_hand, rel=1e-6)  # advantages are float32


@pytest.mark.silent_bug(1)
def test_three_tokens_by_hand_in_value_and_gradient():
    """One row, A = 2, ratios 1.25 (clipped), 0.5 and 1: loss -(2.4 + 1 + 2) / 3 and gradients 0, -1
    / 3, -2 / 3."""
    logprobs = torch.tensor([[0.5, 0.25, 0.8]]).double().log().requires_grad_()
    old = torch.tensor([[0.4, 0.5, 0.8]]).double().log()
    loss_mask = torch.ones(1, 3, dtype=torch.bool)
    terms, _ = loss_of(
        PRESETS["grpo"], logprobs, loss_mask=loss_mask, advantages=torch.full((1, 3), 2.0), old=old
    )
    assert terms["policy"].item() == pytest.approx(-5.4 / 3, rel=1e-12)
    slope = torch.autograd.grad(terms["policy"], logprobs)[0]
    torch.testing.assert_close(slope, torch.tensor([[0.0, -1 / 3, -2 / 3]], dtype=torch.float64))


def test_kl_and_entropy_terms_by_hand():
    """One row of two tokens, ref - logprob = log 2 and 0, ratio 1: k3 is 2 - log 2 - 1 and 0;
    entropies 0.7 and 0.1."""
    loss_mask = torch.ones(1, 2, dtype=torch.bool)
    logprobs, entropy = torch.tensor([[[-1.0, -2.0]], [[0.7, 0.1]]], dtype=torch.float64)
    ref = logprobs + math.log(2) * torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    choices = {"loss_mask": loss_mask, "advantages": torch.zeros(1, 2), "old": None}
    terms, stats = loss_of(PRESETS["grpo"], logprobs, ref=ref, entropy=entropy, **choices)
    assert terms["kl"].item() == pytest.approx((1 - math.log(2)) / 2, rel=1e-12)
    assert terms["entropy"].item() == pytest.approx(0.4, rel=1e-12)
    assert stats["kl/ref_nats"].mean == pytest.approx((1 - math.log(2)) / 2, rel=1e-12)
    assert (stats["entropy/nats"].mean, stats["entropy/nats"].count) == (pytest.approx(0.4), 2)


@pytest.mark.silent_bug(41)
def test_statistics_by_hand():
    """Of eight kept actions the ratios are 1.5, 0.5, 1, 1, 1, 1.1, 2 and 1; 1.5 is clipped above
    and 0.5 below."""
    _, stats = loss_of(PRESETS["grpo"])
    assert {name: stat.count for name, stat in stats.items()} == dict.fromkeys(
        ["ratio", "kl/old_nats", "kl/old_k3_nats", "clip/high_frac", "clip/low_frac"], 8
    )
    assert stats["ratio"].mean == pytest.approx(9.1 / 8, rel=1e-12)
    assert (stats["ratio"].min, stats["ratio"].max) == (pytest.approx(0.5), pytest.approx(2.0))
    log_ratios = [math.log(r) for r in (1.5, 0.5, 1.1, 2.0)]
    assert stats["kl/old_nats"].mean == pytest.approx(-sum(log_ratios) / 8, rel=1e-12)
    assert stats["kl/old_k3_nats"].mean == pytest.approx(
        (9.1 - 8 - sum(log_ratios)) / 8, rel=1e-12
    )  # r - 1 - log r
    assert (stats["clip/high_frac"].mean, stats["clip/low_frac"].mean) == (1 / 8, 1 / 8)
    _, capped = loss_of(
        replace(PRESETS["cispo"], clip_high=0.5)
    )  # of either sign: 2 is above 1.5, none below 0
    assert (capped["clip/high_frac"].sum, capped["clip/low_frac"].sum) == (1, 0)
    _, unclipped = loss_of(PRESETS["rloo"])
    assert (unclipped["clip/high_frac"].mean, unclipped["clip/low_frac"].mean) == (0, 0)


KL_GRADIENTS = [
    ("k1", "naive"),
    ("k1", "unbiased"),
    ("k2", "naive"),
    ("k3", "naive"),
    ("k3", "unbiased"),
]

# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.silent_bug(2)
@pytest.mark.parametrize(
    ("name", "average"),
    [*((name, None) for name in [*PRESETS, "vespo"]), *product(["grpo", "gspo"], AVERAGES)],
)
@pytest.mark.parametrize("old", [None, LOGPROBS], ids=["detached", "stored"])
def test_on_policy_the_ratio_is_one_and_the_gradient_is_that_of_reinforce(name, average, old):
    objective = (PRESETS | {"vespo": Objective(surrogate="vespo")})[name]
    average = average or objective.average
    objective = replace(objective, average=average)
    _, stats = loss_of(objective, old=old)
    assert (stats["ratio"].min, stats["ratio"].max, stats["ratio"].std) == (1, 1, 0)
    assert (stats["clip/high_frac"].sum, stats["clip/low_frac"].sum, stats["kl/old_nats"].sum) == (
        0,
        0,
        0,
    )
    slope, reinforce = (
        slope_of(objective, old=old),
        replace(objective, surrogate="reinforce", ratio="token"),
    )
    torch.testing.assert_close(slope, slope_of(reinforce, old=old), rtol=1e-12, atol=0)
    total = loss_total(KEEP, average=average, max_length=MAX_LENGTH, group_ids=GROUP_IDS)
    by_hand = -loss_weights(
        KEEP, average=average, total=total, group_ids=GROUP_IDS
    ) * advantages_of(objective)
    torch.testing.assert_close(slope, by_hand, rtol=1e-12, atol=0)


# --- invariances ----------------------------------------------------------------------------------

VARIANTS = {
    **PRESETS,
    "vespo": Objective(surrogate="vespo"),
    "gspo of tokens": replace(GSPO, credit="return_to_go"),
    "dual clip": Objective(dual_clip=1.5),
    "nats": Objective(clip_unit="nats", clip_low=0.1, clip_high=0.3),
    "truncated tokens": Objective(correction="truncate", correction_low=0.9, correction_high=1.1),
    "masked tokens": Objective(correction="mask", correction_low=0.9, correction_high=1.1),
    "truncated rows": Objective(
        correction="truncate", correction_level="sequence", correction_high=1.1
    ),
    "masked rows": Objective(correction="mask", correction_level="sequence", correction_high=1.1),
}


def constructed(base: Objective, **choices: Any) -> Objective | None:
    """None where the combination is refused."""
    try:
        return replace(base, **choices)
    except GruppoError:
        return None


ESTIMATORS = ("k1", "k2", "k3")
GRID = {
    (name, average, kl): constructed(objective, average=average, kl=kl)
    for (name, objective), average, kl in product(VARIANTS.items(), AVERAGES, ESTIMATORS)
    if (average, kl) == (objective.average, objective.kl) or name in ("grpo", "gspo", "ppo")
}
everything = pytest.mark.parametrize(
    "objective", [pytest.param(o, id="-".join(where)) for where, o in GRID.items() if o is not None]
)


SAMPLER = OLD + torch.tensor(
    [[0.3, 0, 0], [-0.2, 0.05, 0], [0, 0.02, 0], [-1, 0.2, 0]], dtype=torch.float64
)


@pytest.mark.silent_bug(5)
@everything
@pytest.mark.parametrize("old", [None, OLD], ids=["detached", "stored"])
def test_what_fills_the_masked_slots_changes_nothing(objective, old):
    names = ["entropy", "values", "old_values", "returns"]
    rest = dict(
        zip(
            names,
            torch.rand(4, 4, 3, dtype=torch.float64, generator=torch.manual_seed(0)),
            strict=True,
        )
    )
    rest |= {"advantages": advantages_of(objective), "ref": REF, "sampler_logprobs": SAMPLER}

    def outcome(filling: float):
        def fill(x: Tensor) -> Tensor:
            return x.masked_fill(~KEEP, filling)

        leaves = [fill(LOGPROBS).requires_grad_(), fill(rest["values"]).requires_grad_()]
        filled = {name: fill(x) for name, x in rest.items()} | {"values": leaves[1]}
        terms, stats = loss_of(
            objective, leaves[0], old=None if old is None else fill(old), **filled
        )
        slopes = torch.autograd.grad(sum_of(terms), leaves)
        return (
            {name: term.item() for name, term in terms.items()},
            stats,
            [slope.tolist() for slope in slopes],
        )

    for filling in (1e6, -1e6, float("nan"), float("inf"), -float("inf")):
        assert outcome(filling) == outcome(0.0)


@pytest.mark.silent_bug(11)
@everything
@settings(max_examples=5)
@given(data=st.data())
def test_one_batch_equals_its_micro_batches(objective, data):
    """Rows in any order and any pieces, each padded or cut to its own width; one piece has nothing
    kept at all."""
    logits = torch.randn(5, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    theta = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    lengths = torch.tensor([1, 3, 4, 2, 4])
    loss_mask = torch.arange(4)[None] < lengths[:, None]
    loss_mask[4] = False  # an unscored row
    rewards = torch.tensor([1.0, 0.0, 3.0, 0.5, float("nan")])
    baseline = "mean" if objective.has_critic else objective.baseline
    group_ids = torch.tensor([0, 0, 1, 1, 1])
    advantages, _ = group_advantages(
        rewards, group_ids, loss_mask, baseline=baseline, scale=objective.scale
    )
    total = loss_total(
        loss_mask, average=objective.average, max_length=MAX_LENGTH, group_ids=group_ids
    )
    weights = loss_weights(loss_mask, average=objective.average, total=total, group_ids=group_ids)
    order = data.draw(st.permutations(range(4)))
    cuts = sorted(data.draw(st.sets(st.integers(1, 3))))
    micro_batches = [*torch.tensor(order).tensor_split(cuts), torch.tensor([4])]

    def run(micro_batches: list[Tensor], columns) -> tuple[Tensor, dict]:
        leaf = theta.clone().requires_grad_()
        whole_stats: dict = {}
        for rows in micro_batches:
            width = columns(rows)
            log_p = (logits[rows, :width] @ leaf).log_softmax(-1)
            entropy = -(log_p.exp() * log_p).sum(-1)
            inputs = LossInputs(
                advantages[rows, :width],
                loss_mask[rows, :width],
                weights[rows, :width],
                log_p[..., 0].detach() - 0.1,
                Likelihood(log_p[..., 1].detach()),
                sampler_logprobs=log_p[..., 0].detach() - 0.1 + 0.05 * log_p[..., 2].detach(),
                returns=rewards[rows, None].nan_to_num() + log_p[..., 3].detach(),
            )
            terms, stats = policy_loss(
                Likelihood(log_p[..., 0], entropy, values=log_p[..., 4]), inputs, objective
            )
            sum_of(terms).backward()
            for name, stat in stats.items():
                whole_stats[name] = whole_stats[name] + stat if name in whole_stats else stat
        return leaf.grad, whole_stats

    slope, stats = run([torch.arange(5)], lambda rows: 4)
    slope_in_micro_batches, stats_in_micro_batches = run(
        micro_batches, lambda rows: int(lengths[rows].max())
    )
    torch.testing.assert_close(slope_in_micro_batches, slope, rtol=1e-10, atol=1e-14)
    for name, stat in stats.items():
        in_micro_batches = stats_in_micro_batches[name]
        assert (in_micro_batches.count, in_micro_batches.min, in_micro_batches.max) == (
            stat.count,
            stat.min,
            stat.max,
        )
        assert (in_micro_batches.sum, in_micro_batches.sum_sq) == pytest.approx(
            (stat.sum, stat.sum_sq), rel=1e-10, abs=1e-14
        )


def test_a_micro_batch_with_nothing_kept_has_zero_loss_and_zero_gradient():
    loss_mask = torch.zeros(4, 3, dtype=torch.bool)
    terms, stats = loss_of(GRPO, loss_mask=loss_mask, advantages=torch.ones(4, 3), ref=REF)
    assert [term.item() for term in terms.values()] == [0, 0]
    assert all(stat.count == 0 for stat in stats.values())
    assert not slope_of(GRPO, loss_mask=loss_mask, advantages=torch.ones(4, 3), ref=REF).any()


def test_a_clip_that_nothing_reaches_stops_nothing():
    """Ratios live in [0, inf): clip_low 1 and a far clip_high are the importance-weighted
    objective."""
    objective = replace(GRPO, clip_low=1.0, clip_high=1e9, average="sum")
    terms, stats = loss_of(objective)
    by_hand = -(RATIO * advantages_of(objective))[KEEP].sum()
    assert terms["policy"].item() == pytest.approx(by_hand.item(), rel=1e-12)
    assert stats["clip/high_frac"].sum == stats["clip/low_frac"].sum == 0


@pytest.mark.silent_bug(13)
@pytest.mark.parametrize("average", AVERAGES)
def test_a_correction_that_masks_an_action_takes_it_from_the_numerator_alone(average):
    """Weights 2 and 0.5 outside [0.8, 1.25] and the rest 1: the loss is the others', over the
    denominator of all."""
    weight = torch.ones(4, 3, dtype=torch.float64)
    weight[0, 0], weight[3, 1] = 2.0, 0.5
    objective = Objective(
        average=average, correction="mask", correction_low=0.8, correction_high=1.25
    )
    slope = slope_of(objective, old=None, sampler_logprobs=LOGPROBS - weight.log())
    plain = slope_of(Objective(average=average), old=None)
    assert (slope[0, 0], slope[3, 1]) == (0, 0) and plain[0, 0] != 0 and plain[3, 1] != 0
    slope[0, 0], slope[3, 1] = plain[0, 0], plain[3, 1]
    assert torch.equal(slope, plain)


def test_a_correction_weighs_the_policy_term_and_neither_kl_nor_value():
    entropy = torch.ones(4, 3, dtype=torch.float64)
    rest = {
        "ref": REF,
        "entropy": entropy,
        "values": entropy,
        "returns": entropy * 3,
        "old": LOGPROBS,
    }
    plain, _ = loss_of(Objective(average="sum"), **rest)
    doubled, stats = loss_of(
        Objective(average="sum", correction="truncate"),
        sampler_logprobs=LOGPROBS - math.log(2),
        **rest,
    )
    torch.testing.assert_close(doubled.pop("policy"), 2 * plain.pop("policy"), rtol=1e-12, atol=0)
    assert doubled == plain
    assert (stats["correction/weight"].mean, stats["correction/weight"].count) == (
        pytest.approx(2),
        sum(LENGTHS),
    )


def test_a_correction_without_the_samplers_log_probs_is_refused():
    with pytest.raises(
        GruppoError, match=r"correction='mask'.*there are none.*objective.correction none"
    ):
        loss_of(Objective(correction="mask"))


@pytest.mark.silent_bug(32)
def test_the_value_term_by_hand_has_the_weights_of_the_actions_and_the_stored_values():
    """Two actions: V 3, 3; stored 1, 1; R 2, 4; clip 0.5: halves of max(1, 0.25) and max(1, 6.25),
    averaged."""
    loss_mask = torch.ones(1, 2, dtype=torch.bool)
    one = torch.ones(1, 2, dtype=torch.float64)
    rest = {
        "loss_mask": loss_mask,
        "advantages": one,
        "old": None,
        "values": 3 * one,
        "returns": one * torch.tensor([[2.0, 4.0]]),
    }
    terms, stats = loss_of(Objective(value_clip=0.5), -one, old_values=one, **rest)
    assert terms["value"].item() == pytest.approx((1 + 6.25) / 4, rel=1e-12)
    assert stats["value/clip_frac"].mean == 1
    terms, stats = loss_of(Objective(value_clip=0.0), -one, old_values=one, **rest)
    assert terms["value"].item() == pytest.approx((1 + 1) / 4, rel=1e-12)
    assert stats["value/clip_frac"].mean == 0


def test_a_kl_in_the_reward_is_no_term_of_the_loss_but_is_still_measured():
    terms, stats = loss_of(PRESETS["reinforce_pp"], ref=REF)
    assert set(terms) == {"policy"}
    _, in_loss = loss_of(replace(GRPO, kl="k1"), ref=REF)
    assert stats["kl/ref_nats"] == in_loss["kl/ref_nats"]


@pytest.mark.silent_bug(37)
def test_the_same_change_of_each_dimension_gives_one_ratio_under_mean_and_its_power_under_sum():
    loss_mask, old = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.float64)
    for dims in (1, 4, 256):
        moved = old + dims * math.log(1.01)  # a density 1.01 times as high in each dimension
        rest = {"loss_mask": loss_mask, "advantages": torch.ones(1, 1), "old": old, "dims": dims}
        _, mean = loss_of(Objective(dims="mean"), moved, **rest)
        _, joint = loss_of(Objective(), moved, **rest)
        assert mean["ratio"].mean == pytest.approx(1.01, rel=1e-12)
        assert joint["ratio"].mean == pytest.approx(1.01**dims, rel=1e-12)


def test_a_clip_in_nats_bounds_the_log_ratio():
    """Log-ratios 0.4 and -0.2 kept in [-0.1, 0.3], for advantages of the sign that the clip
    stops."""
    loss_mask = torch.ones(1, 2, dtype=torch.bool)
    moved = torch.tensor([[0.4, -0.2]], dtype=torch.float64)
    objective = Objective(clip_unit="nats", clip_low=0.1, clip_high=0.3, average="sum")
    terms, stats = loss_of(
        objective, moved, loss_mask=loss_mask, advantages=torch.tensor([[1.0, -1.0]]), old=0 * moved
    )
    assert terms["policy"].item() == pytest.approx(-math.exp(0.3) + math.exp(-0.1), rel=1e-12)
    assert (stats["clip/high_frac"].sum, stats["clip/low_frac"].sum) == (1, 1)
