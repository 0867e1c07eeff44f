"""A worker: a process that answers numbered requests, can be killed at any time, and ends with this process.

Requests and answers cross a pipe as JSON, tensors beside it as bytes; nothing is unpickled. A guard stands between the
two processes. It runs no code of the user's, so that it always notices that this process is gone, and then kills the
worker and what the worker has started: on Linux also processes that have left its session.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import logging
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NoReturn

from gruppo.errors import DataError, GruppoError
from gruppo.timeouts import CallError

log = logging.getLogger("gruppo")

MAX_ANSWER_BYTES = 1 << 26
MAX_LINE = 1 << 16
"""Characters that are shown of a line of output; the rest of the line is read and dropped."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_GUARD_S = 1.0
"""Seconds within which the guard notices that its parent is gone."""
_KILL_S = 10.0

_START = """import json, sys
settings = json.loads(sys.argv[1])
sys.path[:] = settings.pop("path")
from gruppo.worker import main
main(**settings)"""


class Worker:
    """A process that makes an object of ``MODULE:CLASS`` and calls it with each request."""

    def __init__(self, target: str) -> None:
        self._number = 0
        self.connection, other = Pipe()
        settings = {"path": [*map(str, sys.path)], "target": target, "connection": other.fileno()}
        command = [
            sys.executable,
            "-u",
            "-W",
            "ignore",
            "-c",
            _START,
            json.dumps(settings | {"parent": os.getpid()}),
        ]
        pipes: Any = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        # In a session of its own: Ctrl-C is this process's.
        self.process = subprocess.Popen(
            command,
            text=True,
            errors="replace",
            pass_fds=[other.fileno()],
            start_new_session=True,
            **pipes,
        )
        other.close()
        # The live screen and notebooks show what is written to sys.stdout, not to its file descriptor.
        self._output = list[threading.Thread]()
        for name in ("stdout", "stderr"):
            lines = (getattr(self.process, name), name)
            thread = threading.Thread(
                target=_copy_lines, args=lines, name="gruppo-worker-output", daemon=True
            )
            thread.start()
            self._output.append(thread)

    def ask(
        self,
        request: bytes,
        buffers: Sequence[bytes] = (),
        *,
        limit_s: float = math.inf,
        **header: Any,
    ) -> dict[str, Any]:
        """Send a request and return the answer, or raise its error.

        ``CallError`` if the process ends, answers too late, or answers another request. Close the worker then.
        """
        self._number += 1
        until = time.monotonic() + limit_s
        header |= {"number": self._number, "buffers": len(buffers)}
        try:
            for part in (json.dumps(header).encode(), request, *buffers):
                self.connection.send_bytes(part)
            # A process that the function has forked may hold the pipe open, so that its end alone is no sign.
            while not self.connection.poll(0.5):
                if self.process.poll() is not None and not self.connection.poll():
                    raise EOFError
                if time.monotonic() > until:
                    raise CallError("timeout", f"its process did not start within {limit_s:.3g} s")
            answer = json.loads(self.connection.recv_bytes(MAX_ANSWER_BYTES))
        except (EOFError, OSError, ValueError, RecursionError):
            raise self._ended() from None
        if not isinstance(answer, dict) or answer.get("number") != self._number:
            message = "its process answered another request than the last one: a copy of it, as of os.fork(), answers"
            raise CallError("exception", message, "number")
        if (error := answer.get("error")) is not None:
            kind, message, identity = error
            if kind in ("GruppoError", "DataError"):
                raise (DataError if kind == "DataError" else GruppoError)(message)
            raise CallError(kind, message, identity)
        return answer

    def _ended(self) -> CallError:
        """Why there is no answer."""
        try:
            code = self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            return CallError("exception", "its process closed the pipe, or wrote into it", "pipe")
        how = f"exited with status {code}, as by os._exit({code})"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            how += " (out of memory?)" if -code == signal.SIGKILL else ""
        return CallError("exception", f"its process {how}", code)

    def kill(self) -> None:
        """Have the process killed, and those that it has started; ``close`` waits for that."""
        self.process.terminate()

    def close(self) -> None:
        with suppress(OSError):
            self.connection.close()
        with suppress(
            subprocess.TimeoutExpired
        ):  # it ends where its pipe ends, unless a call hangs
            self.process.wait(1.0)
        self.kill()
        try:
            self.process.wait(_KILL_S + 2 * _GUARD_S)
        except subprocess.TimeoutExpired:  # the guard was stopped
            self.process.kill()
            self.process.wait()
        for thread in self._output:  # the last lines are shown
            thread.join(1.0)
        if any(thread.is_alive() for thread in self._output):
            log.warning(
                "a process that a reward function has started in the background is still running, with the output of "
                "the function's own process. It is only killed on Linux: end it yourself."
            )


