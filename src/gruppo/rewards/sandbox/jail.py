"""The trainer's end of the jail: each program runs in a confined process, and only data come back.

The layers are those of ``lockdown``; README.md says what they leave open.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from pathlib import Path
from typing import Any

from gruppo.rewards.sandbox.protocol import (
    CaseResult,
    Sandbox,
    SandboxError,
    SandboxLimits,
    base_room,
    decode_values,
)
from gruppo.types import GruppoError

_START_S = 60.0  # an image may have to be unpacked
_END_S = 10.0
_MOST_ERRORS = 1 << 20
_GRACE_S = 30.0
_WALL_FACTOR = 10  # as in child.py, which cannot be imported where there is no fcntl
_KEPT = (
    "LD_LIBRARY_PATH",
)  # what an interpreter may need to start; a program sees no environment at all
_FOLDER = Path(__file__).parents[1]
_INSIDE = ("supervisor", "child", "lockdown", "syscalls", "program", "plain_data")
_FLAGS = ("-P", "-s", "-S", "-B", "-X", "utf8")
_BARE = """
import json, sys
settings = json.loads(sys.argv[1])
sys.path.append(settings.pop("source"))
from sandbox.supervisor import main
sys.path.pop()
main(**settings)
"""
# In a container, the first interpreter starts a second one, which has no environment, fixed hashes
# and no site.
_CONTAINED = f"""
import json, os, sys
settings = json.loads(sys.argv[2])
settings["folders"] = [path for path in sys.path if path.endswith("-packages")]
kept = {{name: os.environ[name] for name in {_KEPT} if name in os.environ}}
kept["PYTHONHASHSEED"] = "0"
command = [sys.executable, *{_FLAGS}, "-c", sys.argv[1], json.dumps(settings)]
os.execve(sys.executable, command, kept)
"""
_BARE_IN_MEMORY = """
import importlib.util, json, sys
class Sources:
    found = json.loads(sys.stdin.buffer.readline())
    def find_spec(name, path=None, target=None):
        if name in Sources.found:
            return importlib.util.spec_from_loader(name, Sources, is_package=name == "sandbox")
    def create_module(spec):
        return None
    def exec_module(module):
        exec(compile(Sources.found[module.__name__], module.__name__ + ".py", "exec"), vars(module))
sys.meta_path.insert(0, Sources)
from sandbox.supervisor import main
sys.meta_path.remove(Sources)
Sources.found.clear()
main(**json.loads(sys.argv[1]))
"""
"""In a container, where the files of this folder do not exist: imports it from the first line of
standard input."""


def sources() -> bytes:
    """The modules of the jail's inside as one line."""
    texts = {
        f"sandbox.{name}": Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        for name in _INSIDE
    }
    return json.dumps(texts | {"sandbox": ""}).encode() + b"\n"


