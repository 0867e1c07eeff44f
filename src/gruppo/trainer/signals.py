"""Signals: the first one stops a run after the current step, a second SIGTERM or SIGINT at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from gruppo import distributed as dist
from gruppo.platforms import stop_signals

FINISHING = "finishing this step, then saving; again stops at once"


def say(message: str) -> None:
    """Write a line to standard error, unbuffered, since a signal may arrive in the middle of a
    print."""
    with suppress(OSError):
        os.write(2, f"gruppo: {message}\n".encode())


class Interrupted(KeyboardInterrupt):
    """A signal arrived where nothing is lost by leaving at once. Not an Exception, so that no
    handler swallows it."""


class Stopper:
    """Turns signals into a request to stop, which the training loop reads after each step."""

    def __init__(self) -> None:
        self.requested = False
        self.say: Callable[[str], None] = say
        """Reports that a signal was received. Called inside a signal handler."""
        self._may_leave = self._was_urgent = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals within the block."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may handle signals
            return
        before = {s: signal.signal(s, self._on_signal) for s in stop_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)

    @contextmanager
    def may_leave(self) -> Iterator[None]:
        """Within the block, whose work need not be kept, a signal raises Interrupted at once.

        If code within swallows it, it is raised at the end.
        """
        if dist.world_size() > 1:
            yield  # a rank that leaves alone would block the others in their next collective
            return
        if self.requested:
            raise Interrupted
        self._may_leave = True
        try:
            yield
        finally:
            self._may_leave = False
        if self.requested:
            raise Interrupted

    def _on_signal(self, number: int, frame: object) -> None:
        # SIGUSR1 warns of a time limit, at which SIGTERM follows; SIGHUP comes with SIGTERM when a
        # session ends
        is_urgent = number in (signal.SIGTERM, signal.SIGINT)
        if self._was_urgent and is_urgent:
            raise KeyboardInterrupt
        is_first, self.requested = not self.requested, True
        self._was_urgent |= is_urgent
        if self._may_leave:
            raise Interrupted
        if is_first and dist.is_main():
            self.say(FINISHING)
