"""Environment classes: an object for each conversation, whose methods are tools. TRL's classes are
such classes."""

from __future__ import annotations

import copy
import inspect
import json
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gruppo.environments.tools import tool_schema
from gruppo.packing import decode, encode
from gruppo.timeouts import (
    CallError,
    CallThread,
    accepted_keywords,
    awaited,
    call_with_timeout,
    function_name,
    require_columns,
)
from gruppo.trust import ENVIRONMENTS
from gruppo.types import GruppoError, Prompt, Rollouts

COLUMN = "environment"
"""Column of the data that names the environment of each prompt, if there are several."""
OWN_METHODS = ("reset", "step", "close", "get_reward", "call_tool", "is_done")
"""Public methods that are not tools."""
PROVIDED = ("text", "messages", "state", "turn", "seed", "prompt")
"""Keywords that functions that reply can take, besides the columns of the data."""
MAX_STATE = 100_000
"""Characters of an attribute, as JSON, beyond which rewards cannot read it: a corpus would be
copied for each row."""


def is_adapter(name: str) -> bool:
    return name.partition(":")[0] in ENVIRONMENTS


def open_adapter(name: str, config: Any) -> Any:
    """Factory of the environments of PREFIX:REST."""
    prefix, _, rest = name.partition(":")
    module = import_module(f"gruppo.environments.{prefix}")
    return getattr(module, f"{prefix}_factory")(rest, config)


def is_class(fn: Any) -> bool:
    """Whether this makes an object for each conversation: a class, a ``partial`` of one, or several
    by name."""
    return isinstance(getattr(fn, "func", fn), type | Mapping | EnvironmentClass)


