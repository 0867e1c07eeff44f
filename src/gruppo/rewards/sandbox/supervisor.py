"""Serves requests, one per line of standard input, each in a confined child; answers are lines of
standard output.

This process never runs a program itself and never reads a request: it forks a handler, which reads
one, forks the program's children and answers. It is a bare interpreter, so that a child starts
within a millisecond and finds nothing of the trainer, and nothing of earlier programs, in memory.
"""

from __future__ import annotations

import _socket  # socket itself would take as long to import as everything else
import contextlib
import gc
import importlib
import json
import operator
import os
import random
import secrets
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from .lockdown import LAST_DESCRIPTOR, Lockdown, answer_clone, die_with
from .program import (
    CHANNEL,
    LOADING,
    LOCKED,
    describe,
    open_streams,
    run_calls,
    run_script,
    write_report,
)

TICK_S = 0.02
WALL_FACTOR = 10
"""Seconds on the clock for each of the limit: a right program is ended only if it gets a tenth of a
processor."""
MOST_THREADS = 64
ASKER = 0  # the supervisor's standard input: the trainer holds its other end
_CHUNK = 1 << 16
_NO_TIME: Sequence[float] = (0.0, 0.0, 0.0)
"""Seconds of the processor, idle, and on the clock divided by ``WALL_FACTOR``. Idle: asleep,
neither running nor waiting for a processor."""
_FLOOD = "too much output"
PRELOADED = """
abc array bisect cmath collections copy dataclasses datetime decimal enum fractions functools
hashlib heapq io itertools json math numbers operator random re statistics string threading time
types typing encodings.latin_1 encodings.ascii
"""
"""Modules that most programs import: loaded once, for all."""


def main(*, packages: Sequence[str], folders: Sequence[str]) -> None:
    """Fork handlers, one request each, until standard input is closed.

    ``packages``: what programs may import besides the standard library; ``folders``: where they
    are.
    """
    for name in PRELOADED.split():
        importlib.import_module(name)
    # A package is loaded once, for all: with threads of its own, it could not be forked.
    libraries = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    os.environ.update(dict.fromkeys(libraries, "1"))
    own_path = list(sys.path)
    sys.path += folders
    try:
        modules = [importlib.import_module(name) for name in packages]
        if "numpy" in sys.modules:  # to be seeded in each child
            importlib.import_module("numpy.random")
        sys.path[:] = own_path
        lockdown = Lockdown(modules)
    except ImportError as error:
        return print(json.dumps({"refused": f"a package cannot be imported ({error})"}), flush=True)
    except OSError as error:
        return print(json.dumps({"refused": f"Landlock cannot be used ({error})"}), flush=True)
    os.environ.clear()
    # If the machine's memory runs out, the kernel ends a program and not the trainer.
    adjustment = "/proc/self/oom_score_adj"
    with contextlib.suppress(OSError), open(adjustment, "w", encoding="ascii") as file:
        file.write("1000")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer ends us, by closing the pipe
    gc.freeze()  # what a child collects is its own: our pages stay shared
    print(json.dumps({"ready": True}), flush=True)
    supervisor = os.getpid()
    while True:
        if os.fork() == 0:
            try:
                die_with(supervisor)
                _serve(lockdown)
            finally:
                os._exit(1)  # closed, or failed
        status = os.waitstatus_to_exitcode(os.wait()[1])
        if status != 0:
            sys.exit(status)


def _serve(lockdown: Lockdown) -> None:
    """Answer one request in a process of its own, in whose memory no program finds those before
    it."""
    line = sys.stdin.buffer.readline()
    if not line:
        return
    try:
        answer = _run(json.loads(line), lockdown)
    except Exception as error:
        answer = {"refused": describe(error)}
    print(json.dumps(answer), flush=True)
    os._exit(0)


def _run(request: Mapping[str, Any], lockdown: Lockdown) -> dict[str, Any]:
    """Return a result per case of a program. Calls share one process, a script has one per case.

    What ends a process costs the case that it was at; the cases after it run in a new one.
    """
    case_s, program_s, count = request["case_s"], request["program_s"], len(request["cases"])
    room, spent = request["room"], _NO_TIME
    results: list[dict[str, str]] = []
    while len(results) < count and max(spent) <= program_s:
        child = _start(request, len(results), room, spent, lockdown)
        child.watch(case_s, program_s)
        room, spent = child.room, child.spent
        kind, text = child.reports.get(LOCKED, ("e", "it ended before it was"))
        # A confined process cannot take this report back; only one that is confined has output.
        if kind != "v" and child.end_reason != _FLOOD:
            return {"refused": f"a process could not be locked: {text}"}
        failure = _failure(child, case_s, program_s)
        if request["kind"] == "calls":
            results += _results_of_calls(child.reports, len(results), count, failure)
        elif child.end_reason or child.status or LOADING in child.reports:
            results.append(failure)
        else:
            room -= len(child.printed)
            printed = child.printed.decode("utf-8", "replace")
            results.append({"status": "value", "value": printed})
    message = "the program's time was used up before this case"
    results += [{"status": "not_run", "message": message}] * (count - len(results))
    return {"results": results}


