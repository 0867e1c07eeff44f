"""Environments: functions that reply to the policy, in conversations of several turns."""

from gruppo.environments.conversation import ConversationEngine, completion_lengths, converse, environment_failures
from gruppo.environments.environment import PROVIDED, Environment

__all__ = ["PROVIDED", "ConversationEngine", "Environment", "completion_lengths", "converse", "environment_failures"]
