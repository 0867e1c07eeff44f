"""Reward functions in a process of their own, which can be killed: whatever they do, the run goes on.

Arguments and answers cross a pipe as JSON, tensors beside it as bytes; nothing is unpickled. The process imports this
module and what the functions need, so it has to stay free of torch.
"""

from __future__ import annotations

import asyncio
import faulthandler
import hashlib
import inspect
import json
import logging
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from inspect import Parameter, Signature
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any

from gruppo.errors import DataError, GruppoError
from gruppo.loading import check_unsealed, load_object
from gruppo.timeouts import CallError, current_call, function_name
from gruppo.watchdog import GRACE_S

log = logging.getLogger("gruppo")

CAN_ISOLATE = os.name == "posix"
"""Whether functions can run in another process. Windows passes no pipes to a process by number."""
_START_S = 60.0
_PLAIN = frozenset({type(None), bool, int, float, str})


@dataclass(frozen=True)
class TrainerState:
    """Progress of the run, as TRL's reward functions read it."""

    global_step: int = 0
    max_steps: int = 0
    epoch: float | None = None
    """Passes over the training prompts before this step; None where the data have no end."""


@dataclass
class Answer:
    """Values that one call returned and logged for its rows."""

    size: int | None = None  # None: the number of values is checked elsewhere
    values: Sequence[Any] = ()  # for each row a number or None, ``StepScores``, or the error that makes it a failure
    metrics: list[tuple[str, float]] = field(default_factory=list)
    extras: list[tuple[str, Sequence[Any]]] = field(default_factory=list)

    def log_metric(self, name: str, value: float) -> None:
        self.metrics.append((name, float(value)))

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        values = list(values)
        if self.size is not None and len(values) != self.size:
            raise ValueError(f"log_extra({column!r}) got {len(values)} values for {self.size} completions")
        self.extras.append((column, values))


def as_list(returned: Any, size: int | None) -> list[Any]:
    """Convert the returned values to a list; ``CallError`` unless there is one per row. None: the rows are unknown."""
    is_array = hasattr(returned, "tolist") and hasattr(returned, "ndim")  # of numpy or torch
    if is_array and returned.ndim != 1:
        raise CallError("count", f"returned shape {tuple(returned.shape)}; it needs one number per completion")
    if not is_array and not isinstance(returned, (list, tuple)):
        got = f"returned {returned!r:.60} ({type(returned).__name__})"
        raise CallError("exception", f"{got}; it needs a list of one number per completion", type(returned).__name__)
    if size is not None and len(returned) != size:
        raise CallError("count", f"returned {len(returned)} rewards for {size} completions")
    return returned.tolist() if is_array else list(returned)


# --- plain data -------------------------------------------------------------------------------------------------------


class _NotPlain(Exception):
    """A value that JSON and bytes cannot hold without changing it."""


