"""The end of a run: a summary for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from gruppo.loading import counted
from gruppo.tracking.files import read_metrics
from gruppo.tracking.formatting import duration
from gruppo.tracking.panels import series

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
    "report.html": "curves, completions and findings on one page",
}


def wilson_interval(successes: float, n: float) -> tuple[float, float]:
    """95% interval of a fraction, within [0, 1] also for 0 or n successes; NaN for n = 0.

    (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n). Wilson 1927.
    """
    if n <= 0:
        return math.nan, math.nan
    p = successes / n
    z_sq = Z_95**2
    center = p + z_sq / (2 * n)
    half = Z_95 * math.sqrt(p * (1 - p) / n + z_sq / (4 * n * n))
    # The ends are exact at 0 and n, which the formula is only to rounding.
    low = (center - half) / (1 + z_sq / n) if successes > 0 else 0.0
    high = (center + half) / (1 + z_sq / n) if successes < n else 1.0
    return low, high


def closing_lines(
    run_dir: Path,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
    commands: Sequence[tuple[str, str]] = (),
    seconds: float = 0.0,
) -> RenderableType:
    """Summary of a finished run: evaluations, files, and ``commands`` to type next with a comment.

    ``before`` and ``after`` are held-out evaluations: ``prompts``, ``mean``, ``low`` and ``high``
    (a 95% interval), and ``parts``, the mean of each reward by name. The rest is read from the
    run's metrics. ``seconds`` is the time since the start, loading and evaluations included.
    """
    lines = [_summary(run_dir, seconds)]
    if before and after:
        lines.append(Text(f"held-out reward, {after.get('prompts', '?')} prompts:"))
        change = f"change {after['mean'] - before['mean']:+.3f}"
        text = f"  {_interval(before)} before, {_interval(after)} after, {change}"
        lines.append(Text(text, "bold"))
        parts = after.get("parts", {})
        for name in parts if len(parts) > 1 else ():  # of a single reward the mean says the same
            old = before.get("parts", {}).get(name, math.nan)
            lines.append(Text(f"  {name}: {old:.3f} before, {parts[name]:.3f} after"))
    elif before or after:
        lines.append(Text(f"held-out reward: {_interval(after or before or {})}"))
    files = [(run_dir / name, text) for name, text in FILES.items() if (run_dir / name).exists()]
    for title, rows in (("Files", files), ("Next", commands)):
        if rows:
            lines.append(Text(f"\n{title}", "bold"))
            lines += [Text.assemble(f"  {left}", (f"  # {text}", "dim")) for left, text in rows]
    return Group(*lines)


def _summary(run_dir: Path, seconds: float) -> Text:
    """Steps, time, last rewards, and rows without one."""
    steps = [row for row in read_metrics(run_dir) if "time/step_s" in row]
    in_steps = sum(row["time/step_s"] for row in steps)
    text = f": {counted(len(steps), 'step')} in {duration(in_steps)}"
    if seconds > in_steps:  # not if the run was resumed: its first steps were before
        text += f", {duration(seconds)} with loading, evaluation and saving"
    rewards = series(steps, "reward/mean")[1][-LAST_STEPS:]
    if rewards:
        last = "last step" if len(rewards) == 1 else f"last {len(rewards)} steps"
        text += f"; reward {sum(rewards) / len(rewards):.3f} over the {last}"
    unscored = sum(row.get("reward/unscored_count", 0) for row in steps)
    warning = f"; {unscored:.0f} sampled rows had no reward (log.txt, samples.jsonl)"
    return Text.assemble((str(run_dir), "bold"), text, (warning if unscored else "", "yellow"))


def _interval(side: Mapping[str, Any]) -> str:
    return f"{side['mean']:.3f} [{side['low']:.3f}, {side['high']:.3f}]"
