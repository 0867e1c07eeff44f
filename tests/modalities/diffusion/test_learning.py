"""Denoisers in the trainer's own steps: rewards go up, a critic learns, demonstrations have their
mean loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.collecting import collect
from tests.fakes_diffusion import ancestral, ddpm

from gruppo.build import adamw
from gruppo.config.schema import Config, OptimConfig, RolloutConfig, Stage
from gruppo.core.objective import GRPO, PPO
from gruppo.data.source import SourceWrapper
from gruppo.engines import LocalEngine
from gruppo.modalities.common.critic import SharedCritic
from gruppo.modalities.common.reference import ReferenceModel
from gruppo.modalities.diffusion.policy import DenoiserCritic
from gruppo.rewards.scoring import RewardSet
from gruppo.trainer.run import Run
from gruppo.trainer.stages import step_params_at
from gruppo.trainer.update import learn
from gruppo.types import Prompt


class Classes:
    """The three classes in turn."""

    def __init__(self) -> None:
        self.taken = 0

    def take(self, n: int) -> list[Prompt]:
        self.taken += n
        return [
            Prompt(f"class {draw % 3}", draw % 3, draw=draw)
            for draw in range(self.taken - n, self.taken)
        ]

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.taken = state["taken"]


def bright(completions, **_):
    return [float(picture.mean()) for picture in completions]


def run_of(fake, objective, critic=None, **optim):
    config = Config(
        objective=objective,
        rollout=RolloutConfig(prompts=6, group_size=8, max_new_tokens=fake.sampling.max_actions),
        optim=OptimConfig(lr=3e-3, token_budget=128, **optim),
        stage=Stage(kl_coef=1e-3),
    )
    policy, rewards = fake.policy, RewardSet([bright], None, 10.0)
    optimizer = adamw(policy, critic, config)
    reference = ReferenceModel(policy)
    return Run(
        config,
        policy,
        LocalEngine(policy),
        SourceWrapper(Classes()),
        rewards,
        optimizer,
        reference=reference,
        critic=critic,
    )


def steps(run, sampling, count):
    metrics = []
    for _ in range(count):
        step_params = replace(step_params_at(run.config, run.state.step), sampling=sampling)
        collected = collect(run, step_params)
        metrics.append(collected.metrics | learn(run, collected.batch, step_params))
        run.state.step += 1
    return metrics


@pytest.mark.silent_bug(2)
def test_branched_groups_make_pictures_brighter():
    fake = ddpm()
    metrics = steps(
        run_of(fake, replace(GRPO, clip_unit="nats", clip_low=1.0, clip_high=1.0)),
        fake.sampling,
        12,
    )
    assert metrics[-1]["reward/mean"] > metrics[0]["reward/mean"] + 0.2
    assert all(step["ratio/max"] == pytest.approx(1, abs=1e-3) for step in metrics)
    assert max(step["mismatch/max_nats"] for step in metrics) <= 1e-5 * 32


def test_several_updates_of_one_batch_move_the_ratio_and_the_clip_stops_them():
    fake = ancestral()
    metrics = steps(
        run_of(fake, replace(GRPO, clip_unit="nats", clip_low=0.1, clip_high=0.1), epochs=4),
        fake.sampling,
        2,
    )
    assert metrics[1]["ratio/max"] > 1.1 and metrics[1]["clip/high_frac"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("critic_of", [SharedCritic, DenoiserCritic])
def test_a_critic_of_denoising_steps_learns_what_they_come_to(critic_of):
    fake = ancestral()
    metrics = steps(run_of(fake, PPO, critic_of(fake.policy)), fake.sampling, 30)
    assert metrics[-1]["loss/value"] < 0.6 * metrics[0]["loss/value"]
    assert metrics[-1]["reward/mean"] > metrics[0]["reward/mean"] + 0.02
