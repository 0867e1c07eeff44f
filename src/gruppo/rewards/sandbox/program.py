"""Runs one program in its confined process: its calls, or the program as a script."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import os
import sys
import threading
import typing
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NoReturn

from .plain_data import decode, encode

CHANNEL = 3  # descriptor that results go to, one line each
LOCKED, LOADING = -2, -1
"""Case numbers of the reports that the process is confined, and that the program's top level has
run."""
_LONGEST_MESSAGE = 300

Report = Callable[[int, str, str], None]


def write_report(nonce: str, case: int, kind: str, text: str) -> None:
    """Write a line: nonce, case, v for a value or e for an error, the text.

    The nonce tells our lines from what a program may write there. A program that finds it can
    report what a return value or an exception can, and no more: what is expected is not in this
    process.
    """
    line = f"{nonce} {case} {kind} {text}\n".encode("ascii", "backslashreplace")
    while line:
        line = line[os.write(CHANNEL, line) :]


def run_calls(request: Mapping[str, Any], first: int, report: Report) -> NoReturn:
    """Run the program, then its setup, then each case's expressions, in one namespace.

    The names of ``typing`` are there without an import, as where the solutions of LeetCode are run.
    """
    module = sys.modules["program"] = ModuleType("program")  # under which classes find themselves
    names, entry = vars(module), request["entry"]
    vars(builtins).update({name: getattr(typing, name) for name in typing.__all__})
    try:
        for part in ("program", "setup"):
            _execute(request[part], names)
        if entry and entry not in names and isinstance(names.get("Solution"), type):
            names[entry] = getattr(names["Solution"](), entry)  # a method, under its bare name
    except BaseException as error:
        report(LOADING, "e", describe(error))
        os._exit(0)
    report(LOADING, "v", "null")
    for case, sources in list(enumerate(request["cases"]))[first:]:
        exception = ""
        try:
            try:
                values = [_evaluate(source, entry, names) for source in sources]
            except BaseException as error:  # tests that expect an exception need its built-in type
                kinds = type(error).__mro__
                exception = next(kind.__name__ for kind in kinds if kind.__module__ == "builtins")
                raise
            report(case, "v", encode(values))
        except BaseException as error:
            report(case, "e", f"{exception} {describe(error)}")
    os._exit(0)


def _execute(source: str, names: dict[str, Any]) -> None:
    # dont_inherit: without what ``from __future__`` says in this file
    exec(compile(source, "program.py", "exec", dont_inherit=True), names)


def _evaluate(source: Any, entry: str, names: dict[str, Any]) -> Any:
    """The value of an expression, or of a call of ``entry`` with arguments."""
    if isinstance(source, str):
        return eval(compile(source, "test", "eval", dont_inherit=True), names)
    return eval(entry, names)(*decode(source["args"]))


def run_script(request: Mapping[str, Any], report: Report) -> NoReturn:
    """Run the program with text on its standard input. Exit status 0 only if a plain Python
    process has it."""
    module = sys.modules["__main__"] = ModuleType("__main__")
    names, status = vars(module), 0
    try:
        _execute(request["program"], names)
    except SystemExit as end:
        status = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        report(LOADING, "e", describe(error))
        os._exit(1)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()  # buffers that a script empties at its end
    _flush()
    names.clear()  # files that it left open are written when they are collected
    gc.collect()
    _flush()
    os._exit(status & 0xFF)


def _flush() -> None:
    for stream in (sys.stdout, sys.__stdout__):
        with contextlib.suppress(Exception):  # None, closed, or one of its own that cannot
            stream.flush()  # type: ignore[union-attr]


def open_streams() -> None:
    """Open text streams over descriptors 0, 1 and 2, as a new process has them."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        mode = "w" if fd else "r"
        stream = os.fdopen(fd, mode, encoding="utf-8", errors="surrogateescape", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = ["program.py"]
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # which the module site would add


def describe(error: BaseException) -> str:
    """Format type and message of an exception, whose ``__str__`` belongs to the program and may
    fail."""
    try:
        text = " ".join(str(error).split())
    except BaseException:
        text = ""
    return f"{type(error).__name__}: {text}"[:_LONGEST_MESSAGE]
