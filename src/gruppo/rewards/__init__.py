"""Rewards of rollouts; one place handles their exceptions, timeouts and weights."""

from gruppo.rewards.code import code_tests
from gruppo.rewards.functions import FunctionReward, columns_of, step_reward
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
]
