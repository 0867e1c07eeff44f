"""Environment classes: an object for each conversation, whose methods are tools. TRL's classes are
such classes."""

from __future__ import annotations

import copy
import inspect
import json
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gruppo.environments.tools import CallThread, tool_schema
from gruppo.loading import counted
from gruppo.packing import decode, encode
from gruppo.timeouts import CallError, accepted_keywords, awaited, call_with_timeout, function_name
from gruppo.trust import ENVIRONMENTS
from gruppo.types import GruppoError, Prompt, Rollouts

COLUMN = "environment"
"""Column of the data that names the environment of each prompt, where there are several."""
OWN_METHODS = ("reset", "step", "close", "get_reward", "get_turn_rewards", "call_tool", "is_done")
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

    def arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values of its keywords, copied except ``state``; None for a required keyword without a
        value."""
        arguments = {name: None for name, required in self.parameters.items() if required}
        for name, value in values.items():
            if self.takes_all or name in self.parameters:
                is_shared = name == "state" or not isinstance(value, list | dict)
                arguments[name] = value if is_shared else copy.deepcopy(value)
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
        self.type: Any = getattr(factory, "func", factory)  # through functools.partial
        probe = None if isinstance(self.type, type) else self._make()
        if probe is not None:
            self.type = type(probe)
        self.name = self.type.__name__
        what = f"environment {self.name!r}"
        own = [name for name in OWN_METHODS if name != "step" or not step_is_tool]
        self.methods = {name for name in own if callable(getattr(self.type, name, None))}
        if "reset" not in self.methods:
            raise GruppoError(f"""{what} has no method reset. Add def reset(self, **columns), which
                returns None, or a text or messages that follow the prompt.""")
        self.signatures = {
            name: Signature(self._bound(name), f"{what} ({name})", provided)
            for name, provided in (("reset", ("prompt", "seed")), ("step", PROVIDED))
            if name in self.methods
        }
        self.idle = deque[tuple[Any, CallThread]]()
        """Objects of a class without close, which are reset again, as in TRL."""
        self.tools = self._tools(probe, own, what)
        if probe is not None:
            self._keep(probe)
        self.tool_names = {schema["function"]["name"] for schema in self.tools}
        self.rewards = {self.name: "get_reward"} if "get_reward" in self.methods else {}
        """Rewards that its environments compute, each with the method that does."""
        if "get_turn_rewards" in self.methods:
            self.rewards[f"{self.name}_turns" if self.rewards else self.name] = "get_turn_rewards"

    def _tools(self, probe: Any, own: Sequence[str], what: str) -> list[dict[str, Any]]:
        if "call_tool" not in self.methods:
            functions = inspect.getmembers(self.type, predicate=inspect.isfunction)
            names = [name for name, _ in functions if name not in own and name[0] != "_"]
            return [tool_schema(self._bound(name), f"tool of {what},") for name in names]
        if probe is None and not isinstance(getattr(self.type, "tools", None), list | tuple):
            probe = self._make()  # it may have to ask a server
            self._keep(probe)
        tools: Any = getattr(probe or self.type, "tools", None)
        is_list = isinstance(tools, list | tuple)
        if not is_list or not all("name" in tool.get("function", ()) for tool in tools):
            raise GruppoError(f"""{what} has call_tool, and its attribute tools is {tools!r:.80}; it
                needs to be a list of schemas,
                {{"type": "function", "function": {{"name": ...}}}}.""")
        return list(tools)

    def _keep(self, probe: Any) -> None:
        """Keep an object for the first conversation, or close it."""
        if "close" not in self.methods:
            self.idle.append((probe, CallThread()))
            return
        with suppress(CallError, GruppoError):  # it may hold a connection or a process
            call_with_timeout(lambda: awaited(probe.close()), None)

    def _make(self) -> Any:
        try:
            return self.factory()
        except Exception as error:
            raise GruppoError(f"""the environment {function_name(self.factory)!r} cannot be made:
                {type(error).__name__}: {error}. Make it callable without arguments, and start what
                it connects to.""") from None

    def _bound(self, name: str) -> Callable[..., Any]:
        """A method with the signature of its calls, without self."""
        method = getattr(self.type, name)
        if isinstance(inspect.getattr_static(self.type, name), staticmethod | classmethod):
            return method
        return MethodType(method, self)

    def state_of(self, instance: Any) -> dict[str, Any]:
        """Copies of the attributes that hold numbers, texts, and lists, dicts or sets of them."""
        state = dict[str, Any]()
        for name, value in dict(getattr(instance, "__dict__", {})).items():
            if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1):
                value = value.item()
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
        attributes = copy.deepcopy(dict(state))
        view: Any = SimpleNamespace(**attributes)
        if not hasattr(self.type, "__del__"):  # it would close what the view does not have
            with suppress(TypeError, AttributeError):  # slots, or a built-in type
                view = object.__new__(self.type)
                view.__dict__.update(attributes)
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
    counts: Counter[str] = field(default_factory=Counter)
    rewards: dict[str, Any] = field(default_factory=dict)
    """Rewards that its environment has computed, by name."""
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
        """Take the rewards that the environment computes at the end, and its state.

        Raises CallError for what is no finite number: a NaN of an environment is a failure, and no
        unscored row.
        """
        assert self.made_by is not None
        rewards = dict[str, Any]()
        for name, method in self.made_by.rewards.items():
            value = awaited(getattr(self.instance, method)())
            if method == "get_reward":
                rewards[name] = _finite(value, method)
                continue
            rewards[name] = [_finite(number, method) for number in value]
            if len(value) > self.turn:
                problem = f"returned {len(value)} numbers for {counted(self.turn, 'answer')}"
                raise CallError("count", f"{method} {problem}")
        self.rewards, self.state = rewards, self.made_by.state_of(self.instance)


def _finite(value: Any, method: str) -> float | None:
    number = value.item() if hasattr(value, "item") else value
    if number is None or (isinstance(number, int | float) and math.isfinite(number)):
        return number
    problem = f"{method} returned {number!r:.60}; it needs finite numbers or None"
    raise CallError("exception", problem)


class EnvironmentReward:
    """A reward that environments of a class compute themselves: ``get_reward``, or
    ``get_turn_rewards``."""

    def __init__(self, name: str, *, scores_steps: bool) -> None:
        self.name, self.scores_steps, self.scores_turns = name, scores_steps, scores_steps

    def __call__(self, rollouts: Rollouts) -> Float[Tensor, "B *T"]:
        own = [rewards.get(self.name) for rewards in rollouts.per_row["environment_rewards"]]
        if not self.scores_steps:
            numbers = [math.nan if value is None else value for value in own]
            return torch.tensor(numbers, dtype=torch.float64)
        scores = torch.full(rollouts.mask.shape, math.nan, dtype=torch.float64)  # [B, T]
        for row, (values, ends) in enumerate(zip(own, rollouts.per_row["turn_ends"], strict=True)):
            for value, end in zip(values or (), ends, strict=False):
                scores[row, end] = math.nan if value is None else value
        return scores
