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

MAX_BYTES, MAX_ITEMS = 1 << 23, 1 << 18
"""Of all answers of a program together: a thousand that each are short would fill the memory."""
_LEAST_MIB, _MOST_MIB = 128, 1 << 20
_START_S = 60.0
_MOST_ERRORS = 1 << 20
_GRACE_S = 30.0
_WALL_FACTOR = 10  # as in supervisor.py, which cannot be imported where there is no fcntl
_INSIDE = ("plain_data", "program", "lockdown", "supervisor")
# The inside comes in the first line of standard input: its folder stays closed.
_BARE = """
import json, sys
from types import ModuleType
for name, text in json.loads(sys.stdin.buffer.readline()).items():
    module = sys.modules["sandbox." + name] = ModuleType("sandbox." + name)
    module.__package__ = "sandbox"
    exec(compile(text, name + ".py", "exec"), vars(module))
module.main(**json.loads(sys.argv[1]))
"""


class SandboxError(GruppoError):
    """The sandbox itself failed; nothing is known about the program."""


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one program."""

    case_s: float = 2.0
    """Seconds for a case: of the processor, and as many asleep."""
    program_s: float = 6.0
    """Seconds for all its cases: of the processor, and as many asleep."""
    memory_mib: int = 1024
    """Address space, that of the interpreter included."""

    def __post_init__(self) -> None:
        is_time = 0 < self.case_s <= 3600 and 0 < self.program_s <= 3600
        if not (is_time and _LEAST_MIB <= self.memory_mib <= _MOST_MIB):
            raise GruppoError(f"""case_s={self.case_s:g}, program_s={self.program_s:g},
                memory_mib={self.memory_mib} cannot limit a program; it needs seconds above 0 and up
                to 3600, and {_LEAST_MIB} to {_MOST_MIB} MiB.""")


@dataclass(frozen=True)
class CaseResult:
    """Result of one case of a program."""

    status: Literal["value", "error", "timeout", "not_run"]
    value: Any = None
    """Calls: the list of the expressions' values, plain data of base types. Scripts: the printed
    text."""
    message: str = ""
    """Why there is no value; for an exception, its type and text."""
    exception: str = ""
    """Built-in type of the exception that the case raised, or the one that its type derives
    from."""


def sources() -> bytes:
    """The modules of the jail's inside as one line."""
    folder = Path(__file__).parent
    texts = {name: (folder / f"{name}.py").read_text(encoding="utf-8") for name in _INSIDE}
    return json.dumps(texts).encode() + b"\n"


