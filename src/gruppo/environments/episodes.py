"""Common parts of the adapters whose environments reward their steps."""

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
        self._failure: Exception | None = None


def scored_by(kind: type[ScoredEpisode], config: Any) -> Any:
    """The class with its rewards as rewards of turns, where ``objective.credit`` tells turns apart, else as their sum.

    Steps without a reward are unscored, and so is an episode of such steps only. The failure of an environment is
    raised again, so that its episode has no score.
    """

    def get_turn_rewards(self: ScoredEpisode) -> list[float | None]:
        if self._failure is not None:
            raise self._failure
        return self.rewards

    def get_reward(self: ScoredEpisode) -> float | None:
        scored = [reward for reward in get_turn_rewards(self) if reward is not None]
        return sum(scored) if scored else None

    # calls of tools are not answers, of which there may be fewer
    method = (
        get_turn_rewards
        if config.objective.credit != "outcome" and hasattr(kind, "step")
        else get_reward
    )
    return type(kind.__name__, (kind,), {"__doc__": kind.__doc__, method.__name__: method})


def as_json(observation: Any) -> str:
    """An observation as JSON; arrays and numbers of NumPy as lists and numbers."""
    return json.dumps(observation, ensure_ascii=False, default=lambda value: value.tolist())