class Signature:
    """Keywords that a function takes."""

    def __init__(self, fn: Callable[..., Any], what: str, provided: Sequence[str]) -> None:
        self.what, self.provided = what, provided
        self.parameters, self.takes_all = accepted_keywords(fn, what)

    def check(self, columns: Collection[str]) -> None:
        """Refuse a required keyword that the data do not have."""
        require_columns(self.what, self.parameters, columns, self.provided)

    def arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values of its keywords, copied except ``state``; None for a required keyword without a
        value."""
        arguments = {name: None for name, required in self.parameters.items() if required}
        for name, value in values.items():
            if self.takes_all or name in self.parameters:
                arguments[name] = value if name == "state" else copy.deepcopy(value)
        return arguments


class EnvironmentClass:
    """A class of environments: how to make them, and the methods and tools that they have.

    ``factory``: a class, or anything that returns an object when it is called without arguments.
    ``step_is_tool``: as in TRL, where ``step`` is a method like others.
    """

    def __init__(self, factory: Callable[[], Any], *, step_is_tool: bool = False) -> None:
        if not callable(factory):
            raise GruppoError(f"""the environment is {factory!r:.80} ({type(factory).__name__}); it
                needs to be a class, or a function without arguments that returns an object. Pass
                the class itself, not an object of it.""")
        self.factory = factory
        example = getattr(factory, "func", factory)  # through functools.partial
        lists_tools = hasattr(example, "call_tool") and not hasattr(example, "tools")
        if not isinstance(example, type) or lists_tools:
            example = self._example()
        self.type: Any = example if isinstance(example, type) else type(example)
        self.name = self.type.__name__
        self._what = f"environment {self.name!r}"
        own = [name for name in OWN_METHODS if name != "step" or not step_is_tool]
        self.methods = {name for name in own if callable(getattr(self.type, name, None))}
        if "reset" not in self.methods:
            raise GruppoError(f"""{self._what} has no method reset. Add def reset(self, **columns),
                which returns None, or a text or messages that follow the prompt.""")
        self.signatures = {
            name: Signature(self._bound(name), f"{self._what} ({name})", provided)
            for name, provided in (("reset", ("prompt", "seed")), ("step", PROVIDED))
            if name in self.methods
        }
        self.tools = self._tools(example, own)
        self.tool_names = {schema["function"]["name"] for schema in self.tools}
        self.idle = deque[tuple[Any, CallThread]]()
        """Objects of a class without close, which are reset again, as in TRL."""

    def _example(self) -> Any:
        """An object that shows the class and its tools. It may hold a connection, so that it is
        closed."""
        try:
            made = self.factory()
        except Exception as error:
            raise GruppoError(f"""the environment {function_name(self.factory)!r} cannot be made:
                {type(error).__name__}: {error}. Make it callable without arguments, and start what
                it connects to.""") from None
        if hasattr(made, "close"):
            with suppress(CallError, GruppoError):
                call_with_timeout(lambda: awaited(made.close()), None)
        return made

    def _bound(self, name: str) -> Callable[..., Any]:
        """A method with the signature of its calls, without self."""
        method = getattr(self.type, name)
        if isinstance(inspect.getattr_static(self.type, name), staticmethod | classmethod):
            return method
        return MethodType(method, self)

    def _tools(self, example: Any, own: Sequence[str]) -> list[dict[str, Any]]:
        if "call_tool" not in self.methods:
            functions = inspect.getmembers(self.type, predicate=inspect.isfunction)
            names = [name for name, _ in functions if name not in own and name[0] != "_"]
            return [tool_schema(self._bound(name), f"tool of {self._what},") for name in names]
        tools: Any = getattr(example, "tools", None)
        is_list = isinstance(tools, list | tuple)
        if not is_list or not all("name" in tool.get("function", ()) for tool in tools):
            raise GruppoError(f"""{self._what} has call_tool, and its attribute tools is
                {tools!r:.80}; it needs to be a list of schemas,
                {{"type": "function", "function": {{"name": ...}}}}.""")
        return list(tools)

    def state_of(self, instance: Any) -> dict[str, Any]:
        """Copies of the attributes that hold numbers, texts, and lists, dicts or sets of them."""
        state = dict[str, Any]()
        for name, value in dict(getattr(instance, "__dict__", {})).items():
            value = value.item() if getattr(value, "ndim", None) == 0 else value
            buffers = list[bytes]()
            try:
                text = json.dumps(encode(value, buffers))
            except Exception:  # a client, a lock, or a dict that a late call still changes
                continue
            if not buffers and len(text) <= MAX_STATE:
                state[name] = decode(json.loads(text), ())
        return state

    def view(self, state: Mapping[str, Any]) -> Any:
        """An object of the class with these attributes, for reward functions that read
        ``environments``."""
        view: Any = SimpleNamespace()
        if not hasattr(self.type, "__del__"):  # it would close what the view does not have
            with suppress(TypeError):  # a built-in type
                view = object.__new__(self.type)
        for name, value in copy.deepcopy(dict(state)).items():
            setattr(view, name, value)
        return view


@dataclass(eq=False)
class Episode:
    """One conversation: its messages, its environment, its counts and rewards."""

    prompt: Prompt
    """Prompt of the data."""
    sample: int
    """Its number in the group."""
    seed: int
    group_seed: int
    """The same for all conversations of a group."""
    inputs: Any
    """Prompt of the policy: that of the data, with what ``reset`` has added."""
    completion: Any = None
    """Everything after the prompt, of the policy and the environment, in the form of the prompt:
    messages or a text."""
    text: str = ""
    """The policy's last answer."""
    turn: int = 0
    """Answers of the policy so far."""
    is_last: bool = False
    """Whether the policy will not read the reply."""
    state: dict[str, Any] = field(default_factory=dict)
    made_by: EnvironmentClass | None = None
    instance: Any = None
    thread: CallThread = field(default_factory=CallThread)
    """Some objects, such as connections, belong to the thread that made them."""
    counts: Counter[str] = field(default_factory=Counter)
    rewards: dict[str, Any] = field(default_factory=dict)
    """The reward that its environment has computed, by the name of the class."""
    failure: str | None = None
    is_closed: bool = False
    has_ended: bool = False
    """Whether the environment ended it."""
    turn_ends: list[int] = field(default_factory=list)
    """The last column of each answer."""
    policy_text: str = ""
    """Everything the policy wrote."""

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of the data, with the target as ``answer`` and ``target``."""
        target = self.prompt.target
        named = {} if target is None else {"answer": target, "target": target}
        return {**named, **self.prompt.meta}

    @property
    def values(self) -> dict[str, Any]:
        """Arguments that ``step``, or a function that replies, can take, by name."""
        own = {name: getattr(self, name) for name in ("text", "state", "turn", "seed")}
        own |= {"messages": self.inputs + self.completion, "prompt": self.inputs}
        return self.columns | own

    @property
    def tool_calls(self) -> tuple[Sequence[Any], str | None]:
        """Tool calls in the policy's last message, and the parse error of one that could not be
        read."""
        message = self.completion[-1] if isinstance(self.completion, list) else {}
        return message.get("tool_calls") or (), message.get("parse_error")

    def take_outcome(self) -> None:
        """Take the reward that the environment computes at the end, and its state.

        Raises CallError for anything but a finite number or None: a NaN of an environment is a
        failure, not an unscored row.
        """
        made = self.made_by
        assert made is not None
        if "get_reward" in made.methods:
            value = awaited(self.instance.get_reward())
            number = value.item() if hasattr(value, "item") else value
            if number is not None and not (
                isinstance(number, int | float) and math.isfinite(number)
            ):
                problem = f"get_reward returned {number!r:.60}; it needs a finite number or None"
                raise CallError("exception", problem)
            self.rewards[made.name] = number
        self.state = made.state_of(self.instance)

    def close(self) -> None:
        if self.instance is not None and hasattr(self.instance, "close"):
            awaited(self.instance.close())


class EnvironmentReward:
    """A reward that environments of a class compute themselves, by ``get_reward``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, rollouts: Rollouts) -> Float[Tensor, "B"]:
        own = [rewards.get(self.name) for rewards in rollouts.per_row["environment_rewards"]]
        return torch.tensor([math.nan if x is None else x for x in own], dtype=torch.float64)
