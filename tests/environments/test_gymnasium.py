"""Environments of Gymnasium as conversations, with the package itself."""

from __future__ import annotations

import sys
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
from tests import tiny
from tests.environments.adapted import said, trained

from gruppo.environments.gymnasium import gymnasium_factory
from gruppo.types import GruppoError

gymnasium = pytest.importorskip("gymnasium")


def opened(name, credit="outcome"):
    return gymnasium_factory(
        name, SimpleNamespace(reward=(), objective=SimpleNamespace(credit=credit))
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2**40])
@pytest.mark.parametrize("name", ["Blackjack-v1", "FrozenLake-v1", "CliffWalking-v1", "Taxi-v4"])
def test_an_episode_is_gymnasiums_own_with_the_same_seed_and_actions(name, seed):
    env, draw = gymnasium.make(name), np.random.default_rng(seed)
    observation, _ = env.reset(seed=seed % 2**31)
    with closing(opened(name)()) as episode:
        reply, rewards, is_over = episode.reset(seed=seed), [], False
        while not is_over:
            text = str(observation) if np.isscalar(observation) else str(list(observation))
            assert reply.lstrip().splitlines()[0] == text
            action = int(draw.integers(env.action_space.n))
            observation, reward, terminated, truncated, _ = env.step(action)
            rewards, is_over = [*rewards, float(reward)], terminated or truncated
            reply = episode.step(f"I am at 99, so my move is {action}.")
            assert (reply is None) == is_over
        assert episode.rewards == rewards and episode.get_reward() == sum(rewards)
    env.close()


def test_the_first_message_names_the_actions_and_a_rendering_marks_where_the_agent_is():
    with closing(opened("FrozenLake-v1")()) as episode:
        text = episode.reset(seed=0)
        assert text == "\n\n0\n[S]FFF\nFHFH\nFFFH\nHFFG\n\nAnswer with a number from 0 to 3."


@pytest.mark.parametrize("text", ["", "left", "7", "-1", "2.", "1 or 4", "9" * 30, "9" * 9999])
def test_an_answer_without_an_action_is_said_to_be_none_and_costs_nothing_but_its_turn(text):
    with closing(opened("FrozenLake-v1")()) as episode:
        episode.reset(seed=0)
        reply = episode.step(text)
        if text == "2.":
            assert "no action" not in reply
        else:
            assert (
                reply == "That is no action. Answer with a number from 0 to 3."
                and episode.rewards == [0.0]
            )


def test_rewards_of_turns_are_given_where_credit_tells_turns_apart():
    with closing(opened("CliffWalking-v1", credit="return_to_go")()) as episode:
        episode.reset(seed=0)
        for text in ("0", "north", "0"):
            episode.step(text)
        assert episode.get_turn_rewards() == [-1.0, 0.0, -1.0] and not hasattr(
            episode, "get_reward"
        )


class Words(gymnasium.Env):
    """Observations and actions are texts."""

    observation_space = gymnasium.spaces.Text(100, charset="abcdefghijklmnopqrstuvwxyz ")
    action_space = gymnasium.spaces.Text(10, charset="abcdefghijklmnopqrstuvwxyz ")
    is_closed = False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "say", {}

    def step(self, action):
        return f"heard {action}", float(len(action)), action == "bye", False, {}

    def close(self):
        Words.is_closed = True


