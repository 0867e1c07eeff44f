"""One object in a process of its own, which can be killed at any time and ends with this process.

    worker = WorkerProcess("my_tools.py:Search", "index.json")  # Search("index.json") in it
    worker.call("find", {"query": "x"}, timeout_s=10.0)  # its method find(query="x")
    worker.close()

Arguments and results are plain data, tensors and arrays (``gruppo.packing``): messages are
numbered, bounded in size, and nothing is unpickled. A guard stands between the two processes. It
runs no code of the user's, so it always notices that this process is gone; it then kills the worker
and everything that the worker has started.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import hashlib
import inspect
import json
import logging
import math
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NoReturn

from gruppo.errors import DataError, GruppoError
from gruppo.loading import load_object
from gruppo.packing import NotEncodable, decode, encode
from gruppo.timeouts import CallError

log = logging.getLogger("gruppo")

IS_AVAILABLE = os.name == "posix"
"""Whether workers can be started: Windows passes no pipes to a process by number."""
MAX_ANSWER_BYTES = 1 << 26
MAX_LINE = 1 << 16
"""Characters that are shown of a line of output; the rest of the line is read and dropped."""
START_S = 60.0
"""Time limit for importing the object; it does not count as time of the first call."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_GUARD_S = 1.0
"""Seconds within which the guard notices that its parent is gone."""
_KILL_S = 10.0

_START = """import json, sys
settings = json.loads(sys.argv[1])
sys.path[:] = settings.pop("path")
from gruppo.worker import main
main(**settings)"""


class WorkerProcess:
    """A process with the object that ``target(*arguments)`` makes.

    ``target``: ``FILE.py:NAME`` or ``package.module:NAME``, a class or a function. Raises what the
    import or the call raises. One call at a time; any thread may ``kill`` it.
    """

    def __init__(self, target: str, *arguments: Any) -> None:
        self._number = 0
        self._connection, other = Pipe()
        settings = {"path": [*map(str, sys.path)], "connection": other.fileno()}
        settings["parent"] = os.getpid()
        # A session of its own: Ctrl-C is for this process.
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-W", "ignore", "-c", _START, json.dumps(settings)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            pass_fds=[other.fileno()],
            start_new_session=True,
        )
        other.close()
        # The live screen and notebooks show what is written to sys.stdout, not to its descriptor.
        self._output = list[threading.Thread]()
        for name in ("stdout", "stderr"):
            copy = (getattr(self.process, name), name)
            self._output.append(threading.Thread(target=_copy_lines, args=copy, daemon=True))
            self._output[-1].start()
        try:
            self.call("", {"target": target, "arguments": list(arguments)}, timeout_s=START_S)
        except BaseException:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def call(
        self,
        method: str,
        arguments: Mapping[str, Any],
        *,
        timeout_s: float | None = None,
        seed: int | None = None,
    ) -> Any:
        """Return what a method of the object returns, awaited if it is a coroutine.

        Raises its GruppoError; ``CallError`` for another exception, or if the process ends, is too
        late (it is then killed) or answers another request; ``NotEncodable`` for arguments that are
        not plain data. With ``seed``, random generators are seeded from it and the arguments.
        """
        self._number += 1
        buffers = list[bytes]()
        body = json.dumps(encode(dict(arguments), buffers)).encode()
        header = {"number": self._number, "method": method, "seed": seed, "buffers": len(buffers)}
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        try:
            for part in (json.dumps(header).encode(), body, *buffers):
                self._connection.send_bytes(part)
            answer = json.loads(self._receive(until))
            is_mine = answer["number"] == self._number
            received = [self._receive(until) for _ in range(answer["buffers"] if is_mine else 0)]
        except TimeoutError:
            self.kill()
            raise CallError("timeout", f"no answer within {timeout_s:.3g} s") from None
        except (EOFError, OSError, ValueError, KeyError, TypeError, RecursionError):
            raise self._ended() from None
        if not is_mine:
            self.kill()
            message = "its process answered another request than the last one"
            message += ": a copy of it, as of os.fork(), answers"
            raise CallError("exception", message, "number")
        if (error := answer.get("error")) is not None:
            kind, message, identity = error
            if kind in ("GruppoError", "DataError"):
                raise (DataError if kind == "DataError" else GruppoError)(message)
            raise CallError(kind, message, identity)
        return decode(answer["value"], received)

    def _receive(self, until: float) -> bytes:
        # A process that the object has forked may hold the pipe open: its end alone is no sign.
        while not self._connection.poll(min(0.5, max(until - time.monotonic(), 0))):
            if time.monotonic() >= until:
                raise TimeoutError
            if not self.is_alive and not self._connection.poll():
                raise EOFError
        return self._connection.recv_bytes(MAX_ANSWER_BYTES)

    def _ended(self) -> CallError:
        """Why there is no answer."""
        try:
            code = self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.kill()
            message = "its process closed the pipe, or wrote into it"
            return CallError("exception", message, "pipe")
        how = f"exited with status {code}, as by os._exit({code})"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            how += " (out of memory?)" if -code == signal.SIGKILL else ""
        return CallError("exception", f"its process {how}", code)

    def kill(self) -> None:
        """Have the process and its children killed; ``close`` waits for that."""
        self.process.terminate()

    def close(self) -> None:
        with suppress(OSError):
            self._connection.close()
        with suppress(subprocess.TimeoutExpired):  # it ends with its pipe, unless a call hangs
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
                "a process that was started in the background by a reward, a tool or an environment"
                " is still running. It is only killed on Linux: end it yourself."
            )


