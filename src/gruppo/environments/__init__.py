"""Environments: tools, functions that reply, and objects of a class, in conversations of several
turns."""

from gruppo.environments.classes import EnvironmentClass, is_adapter, is_class, open_adapter
from gruppo.environments.conversation import (
    ConversationEngine,
    completion_lengths,
    converse,
    environment_failures,
)
from gruppo.environments.environment import Environment
from gruppo.environments.tools import COUNTS

__all__ = [
    "COUNTS",
    "ConversationEngine",
    "Environment",
    "EnvironmentClass",
    "completion_lengths",
    "converse",
]
__all__ += ["environment_failures", "is_adapter", "is_class", "open_adapter"]
