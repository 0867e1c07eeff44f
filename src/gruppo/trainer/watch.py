"""What people see of a run: the log, the live screen, the closing table."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from gruppo.config import serialization
from gruppo.config.schema import Config
from gruppo.config.stages import stage_path
from gruppo.protocols import Tracker
from gruppo.tracking.console import ConsoleTracker
from gruppo.tracking.plots import plot_run
from gruppo.tracking.report import closing_lines, write_page
from gruppo.trainer.run import Run
from gruppo.trainer.signals import say

log = logging.getLogger("gruppo")


def on_screen(run: Run, folder: Path) -> list[Tracker]:
    """The trackers of a run that people watch."""
    every = max(run.config.show_samples_every, 1)
    stages = run.stage_schedule.names
    console = ConsoleTracker(
        run.config.steps,
        title=folder.name,
        step=run.state.step,
        samples_every=every,
        stages=stages,
        run_dir=folder,
        unit="image" if run.policy.renders_images else run.policy.action_name,
    )
    run.stopper.say = lambda message: None if console.announce(message) else say(message)
    return [Screen(console)]


@contextmanager
def heard() -> Iterator[None]:
    """Within, the log's notes are shown (a download of 93 MB is one), unless whoever calls has set that otherwise."""
    level, handler = log.level, None
    if level == logging.NOTSET:
        log.setLevel(logging.INFO)
    if not log.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
    try:
        yield
    finally:
        log.setLevel(level)
        if handler is not None:
            log.removeHandler(handler)


def draw(folder: Path) -> None:
    """The run's curves as PNG files. The run is complete: what cannot be drawn, for whatever reason, costs a line."""
    for what, make in (("curves", lambda: plot_run(folder, note=log.info)), ("page", lambda: write_page(folder))):
        try:
            make()
        except Exception as error:
            log.warning("the %s could not be drawn: %s: %s", what, type(error).__name__, error)


def say_closing(result: Any) -> None:
    """What came of the run, and what to type next."""
    longer = for_longer(serialization.load(result.folder / "config.json"))
    said = closing_lines(result.folder, result.before, result.after, question=result.question, longer=longer)
    Console().print(said, soft_wrap=True)  # a command that is broken in two cannot be copied


def for_longer(config: Config) -> str:
    """The options that train a config again for twice its steps, which a last stage of a fixed length would refuse."""
    to_the_end = f" --{stage_path(config, len(config.plan) - 1)}.steps 0" if config.plan[-1].steps else ""
    return f"--steps {2 * config.steps}{to_the_end}"


class Screen:
    """A console that takes the place of the log's plain lines until it is closed."""

    def __init__(self, console: ConsoleTracker) -> None:
        self.console = console
        self._log = logging.getLogger("gruppo")
        self._set_aside = [handler for handler in self._log.handlers if type(handler) is logging.StreamHandler]
        self._handler = _ToConsole(console)
        for handler in self._set_aside:
            self._log.removeHandler(handler)
        self._log.addHandler(self._handler)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.console.log(step, metrics)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self.console.log_samples(step, rows)

    def close(self) -> None:
        """Give the terminal back before anything else is said. May be called twice."""
        self.console.close()
        self._log.removeHandler(self._handler)
        for handler in self._set_aside:
            self._log.addHandler(handler)


class _ToConsole(logging.Handler):
    """Log lines above the live screen."""

    def __init__(self, console: ConsoleTracker) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        self.console.note(record.getMessage(), is_warning=record.levelno >= logging.WARNING)