class Picture(Words):
    observation_space = gymnasium.spaces.Box(0, 255, (64, 64), np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros((64, 64), np.uint8), {}


class Nested(Words):
    action_space = gymnasium.spaces.Dict(a=gymnasium.spaces.Discrete(2))


class Pair(Words):
    action_space = gymnasium.spaces.MultiDiscrete([2, 3])

    def step(self, action):
        return "again", float(action.sum()), False, False, {}


@pytest.fixture(autouse=True, scope="module")
def registered():
    for kind in (Words, Picture, Nested, Pair, Letters):
        gymnasium.register(f"gruppo/{kind.__name__}-v0", kind)
    yield
    for kind in (Words, Picture, Nested, Pair, Letters):
        del gymnasium.registry[f"gruppo/{kind.__name__}-v0"]


def test_texts_are_observations_and_actions_as_they_are_and_lists_of_numbers_are_json():
    with closing(opened("gruppo/Words-v0")()) as episode:
        assert episode.reset(seed=0) == "\n\nsay\n\nAnswer with a text."
        assert episode.step(" hello\n") == "heard hello" and episode.rewards == [5.0]
        assert episode.step("far too long") == "That is no action. Answer with a text."
        Words.is_closed = False
        assert episode.step("bye") is None
    assert Words.is_closed
    with closing(opened("gruppo/Pair-v0")()) as episode:
        episode.reset(seed=0)
        assert episode.step("[1, 2]") == "again"
        assert "no action" in episode.step("[1, 3]") and "no action" in episode.step("1 2")
        assert episode.rewards == [3.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("FrozenLak-v1", "FrozenLake"),
        ("Taxi-v3", "Taxi-v4"),
        ("no_such_module:Game-v0", "No module named"),
        ("a b", "Malformed"),
        ("gruppo/Picture-v0", "characters as text; it needs at most 4,000"),
        (
            "gruppo/Nested-v0",
            "the actions of gymnasium:gruppo/Nested-v0 are Dict, not one of Discrete",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_no_text_environment_is_one_line(name, said):
    with pytest.raises(GruppoError) as error:
        opened(name)
    assert said in str(error.value)


class Letters(Words):
    """Each answer is worth the number of its vowels, and more than two end the episode."""

    action_space = gymnasium.spaces.Text(100, min_length=0, charset=tiny.CHARACTERS)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "".join(self.np_random.choice([*"abcdefgh"], 8)), {}

    def step(self, action):
        worth = sum(letter in "aeiou" for letter in action)
        return "more", float(worth), worth > 2, False, {}


@pytest.mark.slow
def test_ten_steps_are_trained_and_the_rewards_are_those_of_the_environment(tmp_path):
    changes = {"rollout__stop": ("s", "t"), "rollout__max_new_tokens": 12}
    metrics, rows = trained(tmp_path, environment="gymnasium:gruppo/Letters-v0", **changes)
    assert (
        len(metrics) == 10
        and len(rows) == 120
        and {row["finish"] for row in rows} >= {"length", "stop"}
    )
    for row in rows:
        assert row["reward"] == sum(letter in "aeiou" for text in said(row) for letter in text)
    assert max(len(said(row)) for row in rows) == 3
    assert all(
        own["environment/failed_count"] == own["reward/unscored_count"] == 0 for own in metrics
    )
    starts = {
        (row["step"], row["group"]): {
            r["prompt"][0]["content"]
            for r in rows
            if r["step"] == row["step"] and r["group"] == row["group"]
        }
        for row in rows
    }
    assert {len(prompts) for prompts in starts.values()} == {1} and len(
        set.union(*starts.values())
    ) > 20


def test_rewards_of_turns_train_with_credit_of_later_ones(tmp_path):
    changes = {"rollout__stop": ("s", "t"), "objective__credit": "return_to_go", "steps": 3}
    metrics, rows = trained(tmp_path, environment="gymnasium:gruppo/Letters-v0", **changes)
    assert len(metrics) == 3 and any(row["reward"] for row in rows)


def test_a_package_that_is_not_installed_is_named_before_the_model_is_opened(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(
        GruppoError, match=r'gymnasium:Blackjack-v1 needs the package "gymnasium".*\[gymnasium\]'
    ):
        trained(tmp_path, environment="gymnasium:Blackjack-v1", model="no/such/model")
    with pytest.raises(GruppoError, match="gymnasiun"):
        trained(tmp_path, environment="gymnasiun:Blackjack-v1", model="no/such/model")