def _failure(child: Child, case_s: float, program_s: float) -> dict[str, str]:
    """Result of the case during which the process ended, or of each one if its top level failed."""
    kind, text = child.reports.get(LOADING, ("", ""))
    if kind == "e":
        return {"status": "error", "message": text}
    if child.end_reason == "time":
        message = f"over {case_s:g} s for the case or {program_s:g} s in all"
        return {"status": "timeout", "message": message}
    return {"status": "error", "message": child.end_reason or _ending(child.status)}


def _results_of_calls(
    reports: Mapping[int, tuple[str, str]], first: int, count: int, failure: dict[str, str]
) -> list[dict[str, str]]:
    """Results from the case ``first`` on. ``failure``: that of the case during which the process
    ended, if it did."""
    if reports.get(LOADING, ("", ""))[0] != "v":  # its top level fails again each time
        return [failure] * (count - first)
    results = list[dict[str, str]]()
    for case in range(first, count):
        if case not in reports:
            return [*results, failure]
        kind, text = reports[case]
        exception, _, message = text.partition(" ")
        error = {"status": "error", "message": message, "exception": exception}
        results.append({"status": "value", "value": text} if kind == "v" else error)
    return results


def _ending(status: int) -> str:
    """How a process ended by itself."""
    if not os.WIFSIGNALED(status):
        return f"the process ended with status {status >> 8}"
    number = os.WTERMSIG(status)
    try:
        return f"the process was ended by {signal.Signals(number).name}"
    except ValueError:  # real-time signals have no names
        return f"the process was ended by signal {number}"


