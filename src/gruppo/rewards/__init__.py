"""Rewards of rollouts; one place handles their exceptions, timeouts and weights. Names are loaded when first used.

The process of the reward functions imports ``gruppo.rewards.text``, and no torch with it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "code_tests": "code",
    "FunctionReward": "functions",
    "columns_of": "functions",
    "step_reward": "functions",
    "turn_reward": "functions",
    "ProcessRewardModel": "models",
    "RewardModel": "models",
    "resolve_reward": "registry",
    "Failure": "scoring",
    "RewardSet": "scoring",
    "Scores": "scoring",
    "reward_stats": "scoring",
}

if TYPE_CHECKING:
    from gruppo.rewards.code import code_tests
    from gruppo.rewards.functions import FunctionReward, columns_of, step_reward, turn_reward
    from gruppo.rewards.models import ProcessRewardModel, RewardModel
    from gruppo.rewards.registry import resolve_reward
    from gruppo.rewards.scoring import Failure, RewardSet, Scores, reward_stats

__all__ = [
    "Failure",
    "FunctionReward",
    "ProcessRewardModel",
    "RewardModel",
    "RewardSet",
    "Scores",
    "code_tests",
    "columns_of",
    "resolve_reward",
    "reward_stats",
    "step_reward",
    "turn_reward",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'gruppo.rewards' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"gruppo.rewards.{_HOMES[name]}"), name)
