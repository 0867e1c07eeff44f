"""The end of a run: a summary for the terminal, and ``report.html`` with evaluations, images, samples and plots."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gruppo.integrity import read_json
from gruppo.loading import counted
from gruppo.tracking.files import read_lines, read_metrics, replace_file
from gruppo.tracking.formatting import as_text, duration, number
from gruppo.tracking.samples import BEFORE_AFTER, FOLDER

Z_95 = 1.959963984540054
"""97.5% quantile of the standard normal distribution."""
LAST_STEPS = 10
"""Steps over which the final training reward is averaged; a single step is noisy."""
MAX_TEXT, MAX_SAMPLES = 2000, 12
FILES = {
    "final": "the trained model",
    "metrics.csv": "all metrics of all steps",
    "samples.jsonl": "samples shown, with rewards",
    "completions": "every completion with its rewards",
    "plots/overview.png": "plots of the metrics",
    "images/before_after.png": "the same prompts before and after",
    "report.html": "plots and samples on one page",
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
    return low if successes > 0 else 0.0, high if successes < n else 1.0  # exact, which the formula is only to rounding


# --- the terminal -----------------------------------------------------------------------------------------------------


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
    steps = [row for row in read_metrics(run_dir) if "time/step_s" in row]  # also those that sampled nothing
    rewards = [row["reward/mean"] for row in steps if math.isfinite(row.get("reward/mean", math.nan))][-LAST_STEPS:]
    in_steps = sum(row["time/step_s"] for row in steps)
    summary = Text.assemble((str(run_dir), "bold"), f": {counted(len(steps), 'step')} in {duration(in_steps)}")
    if seconds > in_steps:  # not if the run was resumed: its first steps were before
        summary.append(f", {duration(seconds)} with loading, evaluation and saving")
    if rewards:
        last = "last step" if len(rewards) == 1 else f"last {len(rewards)} steps"
        summary.append(f"; reward {sum(rewards) / len(rewards):.3f} over the {last}")
    unscored = sum(row.get("reward/unscored_count", 0) for row in steps)
    if unscored > 0:
        sampled = steps[-1].get("progress/rollouts", math.nan)
        of_all = f" of {sampled:.0f}" if math.isfinite(sampled) else ""
        summary.append(f"; {unscored:.0f}{of_all} sampled rows had no reward (log.txt, samples.jsonl)", "yellow")
    parts: list[RenderableType] = [summary]
    if before or after:
        parts.append(Padding(_evaluation_table(before or {}, after or {}), (1, 0, 0, 0)))
    files = [(str(run_dir / name), text) for name, text in FILES.items() if (run_dir / name).exists()]
    for title, rows, separator in (("Files", files, "  "), ("Next", commands, "  # ")):
        if rows:
            width = max(len(left) for left, _ in rows)
            lines = [part for left, right in rows for part in (f"\n  {left.ljust(width)}", (separator + right, "dim"))]
            parts.append(Text.assemble((f"\n{title}", "bold"), *lines))
    return Group(*parts)


def _evaluation_table(before: Mapping[str, Any], after: Mapping[str, Any]) -> Table:
    evaluation, sides = after or before, (before, after)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))  # negative rewards fit in 80
    table.add_column(f"held-out, {evaluation.get('prompts', '?')} prompts")
    for name in ("before", "after", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    rows: dict[str, list[Any]] = {"reward [95% interval]": [side.get("mean") for side in sides]}
    if len(evaluation.get("parts", {})) > 1:
        rows |= {f"  {name}": [side.get("parts", {}).get(name) for side in sides] for name in evaluation["parts"]}
    for i, (name, (old, new)) in enumerate(rows.items()):
        cells = [_cell(mean) for mean in (old, new)]
        if i == 0:
            ends = [f" [{_cell(side['low'])}, {_cell(side['high'])}]" if side else "" for side in sides]
            cells = [cell + interval for cell, interval in zip(cells, ends, strict=True)]
        change = Text("-")
        if old is not None and new is not None:
            color = "green" if new > old else "red" if new < old else ""
            change = Text(_cell(new - old, "+"), f"{'' if i else 'bold '}{color}")
        table.add_row(Text(name), *map(Text, cells), change)
    return table


def _cell(value: float | None, sign: str = "") -> str:
    """Three decimals, fewer of numbers from 10 on; "-" for None and NaN."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:{sign}.{3 if abs(value) < 10 else 2 if abs(value) < 100 else 1}f}"


