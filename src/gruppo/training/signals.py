"""Stopping politely: the first signal asks, the second stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Interrupted(BaseException):
    """A signal arrived while nothing would be lost by leaving at once. Not an Exception: no handler swallows it."""


class Stopper:
    """Turns SIGTERM and SIGINT into a request that is heeded at the next safe place."""

    def __init__(self) -> None:
        self.requested = False
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
                signal.signal(number, handler)

    @contextmanager
    def may_leave(self) -> Iterator[None]:
        """Within, a signal raises Interrupted at once: nothing done here needs to be kept."""
        if self.requested:
            raise Interrupted
        self._may_leave = True
        try:
            yield
        finally:
            self._may_leave = False

    def _on_signal(self, number: int, frame: object) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self._may_leave:
            raise Interrupted