class Jail(AbstractContextManager["Jail"]):
    """A bare interpreter that runs programs one after another, each in a confined process. A
    context manager.

    ``command``: starts a Python interpreter in a container of the user's, with the same jail
    inside. ``packages``: what programs may import beside the standard library. Raises SandboxError
    where it cannot be used.
    """

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        *,
        command: Sequence[str] = (),
        packages: Sequence[str] = (),
    ) -> None:
        if sys.platform != "linux" and not command:
            raise SandboxError(f"it needs Linux, and this is {sys.platform}")
        self.limits, self._is_contained = limits or SandboxLimits(), bool(command)
        settings: dict[str, Any] = {"packages": list(packages), "is_contained": self._is_contained}
        if command:
            arguments = [*command, "-c", _CONTAINED, _BARE_IN_MEMORY, json.dumps(settings)]
            environment = None  # that of the command, which does not pass it on
        else:
            folders = []  # from which the packages can be imported
            for name in packages:
                spec = importlib.util.find_spec(name)
                if spec is None or spec.origin is None:
                    raise SandboxError(f"there is no package {name!r} here")
                folders.append(
                    str(Path(spec.origin).parents[1 if spec.submodule_search_locations else 0])
                )
            settings |= {"folders": folders, "source": str(_FOLDER)}
            arguments = [sys.executable, *_FLAGS, "-c", _BARE, json.dumps(settings)]
            environment = {"PYTHONHASHSEED": "0"} | {
                name: os.environ[name] for name in _KEPT if name in os.environ
            }
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                arguments,
                env=environment,
                cwd=None if command else "/",
                start_new_session=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
            )
        except OSError as error:
            self._errors.close()
            raise SandboxError(f"{arguments[0]} cannot be started: {error}") from None
        try:
            self._exchange(sources() if command else b"", _START_S)
        except BaseException:
            self.close()
            raise

    def end(self) -> None:
        """Kill the interpreter and a program that still runs; pending requests raise
        SandboxError."""
        if self._is_contained:  # its command passes the signal on, and may have to clean up
            self._process.terminate()
        else:
            self._process.kill()

    def close(self, *_: object) -> None:
        """``end`` it and free its pipes."""
        self.end()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # what it did not read is lost
                pipe.close()  # type: ignore[union-attr]
        self._errors.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    __exit__ = close

    def calls(
        self,
        program: str,
        cases: Sequence[Sequence[str | Mapping[str, str]]],
        *,
        setup: str = "",
        entry: str | None = None,
        room: int = 0,
    ) -> list[CaseResult]:
        """Evaluate the expressions of each case in the program's namespace, after ``setup``.

        All cases share one process, as a row of asserts does; after one that ended the process, a
        new one goes on with the next.
        """
        results = self._run(
            room, kind="calls", program=program, cases=[*map(list, cases)], setup=setup, entry=entry
        )
        return decode_values(results, cases, room)

    def script(self, program: str, inputs: Sequence[str], *, room: int = 0) -> list[CaseResult]:
        """Run the program with each standard input, in a new process each; the value is the printed
        text."""
        return self._run(room, kind="script", program=program, cases=list(inputs))

    def _run(self, room: int, **request: Any) -> list[CaseResult]:
        limits = self.limits
        request |= {
            "case_s": limits.case_s,
            "program_s": limits.program_s,
            "memory": limits.memory_mib << 20,
        }
        request["room"] = base_room(len(request["cases"])) + room
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
            raise SandboxError(
                f"the jail ended with status {status}" + (f": {errors[-1]:.200}" if errors else "")
            )
        try:
            record = json.loads(line)
        except ValueError:
            raise SandboxError(f"it printed {line!r:.100}, which is no answer") from None
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
def probe(command: tuple[str, ...] = (), packages: tuple[str, ...] = ()) -> str | None:
    """Return why the jail does not hold, or None if it does. Cached; takes about 0.2 s."""
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder, "secret")
        secret.write_text("secret", encoding="utf-8")
        cases = [["6 * 7"]]
        for text in ATTEMPTS.values():
            attempt = text.format(
                secret=str(secret), folder=folder, pid=os.getpid(), python=sys.executable
            )
            cases.append([attempt])
        try:
            with Jail(command=command, packages=packages) as jail:
                computed, *tried = jail.calls(
                    "".join(f"import {name}\n" for name in packages), cases
                )
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
        # A container need not have the file, nor the process.
        if result.status != "error" or not result.message.startswith(
            ("PermissionError", "FileNotFoundError")
        ):
            return f"a program in it could {attempt}"
    return None


def require_jail(command: tuple[str, ...] = (), packages: tuple[str, ...] = ()) -> None:
    """Raise GruppoError unless the jail holds on this machine."""
    problem = probe(command, packages)
    if problem is not None and command:
        raise GruppoError(f"""code that a model wrote is not run by {shlex.join(command)}:
            {problem}. The command has to start a Python 3.11 or later whose standard input and
            output are this process's, as in podman run --rm -i --network none IMAGE python3; see
            docs/guides/code.md.""")
    if problem is not None:
        raise GruppoError(
            f"""code that a model wrote is not run here: {problem}. The jail needs Linux 5.13 or
                later with Landlock and seccomp, on x86-64 or ARM; in a container, a seccomp profile
                that allows both""",
            advice="""Run there, name another sandbox
                    ($reward code_tests:sandbox=...), or score code with your own reward ($reward
                    file.py:function)""",
        )


def choose_sandbox(
    sandbox: str | Callable[[SandboxLimits], Sandbox],
    limits: SandboxLimits,
    packages: Sequence[str] = (),
) -> Callable[[], Sandbox]:
    """Return a function that opens a sandbox; raise GruppoError where programs do not run in it.

    ``sandbox``: empty for the jail; a command that starts Python in a container, with the jail
    inside; or a function of the limits that returns an object with the methods of ``Sandbox``.
    """
    if isinstance(sandbox, str):
        command = tuple(shlex.split(sandbox))
        require_jail(command, tuple(packages))
        return partial(Jail, limits, command=command, packages=packages)
    trial = sandbox(limits)
    try:
        results = trial.calls("def f(x): return 6 * x", [["f(7)"]])
        results += trial.script("print(6 * int(input()))", ["7"])
    except SandboxError as error:
        raise GruppoError(f"code that a model wrote is not run by {sandbox}: {error}.") from None
    finally:
        trial.end()
        trial.close()
    if [result.value for result in results] != [[42], "42\n"]:
        got = ", ".join(result.message or repr(result.value) for result in results)
        raise GruppoError(
            f"a program that computes 6 * 7 gave {got:.200} in {sandbox}; it needs 42 twice."
        )
    return partial(sandbox, limits)
