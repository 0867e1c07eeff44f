"""Reward functions in worker processes: whatever they do, the run goes on.

The first half runs in the trainer; ``Functions`` runs in the workers, and needs no torch.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from inspect import Parameter, Signature
from typing import Any

from gruppo.errors import DataError
from gruppo.loading import check_listed, full_name, load_object
from gruppo.packing import NotEncodable, encode
from gruppo.rewards.answers import Answer, TrainerState, as_list
from gruppo.timeouts import CallError, function_name
from gruppo.worker import START_S, WorkerProcess


class RewardWorkers:
    """Functions of files and modules, called in one worker for each file or module.

    A worker is replaced after a call that is late or ends it. Random generators are seeded from
    ``seed`` and the arguments before each call: a resumed run draws the same numbers.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._workers = dict[str, WorkerProcess]()
        self._locks = defaultdict[str, threading.Lock](threading.Lock)
        weakref.finalize(self, _close_all, self._workers)

    def load(
        self, spec: str, *arguments: Any, is_built_in: bool = False
    ) -> Callable[..., Any] | None:
        """Return the function of a spec, or what the factory of a spec returns for ``arguments``.

        None for what has to be called in this process: anything but a function, such as an object
        with the ``Reward`` protocol, which reads tensors. ``is_built_in``: any folder may name it.
        """
        if not is_built_in:
            check_listed(full_name(spec))  # the worker has no list
        call = partial(self._call, json.dumps([spec, *arguments]))
        try:
            info = call("load", START_S)
        except CallError as error:
            problem = f"{spec} cannot be imported: {error.message}"
            raise DataError(f"{problem}. Fix the file and try again.") from None
        return RemoteFunction(call, info) if info else None

    def _call(self, key: str, method: str, timeout_s: float | None, **arguments: Any) -> Any:
        """Call a method of ``Functions`` for a function, in the worker of its file."""
        place = str(json.loads(key)[0]).rpartition(":")[0]
        with self._locks[place]:
            worker = self._workers.get(place)
            if worker is None or not worker.is_alive:
                worker = self._workers[place] = WorkerProcess("gruppo.rewards.remote:Functions")
                worker.call("load", {"key": key}, timeout_s=START_S)
            try:
                arguments["key"] = key
                return worker.call(method, arguments, timeout_s=timeout_s, seed=self.seed)
            except CallError as error:
                if error.kind == "timeout":
                    worker.close()
                raise


def _close_all(workers: Mapping[str, WorkerProcess]) -> None:
    for worker in workers.values():
        worker.close()


class RemoteFunction:
    """Looks like the function of a spec, and calls it in a worker."""

    is_remote = True

    def __init__(self, call: Callable[..., Any], info: dict[str, Any]) -> None:
        self._call = call
        self.__name__: str = info["name"]
        parameters = []
        for name, kind, is_required in info["parameters"]:
            default = Parameter.empty if is_required else None
            parameters.append(Parameter(name, getattr(Parameter, kind), default=default))
        self.__signature__ = Signature(parameters)
        vars(self).update(info["attributes"])
        if info["has_check"]:
            self.check = lambda columns: call("check", None, columns=list(columns))

    def __call__(self, call_timeout_s: float | None = None, **arguments: Any) -> Any:
        """Values that the function returns. What it logs goes to ``log_metric`` and
        ``log_extra``."""
        logs = {n: arguments.pop(n) for n in ("log_metric", "log_extra") if n in arguments}
        if "trainer_state" in arguments:
            arguments["trainer_state"] = asdict(arguments["trainer_state"])
        torch = sys.modules.get("torch")
        is_on_gpu = torch is not None and torch.cuda.is_initialized()
        device = torch.cuda.current_device() if is_on_gpu else None  # type: ignore[union-attr]
        try:
            answer = self._call(
                "score", call_timeout_s, arguments=arguments, logs=[*logs], device=device
            )
        except NotEncodable as problem:
            raise DataError(
                f"reward {self.__name__} reads a {problem}, which only Python can hand over to it",
                option="scoring.isolate",
                advice="False",
            ) from None
        for name, values in answer["logged"]:  # none of a function that does not take the logger
            for entry in values:
                logs[name](*entry)
        return [
            CallError(*value["error"]) if isinstance(value, dict) else value
            for value in answer["values"]
        ]


# --- in the worker --------------------------------------------------------------------------------


class Functions:
    """Loads reward functions and calls them."""

    def __init__(self) -> None:
        self.functions = dict[str, Any]()

    def _function(self, key: str) -> Any:
        if key not in self.functions:
            spec, *arguments = json.loads(key)
            loaded = load_object(spec)
            self.functions[key] = loaded(*arguments) if arguments else loaded
        return self.functions[key]

    def load(self, key: str) -> dict[str, Any] | None:
        """Load a function; return all that the trainer needs to know of it."""
        function = self._function(key)
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            return None  # the error is raised in the trainer
        if inspect.isclass(function) or isinstance(getattr(function, "name", None), str):
            return None
        names = ("timeout_s", "step_separator", "scores_turns", "memory_bytes")
        attributes = {n: getattr(function, n) for n in names if hasattr(function, n)}
        calls = (function, type(function).__call__)
        attributes["is_async"] = any(map(inspect.iscoroutinefunction, calls))
        return {
            "name": function_name(function),
            "parameters": [[p.name, p.kind.name, p.default is p.empty] for p in parameters],
            "attributes": attributes,
            "has_check": hasattr(function, "check"),
        }

    def check(self, key: str, columns: list[str]) -> None:
        self._function(key).check(columns)

    async def score(
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
        returned = self._function(key)(**arguments)
        if inspect.isawaitable(returned):
            returned = await returned
        return {
            "values": [_plain_entry(entry) for entry in as_list(returned, None)],
            "logged": [["log_metric", logged.metrics], ["log_extra", logged.extras]],
        }


def _plain_entry(entry: Any) -> Any:
    """One returned value, or the error that it is, as plain data."""
    if isinstance(entry, CallError):
        return {"error": [entry.kind, entry.message, str(entry.identity)]}
    if isinstance(entry, int) and abs(entry) > 1 << 1023:  # JSON has no number of so many digits
        return math.copysign(math.inf, entry)
    try:
        encode(entry, [])
        is_plain = not isinstance(entry, dict)
    except NotEncodable:
        is_plain = False
    if is_plain:
        return entry
    kind = type(entry).__name__
    problem = f"returned {entry!r:.60} ({kind}); each entry is a number or None"
    return {"error": ["exception", problem, kind]}
