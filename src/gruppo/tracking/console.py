"""What a run shows while it trains: a live screen in a terminal, one line a step elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from gruppo.tracking.formatting import is_array, number, shorten, shown, span
from gruppo.tracking.screen import TIMES, best_and_worst, header, metrics_panel, samples_panel
from gruppo.tracking.sheets import has_sheet, sheet_name

PLAIN = {
    "sup/loss_nats": "sup",
    "reward/mean": "reward",
    "reward/std_within_group": "spread",
    "kl/ref_nats": "kl",
    "entropy/mean_nats": "entropy",
    "len/mean_actions": "len",
}
"""What a plain line says of a step, and by which word."""
OF_TEXTS = ("entropy/mean_nats", "len/mean_actions")
"""What is the same in every step of an image model, or hangs on which denoising steps were drawn."""
REMEMBERED = 120
"""Steps in a trend; as many are shown as fit."""


class ConsoleTracker:
    """Shows a run from the moment it is made until :meth:`close`.

    ``total_steps`` is the step that the run ends at and ``step`` the one it is at, which a resumed run does not begin
    at 0. Samples change at most every ``samples_every`` steps, so that they can be read. ``stages``: the names of the
    run's stages, of which a step's ``stage/number`` says in which it is; nothing is said of a single one.
    ``run_dir``: where the sheets of pictures are, so that samples which are pictures are named by their sheet's path.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or Console()
        self._total, self._title, self._samples_every, self._clock = total_steps, title, samples_every, clock
        self._stages, self._stage = stages, ""
        self._run_dir = Path(run_dir)
        self._began = clock()
        self._step = step
        self._ends: deque[float] = deque(maxlen=20)
        self._current: dict[str, float] = {}
        self._history: dict[str, deque[float]] = {}
        self._held_out = self._notice = ""
        self._samples: tuple[int, Sequence[Mapping[str, Any]], str] | None = None
        self._body: RenderableType = Text()
        self._live = self._start() if _can_move(self.console) else None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step; a second call for the same step adds to the first."""
        metrics = _with_step_time(metrics)
        held_out = _held_out(metrics)
        if held_out:
            self._held_out = f"held-out at step {step}: {', '.join(held_out)}"
        self._stage = self._stage_of(metrics) or self._stage
        self._remember(step, metrics)
        if self._live:
            return self._draw()
        words = [stage] if (stage := self._stage_of(metrics)) else []
        words += _words(metrics)
        words += [f"{span(left)} left"] if words and (left := self._left_s()) is not None else []
        words += [f"held-out {', '.join(held_out)}"] if held_out else []
        self._print(Text("  ".join([f"step {step}/{self._total}", *words])))

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show the best and the worst rows, unless the last ones are still to be read; of pictures, where they are.

        Of an evaluation (``held_out``) nothing but the path of its sheet.
        """
        rows = [row for row in rows if "failures" not in row]  # those are for the file; the log warns of them
        if any(row.get("held_out") for row in rows):
            if has_sheet(rows):
                self._print(Text(f"  held-out pictures: {self._run_dir / sheet_name(step, is_held_out=True)}"))
            return
        if not rows or (self._samples and step < self._samples[0] + self._samples_every):
            return
        sheet = str(self._run_dir / sheet_name(step)) if has_sheet(rows) else ""
        self._samples = step, rows, sheet
        if self._live:
            return self._draw()
        for row in best_and_worst(rows, 2):
            self._print(_sample_line(row))
        if sheet:
            self._print(Text(f"  pictures: {sheet}"))

    def note(self, message: str) -> None:
        """A line that stays, above the live screen."""
        self._print(Text(message))

    def warn(self, message: str) -> None:
        """A warning that stays, above the live screen."""
        self._print(Text.assemble(("warning: ", "bold yellow"), message))

    def announce(self, message: str) -> bool:
        """Whether a live screen shows the message. Safe in a signal handler: the refreshing thread draws it."""
        self._notice = message
        return self._live is not None

    def close(self) -> None:
        """Leave the last screen in place and give the terminal back. May be called twice."""
        if self._live:
            self._live.stop()

    def _remember(self, step: int, metrics: Mapping[str, float]) -> None:
        if step != self._step:
            self._step, self._current = step, {}
            self._ends.append(self._clock())
        self._current.update(metrics)
        for name, value in metrics.items():
            self._history.setdefault(name, deque(maxlen=REMEMBERED)).append(float(value))

    def _stage_of(self, metrics: Mapping[str, float]) -> str:
        """The name of the stage that a step's metrics are of; "" where they do not say."""
        place = int(metrics.get("stage/number", 0)) - 1
        return self._stages[place] if 0 <= place < len(self._stages) else ""

    def _left_s(self) -> float | None:
        """Seconds to the last step at the pace of the last steps; None until two of them have ended."""
        if len(self._ends) < 2 or self._step >= self._total:
            return None
        pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return max(pace * (self._total - self._step) - (self._clock() - self._ends[-1]), 0.0)

    def _start(self) -> Live:
        live = Live(get_renderable=self._screen, console=self.console, refresh_per_second=4)
        live.start()
        return live

    def _draw(self) -> None:
        """Draw what was logged once; the refreshing thread only draws the clock anew."""
        width = min(self.console.width, 120)
        parts = [metrics_panel(self._current, self._history, self._held_out, width)]
        if self._samples:
            parts.append(samples_panel(*self._samples, width))
        self._body = Group(*parts)

    def _screen(self) -> RenderableType:
        elapsed = self._clock() - self._began
        width = min(self.console.width, 120)
        title = f"{self._title}  {self._stage}".rstrip()
        parts = [header(title, self._step, self._total, elapsed, self._left_s(), width), self._body]
        return Group(*parts, *([Text(f" {self._notice}", "bold yellow")] if self._notice else []))

    def _print(self, text: Text) -> None:
        encoding = self.console.encoding
        text.plain = text.plain.encode(encoding, "backslashreplace").decode(encoding)
        self.console.print(text, soft_wrap=True, highlight=False)


