"""Running one program, locked in: its calls, or the program as a script. Never returns."""

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
from types import CodeType, ModuleType
from typing import Any, NoReturn

from .plain import encode

CHANNEL = 3
"""Where results go, one line each."""
LOCKED, LOADING = -2, -1
"""In the place of a case: that the process is locked, and the program's own top level."""
_LONGEST_MESSAGE = 300

Say = Callable[[int, str, str], None]


def say_with(nonce: str) -> Say:
    """Writes a line: nonce, case, v for a value or e for an error, the text.

    The nonce tells lines of ours from what a program may scribble there. One that finds it out can say what a return
    value can say, and no more: what is expected is not in this process.
    """
    write = os.write

    def say(case: int, kind: str, text: str) -> None:
        line = f"{nonce} {case} {kind} {text}\n".encode("ascii", "backslashreplace")
        while line:
            line = line[write(CHANNEL, line) :]

    return say


def run_calls(job: Mapping[str, Any], first: int, say: Say) -> NoReturn:
    """The program, then its setup, then each case's expressions, in one namespace.

    The names of typing are there without an import, as where the solutions of LeetCode are run.
    """
    names = _fresh("program")
    vars(builtins).update({name: getattr(typing, name) for name in typing.__all__})
    try:
        exec(_compiled(job["program"], "program.py", "exec"), names)
        exec(_compiled(job["setup"], "setup.py", "exec"), names)
        _bind_entry(names, job["entry"])
    except BaseException as error:
        say(LOADING, "e", described(error))
        os._exit(0)
    say(LOADING, "v", "null")
    for case, sources in list(enumerate(job["cases"]))[first:]:
        try:
            say(case, "v", encode([eval(_compiled(source, "test", "eval"), names) for source in sources]))
        except BaseException as error:
            say(case, "e", described(error))
    os._exit(0)


def run_script(job: Mapping[str, Any], say: Say) -> NoReturn:
    """The program with text on its standard input. Exit status 0 where it ended as a program that is well ends."""
    names, status = _fresh("__main__"), 0
    try:
        exec(_compiled(job["program"], "program.py", "exec"), names)
    except SystemExit as end:
        status = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        say(LOADING, "e", described(error))
        os._exit(1)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()  # buffers that a script empties at its end
    _flush()
    names.clear()
    gc.collect()  # files that it left open are written as they go
    _flush()
    os._exit(status & 0xFF)


def _flush() -> None:
    for stream in (sys.stdout, sys.__stdout__):
        with contextlib.suppress(Exception):  # None, closed, or one of its own that cannot
            stream.flush()  # type: ignore[union-attr]


def take_streams() -> None:
    """Text streams over descriptors 0, 1 and 2, as a new process has them."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        stream = os.fdopen(fd, "w" if fd else "r", encoding="utf-8", errors="surrogateescape", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = ["program.py"]
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # which site would have put there


def _compiled(source: str, name: str, mode: str) -> CodeType:
    """Without what this file's own ``from __future__`` says."""
    return compile(source, name, mode, dont_inherit=True)


def _fresh(name: str) -> dict[str, Any]:
    """The namespace of a new module, under which classes find themselves."""
    module = ModuleType(name)
    sys.modules[name] = module
    return vars(module)


def _bind_entry(names: dict[str, Any], entry: str | None) -> None:
    """A method of ``class Solution`` under its bare name, where no function has it."""
    if entry and entry not in names and isinstance(names.get("Solution"), type):
        names[entry] = getattr(names["Solution"](), entry)


def described(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except BaseException:
        text = ""
    return f"{type(error).__name__}: {text}"[:_LONGEST_MESSAGE]
