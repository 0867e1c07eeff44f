"""A jail for programs that a model wrote: a process of its own that runs each of them locked in, and only tells data.

The layers are those of ``jailed/lock.py``. What they leave open, see docs/code.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from gruppo.rewards.jailed.plain import NotPlain, decode
from gruppo.rewards.jailed.watch import WALL_FACTOR
from gruppo.types import GruppoError

Status = Literal["value", "error", "timeout", "not_run"]
_START_S = 30.0
_GRACE_S = 30.0
_CHUNK = 1 << 20
_LEAST_MIB, _MOST_MIB = 128, 1 << 20
_KEPT = ("LD_LIBRARY_PATH",)
"""What an interpreter may need to start; a program sees no environment at all."""
_FOLDER = Path(__file__).parent
_BARE = "import sys; sys.path.append(sys.argv[1]); from jailed.supervisor import main; sys.path.pop(); main()"


class JailError(Exception):
    """The jail itself failed: nothing is known of the program."""


@dataclass(frozen=True)
class Limits:
    """Of one program."""

    case_s: float = 2.0
    """Seconds of the processor for a case; ten times as many on the clock."""
    program_s: float = 6.0
    """Seconds of the processor for all its cases; ten times as many on the clock."""
    memory_mib: int = 1024
    """Of addresses, those of the interpreter included."""

    def __post_init__(self) -> None:
        is_time = 0 < self.case_s <= 3600 and 0 < self.program_s <= 3600
        if not (is_time and _LEAST_MIB <= self.memory_mib <= _MOST_MIB):
            raise GruppoError(
                f"case_s={self.case_s:g}, program_s={self.program_s:g}, memory_mib={self.memory_mib} is no jail for a "
                f"program; it needs seconds above 0 and up to 3600, and {_LEAST_MIB} to {_MOST_MIB} MiB."
            )


@dataclass(frozen=True)
class Said:
    """What a program said of one case."""

    status: Status
    value: Any = None
    """Of calls the list of the expressions' values, of a script the text that it printed."""
    why: str = ""
    """Of another status than value."""