def _can_move(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")


def _with_step_time(metrics: Mapping[str, float]) -> dict[str, float]:
    parts = [metrics[name] for name, _, _ in TIMES if name in metrics]
    return {**({"time/step_s": sum(parts)} if parts else {}), **metrics}


def _held_out(metrics: Mapping[str, float]) -> list[str]:
    names = [name for name in metrics if name.startswith("eval/")]
    return [f"{name.removeprefix('eval/').removesuffix('_mean')} {number(metrics[name])}" for name in names]


def _words(metrics: Mapping[str, float]) -> list[str]:
    has_steps = any(name.startswith("timestep/") for name in metrics)
    told = [name for name in PLAIN if name in metrics and not (has_steps and name in OF_TEXTS)]
    words = [f"{PLAIN[name]} {number(metrics[name])}" for name in told]
    unit = "denoising steps/s" if has_steps else "tok/s"
    words += [f"{number(metrics['rate/tokens_per_s'])} {unit}"] if "rate/tokens_per_s" in metrics else []
    return words + ([f"{number(metrics['time/step_s'])} s"] if "time/step_s" in metrics else [])


def _sample_line(row: Mapping[str, Any]) -> Text:
    if is_array(row.get("prompt")):
        return Text(f"  reward {number(row.get('reward'))}")
    if is_array(row.get("completion")):
        return Text(f'  reward {number(row.get("reward"))}  "{shorten(shown(row.get("prompt", "")), 120)}"')
    prompt, completion = (shorten(shown(row.get(name, "")), 120) for name in ("prompt", "completion"))
    line = f'  reward {number(row.get("reward"))}  "{prompt}" -> "{completion}"'
    return Text(line + (f"  target {shorten(shown(row['target']), 60)}" if row.get("target") is not None else ""))
