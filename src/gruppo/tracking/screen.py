"""The live screen, drawn from what was logged: header, metrics with their trends, where the time goes, samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gruppo.tracking.formatting import is_array, number, percent, shorten, shown, span, trend

Row = Mapping[str, Any]
History = Mapping[str, Sequence[float]]


class Line(NamedTuple):
    """One metric on the screen: its name, what it is called there, and how its value is written."""

    metric: str
    label: str
    form: Callable[[float], str] = number


REWARD = Line("reward/mean", "reward")
LEARNING = (
    Line("sup/loss_nats", "NLL of demos"),
    Line("reward/std_within_group", "spread in a group"),
    Line("group/zero_spread_frac", "groups all alike", percent),
    Line("kl/ref_nats", "KL to reference"),
    Line("kl/old_nats", "KL of the step"),
    Line("entropy/mean_nats", "entropy, nats"),
    Line("len/mean_actions", "length, actions"),
)
RUNNING = (
    Line("clip/high_frac", "clipped above", percent),
    Line("clip/low_frac", "clipped below", percent),
    Line("grad/norm", "gradient norm"),
    Line("rate/tokens_per_s", "tokens a second"),
    Line("time/step_s", "seconds a step"),
    Line("mem/peak_gib", "memory, GiB"),
)
TIMES = (
    ("time/rollout_s", "rollout", "cyan"),
    ("time/reward_s", "reward", "yellow"),
    ("time/update_s", "update", "magenta"),
)
LABEL, VALUE, EDGE = 17, 9, 4
TWO_COLUMNS = 76
"""Width of a label, of a value, of a panel's border and padding; and from where on two columns fit."""


def header(title: str, step: int, total: int, elapsed_s: float, left_s: float | None, width: int) -> RenderableType:
    """Title, clock and bar."""
    clock = f"{span(elapsed_s)} elapsed" + ("" if left_s is None else f", about {span(left_s)} left")
    words = Table.grid(expand=True)
    words.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    words.add_column(justify="right", no_wrap=True)
    words.add_row(Text.assemble(f"step {step}/{total}  ", (title, "bold")), Text(clock, "dim"))
    bar = ProgressBar(total=max(total, 1), completed=step, complete_style="green", finished_style="green")
    return Constrain(Padding(Group(words, bar), (0, 1)), width)


def metrics_panel(metrics: Row, history: History, held_out: str, width: int) -> RenderableType:
    """The current step's metrics beside their trends; a metric that was not logged has no line."""
    inner = width - EDGE
    parts: list[RenderableType] = []
    if "reward/mean" in metrics:
        parts.append(_grid([_line(REWARD, metrics, history, inner, "bold green")]))
    parts += _sides(metrics, history, inner)
    if any(name in metrics for name, _, _ in TIMES):
        parts.append(time_split(metrics, inner))
    if held_out:
        parts.append(Text(held_out, "bold", no_wrap=True, overflow="ellipsis"))
    return Panel(Group(*parts), border_style="dim", width=width) if parts else Text()


def time_split(metrics: Row, width: int) -> Text:
    """One bar whose colours are the shares of rollout, reward and update in the step."""
    logged = [metrics.get(name, 0.0) for name, _, _ in TIMES]
    seconds = [value if 0 < value < math.inf else 0.0 for value in logged]
    total = sum(seconds) or 1.0
    words = Text()
    for (_, label, style), value in zip(TIMES, seconds, strict=True):
        words.append(f"  {label} {percent(round(100 * value / total) / 100)}", style)
    bar = Text("time of a step".ljust(LABEL))
    room = width - LABEL - words.cell_len
    for (_, _, style), value in zip(TIMES, seconds, strict=True):
        bar.append("━" * round(room * value / total), style)
    return bar.append_text(words)


def samples_panel(step: int, rows: Sequence[Row], sheet: str, width: int) -> RenderableType:
    """The best and the worst of the rows, each on at most two lines; of pictures their prompts, and their sheet."""
    target = min(max([6, *(len(shown(row.get("target", ""))) for row in rows)]), 14)
    free = width - EDGE - 6 - target - 6
    columns = [("reward", 6), ("prompt", free * 2 // 5), ("completion", free - free * 2 // 5), ("target", target)]
    if any(is_array(row.get("completion")) for row in rows):
        columns = [("reward", 6), ("prompt", width - EDGE - 8)]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name, size in columns:
        table.add_column(name, width=size, overflow="fold", justify="right" if name == "reward" else "left")
    for row in best_and_worst(rows):
        reward = row.get("reward")
        cells = [Text(shorten(shown(row.get(name, "")), 2 * size - 2)) for name, size in columns[1:]]
        table.add_row(Text(number(reward), _colour(reward)), *cells)
    parts = [table, Text(f"pictures: {sheet}", "dim", overflow="fold")] if sheet else [table]
    title = Text(f"samples of step {step}")
    return Panel(Group(*parts), title=title, title_align="left", border_style="dim", width=width)


def best_and_worst(rows: Sequence[Row], count: int = 4) -> list[Row]:
    """``count`` rows: the highest rewards and the lowest; a row without a reward is lower than any."""
    ranked = sorted(rows, key=lambda row: _rank(row.get("reward")), reverse=True)
    return ranked if len(ranked) <= count else [*ranked[: count - count // 2], *ranked[-(count // 2) :]]


def _colour(reward: float | None) -> str:
    return "dim" if reward is None or reward != reward else "green" if reward > 0 else "red"


def _rank(reward: float | None) -> float:
    return float("-inf") if reward is None or reward != reward else reward


def _sides(metrics: Row, history: History, inner: int) -> list[RenderableType]:
    """How it learns and how it runs, side by side where there is room."""
    is_wide = inner + EDGE >= TWO_COLUMNS
    width = inner // 2 - 1 if is_wide else inner
    sides = [[line for line in side if line.metric in metrics] for side in (LEARNING, RUNNING)]
    grids = [_grid([_line(line, metrics, history, width, "cyan") for line in side]) for side in sides if side]
    if len(grids) < 2 or not is_wide:
        return [*grids]
    both = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    both.add_row(*grids)
    return [both]


def _line(line: Line, metrics: Row, history: History, width: int, style: str) -> tuple[Text, Text, Text]:
    value = Text(line.form(metrics[line.metric]).rjust(VALUE - 1) + " ", "bold")
    return Text(line.label.ljust(LABEL)), value, Text(trend(history.get(line.metric, ()), width - LABEL - VALUE), style)


def _grid(rows: Sequence[tuple[Text, Text, Text]]) -> Table:
    grid = Table.grid()
    for row in rows:
        grid.add_row(*row)
    return grid
