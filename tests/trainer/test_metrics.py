"""What is said of a batch, on batches made by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests import fakes, tiny
from tests.trainer.test_step import run_in, step

from gruppo.build import Parts
from gruppo.rewards.scoring import Scores
from gruppo.trainer.metrics import (
    _reward_stats,
    batch_metrics,
    correlation,
    explained_variance,
)
from gruppo.trainer.recorder import reduced
from gruppo.trainer.run import Run
from gruppo.types import Rollouts, Stat, TrainBatch

NAN = float("nan")


def rollouts_of(*lengths: int, group_ids: list[int], finish: list[str]) -> Rollouts:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    zeros = torch.zeros(mask.shape)
    return Rollouts(
        prompts=tuple(fakes.prompts(*(f"p{n}" for n in range(max(group_ids) + 1)))),
        group_ids=torch.tensor(group_ids),
        actions=zeros.long(),
        mask=mask,
        lengths=torch.tensor(lengths),
        completions=("",) * len(lengths),
        sampler_logprobs=zeros,
        policy_version=zeros.long(),
        temperature=torch.ones(len(lengths)),
        finish=tuple(finish),
    )


def said_of(run: Run, rollouts: Rollouts, rewards: list[float], **entries: Any) -> dict[str, float]:
    scores = Scores(torch.tensor(rewards), {"digits": torch.tensor(rewards)})
    loss_mask = rollouts.mask & scores.rewards.isfinite()[:, None]
    batch = TrainBatch(
        rollouts=rollouts,
        rewards=scores.rewards,
        advantages=torch.zeros(loss_mask.shape),
        loss_mask=loss_mask,
    )
    return batch_metrics(run, replace(batch, **entries), rollouts, scores)


@pytest.mark.silent_bug(41)
def test_metrics_of_a_batch_without_a_critic_by_hand(tmp_path):
    run = run_in(tmp_path, objective="dapo", objective__overlong=4)  # of 8
    rollouts = rollouts_of(
        2, 8, 6, 1, 4, group_ids=[0, 0, 1, 1, 2], finish=["stop", "length", "stop", "error", "stop"]
    )
    advantages = torch.tensor([[1.0] * 8, [-1.0] * 8, [3.0] * 8, [0.0] * 8, [0.5] * 8]).where(
        rollouts.mask, 0
    )
    result = said_of(run, rollouts, [1.0, 0.0, 0.5, NAN, 0.5], advantages=advantages)
    expected = {
        "reward/mean": 0.5,
        "reward/std": math.sqrt((0.25 + 0.25) / 4),
        "reward/digits/mean": 0.5,
        "reward/std_within_group": math.sqrt(0.5),
        "reward/overlong_mean": -(1.0 + 0.5) / 5,
        "reward/unscored_count": 1,
        "group/zero_spread_frac": 1 / 2,  # the third group is one row
        "group/too_few_scored_count": 1,
        "advantage/mean": (1 - 1 + 3 + 0.5) / 4,  # once a row
        "advantage/mean_abs": (1 + 1 + 3 + 0.5) / 4,
        "advantage/min": -1,
        "advantage/max": 3,
        "len/mean_actions": 21 / 5,
        "len/max_actions": 8,
        "finish/truncated_frac": 1 / 5,
        "finish/error_count": 1,
        "tokens": 21,
        "rollouts": 5,
    }
    assert {name: result[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert not [name for name in result if name.startswith(("value/", "return/"))]


@pytest.mark.silent_bug(41)
def test_metrics_of_a_critic_by_hand(tmp_path):
    run = run_in(tmp_path, objective="ppo")
    rollouts = rollouts_of(2, 1, 3, group_ids=[0, 0, 1], finish=["stop"] * 3)
    odd = 1e6  # where nothing is kept
    returns = torch.tensor([[1.0, 2.0, odd], [3.0, odd, odd], [odd, odd, odd]])
    values = torch.tensor([[1.5, 2.0, odd], [2.0, NAN, odd], [odd, odd, NAN]])
    advantages = torch.tensor([[4.0, -1.0, odd], [0.0, odd, odd], [odd, odd, odd]])
    result = said_of(
        run, rollouts, [1.0, 0.0, NAN], returns=returns, old_values=values, advantages=advantages
    )
    residual = torch.tensor([-0.5, 0.0, 1.0], dtype=torch.float64)
    expected = {
        "return/mean": 2.0,
        "return/std": math.sqrt(2 / 3),
        "value/mean": 5.5 / 3,
        "value/explained_variance_frac": 1 - float(residual.var(correction=0)) / (2 / 3),
        "advantage/mean": 1.0,
        "advantage/mean_abs": 5 / 3,
        "advantage/std": math.sqrt((9 + 4 + 1) / 3),
    }
    assert {name: result[name] for name in expected} == pytest.approx(expected, rel=1e-6)


SIZES = [3, 2, 4, 1]
"""Rows of each group."""
A = [1.0, 0.0, NAN, 2.0, 2.0, NAN, NAN, NAN, NAN, 0.5]
B = [3.0, 5.0, 7.0, 1.0, 2.0, 7.0, NAN, NAN, 8.0, NAN]
SUM = [1.0, 0.0, 0.5, 2.0, 2.0, NAN, 3.0, NAN, NAN, 4.0]
OF_SUM = {
    "reward/mean": 12.5 / 7,
    "reward/std": math.sqrt(34.25 / 7 - (12.5 / 7) ** 2),
    "reward/min": 0.0,
    "reward/max": 4.0,
    "reward/std_within_group": (0.5 + 0.0) / 2,  # two groups have fewer than two scored rows
    "reward/std_between_groups": math.sqrt(
        (1.875**2 + 0.375**2 + 0.625**2 + 1.625**2) / 4
    ),  # of 0.5, 2, 3, 4
    "reward/best_of_group_mean": (1 + 2 + 3 + 4) / 4,
    "reward/worst_of_group_mean": (0 + 2 + 3 + 4) / 4,
    "reward/normalised_mean_abs": (1 + 1) / 7,  # 1, -1, 0 of the first group, and 0 without spread
    "reward/normalised_min": -1.0,
    "reward/normalised_max": 1.0,
    "group/zero_spread_frac": 2 / 3,  # the last group is one row
    "group/too_few_scored_count": 1,
}
OF_A = {
    "mean": 5.5 / 5,
    "std": math.sqrt(9.25 / 5 - 1.1**2),
    "min": 0.0,
    "max": 2.0,
    "std_within_group": math.sqrt(0.5) / 2,
    "std_between_groups": math.sqrt(
        (0.5**2 + 1 + 0.5**2) / 3
    ),  # of 0.5, 2, 0.5; one group is not scored at all
    "best_of_group_mean": 3.5 / 3,
    "worst_of_group_mean": 2.5 / 3,
    "normalised_mean_abs": math.sqrt(2) / 5,
    "normalised_min": -math.sqrt(0.5),
    "normalised_max": math.sqrt(0.5),
    "zero_spread_frac": 1 / 2,  # of the groups of several rows that it scores
    "too_few_scored_count": 0,
}
OF_B = {
    "mean": 33 / 7,
    "std": math.sqrt(201 / 7 - (33 / 7) ** 2),
    "min": 1.0,
    "max": 8.0,
    "std_within_group": (2 + math.sqrt(0.5) + math.sqrt(0.5)) / 3,
    "std_between_groups": math.sqrt((25 + 2.25 + 56.25) / 3 - 14**2 / 9),  # of 5, 1.5, 7.5
    "best_of_group_mean": (7 + 2 + 8) / 3,
    "worst_of_group_mean": (3 + 1 + 7) / 3,
    "normalised_mean_abs": (2 + 4 * math.sqrt(0.5)) / 7,
    "normalised_min": -1.0,
    "normalised_max": 1.0,
    "zero_spread_frac": 0.0,
    "too_few_scored_count": 0,
}
OF_BOTH = {  # the rows that both score: (1, 3), (0, 5) and (2, 1), (2, 2)
    "reward_corr_within_group/a/b": -1
    / math.sqrt(0.5 * 2.5),  # (.5, -1), (-.5, 1) and (0, -.5), (0, .5)
}
OF_TWO = (
    OF_SUM
    | {f"reward/{p}/{n}": x for p, of in (("a", OF_A), ("b", OF_B)) for n, x in of.items()}
    | OF_BOTH
)


def two_rewards(groups: list[int]) -> tuple[Rollouts, Scores]:
    """These groups, as a rank would hold them."""
    ids = [group for group, size in enumerate(SIZES) for _ in range(size)]
    rows = [row for group in groups for row, own in enumerate(ids) if own == group]
    rollouts = rollouts_of(
        *[1] * len(rows), group_ids=[groups.index(ids[row]) for row in rows], finish=["stop"] * 10
    )
    total, a, b = (torch.tensor([each[row] for row in rows]) for each in (SUM, A, B))
    return rollouts, Scores(total, {"a": a, "b": b})


def are(said: dict[str, float], expected: dict[str, float]) -> None:
    assert {name: said.get(name) for name in expected} == pytest.approx(
        expected, rel=1e-6, abs=1e-7
    )


@pytest.mark.silent_bug(22)
@pytest.mark.silent_bug(41)
def test_statistics_of_unequal_groups_and_of_two_rewards_by_hand(tmp_path):
    rollouts, scores = two_rewards([0, 1, 2, 3])
    loss_mask = rollouts.mask & scores.rewards.isfinite()[:, None]
    batch = TrainBatch(
        rollouts=rollouts,
        rewards=scores.rewards,
        advantages=torch.zeros(loss_mask.shape),
        loss_mask=loss_mask,
    )
    logged = batch_metrics(run_in(tmp_path), batch, rollouts, scores)
    are(logged, OF_TWO)
    assert {name for name in logged if name.startswith(("reward/", "reward_corr"))} == {
        *(name for name in OF_TWO if name.startswith("reward")),
        *(f"reward/{kind}_count" for kind in ("unscored", "exception", "timeout", "not_finite")),
    }
    sizes = {name: value for name, value in logged.items() if name.startswith("group/size")}
    assert sizes == {
        "group/size_mean": 2.5,
        "group/size_min": 1,
        "group/size_max": 4,
        **{f"group/size_{n}_count": 1 for n in (1, 2, 3, 4)},
    }


@pytest.mark.silent_bug(12)
@pytest.mark.parametrize("deal", [[[0, 1], [2, 3]], [[3, 1], [2, 0]], [[0], [1, 3], [2]]])
def test_the_statistics_of_ranks_add_up_to_those_of_all_rows(deal):
    total: dict[str, Stat] = {}
    for groups in deal:
        rollouts, scores = two_rewards(groups)
        for name, part in scores.parts.items():
            for key, stat in _reward_stats(f"reward/{name}", part, rollouts.group_ids).items():
                total[key] = total.get(key, Stat()) + stat
    logged = reduced(total)
    assert logged == pytest.approx({name: OF_TWO[name] for name in logged})


def test_correlation_by_hand_and_none_without_spread():
    x, y = torch.tensor([1.0, 2.0, 3.0, 6.0]), torch.tensor([2.0, 1.0, 4.0, 3.0])

    def of(a: torch.Tensor, b: torch.Tensor) -> float:
        return correlation(Stat.of(a), Stat.of(b), Stat.of(a.double() * b.double()))

    assert of(x, y) == pytest.approx(
        4 / math.sqrt(14 * 5)
    )  # deviations -2 -1 0 3 and -.5 -1.5 1.5 .5
    assert of(x, x) == pytest.approx(1) and of(x, 5 - 2 * x) == pytest.approx(-1)
    assert math.isnan(of(x, torch.full((4,), 0.35))) and math.isnan(
        correlation(Stat(), Stat(), Stat())
    )


def test_a_reward_may_have_any_name(tmp_path):
    rollouts, scores = two_rewards([0, 1])
    scores = replace(scores, parts={"a:1/{x}": scores.parts["a"], "mean": scores.parts["b"]})
    batch = TrainBatch(
        rollouts=rollouts,
        rewards=scores.rewards,
        advantages=torch.zeros(rollouts.mask.shape),
        loss_mask=rollouts.mask,
    )
    logged = batch_metrics(run_in(tmp_path), batch, rollouts, scores)
    assert logged["reward/a:1/{x}/mean"] == pytest.approx(5 / 4) and logged[
        "reward/mean/mean"
    ] == pytest.approx(18 / 5)
    assert logged["reward_corr_within_group/a:1/{x}/mean"] < 0


def test_explained_variance_by_hand():
    returns = torch.tensor([1.0, 2.0, 3.0, 6.0])

    def of(values: list[float]) -> float:
        return explained_variance(Stat.of(returns), Stat.of(returns - torch.tensor(values)))

    assert of([1.0, 2.0, 3.0, 6.0]) == 1
    assert of([11.0, 12.0, 13.0, 16.0]) == 1  # a constant error is no variance
    assert of([3.0] * 4) == pytest.approx(0, abs=1e-12)
    assert of([1.0, 2.0, 3.0, 0.0]) == pytest.approx(1 - 6.75 / 3.5)  # worse than a constant
    assert of([-1.0, -2.0, -3.0, -6.0]) == pytest.approx(-3)


@pytest.mark.parametrize("value", [0.0, -1234.567])
def test_returns_that_do_not_vary_by_more_than_rounding_leave_nothing_to_explain(value):
    returns = torch.full((7,), value)
    returns[3] = torch.nextafter(returns[3], torch.tensor(torch.inf))
    values = torch.linspace(-1, 1, 7)
    assert math.isnan(explained_variance(Stat.of(returns), Stat.of(returns - values)))
    assert math.isnan(explained_variance(Stat(), Stat()))


@pytest.mark.silent_bug(41)
def test_reward_metrics_of_a_step_with_overlong_are_those_before_the_penalty(tmp_path):
    run = run_in(tmp_path, objective="dapo", objective__overlong=5, rollout__group_size=8)
    collected, _ = step(run)
    lengths = collected.rollouts.lengths.double()
    penalty = -((lengths - 3) / 5).clamp(0, 1)
    assert 0 > penalty.mean() > -1
    assert collected.metrics["reward/overlong_mean"] == pytest.approx(
        float(penalty.mean()), rel=1e-6
    )
    rewards = torch.tensor(tiny.digits(collected.rollouts.completions), dtype=torch.float64)
    assert collected.metrics["reward/mean"] == pytest.approx(float(rewards.mean()), rel=1e-6)
    shaped = rewards + penalty
    for g in range(4):
        group = shaped[8 * g : 8 * g + 8]
        expected = (group - group.mean()) / (group.std() + 1e-4)
        got = collected.batch.advantages[8 * g : 8 * g + 8, 0].double()
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.silent_bug(41)
@pytest.mark.parametrize(("mode", "low", "high"), [("truncate", 0.9, 1.2), ("mask", 0.9, 1.2)])
def test_correction_metrics_and_the_policy_term_are_those_of_weights_made_by_hand(
    tmp_path, mode, low, high
):
    """A sampler that was off by a known amount: the step's policy term is weighted, its KL and
    entropy are not."""
    changes = {
        "stage__kl_coef": 0.1,
        "stage__entropy_coef": 0.01,
        "optim__epochs": 2,
        "rollout__group_size": 6,
    }
    fields = {
        "objective__correction": mode,
        "objective__correction_low": low,
        "objective__correction_high": high,
    }

    def run_with(correction: dict[str, Any]) -> tuple[Any, dict[str, float]]:
        run = run_in(tmp_path, **changes, **correction)
        generate = run.engine.generate

        def off(*args: Any, **kwargs: Any) -> Rollouts:
            rollouts = generate(*args, **kwargs)
            return replace(rollouts, sampler_logprobs=rollouts.sampler_logprobs - shift(rollouts))

        run.engine.generate = off
        return step(run)

    collected, result = run_with(fields)
    batch = collected.batch
    weights = (batch.old_logprobs - batch.rollouts.sampler_logprobs)[batch.loss_mask].double().exp()
    inside = (weights >= low) & (weights <= high)
    weights = weights.clamp(low, high) if mode == "truncate" else weights.where(inside, 0)
    assert 0.2 < inside.double().mean() < 0.9
    assert result["correction/mean"] == pytest.approx(float(weights.mean()), rel=1e-5)
    assert result["correction/min"] == pytest.approx(float(weights.min()), rel=1e-5)
    assert result["correction/max"] == pytest.approx(float(weights.max()), rel=1e-5)
    _, plain = run_with({})
    assert "correction/mean" not in plain
    assert result["loss/policy"] != pytest.approx(plain["loss/policy"], rel=1e-3)


def shift(rollouts: Rollouts) -> torch.Tensor:
    """Between -0.4 and 0.4 nats, by the token."""
    return ((rollouts.actions % 9) - 4) / 10.0


@pytest.mark.parametrize("preset", ["ppo", "reinforce_pp"])
def test_a_step_that_keeps_nothing_has_no_crash_and_no_update(tmp_path, preset):
    run = run_in(
        tmp_path,
        Parts(rewards=[lambda completions, **_: [None] * len(completions)]),
        objective=preset,
    )
    run.state.step, before = 1, [p.clone() for p in run.parameters]  # step 0 would end the run
    _, logged = step(run)
    assert logged["update/updates_count"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, run.parameters, strict=True))
