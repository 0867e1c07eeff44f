"""Reward functions in a process of their own, which can be killed: whatever they do, the run goes on.

``reward_worker`` is the other side.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from inspect import Parameter, Signature
from typing import Any

from gruppo.errors import DataError
from gruppo.loading import check_listed, full_name
from gruppo.reward_values import NotEncodable, encode
from gruppo.reward_worker import make
from gruppo.timeouts import CallError, TimedCall, this_thread
from gruppo.worker import Worker

log = logging.getLogger("gruppo")

CAN_ISOLATE = os.name == "posix"
"""Whether functions can run in another process. Windows passes no pipes to a process by number."""
_START_S = 60.0


class RewardProcesses:
    """Functions of files and modules, called in a process of their own; in further ones while rows are retried.

    A process is killed where a call is abandoned, and replaced for the next one. All functions share one process, so
    that a file is imported once. Random generators are seeded before each call from ``seed`` and the arguments: a
    resumed run draws the same numbers.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._lock = threading.Lock()
        self._all = dict[Worker, set[str]]()  # the functions that each has loaded
        self._idle = list[Worker]()
        self._sources: dict[str, Any] = {}  # file and hash of each function
        weakref.finalize(self, _close_all, self._all)

    def load(
        self, spec: str, *arguments: Any, is_built_in: bool = False
    ) -> Callable[..., Any] | None:
        """Return the function of a spec, or what the factory of a spec returns for ``arguments``.

        ``is_built_in``: the spec is not the user's, so that any folder may name it.
        None for what has to be called in this process: anything but a function, such as an object with the ``Reward``
        protocol, which reads tensors. GruppoError where it cannot be imported.
        """
        if not is_built_in:
            check_listed(full_name(spec))  # the process has no list
        key = json.dumps([spec, *arguments])
        try:
            with self._process(key) as process:
                info = self._load(process, key)
        except CallError as error:
            raise DataError(
                f"{spec} cannot be imported: {error.message}. Fix the file and try again."
            ) from None
        return None if info.get("is_here") else _IsolatedFunction(self, key, info)

    def ask(self, key: str, request: Any, buffers: Sequence[bytes] = ()) -> dict[str, Any]:
        """Answer of a request about a function, from a process that is idle or new. Raises what the function raises."""
        body = json.dumps(request | {"of": key}).encode()
        digest = hashlib.blake2b(b"%d " % self.seed + body, digest_size=4)
        for buffer in buffers:
            digest.update(buffer)
        # outside of a timed call, as a check of columns is, nothing reads this one
        call = getattr(this_thread, "call", None) or TimedCall(lambda: None)
        torch = sys.modules.get("torch")
        device = (
            torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else 0
        )
        with self._process(key) as process:
            try:
                call.kill = process.kill
                if key not in self._all[process]:
                    call.started = math.inf  # importing the file costs nothing of the call's time
                    self._load(process, key, limit_s=_START_S)
                call.started = time.monotonic()
                seed = int.from_bytes(digest.digest(), "big")
                return process.ask(body, buffers, seed=seed, device=device)
            finally:
                call.kill = None  # before another call may take the process

    @contextmanager
    def _process(self, key: str) -> Iterator[Worker]:
        """Within, an idle process, one that has loaded the function if there is one, or a new one."""
        with self._lock:
            self._idle.sort(key=lambda process: key in self._all[process])
            while self._idle:
                process = self._idle.pop()
                if process.process.poll() is None:
                    break
                self._end(process)
            else:
                process = Worker("gruppo.reward_worker:Functions")
                self._all[process] = set()
        try:
            yield process
        except (
            BaseException
        ):  # also of a signal: the answer would be taken for that of the next call
            self._end(process)
            raise
        with self._lock:
            if len(self._idle) < len(
                self._sources
            ):  # all may run at once; further processes were for retried rows
                self._idle.append(process)
                return
        self._end(process)

    def _end(self, process: Worker) -> None:
        process.kill()
        process.close()
        self._all.pop(process, None)

    def _load(self, process: Worker, key: str, *, limit_s: float = math.inf) -> dict[str, Any]:
        info = process.ask(json.dumps({"load": key}).encode(), limit_s=limit_s)
        self._all[process].add(key)
        if self._sources.setdefault(key, info["source"]) != info["source"]:
            message = (
                "has changed since the run began; use it with gruppo resume RUN --allow-changes"
            )
            raise CallError("exception", f"{info['source'][0]} {message}", "changed")
        return info


def _close_all(processes: Iterable[Worker]) -> None:
    for process in [*processes]:
        process.close()


class _IsolatedFunction:
    """Looks like the function of a spec, and calls it in another process."""

    is_isolated = True

    def __init__(self, processes: RewardProcesses, key: str, info: dict[str, Any]) -> None:
        self._processes, self._key = processes, key
        self._local: Callable[..., Any] | None = None
        self.__name__: str = info["name"]
        parameters = [
            Parameter(
                name, getattr(Parameter, kind), default=Parameter.empty if is_required else None
            )
            for name, kind, is_required in info["parameters"]
        ]
        self.__signature__ = Signature(parameters)
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
            cells = encode(plain, buffers)
        except NotEncodable as problem:
            log.warning(
                "reward %s is called in this process: its arguments hold a %s, which only Python can hand over. "
                "--scoring.isolate False says so from the start.",
                *(self.__name__, problem),
            )
            self._local = make(self._key)
            return self._local(**arguments)
        answer = self._processes.ask(self._key, {"arguments": cells, "logs": [*logs]}, buffers)
        for name, value in answer["metrics"]:  # none of a function that does not take log_metric
            logs["log_metric"](name, value)
        for column, values in answer["extras"]:
            logs["log_extra"](column, values)
        return [
            CallError(*value["error"]) if isinstance(value, dict) else value
            for value in answer["values"]
        ]
