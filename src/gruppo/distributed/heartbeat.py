"""Finds the ranks that are dead, stopped, late or have failed, and what each of them was doing.

gloo and NCCL notice that a rank is lost, since its connection closes or a collective times out, and
do not say which one: in a ring, a rank waits for its neighbor, which may only wait itself.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as td

MISSED, ROUNDS = 5, 14
"""Beats without which a rank is lost, and rounds in which that is found and the process ends."""
LEAVE_S = 5.0
"""How long a rank may stay in a collective after it has read that another one has failed."""
TOLD_S = 10.0
"""How long a rank that has failed waits for rank 0 to report it."""


@dataclass(frozen=True)
class RankFailure:
    """What the first rank that failed tells the others."""

    rank: int
    phase: str
    message: str
    exit_code: int


def interval_of(limit_s: float) -> float:
    """Seconds between two beats."""
    return min(limit_s / 30, 1.0)


class Heartbeat:
    """Publishes what this rank does in the store that the ranks share, and reads what the others
    do.

    A stopped process publishes nothing more, and one whose main thread computes does. ``on_stuck``
    is called, in another thread, where this rank stays in a collective for longer than ``limit_s``,
    or long after a rank has failed.
    """

    def __init__(
        self,
        store: td.Store,
        rank: int,
        ranks: int,
        *,
        limit_s: float,
        on_stuck: Callable[[], None],
    ) -> None:
        self._main_store = store
        # a connection of its own, since it may wait for a host that is stopped
        self._store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        self._rank = rank
        self._limit_s = limit_s
        self._interval_s = interval_of(limit_s)
        self._on_stuck = on_stuck
        self._missed = [0] * ranks
        self._rounds = 0
        self._found = ""
        """Ranks that the first rank that looked found to be lost, separated by commas."""
        self.phase = "start"
        """What this rank does."""
        self.calls = 0
        """Collectives that it has begun."""
        self.waiting_since: float | None = None
        """When the main thread began to wait for other ranks."""
        self.states: list[tuple[int, int, str]] = [(0, 0, "start")] * ranks
        """Of each rank: beats, collectives begun, phase."""
        self.failure: RankFailure | None = None
        self.closed = threading.Event()
        """Set at the end of the run: the other thread then ends too."""
        self._store.set(f"state/{rank}", json.dumps((0, 0, self.phase)))
        self._thread = threading.Thread(target=self._run, name="gruppo-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; the store may be on a host that does not answer."""
        self.closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(2 * self._interval_s)

    def _run(self) -> None:
        beats = 0
        failed_at: float | None = None
        while not self.closed.wait(self._interval_s):
            beats += 1
            try:
                self._exchange(beats)
                is_store_lost = False
            except RuntimeError:  # the process that hosts the store has ended
                is_store_lost = True
            if self.failure is not None:
                failed_at = failed_at or time.monotonic()
            since, limit_s = self.waiting_since, self._limit_s
            if since is not None and failed_at is not None:  # that collective cannot complete
                since = max(since, failed_at)
                limit_s = min(limit_s, LEAVE_S)
            if since is not None and time.monotonic() - since > limit_s:
                self._on_stuck()
                return
            if is_store_lost and since is None:
                return

    def _exchange(self, beats: int) -> None:
        """Publish the state of this rank and read those of all."""
        keys = [f"state/{other}" for other in range(len(self._missed))]
        self._store.set(keys[self._rank], json.dumps((beats, self.calls, self.phase)))
        now = [tuple(json.loads(text)) for text in self._store.multi_get(keys)]
        self._found = self._store.compare_set("lost", "", "").decode()
        text = self._store.compare_set("failure", "", "").decode()
        if text and self.failure is None:
            self.failure = RankFailure(**json.loads(text))
        # in rounds, not seconds: where all processes were stopped and go on, none is lost
        rows = zip(self._missed, now, self.states, strict=True)
        self._missed = [missed + 1 if new[0] == old[0] else 0 for missed, new, old in rows]
        self.states = now
        self._rounds += 1

    def _wait(self, is_done: Callable[[], bool], rounds: int) -> None:
        """Wait until something is known, for the time of ``rounds`` beats."""
        until = time.monotonic() + rounds * self._interval_s
        while not is_done() and time.monotonic() < until:
            time.sleep(self._interval_s / 10)

    # --- failures ---

    def publish(self, failure: RankFailure) -> None:
        """Tell the other ranks that this one has failed; the first one that does is what they
        report."""
        with suppress(RuntimeError):
            self._main_store.compare_set("failure", "", json.dumps(vars(failure)))

    def find_failure(self) -> RankFailure | None:
        """What another rank has published, as read by the other thread: the store may be on a
        stopped host."""
        before = self._rounds
        self._wait(lambda: self.failure is not None or self._rounds >= before + 2, 5)
        return None if self.failure is None or self.failure.rank == self._rank else self.failure

    def is_reported(self) -> bool:
        """Say that rank 0 reports its error; on the others, wait until it does.

        False where this rank has to report its own: it is rank 0, or rank 0 does not answer, such
        as after a kill.
        """
        lost = [*filter(None, self._found.split(","))]
        with suppress(RuntimeError):
            if self._rank == 0:
                self._main_store.set("reported", "1")
                others = len(self._missed) - 1 - len(lost)
                # its process may host the store: the others read it before it ends
                until = time.monotonic() + 2.0
                while self._main_store.add("read", 0) < others and time.monotonic() < until:
                    time.sleep(0.02)
            elif "0" not in lost:
                self._main_store.wait(["reported"], timedelta(seconds=min(TOLD_S, self._limit_s)))
                self._main_store.add("read", 1)
                return True
        return False

    # --- ranks that do not come ---

    def lost_ranks(self) -> list[int]:
        """Ranks that are dead or stopped now. All ranks that ask get the answer of the first
        one."""

        def is_lost() -> bool:
            return bool(self._found) or max(self._missed) >= MISSED

        before = self._rounds
        # a rank that was stopped before the timeout began has missed its beats already
        self._wait(is_lost, MISSED + 2)
        if not is_lost() and self._rounds == before and self._rank != 0:
            # its process hosts the store, or the launcher on its machine does
            self._found = "0"
        self._wait(is_lost, 3 * MISSED)
        silent = [str(number) for number, missed in enumerate(self._missed) if missed >= MISSED]
        if silent and not self._found:
            self._found = self._store.compare_set("lost", "", ",".join(silent)).decode()
            # until the others have read it: this process may host the store
            time.sleep(3 * self._interval_s)
        return [int(number) for number in filter(None, self._found.split(","))]
