"""A run in the terminal: a live screen, or one line per step where the output is not a terminal."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from gruppo.tracking.formatting import as_text, duration, number, percent, shorten, trend
from gruppo.tracking.images import has_pixels
from gruppo.tracking.samples import reward_of, sheet_name

Row = Mapping[str, Any]

METRICS: Mapping[str, tuple[str, str, str, Callable[[float], str]]] = {
    "sup/loss_nats": ("sup", "left", "demo loss, nats", number),
    "reward/mean": ("reward", "top", "reward", number),
    "reward/std_within_group": ("spread", "left", "spread in a group", number),
    "group/zero_spread_frac": ("", "left", "groups w/o spread", percent),
    "kl/ref_nats": ("kl", "left", "KL to reference", number),
    "kl/old_nats": ("", "left", "KL of the update", number),
    "entropy/mean_nats": ("entropy", "left", "entropy, nats", number),
    "len/mean_actions": ("len", "left", "length, actions", number),
    "clip/high_frac": ("", "right", "clipped above", percent),
    "clip/low_frac": ("", "right", "clipped below", percent),
    "grad/norm": ("", "right", "gradient norm", number),
    "rate/tokens_per_s": ("", "right", "{unit}s per second", number),
    "time/step_s": ("", "right", "seconds per step", number),
    "mem/peak_gib": ("", "right", "memory, GiB", number),
}
"""Name on a plain line, "" for none; part of the live screen, name there, and format."""
TEXT_ONLY = ("entropy/mean_nats", "len/mean_actions")
"""Left out for images: constant, or dependent on which denoising steps were sampled."""
PHASES = {"rollout": "cyan", "reward": "yellow", "update": "magenta"}
"""Parts of a step, ``time/NAME_s``, with their colors."""
HISTORY = 120
"""Steps of a trend; as many are shown as fit."""
LABEL, VALUE, BORDER = 18, 9, 4
"""Widths of a label, of a value, and of a panel's border with its padding."""
TWO_COLUMNS = 76
"""Width from which on metrics are shown in two columns."""
MAX_WIDTH = 120