class Child:
    """A confined process: collects its reports and enforces its limits.

    ``output``: descriptor of what a script prints. ``asks``: one that asks before each new thread;
    -1 if there is none, since the process has ended. ``cases``: numbers of reports that are
    accepted. ``room``: bytes that its reports and its output may still have. ``spent``: time of the
    program's earlier processes.
    """

    def __init__(
        self,
        pid: int,
        channel: int,
        output: int | None,
        asks: int,
        nonce: str,
        cases: range,
        room: int,
        spent: Sequence[float] = _NO_TIME,
    ) -> None:
        self.pid, self.channel, self.output, self.asks = pid, channel, output, asks
        self.nonce, self.cases, self.room, self.spent = nonce.encode(), cases, room, spent
        self.reports: dict[int, tuple[str, str]] = {}  # by case: v or e, and the text
        self.printed = bytearray()
        self.end_reason = ""  # why it was killed, if it was
        self.status = 0
        self._line = bytearray()
        self._unread = 0  # bytes of the channel since the last line that was ours
        self._measured = (0.0, time.monotonic())  # clocks of the processor and the wall
        self._waited: dict[str, float] = {}  # by thread: seconds of waiting for a processor
        self._threads: list[str] = []

    def watch(self, case_s: float, program_s: float) -> None:
        """Wait for the end, or kill it.

        Seconds of the processor, or asleep: ``case_s`` for a case, ``program_s`` for all of them.
        """
        ended, asks = os.pidfd_open(self.pid), self.asks
        pipes = {self.channel} if self.output is None else {self.channel, self.output}
        poll = select.poll()
        # The end first, for poll looks in this order: then what was written before is ready too.
        descriptors = [fd for fd in (ended, *pipes, asks) if fd >= 0]
        for fd in descriptors:
            poll.register(fd, select.POLLIN)
        poll.register(ASKER, 0)  # tells when the other end is closed, and nothing else
        is_alive, case_began, reported = True, self.spent, 0
        while is_alive:
            ready = dict(poll.poll(TICK_S * 1000))
            is_alive = ended not in ready
            if ASKER in ready:
                poll.unregister(ASKER)
                self._kill("the trainer is gone")
            for fd in pipes & ready.keys():
                if not self._drain(fd):
                    poll.unregister(fd)  # closed: it would be ready for ever
            self._measure()
            if len(self.reports) > reported:
                case_began, reported = self.spent, len(self.reports)
            if ready.get(asks, 0) & select.POLLIN:
                answer_clone(asks, is_allowed=len(self._threads) < MOST_THREADS)
            case_spent = map(operator.sub, self.spent, case_began)
            if is_alive and (max(self.spent) > program_s or max(case_spent) > case_s):
                self._kill("time")
        for fd in descriptors:
            os.close(fd)
        self.status = os.waitpid(self.pid, 0)[1]

    def _drain(self, fd: int) -> bool:
        """Read what is there. Returns whether the other end is open."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(fd, _CHUNK):
                self._take(fd, chunk)
            return False
        return True

    def _take(self, fd: int, chunk: bytes) -> None:
        """Collect printed text and reports: the first line of each case that has the nonce. In
        linear time."""
        if self.end_reason == _FLOOD:
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
            self._kill(_FLOOD)

    def _read_line(self) -> None:
        fields = [*bytes(self._line).split(b" ", 3), b"", b"", b""]
        nonce, number, kind, text = fields[:4]
        is_ours = nonce == self.nonce and kind in (b"v", b"e") and len(number) < 8
        try:
            case = int(number) if is_ours else LOCKED - 1
        except ValueError:
            return
        if case in self.reports or not (case in self.cases or case in (LOCKED, LOADING)):
            return
        if case in self.cases:  # the others are ours, so that no program can prevent them
            if len(self._line) > self.room:
                return self._kill(_FLOOD)
            self.room -= len(self._line)
        self.reports[case] = (kind.decode(), text.decode("ascii", "backslashreplace"))
        self._unread = 0

    def _measure(self) -> None:
        """Add the time since the last call. The CPU clock of an ended process can be read until it
        is waited for.

        Time in which a thread, or this process, waits for a processor is not idle, for the machine
        is busy.
        """
        before, waited = self._measured, dict[str, float]()
        self._measured = (time.clock_gettime((~self.pid << 3) | 2), time.monotonic())
        cpu_s, wall_s = map(operator.sub, self._measured, before)
        self._threads = []
        with contextlib.suppress(OSError):  # /proc may be hidden
            self._threads = os.listdir(f"/proc/{self.pid}/task")
        for task in ("self", *(f"{self.pid}/task/{name}" for name in self._threads)):
            path = f"/proc/{task}/schedstat"
            with contextlib.suppress(OSError, IndexError), open(path, "rb") as file:
                waited[task] = int(file.read().split()[1]) / 1e9
        delay_s = sum(total_s - self._waited.get(task, 0.0) for task, total_s in waited.items())
        # A longer tick than a few was that of a machine, or container, that stood still.
        idle_s = min(max(wall_s - cpu_s - delay_s, 0.0), 5 * TICK_S) if len(waited) > 1 else 0.0
        self._waited = waited
        self.spent = [*map(operator.add, self.spent, (cpu_s, idle_s, wall_s / WALL_FACTOR))]

    def _kill(self, reason: str) -> None:
        if not self.end_reason:
            self.end_reason = reason
            # it is ours until it is waited for, so its number is no other's
            os.kill(self.pid, signal.SIGKILL)


def _start(
    request: Mapping[str, Any], first: int, room: int, spent: Sequence[float], lockdown: Lockdown
) -> Child:
    """Fork a process that confines itself and runs the program's cases from ``first`` on; a script
    runs one."""
    nonce, is_script = secrets.token_hex(16), request["kind"] == "script"
    channel, reports = os.pipe()
    listener, sender = _socket.socketpair()
    null = os.open(os.devnull, os.O_RDWR)
    output, streams = None, [null, null, null]
    if is_script:
        output, prints = os.pipe()
        streams = [_file_in_memory(request["cases"][first]), prints, null]
    streams.append(reports)
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        try:
            report = partial(write_report, nonce)
            try:
                _confine(parent, streams, sender, request, lockdown)
            except Exception as error:
                report(LOCKED, "e", describe(error))
            else:
                report(LOCKED, "v", "")
                run_script(request, report) if is_script else run_calls(request, first, report)
        finally:
            os._exit(1)  # whatever happened: it must not go on as a free process
    sender.close()
    received = listener.recvmsg(1, _socket.CMSG_SPACE(4))[1]  # nothing if it has ended
    asks = int.from_bytes(received[0][2], "little") if received else -1
    listener.close()
    for fd in {*streams, null}:
        os.close(fd)
    for end in (channel, output):
        if end is not None:
            os.set_blocking(end, False)
    cases = range(0) if is_script else range(len(request["cases"]))
    return Child(pid, channel, output, asks, nonce, cases, room, spent)


def _file_in_memory(text: str) -> int:
    """Descriptor of standard input: a pipe would have to be filled while the program runs."""
    fd = os.memfd_create("stdin")
    with open(fd, "wb", closefd=False) as file:
        file.write(text.encode("utf-8", "surrogatepass"))
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _confine(
    parent: int,
    streams: Sequence[int],
    sender: _socket.socket,
    request: Mapping[str, Any],
    lockdown: Lockdown,
) -> None:
    """Make a forked process one that runs a program."""
    lockdown.watch_threads(sender)
    # Descriptors 0 to 3 are the child's own, ``rules`` is for its lockdown, and no other is open.
    copies = [os.dup2(fd, 100 + n, inheritable=False) for n, fd in enumerate(streams)]
    for n, copy in enumerate(copies):
        os.dup2(copy, n)
    os.closerange(CHANNEL + 1, lockdown.rules)
    os.closerange(lockdown.rules + 1, LAST_DESCRIPTOR)
    die_with(parent)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    open_streams()
    random.seed(0)  # a fork is seeded anew
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    lockdown.apply(memory=request["memory"], cpu_s=int(request["program_s"]) + 2)
