"""Reward functions in worker processes: whatever they do, the run goes on.

The first half runs in the trainer; ``Functions`` runs in the workers, and needs no torch.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from inspect import Parameter, Signature
from typing import Any

from gruppo.errors import DataError, GruppoError
from gruppo.loading import check_listed, full_name, load_object
from gruppo.packing import NotEncodable, encode
from gruppo.rewards.answers import Answer, TrainerState, as_list
from gruppo.timeouts import CallError, function_name
from gruppo.worker import START_S, WorkerProcess


class RewardWorkers:
    """Functions of files and modules, called in one worker; in further ones while rows are retried.

    A worker is replaced after a call that is late or ends it. All functions share one, so that a
    file is imported once. Random generators are seeded from ``seed`` and the arguments before each
    call: a resumed run draws the same numbers.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._lock = threading.Lock()
        self._loaded = dict[WorkerProcess, set[str]]()
        self._idle = list[WorkerProcess]()
        self._sources = dict[str, Any]()  # file and hash of each function
        weakref.finalize(self, _close_all, self._loaded)

    def load(
        self, spec: str, *arguments: Any, is_built_in: bool = False
    ) -> Callable[..., Any] | None:
        """Return the function of a spec, or what the factory of a spec returns for ``arguments``.

        None for what has to be called in this process: anything but a function, such as an object
        with the ``Reward`` protocol, which reads tensors. ``is_built_in``: any folder may name it.
        """
        if not is_built_in:
            check_listed(full_name(spec))  # the worker has no list
        key = json.dumps([spec, *arguments])
        try:
            with self._worker(key) as worker:
                info = self._load(worker, key)
        except CallError as error:
            problem = f"{spec} cannot be imported: {error.message}"
            raise DataError(f"{problem}. Fix the file and try again.") from None
        return RemoteFunction(self, key, info) if "name" in info else None

    def call(self, key: str, method: str, timeout_s: float | None, **arguments: Any) -> Any:
        """Call a method of ``Functions`` for a function, in a worker that is idle or new."""
        with self._worker(key) as worker:
            if key not in self._loaded[worker]:
                self._load(worker, key)
            arguments["key"] = key
            return worker.call(method, arguments, timeout_s=timeout_s, seed=self.seed)

    @contextmanager
    def _worker(self, key: str) -> Iterator[WorkerProcess]:
        """An idle worker, if possible one that has loaded the function, or a new one."""
        with self._lock:
            self._idle.sort(key=lambda worker: key in self._loaded[worker])
            worker = self._idle.pop() if self._idle else None
        if worker is None or not worker.is_alive:
            worker = WorkerProcess("gruppo.rewards.remote:Functions")
            self._loaded[worker] = set()
        is_fine = False
        try:
            yield worker
            is_fine = True
        except (GruppoError, NotEncodable):
            is_fine = True
            raise
        finally:
            with self._lock:
                # All functions may run at once; further workers were for retried rows.
                is_kept = is_fine and len(self._idle) < max(len(self._sources), 1)
                if is_kept:
                    self._idle.append(worker)
            if not is_kept:
                self._end(worker)

    def _end(self, worker: WorkerProcess) -> None:
        worker.kill()
        worker.close()
        self._loaded.pop(worker, None)

    def _load(self, worker: WorkerProcess, key: str) -> dict[str, Any]:
        info = worker.call("load", {"key": key}, timeout_s=START_S)
        self._loaded[worker].add(key)
        if self._sources.setdefault(key, info["source"]) != info["source"]:
            problem = f"{info['source'][0]} has changed since the run began"
            advice = "use it with gruppo resume RUN --allow-changes"
            raise CallError("exception", f"{problem}; {advice}", "changed")
        return info


def _close_all(workers: Iterable[WorkerProcess]) -> None:
    for worker in [*workers]:
        worker.close()