def _copy_lines(pipe: IO[str] | None, name: str) -> None:
    """Write the lines of a process to ``sys.stdout`` or ``sys.stderr``. A line may have no end."""
    assert pipe is not None
    with pipe:
        is_new = True
        while line := pipe.readline(MAX_LINE):
            is_whole = line.endswith("\n") or len(line) < MAX_LINE
            text = line if is_whole else f"{line} ... (the rest of this line is cut)\n"
            with suppress(Exception):
                if is_new:
                    getattr(sys, name).write(text)
                    getattr(sys, name).flush()
            is_new = is_whole


# --- in the new process ---------------------------------------------------------------------------


def main(connection: int, parent: int) -> None:
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
    _serve(Connection(connection))


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _guard(worker: int, parent: int) -> NoReturn:
    """Wait until the worker or the parent ends, or SIGTERM; kill the rest; end as the worker
    did."""
    import resource

    waking, signalled = os.pipe()
    os.set_blocking(signalled, False)
    requests = list[int]()
    signal.set_wakeup_fd(signalled)
    signal.signal(signal.SIGTERM, lambda number, frame: requests.append(number))
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    ended = status = 0
    while ended != worker and not requests and os.getppid() == parent:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if not ended and select.select([waking], [], [], _GUARD_S)[0]:
            os.read(waking, 512)
    status = status if ended == worker else 0
    _kill_all(worker)
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def _kill_all(worker: int) -> None:
    """Kill the worker's session and every child of this process, also those that have left it."""
    until = time.monotonic() + _KILL_S
    with suppress(ChildProcessError):  # nothing is left
        while time.monotonic() < until:
            for path in Path("/proc").glob("[0-9]*/stat"):
                with suppress(OSError, ValueError):
                    # the name of a process may hold spaces and brackets
                    fields = path.read_text(errors="replace").rpartition(")")[2].split()
                    if int(fields[1]) == os.getpid():
                        os.kill(int(path.parent.name), signal.SIGKILL)
            with suppress(OSError):
                os.killpg(worker, signal.SIGKILL)
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.01)


def _serve(connection: Connection) -> NoReturn:
    """Answer requests until the pipe is closed."""
    faulthandler.enable()
    # A copy of the process that the object forks must not read requests, nor answer them.
    os.register_at_fork(after_in_child=connection.close)
    loop = asyncio.new_event_loop()  # one for all calls: a client that is opened on it stays usable
    target: Any = None
    while True:
        try:
            header, body = json.loads(connection.recv_bytes()), connection.recv_bytes()
            buffers = [connection.recv_bytes() for _ in range(header["buffers"])]
        except (EOFError, OSError):
            os._exit(0)
        parts = list[bytes]()
        answer: dict[str, Any] = {}
        try:
            if header["seed"] is not None:
                _seed_generators(header["seed"], body, *buffers)
            arguments = decode(json.loads(body), buffers)
            if header["method"]:
                value = getattr(target, header["method"])(**arguments)
                if inspect.isawaitable(value):
                    value = loop.run_until_complete(value)
            else:
                value, target = None, load_object(arguments["target"])(*arguments["arguments"])
            answer = {"value": encode(value, parts)}
            size = max([len(json.dumps(answer)), *map(len, parts)])
            if size > MAX_ANSWER_BYTES:
                most = MAX_ANSWER_BYTES >> 20
                message = f"its answer has {size >> 20} MiB; {most} MiB are the most"
                raise CallError("exception", message, "size")
        except BaseException as error:  # SystemExit too: the trainer has to get an answer
            answer = {"error": _described(error)}
            parts = []
        answer |= {"number": header["number"], "buffers": len(parts)}
        try:
            for part in (json.dumps(answer).encode(), *parts):
                connection.send_bytes(part)
        except OSError:  # in a forked copy, or nobody waits any longer
            os._exit(0)


def _seed_generators(seed: int, *request: bytes) -> None:
    digest = hashlib.blake2b(b"%d " % seed + b"".join(request), digest_size=4).digest()
    number = int.from_bytes(digest, "big")
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(number)


def _described(error: BaseException) -> list[str]:
    if isinstance(error, GruppoError):
        kind = "DataError" if isinstance(error, DataError) else "GruppoError"
        return [kind, str(error), ""]
    if isinstance(error, NotEncodable):
        return ["exception", f"returned a {error}, which is no plain data", "value"]
    problem = error if isinstance(error, CallError) else CallError.from_exception(error)
    return [problem.kind, problem.message, str(problem.identity)]
