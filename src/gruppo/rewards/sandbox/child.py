"""Start of a confined process, collection of its reports, and enforcement of its limits."""

from __future__ import annotations

import contextlib
import os
import random
import re
import secrets
import select
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .lockdown import Lockdown
from .program import CHANNEL, LOADING, LOCKED, describe, open_streams, run_calls, run_script, write_report

TICK_S = 0.02
WALL_FACTOR = 10
"""Seconds on the clock for each of the processor. A program that sleeps is ended too; a right one only where the
machine gives it less than a tenth of a processor."""
MOST_THREADS = 64
ASKER = 0  # the supervisor's standard input: the trainer holds its other end
_CHUNK = 1 << 16
_LINE = re.compile(rb"(?P<nonce>[0-9a-f]+) (?P<case>-?[0-9]{1,6}) (?P<kind>[ve]) (?P<text>.*)", re.DOTALL)


@dataclass
class Meter:
    """CPU and wall-clock time."""

    cpu_s: float = 0.0
    wall_s: float = 0.0

    def is_over(self, limit_s: float) -> bool:
        return self.cpu_s > limit_s or self.wall_s > WALL_FACTOR * limit_s


@dataclass
class Child:
    """A confined process, the ends of its pipes, and what it has reported so far."""

    pid: int
    channel: int
    output: int | None
    nonce: str
    caps: Mapping[int, int]  # bytes beyond the usual that each case may report
    reports: dict[int, tuple[str, str]] = field(default_factory=dict)  # by case: v or e, and the text
    printed: bytearray = field(default_factory=bytearray)
    end_reason: str = ""  # why it was killed, if it was: time, output, threads, orphan
    status: int = 0
    _line: bytes = b""
    _unread: int = 0  # bytes since the last line that was ours
    _began: float = field(default_factory=time.monotonic)
    _case_began: Meter = field(default_factory=Meter)

    def watch(self, case_s: float, program_s: float, used: Meter) -> Meter:
        """Wait for the end, or kill it. Returns its time plus ``used``, the time of earlier processes of the program.

        Seconds of the processor: ``case_s`` for a case, ``program_s`` for all of them.
        """
        ended = os.pidfd_open(self.pid)
        pipes = {fd for fd in (self.channel, self.output) if fd is not None}
        poll = select.poll()
        for fd in (*pipes, ended):
            poll.register(fd, select.POLLIN)
        poll.register(ASKER, 0)  # tells when the other end is closed, and nothing else
        is_alive = True
        while is_alive:
            ready = {fd for fd, _ in poll.poll(TICK_S * 1000)}
            is_alive = ended not in ready
            if ASKER in ready:
                poll.unregister(ASKER)
                self._kill("orphan")
            for fd in ready & pipes if is_alive else pipes:
                with contextlib.suppress(BlockingIOError):
                    while chunk := os.read(fd, _CHUNK):
                        self._take(fd, chunk)
                        if is_alive:
                            break
                    else:
                        if is_alive:  # closed by the program: it would be ready for ever
                            poll.unregister(fd)
            spent = self._spent()
            if is_alive and not self.end_reason:
                case = Meter(spent.cpu_s - self._case_began.cpu_s, spent.wall_s - self._case_began.wall_s)
                total = Meter(spent.cpu_s + used.cpu_s, spent.wall_s + used.wall_s)
                if case.is_over(case_s) or total.is_over(program_s):
                    self._kill("time")
                with contextlib.suppress(OSError):  # /proc may be hidden
                    if len(os.listdir(f"/proc/{self.pid}/task")) > MOST_THREADS:
                        self._kill("threads")
        for fd in (*pipes, ended):
            os.close(fd)
        self.status = os.waitpid(self.pid, 0)[1]
        return Meter(used.cpu_s + spent.cpu_s, used.wall_s + spent.wall_s)

    def _take(self, fd: int, chunk: bytes) -> None:
        """Collect printed text and reports: the first line of each case that has the nonce."""
        if self.end_reason == "output":
            return
        self._unread += len(chunk)
        if fd == self.output:
            self.printed += chunk
        else:
            *lines, self._line = (self._line + chunk).split(b"\n")
            for line in lines:
                fields = _LINE.fullmatch(line)
                if fields is None or fields["nonce"].decode() != self.nonce:
                    continue
                case = int(fields["case"])
                if case in self.reports or case not in (LOCKED, LOADING, *self.caps):
                    continue
                if len(fields["text"]) > self.caps.get(case, 0) + _CHUNK:
                    self._kill("output")
                    continue
                self.reports[case] = (fields["kind"].decode(), fields["text"].decode("ascii", "backslashreplace"))
                self._case_began, self._unread = self._spent(), len(self._line)
        current = max(self.reports, default=LOCKED) + 1
        if self._unread > self.caps.get(current, 0) + _CHUNK:
            self._kill("output")

    def _spent(self) -> Meter:
        """Time since the start. The CPU clock of an ended process can be read until it is waited for."""
        return Meter(time.clock_gettime((~self.pid << 3) | 2), time.monotonic() - self._began)

    def _kill(self, reason: str) -> None:
        self.end_reason = self.end_reason or reason
        os.kill(self.pid, signal.SIGKILL)  # it is ours until it is waited for, so its number is no other's


def start(request: Mapping[str, Any], first: int, caps: Mapping[int, int], lockdown: Lockdown) -> Child:
    """Fork a process that confines itself and runs the program's cases from ``first`` on; a script runs one."""
    nonce, is_script = secrets.token_hex(16), request["kind"] == "script"
    channel, reports = os.pipe()
    output, prints = os.pipe() if is_script else (None, None)
    reads = None
    if is_script:  # standard input is a file in memory: a pipe would have to be filled while the program runs
        reads = os.memfd_create("stdin")
        with open(reads, "wb", closefd=False) as file:
            file.write(request["cases"][first].encode("utf-8", "surrogatepass"))
        os.lseek(reads, 0, os.SEEK_SET)
    pid = os.fork()
    if pid == 0:
        try:
            report = partial(write_report, nonce)
            try:
                # Descriptors 0 to 3 are the child's own, ``rules`` is for its lockdown, and no other is open.
                null = os.open(os.devnull, os.O_RDWR)
                sources = [reads or null, prints or null, null, reports]
                copies = [os.dup2(fd, 100 + place, inheritable=False) for place, fd in enumerate(sources)]
                for place, copy in enumerate(copies):
                    os.dup2(copy, place)
                os.closerange(CHANNEL + 1, lockdown.rules)
                os.closerange(lockdown.rules + 1, 1024)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                open_streams()
                lockdown.apply(memory=request["memory"], cpu_s=int(request["program_s"]) + 2)
            except Exception as error:
                report(LOCKED, "e", describe(error))
            else:
                report(LOCKED, "v", "")
                random.seed(0)  # a fork is seeded anew
                run_script(request, report) if is_script else run_calls(request, first, report)
        finally:
            os._exit(1)  # whatever happened: a child that goes on as the supervisor would be a free one
    for end in filter(None, (reports, prints, reads)):
        os.close(end)
    for end in filter(None, (channel, output)):
        os.set_blocking(end, False)
    return Child(pid, channel, output, nonce, {LOADING: caps[first]} if is_script else caps)
