"""Rewards: what scores a rollout, and the one place that owns exceptions, timeouts and weights."""

from gruppo.rewards.code import code_tests
from gruppo.rewards.failures import Failure
from gruppo.rewards.functions import FunctionReward, columns_of
from gruppo.rewards.models import ProcessRewardModel, RewardModel
from gruppo.rewards.resolve import resolve_reward
from gruppo.rewards.score import RewardSet, Scores, reward_stats
from gruppo.rewards.steps import step_reward

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
