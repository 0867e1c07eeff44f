"""What is said of a batch, on batches made by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests import fakes, tiny
from tests.training.test_step import run_in, step

from gruppo.rewards.score import Scores
from gruppo.training.build import Parts
from gruppo.training.measures import batch_metrics, explained_variance
from gruppo.training.run import Run
from gruppo.types import Batch, Rollouts, Stat

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
        outputs=("",) * len(lengths),
        sampler_logprobs=zeros,
        policy_version=zeros.long(),
        temperature=torch.ones(len(lengths)),
        finish=tuple(finish),
    )


def said_of(run: Run, rollouts: Rollouts, rewards: list[float], **entries: Any) -> dict[str, float]:
    scores = Scores(torch.tensor(rewards), {"digits": torch.tensor(rewards)})
    keep = rollouts.mask & scores.rewards.isfinite()[:, None]
    batch = Batch(rollouts, None, scores.rewards, scores.parts, torch.zeros(keep.shape), keep)
    return batch_metrics(run, replace(batch, **entries), rollouts, scores)


@pytest.mark.silent_bug(41)
def test_metrics_of_a_batch_without_a_critic_by_hand(tmp_path):
    run = run_in(tmp_path, objective="dapo", objective__overlong=4)  # of 8
    rollouts = rollouts_of(2, 8, 6, 1, 4, group_ids=[0, 0, 1, 1, 2], finish=["stop", "length", "stop", "error", "stop"])
    advantages = torch.tensor([[1.0] * 8, [-1.0] * 8, [3.0] * 8, [0.0] * 8, [0.5] * 8]).where(rollouts.mask, 0)
    said = said_of(run, rollouts, [1.0, 0.0, 0.5, NAN, 0.5], advantages=advantages)
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
        "advantage/max": 3,
        "len/mean_actions": 21 / 5,
        "len/max_actions": 8,
        "finish/truncated_frac": 1 / 5,
        "finish/error_count": 1,
        "tokens": 21,
        "rollouts": 5,
    }
    assert {name: said[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert not [name for name in said if name.startswith(("value/", "return/"))]


@pytest.mark.silent_bug(41)
def test_metrics_of_a_critic_by_hand(tmp_path):
    run = run_in(tmp_path, objective="ppo")
    rollouts = rollouts_of(2, 1, 3, group_ids=[0, 0, 1], finish=["stop"] * 3)
    odd = 1e6  # where nothing is kept
    returns = torch.tensor([[1.0, 2.0, odd], [3.0, odd, odd], [odd, odd, odd]])
    values = torch.tensor([[1.5, 2.0, odd], [2.0, NAN, odd], [odd, odd, NAN]])
    advantages = torch.tensor([[4.0, -1.0, odd], [0.0, odd, odd], [odd, odd, odd]])
    said = said_of(run, rollouts, [1.0, 0.0, NAN], returns=returns, old_values=values, advantages=advantages)
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
    assert {name: said[name] for name in expected} == pytest.approx(expected, rel=1e-6)


def test_explained_variance_by_hand():
    returns = torch.tensor([1.0, 2.0, 3.0, 6.0])

    def of(values: list[float]) -> float:
        return explained_variance(Stat.of(returns), Stat.of(returns - torch.tensor(values)))

    assert of([1.0, 2.0, 3.0, 6.0]) == 1
    assert of([11.0, 12.0, 13.0, 16.0]) == 1  # a constant error is no variance
    assert of([3.0] * 4) == pytest.approx(0, abs=1e-12)
    assert of([1.0, 2.0, 3.0, 0.0]) == pytest.approx(1 - 6.75 / 3.5)  # worse than a constant
    assert of([-1.0, -2.0, -3.0, -6.0]) == pytest.approx(-3)


@pytest.mark.parametrize("value", [0.0, 0.35, -1234.567])
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
    assert collected.metrics["reward/overlong_mean"] == pytest.approx(float(penalty.mean()), rel=1e-6)
    rewards = torch.tensor(tiny.digits(collected.rollouts.outputs), dtype=torch.float64)
    assert collected.metrics["reward/mean"] == pytest.approx(float(rewards.mean()), rel=1e-6)
    shaped = rewards + penalty
    for g in range(4):
        group = shaped[8 * g : 8 * g + 8]
        expected = (group - group.mean()) / (group.std() + 1e-4)
        got = collected.batch.advantages[8 * g : 8 * g + 8, 0].double()
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.silent_bug(41)
@pytest.mark.parametrize(("mode", "low", "high"), [("truncate", 0.9, 1.2), ("mask", 0.9, 1.2)])
def test_correction_metrics_and_the_policy_term_are_those_of_weights_made_by_hand(tmp_path, mode, low, high):
    """A sampler that was off by a known amount: the step's policy term is weighted, its KL and entropy are not."""
    changes = {"stage__kl_coef": 0.1, "stage__entropy_coef": 0.01, "optim__epochs": 2, "rollout__group_size": 6}
    fields = {"objective__correction": mode, "objective__correction_low": low, "objective__correction_high": high}

    def run_with(correction: dict[str, Any]) -> tuple[Any, dict[str, float]]:
        run = run_in(tmp_path, **changes, **correction)
        generate = run.engine.generate

        def off(*args: Any, **kwargs: Any) -> Rollouts:
            rollouts = generate(*args, **kwargs)
            return replace(rollouts, sampler_logprobs=rollouts.sampler_logprobs - shift(rollouts))

        run.engine.generate = off
        return step(run)

    collected, said = run_with(fields)
    batch = collected.batch
    weights = (batch.old_logprobs - batch.rollouts.sampler_logprobs)[batch.keep].double().exp()
    inside = (weights >= low) & (weights <= high)
    weights = weights.clamp(low, high) if mode == "truncate" else weights.where(inside, 0)
    assert 0.2 < inside.double().mean() < 0.9
    assert said["correction/mean"] == pytest.approx(float(weights.mean()), rel=1e-5)
    assert said["correction/min"] == pytest.approx(float(weights.min()), rel=1e-5)
    assert said["correction/max"] == pytest.approx(float(weights.max()), rel=1e-5)
    _, plain = run_with({})
    assert "correction/mean" not in plain
    assert said["loss/policy"] != pytest.approx(plain["loss/policy"], rel=1e-3)


def shift(rollouts: Rollouts) -> torch.Tensor:
    """Between -0.4 and 0.4 nats, by the token."""
    return ((rollouts.actions % 9) - 4) / 10.0


@pytest.mark.parametrize("preset", ["grpo", "ppo", "reinforce_pp"])
def test_a_step_that_keeps_nothing_has_no_crash_and_no_update(tmp_path, preset):
    run = run_in(tmp_path, Parts(rewards=[lambda completions, **_: [None] * len(completions)]), objective=preset)
    run.step, before = 1, [p.clone() for p in run.parameters]  # step 0 would end the run
    _, said = step(run)
    assert said["update/updates_count"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, run.parameters, strict=True))
