"""The example that wraps environments of Gymnasium, with the package itself."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tests.environments.adapted import said, trained

gymnasium = pytest.importorskip("gymnasium")

from examples.gymnasium_text import CliffWalking, FrozenLake  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples/gymnasium_text.py"


@pytest.mark.parametrize("made", [FrozenLake, CliffWalking])
def test_an_episode_is_gymnasiums_own_with_the_same_seed_and_actions(made):
    env, draw = gymnasium.make(made.game), np.random.default_rng(2)
    observation, _ = env.reset(seed=7)
    with closing(made()) as episode:
        reply, rewards = episode.reset(seed=7 + 2**31), []
        for _ in range(20):
            assert reply.split()[0] == str(observation)
            action = int(draw.integers(env.action_space.n))
            observation, reward, terminated, truncated, _ = env.step(action)
            rewards.append(float(reward))
            reply = episode.step(f"I am at 99, so my move is {action}.")
            assert (reply is None) == (terminated or truncated)
            if reply is None:
                break
        assert episode.rewards == rewards and episode.get_reward() == sum(rewards)
    env.close()


@pytest.mark.parametrize("text", ["", "left", "7", "-1", "1 or 4", "9" * 9999])
def test_an_answer_without_an_action_costs_nothing_but_its_turn(text):
    with closing(FrozenLake()) as episode:
        assert "[S]FFF" in episode.reset(seed=0)
        assert "no action" in episode.step(text) and episode.rewards == [0.0]


def test_a_policy_is_trained_in_it(tmp_path):
    metrics, rows = trained(
        tmp_path, environment=f"{EXAMPLE}:CliffWalking", steps=2, rollout__stop=("0", "1", "2", "3")
    )
    assert len(metrics) == 2 and metrics[-1]["environment/failed_count"] == 0
    for row in rows:
        moves = sum(text.strip()[-1:] in [*"0123"] for text in said(row))
        assert row["reward"] == -moves or row["reward"] <= -100
