"""Start of a confined process, collection of its reports, and enforcement of its limits."""

from __future__ import annotations

import _socket  # socket itself would take as long to import as everything else
import contextlib
import os
import random
import secrets
import select
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .lockdown import LAST_DESCRIPTOR, Lockdown, answer_clone, die_with
from .program import (
    CHANNEL,
    LOADING,
    LOCKED,
    describe,
    open_streams,
    read_report,
    run_calls,
    run_script,
    write_report,
)

TICK_S = 0.02
WALL_FACTOR = 10
"""Seconds on the clock for each of the limit: a right program is ended only where it gets a tenth
of a processor."""
MOST_THREADS = 64
ASKER = 0  # the supervisor's standard input: the trainer holds its other end
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Meter:
    """Seconds of CPU, idle and wall-clock time. Idle: asleep, neither running nor waiting for a
    processor."""

    cpu_s: float = 0.0
    idle_s: float = 0.0
    wall_s: float = 0.0

    def plus(self, other: Meter, sign: int = 1) -> Meter:
        cpu_s, idle_s = self.cpu_s + sign * other.cpu_s, self.idle_s + sign * other.idle_s
        return Meter(cpu_s, idle_s, self.wall_s + sign * other.wall_s)

    def is_over(self, limit_s: float) -> bool:
        return self.cpu_s > limit_s or self.idle_s > limit_s or self.wall_s > WALL_FACTOR * limit_s


@dataclass
class Child:
    """A confined process, the ends of its pipes, and what it has reported so far."""

    pid: int
    channel: int
    output: int | None
    listener: _socket.socket  # gets the descriptor that asks before each new thread
    nonce: str
    cases: range
    room: int  # bytes that its reports and its output may still have
    reports: dict[int, tuple[str, str]] = field(
        default_factory=dict
    )  # by case: v or e, and the text
    printed: bytearray = field(default_factory=bytearray)
    end_reason: str = ""  # why it was killed, if it was: time, output, threads, orphan
    status: int = 0
    _line: bytearray = field(default_factory=bytearray)
    _unread: int = 0  # bytes of the channel since the last line that was ours
    _delays: dict[str, float] = field(
        default_factory=dict
    )  # by thread: seconds for which it waited for a processor
    _threads: list[str] = field(default_factory=list)
    _spent: Meter = Meter()
    _began: float = field(default_factory=time.monotonic)
    _is_new_case: bool = False

    def watch(self, case_s: float, program_s: float, used: Meter) -> Meter:
        """Wait for the end, or kill it. Returns its time plus ``used``, the time of earlier
        processes of the program.

        Seconds of the processor, or asleep: ``case_s`` for a case, ``program_s`` for all of them.
        """
        ended, asks = os.pidfd_open(self.pid), -1
        pipes = {fd for fd in (self.channel, self.output) if fd is not None}
        poll = select.poll()
        for fd in (*pipes, ended):
            poll.register(fd, select.POLLIN)
        poll.register(ASKER, 0)  # tells when the other end is closed, and nothing else
        is_alive, case_began = True, Meter()
        while is_alive:
            ready = dict(poll.poll(TICK_S * 1000))
            is_alive = ended not in ready
            if ASKER in ready:
                poll.unregister(ASKER)
                self._kill("orphan")
            for fd in pipes & ready.keys() if is_alive else pipes:
                with contextlib.suppress(BlockingIOError):
                    while chunk := os.read(fd, _CHUNK):
                        self._take(fd, chunk)
                        if is_alive:
                            break
                    else:
                        if is_alive:  # closed by the program: it would be ready for ever
                            poll.unregister(fd)
            self._measure()
            if self._is_new_case:
                case_began, self._is_new_case = self._spent, False
            if asks < 0 and LOCKED in self.reports:  # it has sent the descriptor, or has none
                with contextlib.suppress(BlockingIOError):
                    for *_, data in self.listener.recvmsg(
                        1, _socket.CMSG_SPACE(4), _socket.MSG_DONTWAIT
                    )[1]:
                        asks = int.from_bytes(data, "little")
                        poll.register(asks, select.POLLIN)
            if ready.get(asks, 0) & select.POLLIN:
                answer_clone(asks, is_allowed=len(self._threads) < MOST_THREADS)
            if is_alive and not self.end_reason:
                if self._spent.plus(case_began, -1).is_over(case_s) or self._spent.plus(
                    used
                ).is_over(program_s):
                    self._kill("time")
                if len(self._threads) > MOST_THREADS:  # where no descriptor can ask
                    self._kill("threads")
        for fd in filter(lambda fd: fd >= 0, (*pipes, ended, asks)):
            os.close(fd)
        self.listener.close()
        self.status = os.waitpid(self.pid, 0)[1]
        return self._spent.plus(used)

    def _take(self, fd: int, chunk: bytes) -> None:
        """Collect printed text and reports: the first line of each case that has the nonce. In
        linear time."""
        if self.end_reason == "output":
            return
        if fd == self.output:
            self.printed += chunk
        else:
            self._unread += len(chunk)
            *ends, rest = chunk.split(b"\n")
            for end in ends:
                self._line += end
                self._read_line()
                self._line.clear()
            self._line += rest
        if len(self.printed) + self._unread > self.room:
            self._kill("output")

    def _read_line(self) -> None:
        case, kind, text = read_report(self._line, self.nonce) or (LOCKED - 1, "", "")
        if case in self.reports or not (case in self.cases or case in (LOCKED, LOADING)):
            return
        if case not in (LOCKED, LOADING):  # those are ours, so that no program can prevent them
            if len(self._line) > self.room:
                return self._kill("output")
            self.room -= len(self._line)
        self.reports[case] = (kind, text)
        self._unread, self._is_new_case = 0, True

    def _measure(self) -> None:
        """Add the time since the last call. The CPU clock of an ended process can be read until it
        is waited for.

        Time in which a thread, or this process, waits for a processor is not idle, for the machine
        is busy.
        """
        cpu_s = time.clock_gettime((~self.pid << 3) | 2)
        wall_s, delays = time.monotonic() - self._began, dict[str, float]()
        self._threads = []
        with contextlib.suppress(OSError):  # /proc may be hidden
            self._threads = os.listdir(f"/proc/{self.pid}/task")
        for path in (
            "/proc/self/schedstat",
            *(f"/proc/{self.pid}/task/{name}/schedstat" for name in self._threads),
        ):
            with contextlib.suppress(OSError, IndexError), open(path, "rb") as file:
                delays[path] = int(file.read().split()[1]) / 1e9
        idle_s = wall_s - self._spent.wall_s - (cpu_s - self._spent.cpu_s)
        idle_s -= sum(delay_s - self._delays.get(path, 0.0) for path, delay_s in delays.items())
        # A longer tick than a few was that of a machine, or container, that stood still.
        idle_s = min(max(idle_s, 0.0), 5 * TICK_S) if len(delays) > 1 else 0.0
        self._spent, self._delays = Meter(cpu_s, self._spent.idle_s + idle_s, wall_s), delays

    def _kill(self, reason: str) -> None:
        self.end_reason = self.end_reason or reason
        os.kill(
            self.pid, signal.SIGKILL
        )  # it is ours until it is waited for, so its number is no other's