def _encode(value: Any, buffers: list[bytes]) -> Any:
    """Convert to JSON that keeps tuples and keys of any type, with the bytes of tensors and arrays in ``buffers``."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return value if _PLAIN.issuperset(map(type, value)) else [_encode(part, buffers) for part in value]
    if kind is dict and "$" not in value and all(type(key) is str for key in value):
        return {key: _encode(part, buffers) for key, part in value.items()}
    if kind in (tuple, set, frozenset, dict):
        return {
            "$": kind.__name__,
            "of": [_encode(part, buffers) for part in (value.items() if kind is dict else value)],
        }
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if kind is bytes:
        buffers.append(value)
        return {"$": "bytes"}
    if torch is not None and isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous()
        buffers.append(data.reshape(-1).view(torch.uint8).numpy().tobytes())
        return {"$": "tensor", "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)) and value.dtype.kind in "biufc":
        buffers.append(value.tobytes())
        is_scalar = isinstance(value, numpy.generic)
        return {"$": "array", "dtype": value.dtype.str, "shape": list(value.shape), "is_scalar": is_scalar}
    raise _NotPlain(f"{kind.__module__}.{kind.__qualname__}")


def _decode(value: Any, buffers: Iterable[bytes]) -> Any:
    """Invert ``_encode``; ``buffers`` are used up in the order in which they were added."""
    if isinstance(value, list):
        return [_decode(part, buffers) for part in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("$")
    if kind is None:
        return {key: _decode(part, buffers) for key, part in value.items()}
    if kind == "bytes":
        return next(iter(buffers))
    if kind == "tensor":
        import torch

        data, dtype = bytearray(next(iter(buffers))), getattr(torch, value["dtype"])
        return (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).reshape(value["shape"])
    if kind == "array":
        import numpy

        array = numpy.frombuffer(bytearray(next(iter(buffers))), dtype=value["dtype"]).reshape(value["shape"])
        return array[()] if value["is_scalar"] else array
    return {"tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict}[kind](_decode(value["of"], buffers))


def _plain_entry(entry: Any) -> Any:
    """One returned value as JSON: a number, None, a text, a list of them; or the error that it is."""
    if hasattr(entry, "tolist"):
        entry = entry.tolist()
    if isinstance(entry, CallError):
        return {"error": [entry.kind, entry.message, str(entry.identity)]}
    if isinstance(entry, (list, tuple)):
        return [_plain_entry(part) for part in entry]
    if isinstance(entry, int) and abs(entry) > 1 << 1023:  # more digits than Python writes; no float32 in any case
        return math.copysign(math.inf, entry)
    if entry is None or isinstance(entry, (bool, int, float, str)):
        return entry
    got = f"returned {entry!r:.60} ({type(entry).__name__})"
    return {"error": ["exception", f"{got}; each entry is a number or None", type(entry).__name__]}


# --- the trainer's side -----------------------------------------------------------------------------------------------

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from gruppo.reward_process import main; main()"


class _Process:
    """A process that loads functions and calls them, one call at a time."""

    def __init__(self) -> None:
        self.loaded = set[str]()
        self.connection, other = Pipe()
        path = json.dumps([str(entry) for entry in sys.path])
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-W", "ignore", "-c", _START, path, str(other.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            pass_fds=[other.fileno()],
            start_new_session=True,  # Ctrl-C is the trainer's; and processes that a function starts are killed with it
        )
        other.close()
        # The live screen and notebooks show what is written to sys.stdout, not to its file descriptor.
        self._output = [
            threading.Thread(target=_copy_lines, args=(pipe, name), name="gruppo-reward-output", daemon=True)
            for pipe, name in ((self.process.stdout, "stdout"), (self.process.stderr, "stderr"))
        ]
        for thread in self._output:
            thread.start()

    def ask(self, request: bytes, buffers: Sequence[bytes] = (), *, limit_s: float = math.inf, **header: Any) -> Any:
        """Send a request and return the answer. ``CallError`` where the process ends, or answers too late."""
        until = time.monotonic() + limit_s
        try:
            for part in (json.dumps(header | {"buffers": len(buffers)}).encode(), request, *buffers):
                self.connection.send_bytes(part)
            # A process that the function has forked may hold the pipe open, so that its end alone is no sign.
            while not self.connection.poll(0.5):
                if self.process.poll() is not None and not self.connection.poll():
                    raise EOFError
                if time.monotonic() > until:
                    raise CallError("timeout", f"its process did not start within {limit_s:.3g} s")
            return json.loads(self.connection.recv_bytes())
        except (EOFError, OSError, ValueError):
            raise self._end() from None

    def _end(self) -> CallError:
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
        """Kill the process and those that it has started."""
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        with suppress(OSError):
            self.connection.close()
        with suppress(subprocess.TimeoutExpired):  # it ends where its pipe ends, unless a call hangs
            self.process.wait(1.0)
        self.kill()
        self.process.wait()
        for thread in self._output:  # the last lines are shown
            thread.join(1.0)


def _copy_lines(pipe: IO[str] | None, name: str) -> None:
    """Write the lines of a process to ``sys.stdout`` or ``sys.stderr`` of this one."""
    assert pipe is not None
    with pipe:
        for line in pipe:
            with suppress(Exception):
                getattr(sys, name).write(line)
                getattr(sys, name).flush()


class RewardProcesses:
    """Functions of files and modules, called in a process of their own; in further ones while rows are retried.

    A process is killed where a call is abandoned, and replaced for the next one. All functions share one process, so
    that a file is imported once. Random generators are seeded before each call from ``seed`` and the arguments: a
    resumed run draws the same numbers.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._lock = threading.Lock()
        self._all, self._idle = set[_Process](), list[_Process]()
        self._sources: dict[str, Any] = {}
        self._functions = set[str]()
        weakref.finalize(self, _close_all, self._all)

    def load(self, spec: str, *arguments: Any, is_built_in: bool = False) -> Callable[..., Any] | None:
        """Return the function of a spec, or what the factory of a spec returns for ``arguments``.

        ``is_built_in``: the spec is not the user's, so that a folder that is not trusted may name it.
        None for what has to be called in this process: anything but a function, such as an object with the ``Reward``
        protocol, which reads tensors. GruppoError where it cannot be imported.
        """
        if not is_built_in:
            check_unsealed(spec)  # the process knows nothing of a seal
        key = json.dumps([spec, *arguments])
        self._functions.add(key)
        process = self._take(key)
        try:
            info = self._load(process, key)
        except CallError as error:
            self._end(process)
            raise DataError(f"{spec} cannot be imported: {error.message}. Fix the file and try again.") from None
        except BaseException:
            self._end(process)
            raise
        self._put(process)
        return None if info.get("is_here") else _IsolatedFunction(self, key, info)

    def ask(self, key: str, request: Any, buffers: Sequence[bytes] = ()) -> dict[str, Any]:
        """Answer of a request about a function, from a process that is idle or new. Raises what the function raises."""
        body = json.dumps(request | {"of": key}).encode()
        digest = hashlib.blake2b(b"%d " % self.seed + body, digest_size=4)
        for buffer in buffers:
            digest.update(buffer)
        call, process, limit_s = current_call(), self._take(key), None
        torch = sys.modules.get("torch")
        device = torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else 0
        try:
            if call is not None:
                call.kill = process.kill
            if key not in process.loaded:
                if call is not None:
                    call.started = math.inf
                self._load(process, key, limit_s=_START_S)
            if call is not None:
                call.started = time.monotonic()
                # Past this limit the process ends by itself, where nobody is left to kill it.
                limit_s = None if call.timeout_s is None else 2 * call.timeout_s + GRACE_S
            seed = int.from_bytes(digest.digest(), "big")
            answer = process.ask(body, buffers, seed=seed, device=device, exit_after_s=limit_s)
        except BaseException:  # also of a signal: the answer would be taken for that of the next call
            self._end(process)
            raise
        finally:
            if call is not None:
                call.kill = None
        self._put(process)
        return _checked(answer)

    def _take(self, key: str) -> _Process:
        """An idle process, one that has loaded the function if there is one, or a new one."""
        with self._lock:
            self._idle.sort(key=lambda process: key in process.loaded)
            while self._idle:
                process = self._idle.pop()
                if process.process.poll() is None:
                    return process
                self._all.discard(process)
                process.close()
            process = _Process()
            self._all.add(process)
            return process

    def _put(self, process: _Process) -> None:
        """Keep as many processes as there are functions, which may run at once; others were for retried rows."""
        with self._lock:
            if len(self._idle) < len(self._functions):
                self._idle.append(process)
                return
        self._end(process)

    def _end(self, process: _Process) -> None:
        process.kill()
        process.close()
        self._all.discard(process)

    def _load(self, process: _Process, key: str, *, limit_s: float = math.inf) -> dict[str, Any]:
        info = _checked(process.ask(json.dumps({"load": key}).encode(), limit_s=limit_s))
        process.loaded.add(key)
        if self._sources.setdefault(key, info["source"]) != info["source"]:
            path = info["source"][0]
            raise CallError(
                "exception",
                f"{path} has changed since the run began; use it with gruppo resume RUN --allow-changes",
                "changed",
            )
        return info


