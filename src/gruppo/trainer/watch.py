"""What people see of a run while it trains: the log and the live screen."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gruppo.protocols import Tracker
from gruppo.tracking.console import ConsoleTracker
from gruppo.trainer.run import Run
from gruppo.trainer.signals import say

log = logging.getLogger("gruppo")


class Screen(ConsoleTracker):
    """A console that also shows the lines of the log, in place of the log's stream handlers, until
    it is closed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._replaced = [
            handler for handler in log.handlers if type(handler) is logging.StreamHandler
        ]
        self._handler = logging.Handler()
        self._handler.emit = lambda record: self.note(  # type: ignore[method-assign]
            record.getMessage(), is_warning=record.levelno >= logging.WARNING
        )
        for handler in self._replaced:
            log.removeHandler(handler)
        log.addHandler(self._handler)

    def close(self) -> None:
        """Give the terminal and the log back. May be called twice."""
        super().close()
        log.removeHandler(self._handler)
        for handler in self._replaced:
            log.addHandler(handler)


class Output:
    """A standard stream whose reader may leave, as ``head`` does, or whose terminal may close: the
    rest is dropped."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._attempt(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, action: Callable[..., Any], *args: Any) -> None:
        try:
            action(*args)
        except OSError:
            # what is buffered, and what other code writes to the descriptor, must not fail either
            with suppress(OSError):  # a stream without a descriptor
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


@contextmanager
def output_may_close() -> Iterator[None]:
    """Within, a closed standard output or error ends neither the run nor a reward function that
    prints."""
    before = sys.stdout, sys.stderr
    # None without a console on Windows
    sys.stdout, sys.stderr = (stream and Output(stream) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def on_screen(run: Run, folder: Path) -> Tracker:
    """Return the live screen of a run, which also reports signals."""
    console = Screen(
        run.config.steps,
        title=folder.name,
        step=run.state.step,
        samples_every=max(run.config.show_samples_every, 1),
        stages=run.stage_schedule.names,
        run_dir=folder,
        progress=run.engine.progress,
        unit=run.display.progress_unit,
    )
    run.stopper.say = lambda message: None if console.announce(message) else say(message)
    return console


@contextmanager
def logged() -> Iterator[None]:
    """Print the log's notes within, such as that of a download, unless the caller has configured
    the log."""
    level = log.level
    handler = logging.StreamHandler(sys.stderr)  # without a format, it writes the message alone
    if level == logging.NOTSET:
        log.setLevel(logging.INFO)
    if not log.hasHandlers():
        log.addHandler(handler)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