# --- the page ---------------------------------------------------------------------------------------------------------


def write_page(run_dir: str | Path) -> Path | None:
    """Write ``report.html``, which links only to files of the run's folder; None if there is nothing to show.

    Call it after ``plot_run``: it shows the plots that are there.
    """
    run_dir = Path(run_dir)
    sections: list[tuple[str, str | Path]] = []  # each a heading, and a table or the file of an image
    try:
        evaluations = read_json(run_dir / "evaluations.json")
        names = list(dict.fromkeys(name for each in evaluations for name in each["parts"])) if evaluations else []
        names = names if len(names) > 1 else []
        rows = [
            [str(each["step"]), number(each["mean"]), f"{number(each['low'])} to {number(each['high'])}"]
            + [number(each["parts"].get(name)) for name in names]
            for each in evaluations
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # not an evaluation of ours
        rows = []
    if rows:
        table = _table(["step", "mean reward", "95% interval", *names], rows, numbers=99)
        sections.append(("Held-out prompts", table))
    sections.append(("Before and after", run_dir / FOLDER / BEFORE_AFTER))
    # The first, the middle and the last sheet of training.
    sheets = sorted((run_dir / FOLDER).glob("step_*.png"), key=lambda path: (len(path.name), path.name))
    chosen = list(dict.fromkeys(sheets[i] for i in (0, len(sheets) // 2, -1))) if sheets else []
    if chosen:
        text = f"{len(chosen)} of {len(sheets)} sheets; all are in {FOLDER}/."
        sections.append(("Samples during training", f"<p>{text}</p>" if len(chosen) < len(sheets) else ""))
        sections += [("", sheet) for sheet in chosen]
    samples = [row for row in read_lines(run_dir / "samples.jsonl") if "failures" not in row]
    samples = [row for row in samples if isinstance(row.get("completion"), str | list)]
    samples = [row for row in samples if row["step"] == samples[-1]["step"]][:MAX_SAMPLES]
    if samples:
        columns, cells = ("prompt", "completion", "target"), []
        for row in samples:
            reward = row.get("reward")  # infinities are text
            texts = [as_text(row.get(name, ""))[:MAX_TEXT] for name in columns]
            cells.append([reward if isinstance(reward, str) else number(reward), *texts])
        sections.append((f"Samples of step {samples[0]['step']}", _table(["reward", *columns], cells, numbers=1)))
    sections.append(("Plots", run_dir / "plots" / "overview.png"))
    parts: list[str] = []
    for title, content in sections:
        if isinstance(content, Path):
            if not content.exists():
                continue
            name = content.relative_to(run_dir).as_posix()
            image = f'<a href="{quote(name)}"><img src="{quote(name)}" alt=""></a>'
            content = f"<figure>{image}<figcaption>{html.escape(name)}</figcaption></figure>"
        parts += [text for text in (title and f"<h2>{title}</h2>", content) if text]
    if not parts:
        return None
    path = run_dir / "report.html"
    page = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    replace_file(path, page.substitute(title=html.escape(run_dir.absolute().name), body="\n".join(parts)))
    return path


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: int) -> str:
    """An HTML table whose first ``numbers`` columns are aligned as numbers."""
    lines = [f"<table><tr>{''.join(f'<th>{html.escape(name)}</th>' for name in names)}</tr>"]
    for row in rows:
        cells = (f"<td{' class=number' if n < numbers else ''}>{html.escape(text)}</td>" for n, text in enumerate(row))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join([*lines, "</table>"])
