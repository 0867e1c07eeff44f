"""Serves requests, one per line of standard input, each in a confined child; answers are lines of
standard output.

This process never runs a program itself and never reads a request: it forks a handler, which reads
one, forks the program's children and answers. It is a bare interpreter, so that a child starts
within a millisecond and finds nothing of the trainer, and nothing of earlier programs, in memory.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from .child import Child, Meter, start
from .lockdown import Lockdown, die_with
from .program import LOADING, LOCKED, NOT_RUN, add_results

PRELOADED = """
abc array bisect cmath collections copy dataclasses datetime decimal enum fractions functools
hashlib heapq io itertools json math numbers operator random re statistics string threading time
types typing encodings.latin_1 encodings.ascii
"""
"""Modules that most programs import: loaded once, for all."""
_END_REASONS = {
    "output": "too much output",
    "threads": "too many threads",
    "orphan": "the trainer is gone",
}


def main(*, packages: Sequence[str], folders: Sequence[str], is_contained: bool) -> None:
    """Fork handlers, one request each, until standard input is closed.

    ``packages``: what programs may import beside the standard library; ``folders``: where they are.
    ``is_contained``: this interpreter runs in a container of the user's.
    """
    for name in PRELOADED.split():
        importlib.import_module(name)
    # A package is loaded once, for all: with threads of its own, it could not be forked.
    os.environ.update(
        dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    )
    sys.path += folders
    try:
        modules = [importlib.import_module(name) for name in packages]
        if "numpy" in sys.modules:  # to be seeded in each child
            importlib.import_module("numpy.random")
    except ImportError as error:
        return print(json.dumps({"refused": f"a package cannot be imported ({error})"}), flush=True)
    del sys.path[len(sys.path) - len(folders) :]
    os.environ.clear()
    # Where the machine's memory runs out, the kernel ends a program and not the trainer.
    with (
        contextlib.suppress(OSError),
        open("/proc/self/oom_score_adj", "w", encoding="ascii") as file,
    ):
        file.write("1000")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer ends us, by closing the pipe
    signal.signal(
        signal.SIGTERM, lambda *_: os._exit(0)
    )  # process 1 of a container would ignore it
    try:
        lockdown = Lockdown(is_contained=is_contained, packages=modules)
    except OSError as error:
        return print(json.dumps({"refused": f"Landlock cannot be used ({error})"}), flush=True)
    gc.freeze()  # what a child collects is its own: our pages stay shared
    print(json.dumps({"ready": lockdown.abi}), flush=True)
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
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
        answer = {"refused": f"{type(error).__name__}: {error} ({place})"}
    print(json.dumps(answer), flush=True)
    os._exit(0)


def _run(request: Mapping[str, Any], lockdown: Lockdown) -> dict[str, Any]:
    """Return a result per case of a program. Calls share one process, a script has one per case.

    What ends a process costs the case that it was at; the cases after it run in a new one.
    """
    case_s, program_s, count = request["case_s"], request["program_s"], len(request["cases"])
    room, used = request["room"], Meter()
    results: list[dict[str, str]] = []
    while len(results) < count:
        if used.is_over(program_s):
            results += [NOT_RUN] * (count - len(results))
            break
        child = start(request, len(results), room, lockdown)
        used = child.watch(case_s, program_s, used)
        room = child.room
        kind, text = child.reports.get(LOCKED, ("e", "it ended before it was"))
        # A confined process cannot take this report back; only one that is confined has output.
        if kind != "v" and child.end_reason != "output":
            return {"refused": f"a process could not be locked: {text}"}
        failure = _failure(child, case_s, program_s)
        if request["kind"] == "script":
            kind, text = child.reports.get(LOADING, ("", ""))
            failure = {"status": "error", "message": text} if kind == "e" else failure
            is_value = not child.end_reason and child.status == 0 and kind != "e"
            printed = child.printed.decode("utf-8", "replace")
            results.append({"status": "value", "value": printed} if is_value else failure)
            room -= len(child.printed) * is_value
        else:
            add_results(results, child.reports, count, failure)
    return {"results": results}


def _failure(child: Child, case_s: float, program_s: float) -> dict[str, str]:
    """Return the result of the case during which the process ended."""
    if child.end_reason == "time":
        return {
            "status": "timeout",
            "message": f"over {case_s:g} s for the case or {program_s:g} s in all",
        }
    message = _END_REASONS.get(
        child.end_reason, f"the process ended with status {child.status >> 8}"
    )
    if not child.end_reason and os.WIFSIGNALED(child.status):
        number = os.WTERMSIG(child.status)
        try:
            message = f"the process was ended by {signal.Signals(number).name}"
        except ValueError:  # real-time signals have no names
            message = f"the process was ended by signal {number}"
    return {"status": "error", "message": message}
