"""Ranks and collectives. One process is a world of size 1."""

from gruppo.distributed.collectives import *  # noqa: F403
