"""What adapters of environments that reward their steps have in common."""

from __future__ import annotations

import json
from typing import Any

SEEDS = 2**31
"""Seeds that NumPy's generators take, those of before 1.17 included."""
MAX_CHARACTERS = 4000
"""Characters of an observation; a longer one is an image or a table, and no text for a model."""


class ScoredEpisode:
    """An episode whose steps are rewarded; ``rewards`` has one number for each answer, None where there was none."""

    def __init__(self) -> None:
        self.rewards: list[float | None] = []


def scored_by(kind: type[ScoredEpisode], config: Any) -> Any:
    """The class with its rewards as rewards of turns, where ``objective.credit`` tells turns apart, else as their sum.

    The rewards of an episode in which none was given are None, which is unscored.
    """

    def get_turn_rewards(self: ScoredEpisode) -> list[float | None]:
        return [0.0 if r is None else r for r in self.rewards] if any(r is not None for r in self.rewards) else []

    def get_reward(self: ScoredEpisode) -> float | None:
        return sum(get_turn_rewards(self)) if get_turn_rewards(self) else None  # type: ignore[arg-type]

    method = get_reward if config.objective.credit == "outcome" else get_turn_rewards
    return type(kind.__name__, (kind,), {"__doc__": kind.__doc__, method.__name__: method})


def as_json(observation: Any) -> str:
    """An observation as JSON; arrays and numbers of NumPy as lists and numbers."""
    return json.dumps(observation, ensure_ascii=False, default=lambda value: value.tolist())
