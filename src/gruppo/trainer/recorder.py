"""Metrics and durations of a step, gathered beside the work, and metrics from statistics."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from gruppo.types import Stat


class Recorder:
    """Collects the metrics of a step."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.seconds = 0.0
        """Sum of all timed blocks."""
        self._inner = 0.0

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Add the seconds of the block, without those of timed blocks within it, to
        ``time/<name>_s``."""
        began, outer = time.perf_counter(), self._inner
        self._inner = 0.0
        try:
            yield
        finally:
            total = time.perf_counter() - began
            own = total - self._inner
            key = f"time/{name}_s"
            self.metrics[key] = self.metrics.get(key, 0.0) + own
            self.seconds += own
            self._inner = outer + total


def reduced(stats: Mapping[str, Stat], *, keep_empty: bool = False) -> dict[str, float]:
    """Return metrics from statistics that are keyed by their reductions and the metrics' name, such
    as ``mean:eval/psnr`` or ``mean,max:len/{}_actions``.

    Metrics without a value are left out, or NaN with ``keep_empty``.
    """
    metrics = {}
    for key, stat in Stat.read(stats).items():
        reductions, _, name = key.partition(":")
        for reduction in reductions.split(","):
            metric = name.replace("{}", reduction)
            if stat.count or (keep_empty and reduction in ("sum", "count")):
                metrics[metric] = float(getattr(stat, reduction))
            elif keep_empty:
                metrics[metric] = float("nan")
    return metrics
