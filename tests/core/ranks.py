"""Ranks that add up with each other, as threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

from torch import Tensor


def on_ranks(*functions: Callable[..., Any]) -> list[Any]:
    """What each function returns, given an ``all_sum`` and an ``all_gather`` over all of them."""
    barrier, table = Barrier(len(functions), timeout=10), [None] * len(functions)

    def run(rank: int) -> Any:
        def all_gather(mine: Any) -> list[Any]:
            table[rank] = mine
            barrier.wait()
            every = list(table)
            barrier.wait()
            return every

        def all_sum(mine: Tensor) -> Tensor:
            return sum(all_gather(mine))

        return functions[rank](all_sum=all_sum, all_gather=all_gather)

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(run, range(len(functions))))
