"""Environments of Gymnasium as conversations: observations and actions are text.

    pip install gymnasium
    gruppo train plain --model smollm2-135m --data lake.jsonl \
        --environment examples/gymnasium_text.py:FrozenLake --environment.turns 20

Write a class for each environment. The policy answers with the number of an action; the last number
of an answer counts. The reward is the sum of the rewards of the steps.
"""

from __future__ import annotations

import re

import gymnasium

HIGHLIGHT = re.compile(r"\x1b\[[\d;]+m(.*?)\x1b\[0m", re.DOTALL)
"""A colored part of a text rendering: in FrozenLake, where the agent is."""


class FrozenLake:
    """One episode of a game with numbered actions and a rendering as text."""

    game = "FrozenLake-v1"

    def __init__(self) -> None:
        self._env = gymnasium.make(self.game, render_mode="ansi")
        self.rewards: list[float] = []

    def reset(self, seed: int) -> str:
        """Start the episode; every sample of a group starts alike."""
        observation, _ = self._env.reset(seed=seed % 2**31)
        last = int(self._env.action_space.n) - 1
        return f"\n\n{self._text(observation)}\n\nAnswer with a number from 0 to {last}."

    def step(self, text: str) -> str | None:
        numbers = re.findall(r"-?\d{1,9}", text)
        if not numbers or not self._env.action_space.contains(int(numbers[-1])):
            self.rewards.append(0.0)
            return "That is no action. Answer with the number of an action."
        observation, reward, terminated, truncated, _ = self._env.step(int(numbers[-1]))
        self.rewards.append(float(reward))
        return None if terminated or truncated else self._text(observation)

    def get_reward(self) -> float:
        return sum(self.rewards)

    def close(self) -> None:
        self._env.close()

    def _text(self, observation: object) -> str:
        picture = HIGHLIGHT.sub(r"[\1]", self._env.render())
        return f"{observation}\n{picture.strip()}"


class CliffWalking(FrozenLake):
    """The same with a cliff: -1 for each step and -100 for a fall."""

    game = "CliffWalking-v1"