def _close_all(processes: set[_Process]) -> None:
    for process in [*processes]:
        process.close()


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    """Raise the error of an answer, if it is one."""
    if (error := answer.get("error")) is not None:
        kind, message, identity = error
        if kind in ("GruppoError", "DataError"):
            raise (DataError if kind == "DataError" else GruppoError)(message)
        raise CallError(kind, message, identity)
    return answer


class _IsolatedFunction:
    """Looks like the function of a spec, and calls it in another process."""

    def __init__(self, processes: RewardProcesses, key: str, info: dict[str, Any]) -> None:
        self._processes, self._key = processes, key
        self._local: Callable[..., Any] | None = None
        self.__name__: str = info["name"]
        self.__signature__ = Signature(
            [
                Parameter(name, getattr(Parameter, kind), default=Parameter.empty if is_required else None)
                for name, kind, is_required in info["parameters"]
            ]
        )
        self.is_async: bool = info["is_async"]
        vars(self).update(info["attributes"])
        if info["has_check"]:
            self.check = lambda columns: self._processes.ask(self._key, {"check": list(columns)})

    def __call__(self, **arguments: Any) -> Any:
        """Values that the function returns. What it logs goes to ``log_metric`` and ``log_extra``."""
        if self._local is not None:
            return self._local(**arguments)
        plain, buffers = dict(arguments), list[bytes]()
        logs = {name: plain.pop(name) for name in ("log_metric", "log_extra") if name in plain}
        if "trainer_state" in plain:
            plain["trainer_state"] = asdict(plain["trainer_state"])
        try:
            cells = _encode(plain, buffers)
        except _NotPlain as problem:
            log.warning(
                "reward %s is called in this process: its arguments hold a %s, which only Python can hand over. "
                "--scoring.isolate False says so from the start.",
                *(self.__name__, problem),
            )
            self._local = _make(self._key)
            return self._local(**arguments)
        answer = self._processes.ask(self._key, {"arguments": cells, "logs": [*logs]}, buffers)
        for name, value in answer["metrics"] if "log_metric" in logs else ():
            logs["log_metric"](name, value)
        for column, values in answer["extras"] if "log_extra" in logs else ():
            logs["log_extra"](column, values)
        return [CallError(*value["error"]) if isinstance(value, dict) else value for value in answer["values"]]


