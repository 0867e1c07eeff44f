"""What runs in the workers of ``reward_process``: it loads reward functions and calls them.

The worker imports this module and what the functions need, so it has to stay free of torch.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import random
import sys
from asyncio import AbstractEventLoop, new_event_loop
from contextlib import suppress
from typing import Any

from gruppo.loading import load_object
from gruppo.reward_values import Answer, TrainerState, as_list, decode, plain_entry
from gruppo.timeouts import function_name


def make(key: str) -> Any:
    """Object of a spec, or what it returns for the arguments in ``key``."""
    spec, *arguments = json.loads(key)
    loaded = load_object(spec)
    return loaded(*arguments) if arguments else loaded


class Functions:
    """Loads functions and calls them, as requests say."""

    def __init__(self) -> None:
        self.functions = dict[str, Any]()
        self.loop = (
            new_event_loop()
        )  # one for all calls: a client that a function opens on it stays usable

    def __call__(
        self, header: dict[str, Any], request: dict[str, Any], buffers: list[bytes]
    ) -> dict[str, Any]:
        if "load" in request:
            function = self.functions[request["load"]] = make(request["load"])
            return _described(function)
        if "check" in request:
            self.functions[request["of"]].check(request["check"])
            return {}
        return _answer(self.functions[request["of"]], request, buffers, header, self.loop)


def _described(function: Any) -> dict[str, Any]:
    """All that the trainer needs to know of a function."""
    source = None  # its file, and a hash of that
    with suppress(TypeError, OSError):
        path = inspect.getsourcefile(inspect.unwrap(getattr(function, "func", function)))
        with open(path or "", "rb") as file:
            source = [str(path), hashlib.sha256(file.read()).hexdigest()]
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {"is_here": True, "source": source}  # the error is raised there
    if inspect.isclass(function) or isinstance(getattr(function, "name", None), str):
        return {"is_here": True, "source": source}
    names = ("timeout_s", "step_separator", "scores_turns", "memory_bytes")
    return {
        "source": source,
        "name": function_name(function),
        "parameters": [[p.name, p.kind.name, p.default is p.empty] for p in parameters],
        "is_async": inspect.iscoroutinefunction(function)
        or inspect.iscoroutinefunction(type(function).__call__),
        "attributes": {name: getattr(function, name) for name in names if hasattr(function, name)},
        "has_check": hasattr(function, "check"),
    }


def _answer(
    function: Any,
    request: dict[str, Any],
    buffers: list[bytes],
    header: dict[str, Any],
    loop: AbstractEventLoop,
) -> dict[str, Any]:
    """Call a function. Its generators are seeded, and torch records no gradients."""
    arguments, logged = decode(request["arguments"], iter(buffers)), Answer()
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
    returned = function(**arguments)
    if inspect.isawaitable(returned):
        returned = loop.run_until_complete(returned)
    values = [plain_entry(entry) for entry in as_list(returned, None)]
    return {"values": values, "metrics": logged.metrics, "extras": logged.extras}
