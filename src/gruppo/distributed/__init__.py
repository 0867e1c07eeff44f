"""Ranks: who am I, how many are we, and sums over all of us. One process is a world of one."""

from gruppo.distributed.collectives import (
    all_max,
    all_sum,
    barrier,
    gather,
    is_main,
    merge_stats,
    rank,
    start,
    stop,
    sum_gradients,
    together,
    world,
)

__all__ = [
    "all_max",
    "all_sum",
    "barrier",
    "gather",
    "is_main",
    "merge_stats",
    "rank",
    "start",
    "stop",
    "sum_gradients",
    "together",
    "world",
]
