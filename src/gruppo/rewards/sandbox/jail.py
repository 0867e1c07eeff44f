"""The trainer's end of the jail: each program runs in a confined process, and only data come back.

The layers are those of ``lockdown``; README.md says what they leave open.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from gruppo.rewards.sandbox.plain_data import NotPlain, decode
from gruppo.types import GruppoError

_START_S = 30.0
_GRACE_S = 30.0
_WALL_FACTOR = 10  # as in child.py, which cannot be imported where there is no fcntl
_LEAST_MIB, _MOST_MIB = 128, 1 << 20
_KEPT = ("LD_LIBRARY_PATH",)  # what an interpreter may need to start; a program sees no environment at all
_FOLDER = Path(__file__).parents[1]
_BARE = "import sys; sys.path.append(sys.argv[1]); from sandbox.supervisor import main; sys.path.pop(); main()"


class JailError(GruppoError):
    """The jail itself failed; nothing is known about the program."""


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one program."""

    case_s: float = 2.0
    """Seconds of the processor for a case; ten times as many on the clock."""
    program_s: float = 6.0
    """Seconds of the processor for all its cases; ten times as many on the clock."""
    memory_mib: int = 1024
    """Address space, that of the interpreter included."""

    def __post_init__(self) -> None:
        is_time = 0 < self.case_s <= 3600 and 0 < self.program_s <= 3600
        if not (is_time and _LEAST_MIB <= self.memory_mib <= _MOST_MIB):
            raise GruppoError(
                f"case_s={self.case_s:g}, program_s={self.program_s:g}, memory_mib={self.memory_mib} cannot limit a "
                f"program; it needs seconds above 0 and up to 3600, and {_LEAST_MIB} to {_MOST_MIB} MiB."
            )


@dataclass(frozen=True)
class CaseResult:
    """Result of one case of a program."""

    status: Literal["value", "error", "timeout", "not_run"]
    value: Any = None
    """Calls: the list of the expressions' values. Scripts: the printed text."""
    message: str = ""
    """Why there is no value; for an exception, its type and text."""
    exception: str = ""
    """Built-in type of the exception that the case raised, or the one that its type derives from."""


