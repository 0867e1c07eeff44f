"""The screen of a run, with the log's lines above it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gruppo.track.console import ConsoleTracker
from gruppo.training.config import Config
from gruppo.types import Tracker


def on_screen(config: Config, folder: Path) -> list[Tracker]:
    """The trackers of a run that people watch."""
    console = ConsoleTracker(config.steps, title=folder.name, samples_every=max(config.show_samples_every, 1))
    return [Screen(console)]


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

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self.console.samples(step, rows)

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
        say = self.console.warn if record.levelno >= logging.WARNING else self.console.note
        say(record.getMessage())
