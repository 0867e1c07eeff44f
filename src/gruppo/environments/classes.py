"""Environment classes: an object for each conversation, whose methods are tools. TRL's classes are
such classes."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gruppo.environments.tools import CallThread, check_names, tool_schema
from gruppo.loading import counted
from gruppo.packing import decode, encode
from gruppo.timeouts import CallError, accepted_keywords, awaited, call_with_timeout, function_name
from gruppo.trust import ENVIRONMENTS
from gruppo.types import GruppoError, Prompt, Rollouts

log = logging.getLogger("gruppo")

COLUMN = "environment"
"""Column of the data that names the environment of each prompt, where there are several."""
OWN_METHODS = ("reset", "step", "close", "get_reward", "get_turn_rewards", "call_tool", "is_done")
"""Public methods that are not tools."""
MAX_STATE = 100_000
"""Characters of an attribute, as JSON, beyond which rewards cannot read it: a corpus would be
copied for each row."""


def is_adapter(name: str) -> bool:
    return name.partition(":")[0] in ENVIRONMENTS


def open_adapter(name: str, config: Any) -> Any:
    """Factory of the environments of PREFIX:REST."""
    prefix, _, rest = name.partition(":")
    return getattr(import_module(f"gruppo.environments.{prefix}"), f"{prefix}_factory")(
        rest, config
    )


def is_class(fn: Any) -> bool:
    """Whether this makes an object for each conversation: a class, a ``partial`` of one, or several
    by name."""
    return isinstance(fn, type | Mapping | EnvironmentClass) or isinstance(
        getattr(fn, "func", None), type
    )


class Signature:
    """Keywords that a function takes."""

    def __init__(self, fn: Callable[..., Any], what: str) -> None:
        self.parameters, self.takes_all = accepted_keywords(fn, what)

    def arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values of its keywords, copied except ``state``; None for a required keyword without a
        value."""
        values = dict.fromkeys([name for name, required in self.parameters.items() if required]) | {
            **values
        }
        return {
            name: copy.deepcopy(value)
            if isinstance(value, list | dict) and name != "state"
            else value
            for name, value in values.items()
            if self.takes_all or name in self.parameters
        }


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
        probe: Any = None
        made = getattr(factory, "func", factory)  # through functools.partial
        if not isinstance(made, type):
            probe = self._made()
            made = type(probe)
        self.type, self.name = made, made.__name__
        own = [name for name in OWN_METHODS if name != "step" or not step_is_tool]
        self.methods = {name for name in own if callable(getattr(made, name, None))}
        what = f"environment {self.name!r}"
        if "reset" not in self.methods:
            raise GruppoError(f"""{what} has no method reset. Add def reset(self, **columns), which
                returns None, or a text or messages that follow the prompt.""")
        called = self.methods & {"reset", "step"}
        self.signatures = {
            name: Signature(self._bound(name), f"{name} of {what}") for name in called
        }
        if "call_tool" in self.methods:
            tools: Any = getattr(made if probe is None else probe, "tools", None)
            if not isinstance(
                tools, list | tuple
            ):  # of an object, which may have to ask a server for them
                probe = self._made() if probe is None else probe
                tools = getattr(probe, "tools", None)
            try:
                self.tools = [dict(schema) for schema in tools]
                check_names(self.tools)
            except (TypeError, ValueError, KeyError):
                raise GruppoError(f"""{what} has call_tool, and its attribute tools is
                    {tools!r:.80}; it needs to be a list of schemas,
                    {{"type": "function", "function": {{"name": ...}}}}.""") from None
        else:
            functions = inspect.getmembers(
                made, predicate=inspect.isfunction
            )  # of the class: an object has properties
            names = [name for name, _ in functions if name not in own and not name.startswith("_")]
            self.tools = [tool_schema(self._bound(name), f"tool of {what},") for name in names]
        self.rewards = {self.name: "get_reward"} if "get_reward" in self.methods else {}
        """Rewards that its environments compute, each with the method that does."""
        if "get_turn_rewards" in self.methods:
            self.rewards[f"{self.name}_turns" if self.rewards else self.name] = "get_turn_rewards"
        self.tool_names = {schema["function"]["name"] for schema in self.tools}
        self.idle = deque[tuple[Any, CallThread]]()
        """Objects of a class without close, which are reset again, as in TRL."""
        if probe is not None and "close" not in self.methods:
            self.idle.append((probe, CallThread()))
        elif probe is not None:  # it may hold a connection or a process
            try:
                call_with_timeout(lambda: awaited(probe.close()), None)
            except (CallError, GruppoError) as error:
                log.warning("environment %s: close failed: %s", self.name, error)

    def _made(self) -> Any:
        try:
            return self.factory()
        except Exception as error:
            raise GruppoError(f"""the environment {function_name(self.factory)!r} cannot be made:
                {type(error).__name__}: {error}. Make it callable without arguments, and start what
                it connects to.""") from None

    def _bound(self, name: str) -> Callable[..., Any]:
        """A method with the signature of its calls, without self."""
        has_self = not isinstance(
            inspect.getattr_static(self.type, name), staticmethod | classmethod
        )
        return MethodType(getattr(self.type, name), self) if has_self else getattr(self.type, name)

    def state_of(self, instance: Any) -> dict[str, Any]:
        """Copies of the attributes and properties that hold numbers, texts, and lists, dicts or
        sets of them."""
        values, state = dict(getattr(instance, "__dict__", {})), {}
        for name in dir(self.type):
            if isinstance(
                inspect.getattr_static(self.type, name, None), property
            ) and not name.startswith("_"):
                try:
                    values[name] = getattr(instance, name)
                except Exception as error:
                    log.debug("property %s of %s: %s", name, self.name, error)
        for name, value in values.items():
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
        try:
            view: Any = object.__new__(_view_type(self.type, frozenset(state)))
            view.__dict__.update(attributes)
            return view
        except Exception:  # a class with slots, of a built-in type, or that refuses subclasses
            return SimpleNamespace(**attributes)


