"""Rewards of rollouts; one place handles their exceptions, timeouts and weights. Names are loaded
when first used.

The process of the reward functions imports ``gruppo.rewards.text``, and no torch with it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_NAMES = {
    "code": "code_tests",
    "functions": "FunctionReward columns_of step_reward turn_reward",
    "models": "ProcessRewardModel RewardModel",
    "registry": "resolve_reward",
    "scoring": "Failure RewardSet Scores reward_stats",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

if TYPE_CHECKING:
    from gruppo.rewards.code import code_tests
    from gruppo.rewards.functions import FunctionReward, columns_of, step_reward, turn_reward
    from gruppo.rewards.models import ProcessRewardModel, RewardModel
    from gruppo.rewards.registry import resolve_reward
    from gruppo.rewards.scoring import Failure, RewardSet, Scores, reward_stats

# Written out, and not taken from _HOMES: type checkers and linters read it without running this
# file.
__all__ = [
    "Failure",
    "FunctionReward",
    "ProcessRewardModel",
    "RewardModel",
    "RewardSet",
    "Scores",
    "code_tests",
]
__all__ += ["columns_of", "resolve_reward", "reward_stats", "step_reward", "turn_reward"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(
            f"module 'gruppo.rewards' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(import_module(f"gruppo.rewards.{_HOMES[name]}"), name)