class Jail:
    """A bare interpreter that runs programs one after the other, each in a locked process. A context manager."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-s", "-S", "-B", "-X", "utf8", "-c", _BARE, str(_FOLDER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={"PYTHONHASHSEED": "0"} | {name: os.environ[name] for name in _KEPT if name in os.environ},
                cwd="/",
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise JailError(f"the jail's interpreter cannot be started: {error}") from None
        self._heard = bytearray()
        try:
            self.abi = int(self._answer(_START_S)["ready"])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Jail:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def end(self) -> None:
        """End it, and with it a program that still runs: whoever waits for an answer gets a JailError."""
        self._process.kill()

    def close(self) -> None:
        process = self._process
        self.end()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        process.wait()

    def calls(
        self,
        program: str,
        cases: Sequence[Sequence[str]],
        *,
        setup: str = "",
        entry: str | None = None,
        caps: Sequence[int] | None = None,
    ) -> list[Said]:
        """The values of each case's expressions in the program's namespace, after ``setup``.

        All cases share one process, as a row of asserts does; after one that ended the process, a new one goes on with
        the next. ``caps``: bytes beyond 64 KiB that a case may say.
        """
        found = self._ask("calls", program, [list(case) for case in cases], setup, entry, caps)
        return [_read(said, len(case)) for said, case in zip(found, cases, strict=True)]

    def script(self, program: str, inputs: Sequence[str], *, caps: Sequence[int] | None = None) -> list[Said]:
        """What the program prints for each standard input, in a process of its own for each."""
        return [_said(said, said["text"]) for said in self._ask("script", program, list(inputs), "", None, caps)]

    def _ask(
        self, kind: str, program: str, cases: list[Any], setup: str, entry: str | None, caps: Sequence[int] | None
    ) -> list[Mapping[str, str]]:
        limits = self.limits
        request = {
            **{"kind": kind, "program": program, "cases": cases, "setup": setup, "entry": entry},
            **{"caps": list(caps or [0] * len(cases)), "memory": limits.memory_mib << 20},
            **{"case_s": limits.case_s, "program_s": limits.program_s},
        }
        patience = _GRACE_S + WALL_FACTOR * (limits.program_s + limits.case_s)
        self._send(json.dumps(request).encode() + b"\n", patience)
        return self._answer(patience)["results"]

    def _send(self, data: bytes, patience_s: float) -> None:
        assert self._process.stdin is not None
        deadline, fd = time.monotonic() + patience_s, self._process.stdin.fileno()
        os.set_blocking(fd, False)
        view = memoryview(data)
        try:
            while view:
                if not _is_ready(fd, select.POLLOUT, deadline):
                    raise JailError(f"the jail took no request for {patience_s:g} s")
                view = view[os.write(fd, view) :]
        except OSError as error:
            raise JailError(f"the jail ended: {error.strerror}") from None

    def _answer(self, patience_s: float) -> Mapping[str, Any]:
        assert self._process.stdout is not None
        deadline, fd = time.monotonic() + patience_s, self._process.stdout.fileno()
        while b"\n" not in self._heard:
            if not _is_ready(fd, select.POLLIN, deadline):
                raise JailError(f"the jail gave no answer within {patience_s:g} s")
            chunk = os.read(fd, _CHUNK)
            if not chunk:
                raise JailError(f"the jail ended with status {self._process.wait()}")
            self._heard += chunk
        line, _, rest = bytes(self._heard).partition(b"\n")
        self._heard = bytearray(rest)
        record = json.loads(line)
        if "refused" in record:
            raise JailError(record["refused"])
        return record


def _is_ready(fd: int, event: int, deadline: float) -> bool:
    poll = select.poll()
    poll.register(fd, event)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))


def _read(said: Mapping[str, str], count: int) -> Said:
    if said["status"] != "value":
        return _said(said, None)
    try:
        value = decode(said["text"])
    except NotPlain as error:
        return Said("error", why=str(error))
    if not isinstance(value, list) or len(value) != count:  # a line of the program's own
        return Said("error", why="it is no plain data")
    return Said("value", value)


def _said(said: Mapping[str, str], value: Any) -> Said:
    is_value = said["status"] == "value"
    status: Any = said["status"]
    return Said(status, value if is_value else None, "" if is_value else said["text"])


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
"""What is tried before the first program is run; each has to be refused."""


@cache
def probe() -> str | None:
    """None where the jail holds, else why it does not. Tried once in a process, in about 0.2 s."""
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder, "secret")
        secret.write_text("secret", encoding="utf-8")
        facts = {"secret": str(secret), "folder": folder, "pid": os.getpid(), "python": sys.executable}
        try:
            with Jail() as jail:
                sound, *tried = jail.calls("", [["6 * 7"], *([text.format(**facts)] for text in ATTEMPTS.values())])
                (printed,) = jail.script("print(6 * int(input()))", ["7"])
        except JailError as error:
            return str(error)
    if sound != Said("value", [42]):
        return f"a program that computes 6 * 7 does not run in it: {sound.why or sound.value}"
    if printed != Said("value", "42\n"):
        return f"a script that prints 6 * 7 does not run in it: {printed.why or repr(printed.value)}"
    held = [said.status == "error" and said.why.startswith("PermissionError") for said in tried]
    return next(
        (f"a program in it could {what}" for what, is_held in zip(ATTEMPTS, held, strict=True) if not is_held), None
    )


def require_jail() -> None:
    """GruppoError unless the jail holds on this machine."""
    problem = probe()
    if problem is not None:
        raise GruppoError(
            f"code that a model wrote is not run here: {problem}. The jail needs Linux 5.13 or later with Landlock and "
            "seccomp, on x86-64 or ARM; in a container, a seccomp profile that allows both. Run there, or score code "
            "with a reward of your own (--reward file.py:function)."
        )