# --- the other side ---------------------------------------------------------------------------------------------------


def _make(key: str) -> Any:
    """Object of a spec, or what it returns for the arguments in ``key``."""
    spec, *arguments = json.loads(key)
    loaded = load_object(spec)
    return loaded(*arguments) if arguments else loaded


def main() -> None:
    """Serve requests until the pipe is closed."""
    faulthandler.enable()
    number = int(sys.argv[2])
    os.set_inheritable(number, False)
    connection, functions = Connection(number), dict[str, Any]()
    loop = asyncio.new_event_loop()  # one for all calls: a client that a function opens on it stays usable
    while True:
        try:
            header, request = json.loads(connection.recv_bytes()), json.loads(connection.recv_bytes())
            buffers = [connection.recv_bytes() for _ in range(header["buffers"])]
        except (EOFError, OSError):
            os._exit(0)
        try:
            if "load" in request:
                function = functions[request["load"]] = _make(request["load"])
                answer = _described(function)
            elif "check" in request:
                functions[request["of"]].check(request["check"])
                answer = {}
            else:
                answer = _answer(functions[request["of"]], request, buffers, header, loop)
            reply = json.dumps(answer, default=lambda value: value.tolist() if hasattr(value, "tolist") else str(value))
        except GruppoError as error:
            kind = "DataError" if isinstance(error, DataError) else "GruppoError"
            reply = json.dumps({"error": [kind, str(error), ""]})
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: the trainer has to get an answer
            problem = error if isinstance(error, CallError) else CallError.from_exception(error)
            reply = json.dumps({"error": [problem.kind, problem.message, str(problem.identity)]})
        connection.send_bytes(reply.encode())


def _described(function: Any) -> dict[str, Any]:
    """All that the trainer needs to know of a function."""
    source = _source(function)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {"is_here": True, "source": source}  # the error is raised there
    if inspect.isclass(function) or isinstance(getattr(function, "name", None), str):
        return {"is_here": True, "source": source}
    names = ("timeout_s", "step_separator", "memory_bytes")
    return {
        "source": source,
        "name": function_name(function),
        "parameters": [[p.name, p.kind.name, p.default is p.empty] for p in parameters],
        "is_async": inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__),
        "attributes": {name: getattr(function, name) for name in names if hasattr(function, name)},
        "has_check": hasattr(function, "check"),
    }


def _source(function: Any) -> list[str] | None:
    """File of a function, and its hash."""
    try:
        path = inspect.getsourcefile(inspect.unwrap(getattr(function, "func", function)))
        with open(path or "", "rb") as file:
            return [str(path), hashlib.sha256(file.read()).hexdigest()]
    except (TypeError, OSError):
        return None


def _answer(
    function: Callable[..., Any],
    request: dict[str, Any],
    buffers: Sequence[bytes],
    header: dict[str, Any],
    loop: asyncio.AbstractEventLoop,
) -> dict[str, Any]:
    """Call a function. Its generators are seeded, and torch records no gradients."""
    arguments, logged = _decode(request["arguments"], iter(buffers)), Answer()
    arguments |= {name: getattr(logged, name) for name in request["logs"]}
    if "trainer_state" in arguments:
        arguments["trainer_state"] = TrainerState(**arguments["trainer_state"])
    random.seed(header["seed"])
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(header["seed"])
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(header["seed"])
        torch.set_grad_enabled(False)
        if header["device"]:
            torch.cuda.set_device(header["device"])
    if header["exit_after_s"] is not None:
        faulthandler.dump_traceback_later(header["exit_after_s"], exit=True)
    try:
        returned = function(**arguments)
        if inspect.isawaitable(returned):
            returned = loop.run_until_complete(returned)
        values = [_plain_entry(entry) for entry in as_list(returned, None)]
    finally:
        faulthandler.cancel_dump_traceback_later()
    return {"values": values, "metrics": logged.metrics, "extras": logged.extras}
