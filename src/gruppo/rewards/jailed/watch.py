"""Watching one locked child: what it says, what it costs, and its end."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from .program import LOADING, LOCKED

TICK_S = 0.02
WALL_FACTOR = 10
"""Seconds on the clock for each of the processor. One that sleeps is ended too; a right one only where the machine
gives it less than a tenth of a processor."""
MOST_THREADS = 64
ASKER = 0
"""The supervisor's standard input: the trainer holds its other end."""
_CHUNK = 1 << 16
_LINE = re.compile(rb"(?P<nonce>[0-9a-f]+) (?P<case>-?[0-9]{1,6}) (?P<kind>[ve]) (?P<text>.*)", re.DOTALL)


@dataclass
class Limits:
    """Of one program. Seconds of the processor; bytes."""

    case_s: float
    program_s: float
    memory: int


@dataclass
class Meter:
    """Time spent, by the processor and by the clock."""

    cpu_s: float = 0.0
    wall_s: float = 0.0

    def is_over(self, limit_s: float) -> bool:
        return self.cpu_s > limit_s or self.wall_s > WALL_FACTOR * limit_s


@dataclass
class Child:
    """A locked process, the ends of its pipes, and what it has said so far."""

    pid: int
    channel: int
    output: int | None
    nonce: str
    caps: Mapping[int, int]
    """Bytes that each case may say."""
    said: dict[int, tuple[str, str]] = field(default_factory=dict)
    """By case: v or e, and the text."""
    printed: bytearray = field(default_factory=bytearray)
    why: str = ""
    """Why it was ended, if it was: time, output, threads, orphan."""
    status: int = 0
    _line: bytes = b""
    _unread: int = 0
    """Bytes since the last line that was ours."""
    _began: float = field(default_factory=time.monotonic)
    _mark: Meter = field(default_factory=Meter)

    @property
    def current(self) -> int:
        """The case that it is at."""
        return max(self.said, default=LOCKED) + 1

    def spent(self) -> Meter:
        """Since it began. The clock of a process that has ended stands still until it is waited for."""
        return Meter(time.clock_gettime((~self.pid << 3) | 2), time.monotonic() - self._began)

    def watch(self, limits: Limits, used: Meter) -> Meter:
        """Until it has ended or was ended; what it used, added to what others of its program did."""
        with contextlib.ExitStack() as stack:
            end = os.pidfd_open(self.pid)
            stack.callback(os.close, end)
            ears = [fd for fd in (self.channel, self.output) if fd is not None]
            for fd in ears:
                stack.callback(os.close, fd)
            poll = select.poll()
            for fd in (*ears, end):
                poll.register(fd, select.POLLIN)
            poll.register(ASKER, 0)  # tells when the other end is closed, and nothing else
            alive = True
            while alive:
                ready = {fd for fd, _ in poll.poll(TICK_S * 1000)}
                alive = end not in ready
                if ASKER in ready:
                    poll.unregister(ASKER)
                    self._end("orphan")
                for fd in ears if not alive else ready.intersection(ears):
                    self._listen(fd, poll, to_the_end=not alive)
                spent = self.spent()
                if alive and not self.why:
                    excess = self._excess(limits, spent, used)
                    if excess:
                        self._end(excess)
        self.status = os.waitpid(self.pid, 0)[1]
        return Meter(used.cpu_s + spent.cpu_s, used.wall_s + spent.wall_s)

    def _listen(self, fd: int, poll: select.poll, *, to_the_end: bool) -> None:
        while True:
            try:
                chunk = os.read(fd, _CHUNK)
            except BlockingIOError:
                return
            if not chunk:
                if not to_the_end:
                    poll.unregister(fd)
                return
            if self.why != "output":
                self._take(fd, chunk)
            if not to_the_end or self.why:
                return

    def _take(self, fd: int, chunk: bytes) -> None:
        self._unread += len(chunk)
        if fd == self.output:
            self.printed += chunk
        else:
            *lines, self._line = (self._line + chunk).split(b"\n")
            for line in lines:
                if self._read(line):
                    self._unread = len(self._line)
        if self._unread > self._cap(self.current):
            self._end("output")

    def _read(self, line: bytes) -> bool:
        """Whether a line is one of ours, the first of its case."""
        found = _LINE.fullmatch(line)
        if found is None or found["nonce"].decode() != self.nonce:
            return False
        case = int(found["case"])
        if case in self.said or (case not in (LOCKED, LOADING) and case not in self.caps):
            return False
        if len(found["text"]) > self._cap(case):
            self._end("output")
            return False
        self.said[case] = (found["kind"].decode(), found["text"].decode("ascii", "backslashreplace"))
        self._mark = self.spent()
        return True

    def _cap(self, case: int) -> int:
        return self.caps.get(case, 0) + _CHUNK

    def _end(self, why: str) -> None:
        self.why = self.why or why
        os.kill(self.pid, signal.SIGKILL)  # it is ours until it is waited for, so its number is no other's

    def _excess(self, limits: Limits, spent: Meter, used: Meter) -> str:
        of_case = Meter(spent.cpu_s - self._mark.cpu_s, spent.wall_s - self._mark.wall_s)
        of_all = Meter(spent.cpu_s + used.cpu_s, spent.wall_s + used.wall_s)
        if of_case.is_over(limits.case_s) or of_all.is_over(limits.program_s):
            return "time"
        return "threads" if _threads(self.pid) > MOST_THREADS else ""


def _threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0
