"""Environments that reply to the policy: functions, objects of a class and tools.

Each conversation is one protocol, ``_reset`` and ``_step``, in coroutines that run at the same time
and whose calls of user code have a deadline.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from gruppo.environments.classes import (
    COLUMN,
    PROVIDED,
    EnvironmentClass,
    EnvironmentReward,
    Episode,
    Signature,
    is_class,
)
from gruppo.environments.tools import call, check_names, run_all, safe_text, tool_schema
from gruppo.loading import visible
from gruppo.timeouts import CallError, awaited, describe_error, error_message, function_name
from gruppo.types import DataError, GruppoError, Prompt

log = logging.getLogger("gruppo")

MAX_OBSERVATION = 1_000_000
"""Maximum characters that ``reset`` adds to a prompt; the model's context is shorter."""
CHARACTERS_PER_TOKEN = 16
"""A longer output is cut before it is tokenized, which takes seconds per megabyte. English has 4 to
a token."""
MAX_NAME, MAX_ERROR = 64, 1000
"""Maximum characters of a tool's name, and of an error, that the policy reads."""

Check = Callable[[Prompt], str | None]
Reply = list[dict[str, Any]] | str
"""Messages in a conversation; a string if the prompt is one."""


class Environment:
    """Replies to the policy by tools that it calls, a function, or an object of a class for each
    conversation.

    ``fn`` as a function is called with the keywords in its signature: ``text`` is what the policy
    has just written, ``messages`` the whole conversation with its prompt (the text so far, if the
    prompt is a string), ``turn`` 1 after the first answer, ``state`` a dict of this conversation,
    empty at first, which rewards can ask for, and ``seed`` a number that is the same whenever the
    run is repeated; further keywords are the columns of the data, with ``Prompt.target`` as
    ``answer`` and ``target``. It returns None when the conversation is over; or a string, which
    becomes a user's message; or a message with a role and a content; or a list of messages.

    ``fn`` as a class, a ``functools.partial`` of one, an ``EnvironmentClass``, or a dict of them by
    the data's column ``environment``: an object for each conversation, with ``reset`` and, as they
    are needed, ``step``, ``close``, ``get_reward``; its other public methods are tools. ``tools``:
    functions with type hints and a docstring.

    A message of the policy that calls tools is replied to with the result or the error of each
    call. To any other, ``step`` or the function replies; without either it ends the conversation.
    An exception in these, or a reply that takes longer than ``timeout_s`` seconds, costs only its
    own conversation. The calls of all conversations of a turn are made at the same time, those of
    each in a thread of its own; with ``timeout_s=None`` all in the caller's thread, one after
    another.
    """

    def __init__(
        self,
        fn: Any = None,
        *,
        tools: Sequence[Callable[..., Any]] = (),
        turns: int = 8,
        max_reply_tokens: int = 256,
        timeout_s: float | None = 60.0,
    ) -> None:
        self.turns, self.max_reply_tokens, self.timeout_s = turns, max_reply_tokens, timeout_s
        if fn is None and not tools:
            raise GruppoError("""the environment has no function that replies, no class and no
                tools. Give one of them.""")
        self.classes = _classes(fn)
        """By the data's column ``environment``, or None for all; empty if ``fn`` is a function."""
        self.fn: Any = None if self.classes else fn
        names = [made.name for made in self.classes.values()]
        self.name = ", ".join(dict.fromkeys(names)) or function_name(tools[0] if fn is None else fn)
        self._signature: Signature | None = None
        if self.fn is not None:
            self._signature = Signature(fn, f"environment {self.name!r}", PROVIDED)
        self._functions = {function_name(tool): tool for tool in tools}
        self._schemas = [tool_schema(tool) for tool in tools]
        self.tools = list(self._schemas)
        """Schemas of the tools of all classes."""
        check_names(self._schemas)
        for made in self.classes.values():  # they may share names: a conversation has one of them
            check_names([*self._schemas, *made.tools])
            self.tools += [schema for schema in made.tools if schema not in self.tools]
        self.rewards = {
            made.name: EnvironmentReward(made.name)
            for made in self.classes.values()
            if "get_reward" in made.methods
        }
        """Rewards that the environments compute, by name."""
        self._reported = set[str]()
        self.elapsed_s = 0.0
        """Seconds spent in calls so far."""

    def check(self, columns: Collection[str]) -> None:
        """Refuse a function that asks for a column that the data do not have."""
        if self._signature is not None:
            self._signature.check(columns)
        for made in self.classes.values():
            for signature in made.signatures.values():
                signature.check(columns)
        if self.classes and None not in self.classes and COLUMN not in columns:
            raise DataError(f"""there are several environments,
                {", ".join(map(repr, self.classes))}, and the data have no column {COLUMN!r} that
                names that of each prompt. Add it.""")

    @property
    def shadowed(self) -> set[str]:
        """Columns that the data must not have: arguments of environments and rewards have these
        names."""
        has_step = any("step" in made.signatures for made in self.classes.values())
        names = {*PROVIDED} - {"prompt"} if self.fn is not None or has_step else set()
        return names | ({"state", "environments"} if self.classes else set())

    def class_of(self, prompt: Prompt) -> EnvironmentClass | None:
        return self.classes.get(None if None in self.classes else prompt.meta.get(COLUMN))

    def tools_of(self, prompt: Prompt) -> list[dict[str, Any]]:
        """Schemas of the tools that exist in the conversations of a prompt."""
        made = self.class_of(prompt)
        return [*self._schemas, *(made.tools if made else ())]

    def view(self, prompt: Prompt, state: Mapping[str, Any]) -> Any:
        """The environment of a conversation as rewards read it: an object of its class, with its
        plain attributes."""
        made = self.class_of(prompt)
        return None if made is None else made.view(state)

    # --- of all conversations ---

    def open(self, episodes: Sequence[Episode], check: Check = lambda prompt: None) -> None:
        """Make an object for each conversation, or take an idle one, and reset it. ``check`` says
        why a prompt that it made cannot be read."""
        if self.classes:
            self._run_or_fail(episodes, [self._open(episode, check) for episode in episodes])

    def replies(self, episodes: Mapping[int, Episode]) -> dict[int, Reply | CallError | None]:
        """By the same key: the reply, None at the end of the conversation, or why there is no
        reply."""
        results = self._run([self._step(episode) for episode in episodes.values()])
        return dict(zip(episodes, results, strict=True))

    def finish(self, episodes: Sequence[Episode]) -> None:
        """Take the rewards and the state of the objects whose conversations are over."""
        over = [episode for episode in episodes if episode.made_by and episode.failure is None]
        self._run_or_fail(over, [self._call(episode, episode.take_outcome) for episode in over])

    def close(self, episodes: Sequence[Episode] = ()) -> None:
        """Close the objects, whatever has happened; one of a class without ``close`` is reset for
        another conversation. Without episodes, end the threads of idle ones."""
        for result in self._run([self._close(episode) for episode in episodes]):
            if isinstance(result, CallError):
                self._warn_once("close", result.message)
        for made in () if episodes else self.classes.values():
            while made.idle:
                made.idle.popleft()[1].stop()

    def _run(self, coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """The result of each coroutine, or the ``CallError`` that it ended in."""
        began = time.perf_counter()
        try:
            return run_all(coroutines, self.timeout_s)
        finally:
            self.elapsed_s += time.perf_counter() - began

    def _run_or_fail(self, episodes: Sequence[Episode], coroutines: Sequence[Any]) -> None:
        """Run a coroutine for each conversation, which fails with it."""
        for episode, result in zip(episodes, self._run(coroutines), strict=True):
            if isinstance(result, CallError):
                episode.failure = result.message

    # --- of one conversation ---

    async def _call(self, episode: Episode, fn: Callable[[], Any]) -> Any:
        return await call(fn, episode.thread, self.timeout_s)

    async def _open(self, episode: Episode, check: Check) -> None:
        made = episode.made_by = self.class_of(episode.prompt)
        if made is None:
            name, known = episode.prompt.meta.get(COLUMN), ", ".join(map(repr, self.classes))
            raise CallError("exception", f"its environment {name!r:.80} is none of {known}")
        # not checked before: engines with lag converse in several threads
        with suppress(IndexError):
            episode.instance, episode.thread = made.idle.popleft()
        try:
            inputs = await self._call(episode, partial(self._reset, episode, made))
        except CallError as error:
            raise CallError(error.kind, f"reset: {error.message}") from error
        prompt = replace(episode.prompt, inputs=inputs)
        problem = await call(partial(check, prompt), episode.thread, None)
        if problem is not None:
            raise CallError("exception", problem)
        episode.inputs = inputs

    def _reset(self, episode: Episode, made: EnvironmentClass) -> Any:
        """Reset the environment of a conversation; returns the prompt of the policy."""
        if episode.instance is None:
            episode.instance = made.factory()
            if episode.is_closed:  # it is late, and nothing else closes it
                return episode.close()
        inputs = episode.prompt.inputs
        values = {"seed": episode.group_seed, "prompt": inputs} | episode.columns
        added = awaited(episode.instance.reset(**made.signatures["reset"].arguments(values)))
        if isinstance(added, str) and not isinstance(inputs, str):
            *before, last = inputs  # as in TRL, it is the end of the last message
            text, _ = safe_text(added, MAX_OBSERVATION)
            return [*before, {**last, "content": last["content"] + text}]
        reply: Any = parse_reply(added, inputs, MAX_OBSERVATION)
        return inputs if reply is None else inputs + reply

    async def _step(self, episode: Episode) -> Reply | None:
        """Reply to the policy's answer; None ends the conversation."""
        calls, problem = episode.tool_calls
        made = episode.made_by
        if self.tools and (calls or problem):
            if episode.is_last and made is None:
                return []  # nothing reads the results, and functions keep no state
            messages = [await self._call_tool(episode, made_call) for made_call in calls]
            if problem and not episode.is_last:  # no tool was called
                episode.counts["unparsed"] += 1
                name = self.tools[0]["function"]["name"]
                messages.append(tool_message(name, f"error: {safe_text(problem, MAX_ERROR)[0]}"))
            is_over = made and await self._call(episode, partial(_is_done, episode.instance))
            return None if is_over else messages
        signature = made.signatures.get("step") if made else self._signature
        if signature is None:
            return None
        return await self._call(episode, partial(self._reply, episode, signature))

    def _reply(self, episode: Episode, signature: Signature) -> Reply | None:
        """The reply of ``step``, or of the function."""
        fn = episode.instance.step if episode.made_by else self.fn
        raw = awaited(fn(**signature.arguments(episode.values)))
        return parse_reply(raw, episode.inputs, CHARACTERS_PER_TOKEN * self.max_reply_tokens)

    async def _call_tool(self, episode: Episode, made_call: Mapping[str, Any]) -> dict[str, Any]:
        """The message with the result of a tool, or with its error."""
        name, arguments = made_call["function"]["name"], made_call["function"]["arguments"]
        episode.counts["calls"] += 1
        try:
            fn = partial(self._result, episode, name, arguments)
            content, is_cut = await self._call(episode, fn)
            episode.counts["truncated"] += is_cut
        except CallError as error:
            content = f"error: {error.message}"
            episode.counts["timeout" if error.kind == "timeout" else "failed"] += 1
        return tool_message(name, content)

    def _result(
        self, episode: Episode, name: str, arguments: Mapping[str, Any]
    ) -> tuple[str, bool]:
        """The result of a call as the policy reads it, and whether it was truncated."""
        made, fn = episode.made_by, self._functions.get(name)
        if made is not None and name in made.tool_names:
            if "call_tool" in made.methods:
                arguments = {"name": name, "arguments": arguments}
                name = "call_tool"
            fn = getattr(episode.instance, name, None)
        if fn is None:
            known = [schema["function"]["name"] for schema in self.tools_of(episode.prompt)]
            there = f"there is no tool {visible(name)[:MAX_NAME]}; there is {', '.join(known)}"
            raise CallError("exception", there)
        try:
            result = awaited(fn(**copy.deepcopy(dict(arguments))))
            return safe_text(result, CHARACTERS_PER_TOKEN * self.max_reply_tokens)
        except (Exception, SystemExit) as error:  # the policy reads no names of files
            self._warn_once(f"tool {name}", describe_error(error))
            message = f"{type(error).__name__}: {error_message(error)}".removesuffix(": ")
            raise CallError("exception", safe_text(message, MAX_ERROR)[0]) from error

    async def _close(self, episode: Episode) -> None:
        episode.is_closed = True
        made, instance, thread = episode.made_by, episode.instance, episode.thread
        is_usable = made and instance is not None and not episode.failure and not thread.was_late
        if made and is_usable and "close" not in made.methods:
            return made.idle.append((instance, thread))
        try:
            if instance is not None:
                await self._call(episode, episode.close)
        finally:
            thread.stop()

    def _warn_once(self, what: str, why: str) -> None:
        """Warn of the first failure of each kind; all are counted."""
        if what not in self._reported:
            self._reported.add(what)
            text = "environment %s: %s failed: %s. Further failures of it are only counted."
            log.warning(text, self.name, what, why)


def _classes(fn: Any) -> dict[str | None, EnvironmentClass]:
    if is_class(fn):
        several = fn if isinstance(fn, Mapping) else {None: fn}
        return {
            name: one if isinstance(one, EnvironmentClass) else EnvironmentClass(one)
            for name, one in several.items()
        }
    if fn is not None and (not callable(fn) or isinstance(fn, Environment)):
        raise GruppoError(f"""the environment is {fn!r:.80} ({type(fn).__name__}), not a function;
            it needs one such as def reply(text, state), or a class with reset.""")
    return {}


def _is_done(instance: Any) -> bool:
    value = getattr(instance, "is_done", False)
    return bool(awaited(value()) if callable(value) else value)


def tool_message(name: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "name": visible(name)[:MAX_NAME], "content": content}


def parse_reply(raw: Any, inputs: Any, limit: int) -> Reply | None:
    """Convert what an environment returned to messages, or to a string if the prompt is one, each
    content at most ``limit`` characters with control characters as escapes; else raise
    CallError."""
    if raw is None:
        return None
    if isinstance(raw, str):
        text, _ = safe_text(raw, limit)
        return text if isinstance(inputs, str) else [{"role": "user", "content": text}]
    messages = [raw] if isinstance(raw, Mapping) else raw
    try:
        is_mine = [isinstance(m["content"], str) and m["role"] != "assistant" for m in messages]
        is_reply = isinstance(messages, Sequence) and all(is_mine)
    except (TypeError, KeyError):
        is_reply = False
    if messages and is_reply and not isinstance(inputs, str):
        return [m | {"content": safe_text(m["content"], limit)[0]} for m in map(dict, messages)]
    need = "a reply is a text, a message with role and content that is not the assistant's, "
    need += "a list of these, or None; to a prompt that is a text only a text"
    found = f"returned {raw!r:.80} ({type(raw).__name__})"
    raise CallError("exception", f"{found}; {need}", type(raw).__name__)
