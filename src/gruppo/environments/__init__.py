"""Environments: what answers the policy, so that it speaks again."""

from gruppo.environments.conversation import Conversing, converse, failures_of, written
from gruppo.environments.environment import PROVIDED, Environment

__all__ = ["PROVIDED", "Conversing", "Environment", "converse", "failures_of", "written"]
