"""One request a line on standard input, one answer a line on standard output; a locked child for each run.

This process never runs a program itself and never holds an expected answer. It is an interpreter of its own, so that a
child forked from it starts within a millisecond and finds nothing of the trainer in memory.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import secrets
import signal
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from .lock import Lock
from .program import CHANNEL, LOADING, LOCKED, described, run_calls, run_script, say_with, take_streams
from .watch import Child, Limits, Meter

PRELOADED = (
    *(
        "abc",
        "array",
        "bisect",
        "cmath",
        "collections",
        "copy",
        "dataclasses",
        "datetime",
        "decimal",
        "enum",
        "fractions",
    ),
    *("functools", "hashlib", "heapq", "io", "itertools", "json", "math", "numbers", "operator", "random", "re"),
    *("statistics", "string", "threading", "time", "types", "typing", "encodings.latin_1", "encodings.ascii"),
)
"""Modules that most programs import: loaded once, for all."""
_WHY = {"output": "it said too much", "threads": "too many threads", "orphan": "the one who asked is gone"}
_SILENT = ("e", "it ended before it was")
_NOT_RUN = {"status": "not_run", "text": "the program's time was used up before this case"}


def main() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    os.environ.clear()
    _be_first_to_go()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one who asked ends us, by closing the pipe
    try:
        lock = Lock()
    except OSError as error:
        return _answer({"refused": f"Landlock cannot be used ({error})"})
    gc.freeze()  # what a child collects is its own: our pages stay shared
    _answer({"ready": lock.abi})
    for line in sys.stdin.buffer:
        try:
            _answer(Job(json.loads(line), lock).run())
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            _answer({"refused": f"{type(error).__name__}: {error} ({os.path.basename(frame.filename)}:{frame.lineno})"})


def _be_first_to_go() -> None:
    """Where the machine's memory runs out, the kernel ends a program and not the trainer."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")


def _answer(record: Mapping[str, Any]) -> None:
    data = memoryview(json.dumps(record).encode() + b"\n")
    while data:
        data = data[os.write(1, data) :]


class Job:
    """One program with its cases. ``kind``: calls, all in one process, or script, a process for each case."""

    def __init__(self, request: Mapping[str, Any], lock: Lock) -> None:
        self.request, self.lock = request, lock
        self.is_script = request["kind"] == "script"
        self.cases, self.caps = request["cases"], dict(enumerate(request["caps"]))
        self.limits = Limits(request["case_s"], request["program_s"], request["memory"])
        self.used = Meter()
        self.results: list[dict[str, str]] = []

    def run(self) -> dict[str, Any]:
        """An answer for each case. What ends a process costs the case that it was at; the others get a new one."""
        while len(self.results) < len(self.cases):
            if self.used.is_over(self.limits.program_s):
                self.results += [_NOT_RUN] * (len(self.cases) - len(self.results))
            else:
                child = self._start(len(self.results))
                self.used = child.watch(self.limits, self.used)
                if child.said.get(LOCKED, ("", ""))[0] != "v":  # a locked one cannot take this back
                    return {"refused": f"a process could not be locked: {child.said.get(LOCKED, _SILENT)[1]}"}
                self._take_script(child) if self.is_script else self._take_calls(child)
        return {"results": self.results, "cpu_s": round(self.used.cpu_s, 4)}

    def _take_script(self, child: Child) -> None:
        kind, text = child.said.get(LOADING, ("", ""))
        if child.why or child.status != 0 or kind == "e":
            self.results.append({"status": "error", "text": text} if kind == "e" else _ended(child, self.limits))
        else:
            self.results.append({"status": "value", "text": child.printed.decode("utf-8", "replace")})

    def _take_calls(self, child: Child) -> None:
        kind, text = child.said.get(LOADING, ("", ""))
        left = len(self.cases) - len(self.results)
        if kind != "v":  # it fails again each time
            self.results += [{"status": "error", "text": text} if kind == "e" else _ended(child, self.limits)] * left
            return
        while len(self.results) in child.said:
            kind, text = child.said[len(self.results)]
            self.results.append({"status": "value" if kind == "v" else "error", "text": text})
        if len(self.results) < len(self.cases):
            self.results.append(_ended(child, self.limits))

    def _start(self, first: int) -> Child:
        nonce = secrets.token_hex(16)
        channel, says = os.pipe()
        output, prints = os.pipe() if self.is_script else (None, None)
        reads = self._input(first) if self.is_script else None
        pid = os.fork()
        if pid == 0:
            self._run_locked(first, nonce, reads, prints, says)
        for fd in (says, prints, reads):
            if fd is not None:
                os.close(fd)
        for fd in (channel, output):
            if fd is not None:
                os.set_blocking(fd, False)
        return Child(pid, channel, output, nonce, {LOADING: self.caps[first]} if self.is_script else self.caps)

    def _run_locked(self, first: int, nonce: str, reads: int | None, prints: int | None, says: int) -> None:
        """In the child: never returns."""
        try:
            say = say_with(nonce)
            try:
                _take_places(reads, prints, says, keep=self.lock.rules)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                take_streams()
                self.lock.close(memory=self.limits.memory, cpu_s=int(self.limits.program_s) + 2)
            except Exception as error:
                say(LOCKED, "e", described(error))
            else:
                say(LOCKED, "v", "")
                random.seed(0)  # a fork is seeded anew
                run_script(self.request, say) if self.is_script else run_calls(self.request, first, say)
        finally:
            os._exit(1)  # whatever happened: a child that goes on as the supervisor would be a free one

    def _input(self, case: int) -> int:
        """A file in memory that holds a case's standard input."""
        fd = os.memfd_create("stdin")
        data = memoryview(self.cases[case].encode("utf-8", "surrogatepass"))
        while data:
            data = data[os.write(fd, data) :]
        os.lseek(fd, 0, os.SEEK_SET)
        return fd


def _take_places(reads: int | None, prints: int | None, says: int, *, keep: int) -> None:
    """Descriptors 0 to 3 are the child's own, ``keep`` is for the lock, and no other is open."""
    nothing = os.open(os.devnull, os.O_RDWR)
    wanted = [nothing if reads is None else reads, nothing if prints is None else prints, nothing, says]
    copies = [os.dup2(fd, 100 + place, inheritable=False) for place, fd in enumerate(wanted)]
    for place, fd in enumerate(copies):
        os.dup2(fd, place)
    assert len(wanted) - 1 == CHANNEL
    os.closerange(len(wanted), keep)
    os.closerange(keep + 1, 1024)


def _ended(child: Child, limits: Limits) -> dict[str, str]:
    """What became of a case that said nothing."""
    if child.why == "time":
        return {"status": "timeout", "text": f"over {limits.case_s:g} s for the case or {limits.program_s:g} s in all"}
    if child.why:
        return {"status": "error", "text": _WHY[child.why]}
    if os.WIFSIGNALED(child.status):
        return {"status": "error", "text": f"the process was ended by {_signal_name(os.WTERMSIG(child.status))}"}
    return {"status": "error", "text": f"the process ended with status {os.WEXITSTATUS(child.status)}"}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # those of real time have no names
        return f"signal {number}"
