"""Serves requests, one per line of standard input, each in a confined child; answers are lines of standard output.

This process never runs a program itself and never holds an expected answer. It is a bare interpreter, so that a child
forked from it starts within a millisecond and finds nothing of the trainer in memory.
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
from collections.abc import Mapping
from typing import Any

from .child import Child, Meter, start
from .lockdown import Lockdown
from .program import LOADING, LOCKED

PRELOADED = """
abc array bisect cmath collections copy dataclasses datetime decimal enum fractions functools hashlib heapq io itertools
json math numbers operator random re statistics string threading time types typing encodings.latin_1 encodings.ascii
"""
"""Modules that most programs import: loaded once, for all."""
_END_REASONS = {"output": "too much output", "threads": "too many threads", "orphan": "the trainer is gone"}
_NOT_RUN = {"status": "not_run", "message": "the program's time was used up before this case"}


def main() -> None:
    """Serve requests until standard input is closed."""
    for name in PRELOADED.split():
        importlib.import_module(name)
    os.environ.clear()
    # Where the machine's memory runs out, the kernel ends a program and not the trainer.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer ends us, by closing the pipe
    try:
        lockdown = Lockdown()
    except OSError as error:
        return print(json.dumps({"refused": f"Landlock cannot be used ({error})"}), flush=True)
    gc.freeze()  # what a child collects is its own: our pages stay shared
    print(json.dumps({"ready": lockdown.abi}), flush=True)
    for line in sys.stdin.buffer:
        try:
            answer = _run(json.loads(line), lockdown)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
            answer = {"refused": f"{type(error).__name__}: {error} ({place})"}
        print(json.dumps(answer), flush=True)


def _run(request: Mapping[str, Any], lockdown: Lockdown) -> dict[str, Any]:
    """Return a result per case of a program. Calls share one process, a script has one per case.

    What ends a process costs the case that it was at; the cases after it run in a new one.
    """
    case_s, program_s, count = request["case_s"], request["program_s"], len(request["cases"])
    caps, used = dict(enumerate(request["caps"])), Meter()
    results: list[dict[str, str]] = []
    while len(results) < count:
        if used.is_over(program_s):
            results += [_NOT_RUN] * (count - len(results))
            break
        child = start(request, len(results), caps, lockdown)
        used = child.watch(case_s, program_s, used)
        kind, text = child.reports.get(LOCKED, ("e", "it ended before it was"))
        if kind != "v":  # a confined process cannot take this report back
            return {"refused": f"a process could not be locked: {text}"}
        kind, text = child.reports.get(LOADING, ("", ""))
        failure = {"status": "error", "message": text} if kind == "e" else _failure(child, case_s, program_s)
        if request["kind"] == "script":
            is_value = not child.end_reason and child.status == 0 and kind != "e"
            printed = child.printed.decode("utf-8", "replace")
            results.append({"status": "value", "value": printed} if is_value else failure)
        elif kind != "v":  # its top level fails again each time
            results += [failure] * (count - len(results))
        else:
            while len(results) in child.reports:
                kind, text = child.reports[len(results)]
                exception, _, message = text.partition(" ")
                error = {"status": "error", "message": message, "exception": exception}
                results.append({"status": "value", "value": text} if kind == "v" else error)
            if len(results) < count:
                results.append(failure)
    return {"results": results}


def _failure(child: Child, case_s: float, program_s: float) -> dict[str, str]:
    """Return the result of the case during which the process ended."""
    if child.end_reason == "time":
        return {"status": "timeout", "message": f"over {case_s:g} s for the case or {program_s:g} s in all"}
    message = _END_REASONS.get(child.end_reason, f"the process ended with status {child.status >> 8}")
    if not child.end_reason and os.WIFSIGNALED(child.status):
        number = os.WTERMSIG(child.status)
        try:
            message = f"the process was ended by {signal.Signals(number).name}"
        except ValueError:  # real-time signals have no names
            message = f"the process was ended by signal {number}"
    return {"status": "error", "message": message}