class Jail(AbstractContextManager["Jail"]):
    """A bare interpreter that runs programs one after another, each in a confined process. A context manager.

    Raises JailError where it cannot be used.
    """

    def __init__(self, limits: SandboxLimits | None = None) -> None:
        if sys.platform != "linux":
            raise JailError(f"it needs Linux, and this is {sys.platform}")
        self.limits = limits or SandboxLimits()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-s", "-S", "-B", "-X", "utf8", "-c", _BARE, str(_FOLDER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={"PYTHONHASHSEED": "0"} | {name: os.environ[name] for name in _KEPT if name in os.environ},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise JailError(f"the jail's interpreter cannot be started: {error}") from None
        try:
            self._exchange(b"", _START_S)
        except BaseException:
            self.close()
            raise

    def end(self) -> None:
        """Kill the interpreter and a program that still runs; pending requests raise JailError."""
        self._process.kill()

    def close(self, *_: object) -> None:
        """``end`` it and free its pipes."""
        self.end()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # what it did not read is lost
                pipe.close()  # type: ignore[union-attr]
        self._process.wait()

    __exit__ = close

    def calls(
        self,
        program: str,
        cases: Sequence[Sequence[str]],
        *,
        setup: str = "",
        entry: str | None = None,
        caps: Sequence[int] | None = None,
    ) -> list[CaseResult]:
        """Evaluate the expressions of each case in the program's namespace, after ``setup``.

        All cases share one process, as a row of asserts does; after one that ended the process, a new one goes on with
        the next. ``caps``: bytes beyond 64 KiB that the values of a case may have.
        """
        results = self._run(caps, kind="calls", program=program, cases=[*map(list, cases)], setup=setup, entry=entry)
        for n, result in enumerate(results):
            if result.status == "value":
                try:
                    value = decode(result.value)
                    if not isinstance(value, list) or len(value) != len(cases[n]):  # a line that the program forged
                        raise NotPlain("it is no plain data")
                    results[n] = CaseResult("value", value)
                except NotPlain as error:
                    results[n] = CaseResult("error", message=str(error))
        return results

    def script(self, program: str, inputs: Sequence[str], *, caps: Sequence[int] | None = None) -> list[CaseResult]:
        """Run the program with each standard input, in a new process each; the value is the printed text."""
        return self._run(caps, kind="script", program=program, cases=list(inputs))

    def _run(self, caps: Sequence[int] | None, **request: Any) -> list[CaseResult]:
        limits = self.limits
        request |= {"case_s": limits.case_s, "program_s": limits.program_s, "memory": limits.memory_mib << 20}
        request["caps"] = list(caps or [0] * len(request["cases"]))
        patience_s = _GRACE_S + _WALL_FACTOR * (limits.program_s + limits.case_s)
        answer = self._exchange(json.dumps(request).encode() + b"\n", patience_s)
        return [CaseResult(**record) for record in answer["results"]]

    def _exchange(self, request: bytes, patience_s: float) -> Mapping[str, Any]:
        """Send a request and return the answer; kill the jail if it does not answer in time."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        began, timer = time.monotonic(), threading.Timer(patience_s, self.end)
        timer.daemon = True
        timer.start()
        try:
            stdin.write(request)
            stdin.flush()
            line = stdout.readline()
        except (OSError, ValueError) as error:  # ValueError: it was closed
            raise JailError(f"the jail ended: {error}") from None
        finally:
            timer.cancel()
        if not line.endswith(b"\n"):
            if time.monotonic() > began + patience_s:
                raise JailError(f"the jail gave no answer within {patience_s:g} s")
            raise JailError(f"the jail ended with status {self._process.wait()}")
        record = json.loads(line)
        if "refused" in record:
            raise JailError(record["refused"])
        return record


ATTEMPTS = {
    "read a file": "open({secret!r}).read()",
    "list a folder": "__import__('os').listdir({folder!r})",
    "write a file": "open({folder!r} + '/new', 'w')",
    "remove a file": "__import__('os').remove({secret!r})",
    "change a file's rights": "__import__('os').chmod({secret!r}, 0o777)",
    "read another process's memory": "open('/proc/{pid}/mem', 'rb')",
    "open a socket": "__import__('socket').socket()",
    "start a process": "__import__('os').fork()",
    "start a program": "__import__('os').execv({python!r}, ['python'])",
    "signal another process": "__import__('os').kill({pid}, 0)",
    "limit another process": "__import__('resource').prlimit({pid}, 0)",
}
"""Escapes that ``probe`` tries before the first program is run; each has to be refused."""


@cache
def probe() -> str | None:
    """Return why the jail does not hold, or None if it does. Cached; takes about 0.2 s."""
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder, "secret")
        secret.write_text("secret", encoding="utf-8")
        facts = {"secret": str(secret), "folder": folder, "pid": os.getpid(), "python": sys.executable}
        try:
            with Jail() as jail:
                computed, *tried = jail.calls("", [["6 * 7"], *([text.format(**facts)] for text in ATTEMPTS.values())])
                (printed,) = jail.script("print(6 * int(input()))", ["7"])
        except JailError as error:
            return str(error)
    for what, result, value in (("program that computes", computed, [42]), ("script that prints", printed, "42\n")):
        if result != CaseResult("value", value):
            return f"a {what} 6 * 7 does not run in it: {result.message or repr(result.value)}"
    for attempt, result in zip(ATTEMPTS, tried, strict=True):
        if result.status != "error" or not result.message.startswith("PermissionError"):
            return f"a program in it could {attempt}"
    return None


def require_jail() -> None:
    """Raise GruppoError unless the jail holds on this machine."""
    problem = probe()
    if problem is not None:
        raise GruppoError(
            f"code that a model wrote is not run here: {problem}. The jail needs Linux 5.13 or later with Landlock and "
            "seccomp, on x86-64 or ARM; in a container, a seccomp profile that allows both. Run there, or score code "
            "with your own reward (--reward file.py:function)."
        )