@lru_cache(maxsize=64)
def _view_type(made: type, names: frozenset[str]) -> type:
    """Subclass in which properties of these names are plain attributes, and which has no
    destructor."""
    # None shadows a property, which would take no value of an instance; __del__ would close what
    # the view does not have
    own: dict[str, Any] = {"__del__": lambda self: None, "__module__": made.__module__}
    own |= {
        name: None
        for name in names
        if isinstance(inspect.getattr_static(made, name, None), property)
    }
    return type(made)(made.__name__, (made,), own)


@dataclass(eq=False)
class Episode:
    """One conversation: its messages, its environment, its counts and rewards."""

    prompt: Prompt
    """Prompt of the data."""
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
    worker: CallThread | None = None
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
        return ({} if target is None else {"answer": target, "target": target}) | {
            **self.prompt.meta
        }

    @property
    def values(self) -> dict[str, Any]:
        """Arguments that a function that replies can take, by name."""
        inputs, completion = self.inputs, self.completion
        messages = inputs + completion if isinstance(inputs, str) else [*inputs, *completion]
        own = {name: getattr(self, name) for name in ("text", "state", "turn", "seed")}
        return self.columns | own | {"messages": messages, "prompt": inputs}

    @property
    def tool_calls(self) -> tuple[Sequence[Any], str | None]:
        """Tool calls in the policy's last message, and the parse error of one that could not be
        read."""
        message = (
            self.completion[-1] if isinstance(self.completion, list) and self.completion else {}
        )
        return message.get("tool_calls") or (), message.get("parse_error")

    def outcome(self, made: EnvironmentClass) -> tuple[dict[str, Any], dict[str, Any]]:
        """Rewards that the environment computes at the end, by name, and its state.

        Raises CallError for what is no finite number: a NaN of an environment is a failure, and no
        unscored row.
        """
        rewards = dict[str, Any]()
        for name, method in made.rewards.items():
            value = awaited(getattr(self.instance, method)())
            values = value if method == "get_turn_rewards" else [value]
            numbers = [number.item() if hasattr(number, "item") else number for number in values]
            for number in numbers:
                if number is not None and not (
                    isinstance(number, int | float) and math.isfinite(number)
                ):
                    raise CallError(
                        "exception",
                        f"{method} returned {number!r:.60}; it needs finite numbers or None",
                    )
            if method == "get_turn_rewards" and len(numbers) > self.turn:
                raise CallError(
                    "count",
                    f"{method} returned {len(numbers)} numbers for {counted(self.turn, 'answer')}",
                )
            rewards[name] = numbers if method == "get_turn_rewards" else numbers[0]
        return rewards, made.state_of(self.instance)


class EnvironmentReward:
    """A reward that environments of a class compute themselves: ``get_reward``, or
    ``get_turn_rewards``."""

    def __init__(self, name: str, *, scores_steps: bool) -> None:
        self.name, self.scores_steps, self.scores_turns = name, scores_steps, scores_steps

    def __call__(self, rollouts: Rollouts) -> Float[Tensor, "B *T"]:
        own = [rewards.get(self.name) for rewards in rollouts.per_row["environment_rewards"]]
        if not self.scores_steps:
            return torch.tensor(
                [math.nan if value is None else value for value in own], dtype=torch.float64
            )
        scores = torch.full(
            rollouts.mask.shape, math.nan, dtype=torch.float64
        )  # [B, T], NaN: unscored
        for row, (values, ends) in enumerate(zip(own, rollouts.per_row["turn_ends"], strict=True)):
            for value, end in zip(values or (), ends, strict=False):
                scores[row, end] = math.nan if value is None else value
        return scores
