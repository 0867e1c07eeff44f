"""Rewards: what scores a rollout, and the one place that owns exceptions, timeouts and weights."""

from gruppo.rewards.failures import Failure
from gruppo.rewards.functions import FunctionReward, columns_of
from gruppo.rewards.resolve import resolve_reward
from gruppo.rewards.score import RewardSet, Scores, reward_stats

__all__ = ["Failure", "FunctionReward", "RewardSet", "Scores", "columns_of", "resolve_reward", "reward_stats"]