class Jail(AbstractContextManager["Jail"]):
    """A bare interpreter that runs programs one after another, each in a confined process. A
    context manager.

    ``packages``: what programs may import besides the standard library. Raises SandboxError if it
    cannot be used.
    """

    def __init__(
        self, limits: SandboxLimits | None = None, *, packages: Sequence[str] = ()
    ) -> None:
        if sys.platform != "linux":
            raise SandboxError(f"it needs Linux, and this is {sys.platform}")
        self.limits = limits or SandboxLimits()
        settings = {"packages": list(packages), "folders": [*filter(None, sys.path)]}
        flags = ["-P", "-s", "-S", "-B", "-X", "utf8"]
        # A program sees no environment at all; an interpreter may need this to start.
        environment = {n: os.environ[n] for n in ("LD_LIBRARY_PATH",) if n in os.environ}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, *flags, "-c", _BARE, json.dumps(settings)],
            env=environment | {"PYTHONHASHSEED": "0"},
            cwd="/",
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        try:
            self._exchange(sources(), _START_S)
        except BaseException:
            self.close()
            raise

    def end(self) -> None:
        """Kill the interpreter and a program that still runs; pending requests raise
        SandboxError. Called from any thread."""
        self._process.kill()

    def close(self, *_: object) -> None:
        """``end`` it and free its pipes."""
        self.end()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # what it did not read is lost
                pipe.close()  # type: ignore[union-attr]
        self._errors.close()
        self._process.wait()

    __exit__ = close

    def calls(
        self,
        program: str,
        cases: Sequence[Sequence[str | Mapping[str, str]]],
        *,
        setup: str = "",
        entry: str | None = None,
    ) -> list[CaseResult]:
        """Evaluate the expressions of each case in the program's namespace, after ``setup``.

        A case holds expressions, or arguments for ``entry``, ``{"args": ...}`` as
        ``plain_data.encode`` writes them; ``entry`` may be a method of ``class Solution``. All
        cases share one process, as a row of asserts does; after one that ended the process, a new
        one goes on with the next.
        """
        results = self._run(
            kind="calls", program=program, cases=[*map(list, cases)], setup=setup, entry=entry
        )
        budget = iter(range(MAX_ITEMS))
        for n, (result, case) in enumerate(zip(results, cases, strict=True)):
            if result.status == "value":
                try:
                    value = decode(result.value, budget)
                    if not isinstance(value, list) or len(value) != len(case):  # forged
                        raise NotPlain("it is not plain data")
                    results[n] = CaseResult("value", value)
                except NotPlain as error:
                    results[n] = CaseResult("error", message=str(error))
        return results

    def script(self, program: str, inputs: Sequence[str]) -> list[CaseResult]:
        """Run the program with each standard input, in a new process each; the value is the printed
        text."""
        return self._run(kind="script", program=program, cases=list(inputs))

    def _run(self, **request: Any) -> list[CaseResult]:
        limits = self.limits
        request |= {
            "case_s": limits.case_s,
            "program_s": limits.program_s,
            "memory": limits.memory_mib << 20,
            "room": MAX_BYTES,
        }
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
            with contextlib.suppress(BrokenPipeError):  # it ended; why is read below
                stdin.write(request)
                stdin.flush()
            line = stdout.readline()
        except (OSError, ValueError) as error:  # ValueError: it was closed
            raise SandboxError(f"the jail ended: {error}") from None
        finally:
            timer.cancel()
        if not line.endswith(b"\n"):
            if time.monotonic() > began + patience_s:
                raise SandboxError(f"the jail gave no answer within {patience_s:g} s")
            status = self._process.wait()
            self._errors.seek(0)
            errors = self._errors.read(_MOST_ERRORS).decode("utf-8", "replace").strip().splitlines()
            why = f": {errors[-1]:.200}" if errors else ""
            raise SandboxError(f"the jail ended with status {status}{why}")
        try:
            record = json.loads(line)
        except ValueError:
            raise SandboxError(f"it printed {line!r:.100}, which is not an answer") from None
        if "refused" in record:
            raise SandboxError(record["refused"])
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
def probe(packages: tuple[str, ...] = ()) -> str | None:
    """Return why the jail does not hold, or None if it does. Cached; takes about 0.2 s."""
    imports = "".join(f"import {name}\n" for name in packages)
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder, "secret")
        secret.write_text("secret", encoding="utf-8")
        python, pid = sys.executable, os.getpid()
        attempts = [
            text.format(secret=str(secret), folder=folder, pid=pid, python=python)
            for text in ATTEMPTS.values()
        ]
        try:
            with Jail(packages=packages) as jail:
                computed, *tried = jail.calls(imports, [["6 * 7"], *([text] for text in attempts)])
                (printed,) = jail.script("print(6 * int(input()))", ["7"])
        except SandboxError as error:
            return str(error)
    for what, result, value in (
        ("program that computes", computed, [42]),
        ("script that prints", printed, "42\n"),
    ):
        if result != CaseResult("value", value):
            return f"a {what} 6 * 7 does not run in it: {result.message or repr(result.value)}"
    for attempt, result in zip(ATTEMPTS, tried, strict=True):
        if result.status != "error" or not result.message.startswith("PermissionError"):
            return f"a program in it could {attempt}"
    return None


def require_jail(packages: tuple[str, ...] = ()) -> None:
    """Raise GruppoError unless the jail holds on this machine."""
    problem = probe(packages)
    if problem is not None:
        raise GruppoError(
            f"""code that a model wrote is not run here: {problem}. The jail needs Linux 5.13 or
                later with Landlock and seccomp, on x86-64 or ARM; in a container, a seccomp profile
                that allows both""",
            advice="""Run there, or score code with your own reward ($reward file.py:function)""",
        )
