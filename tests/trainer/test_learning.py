"""What the whole is for: the reward rises."""

from __future__ import annotations

import pytest
from tests import tiny
from tests.trainer.runs import metrics

from gruppo import api
from gruppo.core.objective import PRESETS


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "updates"), [*((name, 1) for name in PRESETS), ("grpo", 2)])
def test_the_share_of_digits_rises_from_a_third_to_nearly_all(tmp_path, preset, updates):
    """Over seeds 0 to 3, the lowest of the last is 0.84."""
    sizes = {
        "rollout__prompts": 4,
        "rollout__group_size": 6,
        "steps": 9,
        "saving__every": 0,
        "evaluation__every": 0,
    }
    run = api.start(
        tiny.config(tmp_path, objective=preset, optim__minibatches=updates, optim__lr=0.03, **sizes)
    )
    rewards = [row["reward/mean"] for row in metrics(run.folder) if "reward/mean" in row]
    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    assert first < 0.45
    assert last > 0.75
    assert run.before["mean"] < run.after["mean"] or run.before["mean"] > 0.9