class RemoteFunction:
    """Looks like the function of a spec, and calls it in a worker."""

    is_remote = True

    def __init__(self, workers: RewardWorkers, key: str, info: dict[str, Any]) -> None:
        self._workers, self._key = workers, key
        self.__name__: str = info["name"]
        self.is_async: bool = info["is_async"]
        self.__signature__ = Signature(
            [
                Parameter(
                    name, getattr(Parameter, kind), default=Parameter.empty if needed else None
                )
                for name, kind, needed in info["parameters"]
            ]
        )
        vars(self).update(info["attributes"])
        if info["has_check"]:
            self.check = lambda columns: workers.call(key, "check", None, columns=list(columns))

    def __call__(self, call_timeout_s: float | None = None, **arguments: Any) -> Any:
        """Values that the function returns. What it logs goes to ``log_metric`` and
        ``log_extra``."""
        logs = {n: arguments.pop(n) for n in ("log_metric", "log_extra") if n in arguments}
        if "trainer_state" in arguments:
            arguments["trainer_state"] = asdict(arguments["trainer_state"])
        torch = sys.modules.get("torch")
        is_on_gpu = torch is not None and torch.cuda.is_initialized()
        device = torch.cuda.current_device() if torch is not None and is_on_gpu else None
        request = {"arguments": arguments, "logs": [*logs], "device": device}
        try:
            answer = self._workers.call(self._key, "score", call_timeout_s, **request)
        except NotEncodable as problem:
            raise DataError(
                f"reward {self.__name__} reads a {problem}, which only Python can hand over to it",
                option="scoring.isolate",
                advice="False",
            ) from None
        for name, value in answer["metrics"]:  # none of a function that does not take log_metric
            logs["log_metric"](name, value)
        for column, values in answer["extras"]:
            logs["log_extra"](column, values)
        values = answer["values"]
        return [
            CallError(*value["error"]) if isinstance(value, dict) else value for value in values
        ]


# --- in the worker --------------------------------------------------------------------------------


def make(key: str) -> Any:
    """Object of a spec, or what it returns for the arguments in ``key``."""
    spec, *arguments = json.loads(key)
    loaded = load_object(spec)
    return loaded(*arguments) if arguments else loaded


class Functions:
    """Loads reward functions and calls them."""

    def __init__(self) -> None:
        self.functions = dict[str, Any]()

    def load(self, key: str) -> dict[str, Any]:
        """Load a function; return all that the trainer needs to know of it."""
        function = self.functions[key] = make(key)
        source = None  # its file, and a hash of that
        with suppress(TypeError, OSError):
            path = inspect.getsourcefile(inspect.unwrap(getattr(function, "func", function)))
            with open(path or "", "rb") as file:
                source = [str(path), hashlib.sha256(file.read()).hexdigest()]
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            return {"source": source}  # the error is raised in the trainer
        if inspect.isclass(function) or isinstance(getattr(function, "name", None), str):
            return {"source": source}
        names = ("timeout_s", "step_separator", "scores_turns", "memory_bytes")
        calls = (function, type(function).__call__)
        return {
            "source": source,
            "name": function_name(function),
            "parameters": [[p.name, p.kind.name, p.default is p.empty] for p in parameters],
            "is_async": any(map(inspect.iscoroutinefunction, calls)),
            "attributes": {n: getattr(function, n) for n in names if hasattr(function, n)},
            "has_check": hasattr(function, "check"),
        }

    def check(self, key: str, columns: list[str]) -> None:
        self.functions[key].check(columns)

    def score(
        self, key: str, arguments: dict[str, Any], logs: list[str], device: int | None
    ) -> Any:
        """Call a function. torch records no gradients."""
        logged = Answer()
        arguments |= {name: getattr(logged, name) for name in logs}
        if "trainer_state" in arguments:
            arguments["trainer_state"] = TrainerState(**arguments["trainer_state"])
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_grad_enabled(False)
            if device is not None:
                torch.cuda.set_device(device)
        returned = self.functions[key](**arguments)
        if inspect.isawaitable(returned):
            return _awaited(returned, logged)
        return _answer(returned, logged)


async def _awaited(returned: Awaitable[Any], logged: Answer) -> dict[str, Any]:
    return _answer(await returned, logged)


def _answer(returned: Any, logged: Answer) -> dict[str, Any]:
    values = [_plain_entry(entry) for entry in as_list(returned, None)]
    return {"values": values, "metrics": logged.metrics, "extras": logged.extras}


def _plain_entry(entry: Any) -> Any:
    """One returned value, or the error that it is, as plain data."""
    if isinstance(entry, CallError):
        return {"error": [entry.kind, entry.message, str(entry.identity)]}
    if isinstance(entry, int) and abs(entry) > 1 << 1023:  # JSON has no number of so many digits
        return math.copysign(math.inf, entry)
    kind = type(entry).__name__
    try:
        encode(entry, [])
    except NotEncodable:
        is_bad = True
    else:
        is_bad = isinstance(entry, dict)
    if is_bad:
        problem = f"returned {entry!r:.60} ({kind}); each entry is a number or None"
        return {"error": ["exception", problem, kind]}
    return entry