class ConsoleTracker:
    """Tracker that shows a run until :meth:`close`.

    ``step`` and ``total_steps`` are the run's current and last step. Samples change at most every ``samples_every``
    steps, so that they can be read. ``stages``: names of the stages, of which ``stage/number`` says which is running.
    ``run_dir``: where sheets of images are. ``unit``: what ``rate/tokens_per_s`` counts, such as token; "image" for
    policies that render images, whose actions are converted to images. ``progress``: what is being done within the
    step, asked for at each refresh.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        console: Console | None = None,
        title: str = "gruppo",
        step: int = 0,
        samples_every: int = 5,
        stages: Sequence[str] = (),
        run_dir: str | Path = "",
        unit: str = "token",
        progress: Callable[[], str] = str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or Console()
        self._total, self._title, self._samples_every, self._clock = (
            total_steps,
            title,
            samples_every,
            clock,
        )
        self._stages, self._stage, self._unit, self._run_dir = stages, "", unit, Path(run_dir)
        self._start, self._step, self._progress = clock(), step, progress
        self._step_ends: deque[float] = deque(maxlen=20)
        self._metrics: dict[str, float] = {}
        self._history: dict[str, deque[float]] = {}
        self._held_out = self._notice = ""
        self._samples: tuple[int, Sequence[Row], str] | None = None
        self._body: RenderableType = Text()
        self._live: Live | None = None
        # Elsewhere plain lines: a log file has no cursor to move, and other encodings lack the blocks of the trends.
        if (
            self.console.is_terminal
            and not self.console.is_dumb_terminal
            and self.console.encoding.startswith("utf")
        ):
            self._live = Live(
                get_renderable=self.screen, console=self.console, refresh_per_second=4
            )
            self._live.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step; a second call for the same step adds to the first."""
        metrics = dict(metrics)
        if phases := [metrics[f"time/{name}_s"] for name in PHASES if f"time/{name}_s" in metrics]:
            metrics.setdefault("time/step_s", sum(phases))
        if (
            self._unit == "image"
        ):  # its actions are denoising steps: images per second are the rate over their number
            rate, actions = (
                metrics.pop("rate/tokens_per_s", None),
                metrics.get("len/mean_actions", 0),
            )
            if rate is not None and actions > 0:
                metrics["rate/tokens_per_s"] = rate / actions
            metrics = {name: value for name, value in metrics.items() if name not in TEXT_ONLY}
        evaluated = {
            name[5:].removesuffix("_mean"): v
            for name, v in metrics.items()
            if name.startswith("eval/")
        }
        if held_out := ", ".join(f"{name} {number(value)}" for name, value in evaluated.items()):
            self._held_out = f"held-out at step {step}: {held_out}"
        index = (
            int(metrics.get("stage/number", 0)) - 1
        )  # of a step of evaluation alone, none is logged
        stage = self._stages[index] if 0 <= index < len(self._stages) else ""
        self._stage = stage or self._stage
        if step != self._step:
            self._step, self._metrics = step, {}
            self._step_ends.append(self._clock())
        self._metrics.update(metrics)
        for name, value in metrics.items():
            self._history.setdefault(name, deque(maxlen=HISTORY)).append(float(value))
        if self._live:
            return self._update_body()
        words = [stage] if stage else []
        words += [
            f"{row[0]} {number(metrics[name])}"
            for name, row in METRICS.items()
            if row[0] and name in metrics
        ]
        unscored, unit = (
            metrics.get("reward/unscored_count", 0),
            "tok" if self._unit == "token" else f"{self._unit}s",
        )
        words += [f"{unscored:.0f} without a reward"] if unscored > 0 else []
        for name, text in (("rate/tokens_per_s", f"{unit}/s"), ("time/step_s", "s")):
            words += [f"{number(metrics[name])} {text}"] if name in metrics else []
        # A call with an evaluation alone logs none of these, and is shown without the time left.
        words += (
            [f"{duration(left)} left"]
            if words and (left := self._seconds_left()) is not None
            else []
        )
        words += [f"held-out {held_out}"] if held_out else []
        self._print(Text("  ".join([f"step {step}/{self._total}", *words])))

    def log_samples(self, step: int, rows: Sequence[Row]) -> None:
        """Show the best and the worst rows, unless the last ones are recent; for images also the file of their sheet.

        Of an evaluation (``held_out``) only the sheet is named.
        """
        rows = [row for row in rows if "failures" not in row]  # the log warns of those
        is_held_out = any(row.get("held_out") for row in rows)
        sheet = self._run_dir / sheet_name(step, is_held_out)
        if is_held_out and sheet.is_file():
            self._print(Text(f"  held-out images: {sheet}"))
        if (
            is_held_out
            or not rows
            or (self._samples and step < self._samples[0] + self._samples_every)
        ):
            return
        self._samples = step, rows, str(sheet) if sheet.is_file() else ""
        if self._live:
            return self._update_body()
        for row in best_and_worst(rows, 2):
            line = f"  reward {number(row.get('reward'))}"
            if not has_pixels(row.get("prompt")):
                line += f'  "{shorten(as_text(row.get("prompt", "")), 120)}"'
                if not has_pixels(row.get("completion")):
                    line += f' -> "{shorten(as_text(row.get("completion", "")), 120)}"'
                    if row.get("target") is not None:
                        line += f"  target {shorten(as_text(row['target']), 60)}"
            self._print(Text(line))
        if sheet.is_file():
            self._print(Text(f"  images: {sheet}"))

    def note(self, message: str, *, is_warning: bool = False) -> None:
        """Print a message above the live screen."""
        self._print(Text.assemble(("warning: " if is_warning else "", "bold yellow"), message))

    def announce(self, message: str) -> bool:
        """Show a message on the live screen; False without one. Safe in a signal handler: another thread draws it."""
        self._notice = message
        return self._live is not None

    def close(self) -> None:
        """Leave the last screen in place and release the terminal. May be called twice."""
        if self._live:
            self._live.stop()

    def screen(self) -> RenderableType:
        """The live screen: title, clock and progress bar, metrics with trends, and samples."""
        clock = f"{duration(self._clock() - self._start)} elapsed"
        clock += "" if (left := self._seconds_left()) is None else f", about {duration(left)} left"
        left_column, right_column = (
            Column(ratio=1, no_wrap=True),
            Column(justify="right", no_wrap=True),
        )
        header = Table.grid(left_column, right_column, expand=True)
        title = f"{self._title}  {self._stage}".rstrip()
        header.add_row(
            Text.assemble(f"step {self._step}/{self._total}  ", (title, "bold")), Text(clock, "dim")
        )
        bar = ProgressBar(
            max(self._total, 1),
            completed=self._step,
            complete_style="green",
            finished_style="green",
        )
        top = Constrain(Padding(Group(header, bar), (0, 1)), min(self.console.width, MAX_WIDTH))
        below = [Text(f" {self._notice}", "bold yellow")] if self._notice else []
        below += [Text(f" {progress}", "dim")] if (progress := self._progress()) else []
        return Group(top, self._body, *below)

    def _seconds_left(self) -> float | None:
        """Seconds to the last step at the pace of the last steps; None until two of them have ended."""
        if len(self._step_ends) < 2 or self._step >= self._total:
            return None
        pace = (self._step_ends[-1] - self._step_ends[0]) / (len(self._step_ends) - 1)
        return max(pace * (self._total - self._step) - (self._clock() - self._step_ends[-1]), 0.0)

    def _update_body(self) -> None:
        """Draw what was logged; the refreshing thread only redraws the clock."""
        width, metrics = min(self.console.width, MAX_WIDTH), self._metrics
        inner, is_wide = width - BORDER, width >= TWO_COLUMNS
        grids = {place: Table.grid() for place in ("top", "left", "right")}
        for name, (_, place, label, form) in METRICS.items():
            if (
                name in metrics
            ):  # a line with its trend, as wide as its column or the screen leaves room for
                room = inner // 2 - 1 if is_wide and place != "top" else inner
                blocks = trend(self._history.get(name, ()), room - LABEL - VALUE)
                value = Text(form(metrics[name]).rjust(VALUE - 1) + " ", "bold")
                style = "bold green" if place == "top" else "cyan"
                grids[place].add_row(
                    Text(label.format(unit=self._unit).ljust(LABEL)), value, Text(blocks, style)
                )
        parts: list[RenderableType] = [grid for grid in grids.values() if grid.row_count]
        if (
            is_wide and grids["left"].row_count and grids["right"].row_count
        ):  # the last two parts, side by side
            both = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
            both.add_row(grids["left"], grids["right"])
            parts[-2:] = [both]
        if any(f"time/{name}_s" in metrics for name in PHASES):
            parts.append(time_bar(metrics, inner))
        if (unscored := metrics.get("reward/unscored_count", 0)) > 0:
            parts.append(Text(f"{unscored:.0f} rows of this step have no reward", "bold yellow"))
        if self._held_out:
            parts.append(Text(self._held_out, "bold", no_wrap=True, overflow="ellipsis"))
        panels: list[RenderableType] = (
            [Panel(Group(*parts), border_style="dim", width=width)] if parts else [Text()]
        )
        if (
            self._samples
        ):  # the best and the worst rows, each on at most two lines; of images the prompts
            step, rows, sheet = self._samples
            target = min(max([6, *(len(as_text(row.get("target", ""))) for row in rows)]), 14)
            free = (
                inner - 6 - target - 6
            )  # without the rewards, and two spaces between each two of four columns
            columns = {
                "prompt": free * 2 // 5,
                "completion": free - free * 2 // 5,
                "target": target,
            }
            if any(has_pixels(row.get("completion")) for row in rows):
                columns = {"prompt": inner - 8}
            heads = [Column("reward", width=6, overflow="fold", justify="right")]
            heads += [Column(name, width=size, overflow="fold") for name, size in columns.items()]
            table = Table(
                *heads, box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim"
            )
            for row in best_and_worst(rows):
                reward = reward_of(row, math.nan)
                style = "dim" if reward != reward else "green" if reward > 0 else "red"
                texts = [
                    shorten(as_text(row.get(name, "")), 2 * size - 2)
                    for name, size in columns.items()
                ]
                table.add_row(Text(number(reward), style), *map(Text, texts))
            parts = [table, Text(f"images: {sheet}", "dim", overflow="fold")] if sheet else [table]
            title = f"samples of step {step}"
            panels.append(
                Panel(
                    Group(*parts), title=title, title_align="left", border_style="dim", width=width
                )
            )
        self._body = Group(*panels)

    def _print(self, text: Text) -> None:
        encoding = (
            self.console.encoding
        )  # what it cannot write is shown as an escape, and stops no run
        text.plain = text.plain.encode(encoding, "backslashreplace").decode(encoding)
        self.console.print(text, soft_wrap=True, highlight=False)


def time_bar(metrics: Mapping[str, float], width: int) -> Text:
    """A bar whose colors are the fractions of rollout, reward and update in the time of a step."""
    seconds = {name: metrics.get(f"time/{name}_s", 0.0) for name in PHASES}
    seconds = {name: value if 0 < value < math.inf else 0.0 for name, value in seconds.items()}
    total, bar, legend = sum(seconds.values()) or 1.0, Text("time per step".ljust(LABEL)), Text()
    for name, value in seconds.items():
        legend.append(f"  {name} {percent(round(100 * value / total) / 100)}", PHASES[name])
    for name, value in seconds.items():  # the bar takes what the legend leaves
        bar.append("━" * round((width - LABEL - legend.cell_len) * value / total), PHASES[name])
    return bar.append_text(legend)


def best_and_worst(rows: Sequence[Row], count: int = 4) -> list[Row]:
    """``count`` rows with the highest and the lowest rewards; rows without a reward are the lowest."""
    ranked = sorted(rows, key=lambda row: reward_of(row, -math.inf), reverse=True)
    return (
        ranked
        if len(ranked) <= count
        else [*ranked[: count - count // 2], *ranked[-(count // 2) :]]
    )
