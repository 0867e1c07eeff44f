"""Stopping politely: the first signal asks, the second stops at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from gruppo import distributed as dist

FINISHING = "finishing this step, then saving; again stops at once"


def say(message: str) -> None:
    """A line on standard error, past all buffers: a signal may have come in the middle of a print."""
    with suppress(OSError):
        os.write(2, f"gruppo: {message}\n".encode())


class Interrupted(KeyboardInterrupt):
    """A signal arrived while nothing would be lost by leaving at once. Not an Exception: no handler swallows it."""


class Stopper:
    """Turns SIGTERM and SIGINT into a request that is heeded at the next safe place."""

    def __init__(self) -> None:
        self.requested = False
        self.say: Callable[[str], None] = say
        """Tells people that they were heard. Called inside a signal handler."""
        self._may_leave = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals within; outside the main thread they cannot be, and are left alone."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {s: signal.signal(s, self._on_signal) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)

    @contextmanager
    def may_leave(self) -> Iterator[None]:
        """Within, a signal raises Interrupted at once: nothing done here needs to be kept.

        One that code within has swallowed raises it at the end. Where there are other ranks, none leaves on its own.
        """
        if dist.world_size() > 1:
            yield
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
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self._may_leave:
            raise Interrupted
        if dist.is_main():
            self.say(FINISHING)