def _copy_lines(pipe: IO[str] | None, name: str) -> None:
    """Write the lines of a process to ``sys.stdout`` or ``sys.stderr`` of this one. A line may have no end."""
    assert pipe is not None
    with pipe:
        is_new = True
        while line := pipe.readline(MAX_LINE):
            is_whole = line.endswith("\n") or len(line) < MAX_LINE
            with suppress(Exception):
                if is_new:
                    getattr(sys, name).write(
                        line if is_whole else f"{line} ... (the rest of this line is cut)\n"
                    )
                    getattr(sys, name).flush()
            is_new = is_whole


# --- in the new process -----------------------------------------------------------------------------------------------


def main(target: str, connection: int, parent: int) -> None:
    """Fork the worker and guard it."""
    guard = os.getpid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans among the worker's children become the guard's
    if worker := os.fork():
        os.close(connection)
        _guard(worker, parent)
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the guard has one thread, which ends with it
    if os.getppid() != guard:  # it died before
        os._exit(1)
    os.set_inheritable(connection, False)
    _serve(target, Connection(connection))


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _guard(worker: int, parent: int) -> NoReturn:
    """Wait until the worker ends, the parent ends or asks by SIGTERM; kill what is left, and end as the worker did."""
    import resource

    waking, signalled = os.pipe()
    os.set_blocking(signalled, False)
    requests, status = list[int](), 0
    signal.set_wakeup_fd(signalled)
    signal.signal(signal.SIGTERM, lambda number, frame: requests.append(number))
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    is_alive = True
    while is_alive and not requests and os.getppid() == parent:
        ended, its_status = os.waitpid(-1, os.WNOHANG)
        if ended == worker:
            is_alive, status = False, its_status
        elif not ended and select.select([waking], [], [], _GUARD_S)[0]:
            os.read(waking, 512)
    until = time.monotonic() + _KILL_S
    with suppress(ChildProcessError):  # nothing is left
        while time.monotonic() < until:
            for pid in _children():
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(OSError):
                os.killpg(worker, signal.SIGKILL)
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.01)
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def _children() -> list[int]:
    """Children of this process on Linux."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            fields = (
                path.read_text(errors="replace").rpartition(")")[2].split()
            )  # a name may hold spaces and brackets
            if int(fields[1]) == os.getpid():
                found.append(int(path.parent.name))
    return found


def _serve(target: str, connection: Connection) -> NoReturn:
    """Answer requests until the pipe is closed."""
    faulthandler.enable()
    # A copy of the process that a function forks must not read requests, nor answer them.
    os.register_at_fork(after_in_child=connection.close)
    module, _, name = target.partition(":")
    answer: Callable[[dict[str, Any], dict[str, Any], list[bytes]], dict[str, Any]]
    answer = getattr(importlib.import_module(module), name)()
    while True:
        try:
            header, request = (
                json.loads(connection.recv_bytes()),
                json.loads(connection.recv_bytes()),
            )
            buffers = [connection.recv_bytes() for _ in range(header["buffers"])]
        except (EOFError, OSError):
            os._exit(0)
        number = {"number": header["number"]}
        try:
            reply = json.dumps(number | answer(header, request, buffers), default=_plain)
            if len(reply) > MAX_ANSWER_BYTES:
                message = f"its answer has {len(reply) >> 20} MiB; {MAX_ANSWER_BYTES >> 20} MiB are the most"
                raise CallError("exception", message, "size")
        except GruppoError as error:
            kind = "DataError" if isinstance(error, DataError) else "GruppoError"
            reply = json.dumps(number | {"error": [kind, str(error), ""]})
        except (
            BaseException
        ) as error:  # SystemExit and KeyboardInterrupt too: the trainer has to get an answer
            problem = error if isinstance(error, CallError) else CallError.from_exception(error)
            reply = json.dumps(
                number | {"error": [problem.kind, problem.message, str(problem.identity)]}
            )
        try:
            connection.send_bytes(reply.encode())
        except OSError:  # in a forked copy, or nobody waits any longer
            os._exit(0)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
