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
        interval_s: float,
        limit_s: float,
        on_stuck: Callable[[], None],
    ) -> None:
        self._main_store = store
        # a connection of its own, since it may wait for a host that is stopped
        self._store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        self._rank, self._interval_s, self._limit_s, self._on_stuck = (
            rank,
            interval_s,
            limit_s,
            on_stuck,
        )
        self._missed, self._rounds, self._found = [0] * ranks, 0, ""
        self.phase, self.calls = "start", 0
        """What this rank does, and how many collectives it has begun."""
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
        beats, failed_at = 0, None
        keys = [f"state/{other}" for other in range(len(self._missed))]
        while not self.closed.wait(self._interval_s):
            beats += 1
            try:
                self._store.set(keys[self._rank], json.dumps((beats, self.calls, self.phase)))
                now = [tuple(json.loads(text)) for text in self._store.multi_get(keys)]
                self._found = self._store.compare_set("lost", "", "").decode()
                if self.failure is None and (
                    text := self._store.compare_set("failure", "", "").decode()
                ):
                    self.failure = RankFailure(**json.loads(text))
            except RuntimeError:  # the process that hosts the store has ended
                now = None
            # in rounds, not seconds: where all processes were stopped and go on, none is lost
            if now is not None:
                rows = zip(self._missed, now, self.states, strict=True)
                self._missed = [missed + 1 if new[0] == old[0] else 0 for missed, new, old in rows]
                self.states, self._rounds = now, self._rounds + 1
            if self.failure is not None and failed_at is None:
                failed_at = time.monotonic()
            since, limit_s = self.waiting_since, self._limit_s
            if since is not None and failed_at is not None:  # that collective cannot complete
                since, limit_s = max(since, failed_at), min(limit_s, LEAVE_S)
            if since is not None and time.monotonic() - since > limit_s:
                self._on_stuck()
                return
            if now is None and since is None:
                return

    # --- failures ---

    def publish(self, failure: RankFailure) -> None:
        """Tell the other ranks that this one has failed; the first one that does is what they
        report."""
        with suppress(RuntimeError):
            self._main_store.compare_set("failure", "", json.dumps(vars(failure)))

    def find_failure(self) -> RankFailure | None:
        """What another rank has published, as read by the other thread: the store may be on a
        stopped host."""
        before, until = self._rounds, time.monotonic() + 5 * self._interval_s
        while self.failure is None and self._rounds < before + 2 and time.monotonic() < until:
            time.sleep(self._interval_s / 10)
        return None if self.failure is None or self.failure.rank == self._rank else self.failure

    def is_reported(self) -> bool:
        """Say that rank 0 reports its error; on the others, wait until it does.

        False where this rank has to report its own: it is rank 0, or rank 0 does not answer, such
        as after a kill.
        """
        others = (
            len(self._missed) - 1 - len(list(filter(None, self._found.split(","))))
        )  # none that is lost
        with suppress(RuntimeError):
            if self._rank == 0:
                self._main_store.set("reported", "1")
                until = (
                    time.monotonic() + 2.0
                )  # its process may host the store: the others read it before
                while self._main_store.add("read", 0) < others and time.monotonic() < until:
                    time.sleep(0.02)
            elif "0" not in self._found.split(","):
                self._main_store.wait(["reported"], timedelta(seconds=min(TOLD_S, self._limit_s)))
                self._main_store.add("read", 1)
                return True
        return False

    # --- ranks that do not come ---

    def lost_ranks(self) -> list[int]:
        """Ranks that are dead or stopped now. All ranks that ask get the answer of the first
        one."""
        before, until = self._rounds, time.monotonic() + 4 * MISSED * self._interval_s
        for _ in range(
            MISSED + 2
        ):  # a rank that was stopped before the timeout began has missed them already
            if self._found or max(self._missed) >= MISSED:
                break
            time.sleep(self._interval_s)
        else:
            if self._rounds == before and self._rank != 0:
                self._found = (
                    "0"  # its process hosts the store, or the launcher on its machine does
                )
                return [0]
        while not self._found and not max(self._missed) >= MISSED and time.monotonic() < until:
            time.sleep(self._interval_s)
        if not self._found and (
            silent := [str(n) for n, missed in enumerate(self._missed) if missed >= MISSED]
        ):
            self._found = self._store.compare_set("lost", "", ",".join(silent)).decode()
            time.sleep(
                3 * self._interval_s
            )  # until the others have read it: this process may host the store
        return [int(number) for number in self._found.split(",") if number]
