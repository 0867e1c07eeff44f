"""The end of a run: a summary for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from gruppo.loading import counted
from gruppo.tracking.files import read_metrics
from gruppo.tracking.formatting import duration

Z_95 = 1.959963984540054
"""97.5% quantile of the standard normal distribution."""
LAST_STEPS = 10
"""Steps over which the final training reward is averaged; a single step is noisy."""
FILES = {
    "final": "the trained model",
    "metrics.csv": "all metrics of all steps",
    "samples.jsonl": "samples shown, with rewards",
    "completions": "every completion with its rewards",
    "plots/overview.png": "plots of the metrics",
    "images/before_after.png": "the same prompts before and after",
    "report.html": "curves, completions and findings on one page",
}


def wilson_interval(successes: float, n: float) -> tuple[float, float]:
    """95% interval of a fraction, within [0, 1] also for 0 or n successes; NaN for n = 0.

    (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n). Wilson 1927.
    """
    if n <= 0:
        return math.nan, math.nan
    p, z_sq = successes / n, Z_95**2
    center = p + z_sq / (2 * n)
    half = Z_95 * math.sqrt(p * (1 - p) / n + z_sq / (4 * n * n))
    low, high = (center - half) / (1 + z_sq / n), (center + half) / (1 + z_sq / n)
    return (
        low if successes > 0 else 0.0,
        high if successes < n else 1.0,
    )  # exact, which the formula is only to rounding


def closing_lines(
    run_dir: str | Path,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
    commands: Sequence[tuple[str, str]] = (),
    seconds: float = 0.0,
) -> RenderableType:
    """Summary of a finished run: evaluations, files, and ``commands`` to type next, each with what it does.

    ``before`` and ``after`` are held-out evaluations: ``step``, ``prompts``, ``mean``, ``low`` and ``high`` (a 95%
    interval), and ``parts``, the mean of each reward by name. Steps, their time, the reward and the count of rows
    without one are read from the run's metrics. ``seconds``: time since the start, loading and evaluations included.
    """
    run_dir = Path(run_dir)
    steps = [
        row for row in read_metrics(run_dir) if "time/step_s" in row
    ]  # also those that sampled nothing
    rewards = [
        row["reward/mean"] for row in steps if math.isfinite(row.get("reward/mean", math.nan))
    ][-LAST_STEPS:]
    in_steps = sum(row["time/step_s"] for row in steps)
    summary = Text.assemble(
        (str(run_dir), "bold"), f": {counted(len(steps), 'step')} in {duration(in_steps)}"
    )
    if seconds > in_steps:  # not if the run was resumed: its first steps were before
        summary.append(f", {duration(seconds)} with loading, evaluation and saving")
    if rewards:
        last = "last step" if len(rewards) == 1 else f"last {len(rewards)} steps"
        summary.append(f"; reward {sum(rewards) / len(rewards):.3f} over the {last}")
    if (unscored := sum(row.get("reward/unscored_count", 0) for row in steps)) > 0:
        sampled = steps[-1].get(
            "progress/rollouts", math.nan
        )  # counted since the start, over all resumes
        of_all = f" of {sampled:.0f}" if math.isfinite(sampled) else ""
        summary.append(
            f"; {unscored:.0f}{of_all} sampled rows had no reward (log.txt, samples.jsonl)",
            "yellow",
        )
    parts: list[RenderableType] = [summary]
    if before or after:
        evaluation, sides = after or before or {}, (before or {}, after or {})
        heads = [Column(f"held-out, {evaluation.get('prompts', '?')} prompts")]
        heads += [
            Column(name, justify="right", no_wrap=True) for name in ("before", "after", "change")
        ]
        # With a padding of one, negative rewards fit in 80 columns.
        table = Table(
            *heads, box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
        )
        intervals = [
            f" [{_cell(side['low'])}, {_cell(side['high'])}]" if side else "" for side in sides
        ]
        means: list[tuple[str, Any, list[str]]] = [
            ("reward [95% interval]", [s.get("mean") for s in sides], intervals)
        ]
        if (
            len(names := evaluation.get("parts", {})) > 1
        ):  # of a single reward the mean says the same
            means += [
                (f"  {name}", [s.get("parts", {}).get(name) for s in sides], ["", ""])
                for name in names
            ]
        for name, (old, new), ends in means:
            cells = [_cell(mean) + end for mean, end in zip((old, new), ends, strict=True)]
            change = Text("-")
            if old is not None and new is not None:
                color = "green" if new > old else "red" if new < old else ""
                change = Text(
                    _cell(new - old, "+"), color if name.startswith(" ") else f"bold {color}"
                )
            table.add_row(Text(name), *map(Text, cells), change)
        parts.append(Padding(table, (1, 0, 0, 0)))
    files = [
        (str(run_dir / name), text) for name, text in FILES.items() if (run_dir / name).exists()
    ]
    for title, rows, separator in (("Files", files, "  "), ("Next", commands, "  # ")):
        if rows:
            width = max(len(left) for left, _ in rows)
            lines = [
                part
                for left, right in rows
                for part in (f"\n  {left.ljust(width)}", (separator + right, "dim"))
            ]
            parts.append(Text.assemble((f"\n{title}", "bold"), *lines))
    return Group(*parts)


def _cell(value: float | None, sign: str = "") -> str:
    """Three decimals, fewer of numbers from 10 on; "-" for None and NaN."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:{sign}.{3 if abs(value) < 10 else 2 if abs(value) < 100 else 1}f}"
