"""What is said when a run ends: before and after, where the files are, what to type next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gruppo.loading import program
from gruppo.tracking.files import read_metrics
from gruppo.tracking.formatting import span

Z_95 = 1.959963984540054
"""97.5% of a standard normal lies below it."""
LAST = 10
"""Steps that the final training reward is averaged over; one step alone is noise."""
LONGEST_QUESTION = 120
"""Characters of a prompt that are put into a command to try."""
FILES = {
    "final": "the trained model",
    "metrics.csv": "every metric of every step",
    "samples.jsonl": "prompts, completions and their rewards",
    "plots/overview.png": "the curves",
    "images/before_after.png": "the same prompts before and after",
    "report.html": "curves and samples on one page",
}


def wilson_interval(successes: float, n: float) -> tuple[float, float]:
    """95% interval of a share, which stays inside [0, 1] also for 0 or n successes; NaN for n = 0.

    (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n). Wilson 1927.
    """
    if n <= 0:
        return math.nan, math.nan
    p, z_sq = successes / n, Z_95**2
    centre = p + z_sq / (2 * n)
    half = Z_95 * math.sqrt(p * (1 - p) / n + z_sq / (4 * n * n))
    low, high = (centre - half) / (1 + z_sq / n), (centre + half) / (1 + z_sq / n)
    return low if successes > 0 else 0.0, high if successes < n else 1.0  # the ends are exact; rounding is not


def closing_lines(
    run_dir: str | Path,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
    *,
    question: str = "What is 3 + 4?",
    longer: str = "",
) -> RenderableType:
    """The end of a run, for a terminal or a log.

    ``before`` and ``after`` are held-out evaluations: ``step``, ``prompts``, ``mean``, ``low`` and ``high`` (a 95%
    interval), and ``parts``, the mean of each reward by name. ``longer``: the options that train the run's config for
    longer. Steps, reward and time are read from the run's metrics.
    """
    run_dir = Path(run_dir)
    steps = [row for row in read_metrics(run_dir) if "time/step_s" in row]  # also those that sampled nothing
    evaluations = [_evaluations(before, after)] if before or after else []
    longer = longer or f"--steps {2 * len(steps) or 300}"
    return Group(_summary(run_dir, steps), *evaluations, *_files(run_dir), _commands(run_dir, question, longer))


def _summary(run_dir: Path, steps: Sequence[Mapping[str, float]]) -> Text:
    rewards = [row["reward/mean"] for row in steps if math.isfinite(row.get("reward/mean", math.nan))][-LAST:]
    seconds = sum(row.get("time/step_s", 0.0) for row in steps)
    text = Text.assemble((str(run_dir), "bold"), f": {len(steps)} steps in {span(seconds)}")
    if rewards:
        text.append(f"; reward {sum(rewards) / len(rewards):.3f} over the last {len(rewards)} steps")
    return text


def _evaluations(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> RenderableType:
    some = after or before or {}
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(f"held-out, {some.get('prompts', '?')} prompts")
    for name in ("before", "after", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row(Text("reward [95% interval]"), _interval(before), _interval(after), _change(before, after, "bold"))
    names = some.get("parts", {})
    for name in names if len(names) > 1 else ():
        old, new = ({"mean": e["parts"][name]} if e and name in e["parts"] else None for e in (before, after))
        table.add_row(Text(f"  {name}"), _mean(old), _mean(new), _change(old, new, ""))
    return Padding(table, (1, 0, 0, 0))


def _interval(evaluation: Mapping[str, Any] | None) -> Text:
    if not evaluation:
        return Text("-")
    return Text(f"{_mean(evaluation)} [{evaluation['low']:.3f}, {evaluation['high']:.3f}]")


def _mean(evaluation: Mapping[str, Any] | None) -> str:
    return f"{evaluation['mean']:.3f}" if evaluation else "-"


def _change(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None, style: str) -> Text:
    if not before or not after:
        return Text("-")
    change = after["mean"] - before["mean"]
    return Text(f"{change:+.3f}", f"{style} {'green' if change > 0 else 'red' if change < 0 else ''}")


def _files(run_dir: Path) -> list[Text]:
    present = [(str(run_dir / name), what) for name, what in FILES.items() if (run_dir / name).exists()]
    return [_aligned("Files", present, "  ")] if present else []


def _commands(run_dir: Path, question: str, longer: str) -> Text:
    run, gruppo = shlex.quote(str(run_dir)), shlex.quote(program())
    asked = question if question and question.isprintable() and len(question) <= LONGEST_QUESTION else "..."
    again = f"train {shlex.quote(str(run_dir / 'config.json'))} {longer}"
    commands = [
        (f"{gruppo} sample {run} {shlex.quote(asked)}", "ask it something"),
        (f"{gruppo} eval {run}", "measure it again"),
        (f"{gruppo} resume {run}", "if it was stopped"),
        (f"{gruppo} {again}", "train again, for longer"),
    ]
    return _aligned("Next", commands, "  # ")


def _aligned(title: str, rows: list[tuple[str, str]], between: str) -> Text:
    width = max(len(left) for left, _ in rows)
    text = Text(f"\n{title}\n", "bold")
    for left, right in rows:
        text.append(f"  {left.ljust(width)}", "not bold")
        text.append(f"{between}{right}\n", "not bold dim")
    text.rstrip()
    return text