def start(request: Mapping[str, Any], first: int, room: int, lockdown: Lockdown) -> Child:
    """Fork a process that confines itself and runs the program's cases from ``first`` on; a script
    runs one."""
    nonce, is_script = secrets.token_hex(16), request["kind"] == "script"
    channel, reports = os.pipe()
    listener, sender = _socket.socketpair()
    output, prints = os.pipe() if is_script else (None, None)
    reads = None
    if (
        is_script
    ):  # standard input is a file in memory: a pipe would have to be filled while the program runs
        reads = os.memfd_create("stdin")
        with open(reads, "wb", closefd=False) as file:
            file.write(request["cases"][first].encode("utf-8", "surrogatepass"))
        os.lseek(reads, 0, os.SEEK_SET)
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        try:
            report = partial(write_report, nonce)
            try:
                lockdown.watch_threads(sender)
                # Descriptors 0 to 3 are the child's own, ``rules`` is for its lockdown, and no
                # other is open.
                null = os.open(os.devnull, os.O_RDWR)
                sources = [reads or null, prints or null, null, reports]
                copies = [
                    os.dup2(fd, 100 + place, inheritable=False) for place, fd in enumerate(sources)
                ]
                for place, copy in enumerate(copies):
                    os.dup2(copy, place)
                os.closerange(CHANNEL + 1, lockdown.rules)
                os.closerange(lockdown.rules + 1, LAST_DESCRIPTOR)
                die_with(parent)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                open_streams()
                lockdown.apply(memory=request["memory"], cpu_s=int(request["program_s"]) + 2)
            except Exception as error:
                report(LOCKED, "e", describe(error))
            else:
                report(LOCKED, "v", "")
                random.seed(0)  # a fork is seeded anew
                if "numpy" in sys.modules:
                    sys.modules["numpy"].random.seed(0)
                run_script(request, report) if is_script else run_calls(request, first, report)
        finally:
            os._exit(
                1
            )  # whatever happened: a child that goes on as the supervisor would be a free one
    sender.close()
    for end in filter(None, (reports, prints, reads)):
        os.close(end)
    for end in filter(None, (channel, output)):
        os.set_blocking(end, False)
    cases = range(0) if is_script else range(len(request["cases"]))
    return Child(pid, channel, output, listener, nonce, cases, room)
