"""Finds the ranks that are dead or stopped.

gloo and NCCL notice that a rank is lost, since its connection closes or a collective times out, and do not say which
one: in a ring, a rank waits for its neighbor, which may only wait itself.
"""

from __future__ import annotations

import threading
import time

import torch.distributed as td

MISSED, ROUNDS = 5, 10
"""Beats without which a rank is lost, and rounds in which that is found."""


class Heartbeat:
    """Counts up in the store that the ranks share, and watches the counts of the others.

    A stopped process counts no more, and one whose main thread computes does.
    """

    def __init__(self, store: td.Store, rank: int, world_size: int, *, interval_s: float) -> None:
        # a connection of its own, since it may wait for a host that is stopped
        self._store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        self._rank, self._interval_s = rank, interval_s
        self._missed, self._rounds, self._found = [0] * world_size, 0, ""
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="gruppo-heartbeat", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        counts = [0] * len(self._missed)
        while not self._closed.wait(self._interval_s):
            try:
                self._store.add(f"beats/{self._rank}", 1)
                now = [self._store.add(f"beats/{other}", 0) for other in range(len(counts))]
                self._found = self._store.compare_set("lost", "", "").decode()
            except RuntimeError:  # the process that hosts the store has ended
                return
            # in rounds, not seconds: where all processes were stopped and go on, none is lost
            self._missed = [
                missed + 1 if new == old else 0 for missed, new, old in zip(self._missed, now, counts, strict=True)
            ]
            counts, self._rounds = now, self._rounds + 1

    def lost_ranks(self) -> list[int]:
        """Ranks that are dead or stopped now. All ranks that ask get the answer of the first one."""
        before, until = self._rounds, time.monotonic() + 4 * MISSED * self._interval_s
        time.sleep((MISSED + 2) * self._interval_s)
        if self._rounds == before:
            return [0]  # its process hosts the store, or the launcher on its machine does
        while not self._found and not max(self._missed) >= MISSED and time.monotonic() < until:
            time.sleep(self._interval_s)
        if not self._found and (silent := [str(n) for n, missed in enumerate(self._missed) if missed >= MISSED]):
            self._found = self._store.compare_set("lost", "", ",".join(silent)).decode()
            time.sleep(3 * self._interval_s)  # until the others have read it: this process may host the store
        return [int(number) for number in self._found.split(",") if number]
