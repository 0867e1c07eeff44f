"""A run in the terminal: a live screen, or one line per step if the output is not a terminal."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gruppo.tracking.formatting import as_text, duration, number, shorten
from gruppo.tracking.images import has_pixels
from gruppo.tracking.samples import reward_of, sheet_name

Row = Mapping[str, Any]

METRICS: Mapping[str, tuple[str, str]] = {
    "sup/loss_nats": ("sup", "demo loss, nats"),
    "reward/mean": ("reward", "reward"),
    "reward/std_within_group": ("spread", "spread in a group"),
    "group/zero_spread_frac": ("", "groups w/o spread"),
    "kl/ref_nats": ("kl", "KL to reference"),
    "entropy/mean_nats": ("entropy", "entropy, nats"),
    "len/mean_actions": ("len", "length, actions"),
    "clip/high_frac": ("", "clipped above"),
    "grad/norm": ("", "gradient norm"),
    "time/rollout_s": ("", "seconds of rollout"),
    "time/update_s": ("", "seconds of update"),
    "mem/peak_gib": ("", "memory, GiB"),
}
"""Name on a plain line, "" for none, and name on the live screen."""
TEXT_ONLY = ("entropy/mean_nats", "len/mean_actions")
"""Left out for images: constant, or dependent on which denoising steps were sampled."""


@dataclass(eq=False)
class ConsoleTracker:
    """Tracker that shows a run until :meth:`close`."""

    total_steps: int
    _: KW_ONLY
    console: Console = field(default_factory=Console)
    title: str = "gruppo"
    step: int = 0
    samples_every: int = 5
    """Steps between samples at least, so that they can be read."""
    stages: Sequence[str] = ()
    """Names of the stages, of which ``stage/number`` says which is running."""
    run_dir: str | Path = ""
    """Where the sheets of images are."""
    unit: str = "token"
    """What ``rate/tokens_per_s`` counts, "image" for policies that render images."""
    progress: Callable[[], str] = str
    """Returns what is being done within the step."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._start = self.clock()
        self._step_ends: deque[float] = deque(maxlen=20)
        self._metrics: dict[str, float] = {}
        self._stage = self._held_out = self._notice = ""
        self._samples: list[str] = []
        self._samples_at = -math.inf
        self._live: Live | None = None
        # A log file has no cursor to move, and the screen is not escaped for other encodings.
        is_screen = self.console.is_terminal and not self.console.is_dumb_terminal
        if is_screen and self.console.encoding.startswith("utf"):
            self._live = Live(
                get_renderable=self.screen, console=self.console, refresh_per_second=4
            )
            self._live.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step; a second call for the same step adds to the first."""
        shown = dict(metrics)
        if self.unit == "image":  # its actions are denoising steps
            shown = {name: value for name, value in metrics.items() if name not in TEXT_ONLY}
            if "rate/tokens_per_s" in shown:
                shown["rate/tokens_per_s"] /= metrics.get("len/mean_actions") or 1
        if step != self.step:
            self.step, self._metrics = step, {}
            self._step_ends.append(self.clock())
        self._metrics |= shown
        index = int(shown.get("stage/number", 0)) - 1
        if 0 <= index < len(self.stages):
            self._stage = self.stages[index]
        held_out = ", ".join(
            f"{name[5:].removesuffix('_mean')} {number(value)}"
            for name, value in shown.items()
            if name.startswith("eval/")
        )
        if held_out:
            self._held_out = f"held-out at step {step}: {held_out}"
        if self._live is None:
            words = [f"step {step}/{self.total_steps}", *self._words(shown)]
            words += [f"held-out {held_out}"] if held_out else []
            self._print(Text("  ".join(words)))

    def _words(self, metrics: Mapping[str, float]) -> list[str]:
        """A plain line of metrics; empty for those of an evaluation alone."""
        words = [
            f"{name} {number(metrics[metric])}"
            for metric, (name, _) in METRICS.items()
            if name and metric in metrics
        ]
        words += self._totals(metrics)
        if "time/step_s" in metrics:
            words.append(f"{number(metrics['time/step_s'])} s")
        left = self._seconds_left()
        if words and left is not None:
            words.append(f"{duration(left)} left")
        return [self._stage, *words] if words and self._stage else words

    def _totals(self, metrics: Mapping[str, float]) -> list[str]:
        """The speed, and the count of rows without a reward."""
        words = []
        if metrics.get("reward/unscored_count", 0) > 0:
            words.append(f"{metrics['reward/unscored_count']:.0f} without a reward")
        if "rate/tokens_per_s" in metrics:
            words.append(f"{number(metrics['rate/tokens_per_s'])} {self.unit}s/s")
        return words

    def log_samples(self, step: int, rows: Sequence[Row]) -> None:
        """Show the best and the worst rows, unless the last ones are recent; of an evaluation
        (``held_out``) only the name of the sheet of images."""
        rows = [row for row in rows if "failures" not in row]  # the log warns of those
        is_held_out = any(row.get("held_out") for row in rows)
        sheet = Path(self.run_dir) / sheet_name(step, is_held_out)
        if is_held_out and sheet.is_file():
            self._print(Text(f"  held-out images: {sheet}"))
        if is_held_out or not rows or step < self._samples_at + self.samples_every:
            return
        self._samples_at = step
        self._samples = [_sample(row) for row in best_and_worst(rows, 4 if self._live else 2)]
        self._samples += [f"images: {sheet}"] if sheet.is_file() else []
        for line in () if self._live else self._samples:
            self._print(Text(f"  {line}"))

    def note(self, message: str, *, is_warning: bool = False) -> None:
        """Print a message above the live screen."""
        self._print(Text.assemble(("warning: " if is_warning else "", "bold yellow"), message))

    def announce(self, message: str) -> bool:
        """Show a message on the live screen; False without one. Safe in a signal handler."""
        self._notice = message
        return self._live is not None

    def close(self) -> None:
        """Leave the last screen in place and release the terminal. May be called twice."""
        if self._live:
            self._live.stop()

    def screen(self) -> RenderableType:
        """The live screen: title, clock, metrics and samples."""
        left = self._seconds_left()
        clock = f"  {duration(self.clock() - self._start)} elapsed"
        if left is not None:
            clock += f", about {duration(left)} left"
        title = f"{self.title}  {self._stage}".rstrip()
        head = Text.assemble(
            f"step {self.step}/{self.total_steps}  ", (title, "bold"), (clock, "dim")
        )
        metrics = dict(self._metrics)  # the logging thread replaces it
        table = Table.grid(padding=(0, 2))
        for name, (_, label) in METRICS.items():
            if name in metrics:
                table.add_row(label, Text(number(metrics[name]), "bold", justify="right"))
        lines = ["  ".join(self._totals(metrics)), self._held_out, *self._samples, self._notice]
        texts = [Text(line, overflow="fold") for line in [*lines, self.progress()] if line]
        return Group(head, table, *texts)

    def _seconds_left(self) -> float | None:
        """Seconds to the last step at the pace of the last ones; None until two have ended."""
        if len(self._step_ends) < 2 or self.step >= self.total_steps:
            return None
        pace = (self._step_ends[-1] - self._step_ends[0]) / (len(self._step_ends) - 1)
        since = self.clock() - self._step_ends[-1]
        return max(pace * (self.total_steps - self.step) - since, 0.0)

    def _print(self, text: Text) -> None:
        encoding = self.console.encoding  # what it cannot write is escaped, and stops no run
        text.plain = text.plain.encode(encoding, "backslashreplace").decode(encoding)
        self.console.print(text, soft_wrap=True, highlight=False)


def _sample(row: Row) -> str:
    """A row on one line, without images."""
    line = f"reward {number(row.get('reward'))}"
    for name, before in (("prompt", "  "), ("completion", " -> ")):
        if has_pixels(row.get(name)):
            return line
        line += f'{before}"{shorten(as_text(row.get(name, "")), 120)}"'
    target = row.get("target")
    return line if target is None else f"{line}  target {shorten(as_text(target), 60)}"


def best_and_worst(rows: Sequence[Row], count: int = 4) -> list[Row]:
    """``count`` rows with the highest and the lowest rewards; those without one are the lowest."""
    ranked = sorted(rows, key=lambda row: reward_of(row, -math.inf), reverse=True)
    half = count // 2
    return ranked if len(ranked) <= count else [*ranked[: count - half], *ranked[-half:]]
