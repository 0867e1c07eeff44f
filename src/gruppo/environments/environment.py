"""Environments that reply to the policy: functions, objects of a class and tools, called with a
deadline."""

from __future__ import annotations

import copy
import inspect
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

from gruppo.environments.classes import (
    COLUMN,
    EnvironmentClass,
    EnvironmentReward,
    Episode,
    Signature,
    is_class,
)
from gruppo.environments.tools import (
    Calls,
    CallThread,
    check_names,
    run_calls,
    safe_text,
    tool_schema,
)
from gruppo.loading import visible
from gruppo.timeouts import (
    CallError,
    awaited,
    describe_error,
    error_message,
    function_name,
    require_columns,
)
from gruppo.types import DataError, GruppoError, Prompt

log = logging.getLogger("gruppo")

PROVIDED = ("text", "messages", "state", "turn", "seed", "prompt")
"""Keywords that functions that reply can take, besides the columns of the data."""
MAX_LATE_REPLIES = 4
"""Late replies in one turn after which the remaining conversations of the turn fail too."""
MAX_OBSERVATION = 1_000_000
"""Maximum characters that ``reset`` adds to a prompt; the model's context is shorter."""
CHARACTERS_PER_TOKEN = 16
"""A longer output is cut before it is tokenized, which takes seconds per megabyte. English has 4 to
a token."""
MAX_NAME, MAX_ERROR = 64, 1000
"""Maximum characters of a tool's name, and of an error, that the policy reads."""

Reply = list[dict[str, Any]] | str
"""Messages in a conversation; a text where the prompt is a text."""


class Environment:
    """Replies to the policy by tools that it calls, a function, or an object of a class for each
    conversation.

    ``fn`` as a function is called for one conversation at a time, with the keywords in its
    signature: ``text`` is what the policy has just written, ``messages`` the whole conversation
    with its prompt (the text so far, where the prompt is a text), ``turn`` 1 after the first
    answer, ``state`` a dict of this conversation, empty at first, which rewards can ask for, and
    ``seed`` a number that is the same whenever the run is repeated; further keywords are the
    columns of the data, with ``Prompt.target`` as ``answer`` and ``target``. It returns None where
    the conversation is over; or a text, which becomes a user's message; or a message with a role
    and a content; or a list of messages. An ``async`` function is called for all conversations of a
    turn at the same time, any other for one after another.

    ``fn`` as a class, a ``functools.partial`` of one, an ``EnvironmentClass``, or a dict of them by
    the data's column ``environment``: an object for each conversation, with ``reset`` and, as they
    are needed, ``step``, ``close``, ``get_reward``, ``get_turn_rewards``; its other public methods
    are tools. ``tools``: functions with type hints and a docstring. All these are called for all
    conversations of a turn at the same time.

    A message of the policy that calls tools is replied to with the result or the error of each
    call. To any other, ``step`` or the function replies; without either it ends the conversation.
    An exception in these, or a reply that takes longer than ``timeout_s`` seconds, costs only its
    own conversation. With ``timeout_s=None`` calls are made in the caller's thread, one after
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
        self.classes = dict[str | None, EnvironmentClass]()
        """By the data's column ``environment``, or None for all; none where ``fn`` is a
        function."""
        if is_class(fn):
            for name, one in (fn if isinstance(fn, Mapping) else {None: fn}).items():
                self.classes[name] = (
                    one if isinstance(one, EnvironmentClass) else EnvironmentClass(one)
                )
        self.fn = None if self.classes else fn
        if self.fn is None and not self.classes and not tools:
            raise GruppoError(
                "the environment has no function that replies, no class and no tools. Give one of "
                "them."
            )
        if self.fn is not None and (not callable(fn) or isinstance(fn, Environment)):
            need = "one such as def reply(text, state), or a class with reset"
            raise GruppoError(
                f"the environment is {fn!r:.80} ({type(fn).__name__}), not a function; it needs "
                f"{need}."
            )
        for tool in tools:
            if not callable(tool):
                raise GruppoError(
                    f"the tool {tool!r:.80} is a {type(tool).__name__}; it needs to be a function."
                )
        self.turns, self.max_reply_tokens, self.timeout_s = turns, max_reply_tokens, timeout_s
        names = [made.name for made in self.classes.values()] or [
            function_name(tools[0] if fn is None else fn)
        ]
        self.name = ", ".join(dict.fromkeys(names))
        # the second of an object that is called
        self.is_async = inspect.iscoroutinefunction(self.fn) or inspect.iscoroutinefunction(
            type(self.fn).__call__
        )
        self._signature = (
            None if self.fn is None else Signature(self.fn, f"environment {self.name!r}")
        )
        self._functions = {function_name(tool): tool for tool in tools}
        self._schemas = [tool_schema(tool) for tool in tools]
        of_classes = [made.tools for made in self.classes.values()] or [[]]
        for own in of_classes:  # classes may share names: a conversation has the tools of one
            check_names([*self._schemas, *own])
        every = [*self._schemas, *chain(*of_classes)]
        self.tools = [schema for n, schema in enumerate(every) if schema not in every[:n]]
        """Schemas of the tools of all classes."""
        pairs = chain(*(made.rewards.items() for made in self.classes.values()))
        self.rewards = {
            name: EnvironmentReward(name, scores_steps=fn == "get_turn_rewards")
            for name, fn in pairs
        }
        """Rewards that the environments compute, by name."""
        self._one_at_a_time, self._clock, self._reported = (
            threading.Lock(),
            threading.Lock(),
            set[str](),
        )
        self.elapsed_s = 0.0
        """Seconds spent in calls so far."""

    def check(self, columns: Collection[str]) -> None:
        """Refuse a function that asks for a column that the data do not have."""
        if self._signature is not None:
            require_columns(
                f"environment {self.name!r}", self._signature.parameters, columns, PROVIDED
            )
        for made in self.classes.values():
            for method, signature in made.signatures.items():
                provided = PROVIDED if method == "step" else ("prompt", "seed")
                require_columns(
                    f"environment {made.name!r} ({method})", signature.parameters, columns, provided
                )
        if self.classes and None not in self.classes and COLUMN not in columns:
            raise DataError(f"""there are several environments,
                {", ".join(map(repr, self.classes))}, and the data have no column {COLUMN!r} that
                names that of each prompt. Add it.""")

    @property
    def shadowed(self) -> frozenset[str]:
        """Columns that the data must not have: arguments of environments and rewards have these
        names."""
        has_step = any("step" in made.signatures for made in self.classes.values())
        names = {*PROVIDED} - {"prompt"} if self.fn is not None or has_step else set()
        return frozenset(names | ({"state", "environments"} if self.classes else set()))

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

    # --- the life of an object ---

    def open(self, episodes: Sequence[Episode]) -> None:
        """Make an object for each conversation, or take an idle one, and reset it."""
        jobs = dict[int, Calls]()
        for row, episode in enumerate(episodes if self.classes else ()):
            made = episode.made_by = self.class_of(episode.prompt)
            if made is None:
                name, known = episode.prompt.meta.get(COLUMN), ", ".join(map(repr, self.classes))
                episode.failure = f"its environment {name!r:.80} is none of {known}"
                continue
            try:
                episode.instance, episode.worker = made.idle.popleft()
            except IndexError:  # not checked before: engines with lag converse in several threads
                episode.worker = CallThread()
            jobs[row] = Calls([partial(self._reset, episode, made)], episode.worker)
        for row, (result,) in self._run(jobs).items():
            if isinstance(result, CallError):
                episodes[row].failure = f"reset: {result.message}"
            else:
                episodes[row].inputs = result

    def _reset(self, episode: Episode, made: EnvironmentClass) -> Any:
        """Reset the environment of a conversation; returns the prompt of the policy."""
        prompt = episode.prompt
        if episode.instance is None:
            episode.instance = made.factory()
            if episode.is_closed:  # it is late, and nothing else closes it
                return awaited(episode.instance.close()) if "close" in made.methods else None
        values = {"seed": episode.group_seed, "prompt": prompt.inputs} | episode.columns
        observation = awaited(episode.instance.reset(**made.signatures["reset"].arguments(values)))
        if (
            isinstance(observation, list)
            and observation
            and not any("role" in part for part in observation)
        ):
            observation, _ = safe_text(
                observation, MAX_OBSERVATION
            )  # blocks of content, not messages
        if isinstance(observation, str):  # as in TRL, the end of the last message
            text, _ = safe_text(observation, MAX_OBSERVATION)
            if isinstance(prompt.inputs, str):
                return prompt.inputs + text
            *before, last = prompt.inputs
            return [*before, {**last, "content": last["content"] + text}]
        messages = safe_reply(parse_reply(observation, prompt.inputs), MAX_OBSERVATION)
        return prompt.inputs if messages is None else [*prompt.inputs, *messages]

    def finish(self, episodes: Sequence[Episode]) -> None:
        """Take the rewards and the state of the objects whose conversations are over."""
        jobs = dict[int, Calls]()
        for row, episode in enumerate(episodes):
            if (
                episode.made_by is not None
                and episode.instance is not None
                and episode.failure is None
            ):
                jobs[row] = Calls([partial(episode.outcome, episode.made_by)], episode.worker)
        for row, (result,) in self._run(jobs).items():
            if isinstance(result, CallError):
                episodes[row].failure = result.message
            else:
                episodes[row].rewards, episodes[row].state = result

    def close(self, episodes: Sequence[Episode] = ()) -> None:
        """Close the objects, whatever has happened; one of a class without ``close`` is reset for
        another conversation. Without episodes, end the threads of idle ones."""
        jobs, workers = dict[int, Calls](), list[CallThread]()
        for row, episode in enumerate(episodes):
            episode.is_closed = True
            made, worker, instance = episode.made_by, episode.worker, episode.instance
            if made is None or worker is None:
                continue
            is_kept = (
                instance is not None and "close" not in made.methods and episode.failure is None
            )
            if is_kept and not worker.was_late:
                made.idle.append((instance, worker))
                continue
            workers.append(worker)
            if instance is not None and "close" in made.methods:
                jobs[row] = Calls([partial(_close, instance)], worker)
        for (result,) in self._run(jobs).values():
            if isinstance(result, CallError):
                self._warn_once("close", result.message)
        for worker in workers:
            worker.stop()
        for made in () if episodes else self.classes.values():
            while made.idle:
                made.idle.popleft()[1].stop()

    # --- replies ---

    def replies(self, episodes: Mapping[int, Episode]) -> dict[int, Reply | CallError | None]:
        """By the same key: the reply, None at the end of the conversation, or why there is no
        reply."""
        answers, functions, jobs = dict[int, Any](), dict[int, Episode](), dict[int, Calls]()
        calling = {
            key for key, episode in episodes.items() if self.tools and any(episode.tool_calls)
        }
        for key, episode in episodes.items():
            made = episode.made_by
            if key in calling and episode.is_last and made is None:
                answers[key] = []  # nothing reads the results, and functions keep no state
            elif key in calling:
                calls: list[Any] = [
                    partial(self._call_tool, episode, call) for call in episode.tool_calls[0]
                ]
                calls += [] if made is None else [partial(_is_done, episode.instance)]
                jobs[key] = Calls(calls, episode.worker)
            elif made is not None and "step" in made.signatures:
                jobs[key] = Calls([partial(self._reply, episode)], episode.worker)
            elif self.fn is None:
                answers[key] = None
            elif self.is_async:
                jobs[key] = Calls([partial(self._reply, episode)])
            else:
                functions[key] = episode
        for key, results in self._run(jobs).items():
            if key not in calling:
                answers[key] = results[0]
                continue
            is_done = False if episodes[key].made_by is None else results.pop()
            messages = self._results(episodes[key], results)
            answers[key] = (
                is_done if isinstance(is_done, CallError) else None if is_done else messages
            )
        if functions:
            # One conversation after another in one thread; in a new thread after each late reply.
            worker = CallThread()
            calls = [partial(self._reply, episode) for episode in functions.values()]
            try:
                with self._one_at_a_time:  # engines with lag converse in several threads
                    (results,) = self._run({0: Calls(calls, worker, MAX_LATE_REPLIES)}).values()
            finally:
                worker.stop()
            answers |= zip(functions, results, strict=True)
        return answers

    def _results(self, episode: Episode, results: Sequence[Any]) -> Reply:
        """A message for each call of a tool."""
        messages, (calls, problem) = list[dict[str, Any]](), episode.tool_calls
        for call, result in zip(calls, results, strict=True):
            is_failed = isinstance(result, CallError)
            text, is_cut = (f"error: {result.message}", False) if is_failed else result
            episode.counts["calls"] += 1
            if is_failed or is_cut:
                episode.counts[
                    "truncated" if is_cut else "timeout" if result.kind == "timeout" else "failed"
                ] += 1
            name = visible(call["function"]["name"])[:MAX_NAME]
            messages.append({"role": "tool", "name": name, "content": text})
        if problem and not episode.is_last:  # no tool was called
            episode.counts["unparsed"] += 1
            name, (text, _) = self.tools[0]["function"]["name"], safe_text(problem, MAX_ERROR)
            messages.append({"role": "tool", "name": name, "content": f"error: {text}"})
        return messages

    def _call_tool(self, episode: Episode, call: Mapping[str, Any]) -> tuple[str, bool]:
        """The result of a call as the policy reads it, and whether it was truncated."""
        name, arguments, made = (
            call["function"]["name"],
            call["function"]["arguments"],
            episode.made_by,
        )
        if made is not None and name in made.tool_names:
            instance = episode.instance
            fn = getattr(instance, name, None)
            if "call_tool" in made.methods:
                fn = lambda **own: instance.call_tool(name, own)  # noqa: E731
        else:
            fn = self._functions.get(name)
        if fn is None:
            known = [schema["function"]["name"] for schema in self.tools_of(episode.prompt)]
            raise CallError(
                "exception",
                f"there is no tool {visible(name)[:MAX_NAME]}; there is {', '.join(known)}",
            )
        try:
            result = awaited(fn(**copy.deepcopy(dict(arguments))))
            return safe_text(result, CHARACTERS_PER_TOKEN * self.max_reply_tokens)
        except (Exception, SystemExit) as error:  # the policy reads no names of files
            self._warn_once(f"tool {name}", describe_error(error))
            text, _ = safe_text(
                f"{type(error).__name__}: {error_message(error)}".removesuffix(": "), MAX_ERROR
            )
            raise CallError("exception", text) from error

    def _run(self, jobs: Mapping[int, Calls]) -> dict[int, list[Any]]:
        """Make the calls; return what each returned, or the ``CallError`` that it ended in."""
        if jobs:
            with self._timed():
                run_calls(jobs, self.timeout_s)
        return {key: calls.results for key, calls in jobs.items()}

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            with self._clock:
                self.elapsed_s += time.perf_counter() - began

    def _warn_once(self, what: str, why: str) -> None:
        """Warn of the first failure of each kind; all are counted."""
        if what not in self._reported:
            self._reported.add(what)
            log.warning(
                "environment %s: %s failed: %s. Further failures of it are only counted.",
                self.name,
                what,
                why,
            )

    def _reply(self, episode: Episode) -> Reply | None:
        """The reply of ``step``, or of the function."""
        if episode.made_by is None:
            assert self.fn is not None and self._signature is not None
            raw = awaited(self.fn(**self._signature.arguments(episode.values)))
            return parse_reply(raw, episode.inputs)
        arguments = episode.made_by.signatures["step"].arguments(episode.values)
        reply = parse_reply(awaited(episode.instance.step(**arguments)), episode.inputs)
        return safe_reply(reply, CHARACTERS_PER_TOKEN * self.max_reply_tokens)


def _is_done(instance: Any) -> bool:
    value = getattr(instance, "is_done", False)
    return bool(awaited(value()) if callable(value) else value)


def _close(instance: Any) -> None:
    awaited(instance.close())


def safe_reply(reply: Reply | None, limit: int) -> Reply | None:
    """The reply with control characters as escapes, each text at most ``limit`` characters."""
    if reply is None or isinstance(reply, str):
        return reply and safe_text(reply, limit)[0]
    return [message | {"content": safe_text(message["content"], limit)[0]} for message in reply]


def parse_reply(raw: Any, inputs: Any) -> Reply | None:
    """Convert what an environment returned to messages, or to a text if the prompt is one; else
    raise CallError."""
    if raw is None or (isinstance(raw, str) and isinstance(inputs, str)):
        return raw
    if isinstance(raw, str):
        return [{"role": "user", "content": raw}]
    messages = [raw] if isinstance(raw, Mapping) else list(raw) if isinstance(raw, Sequence) else []
    is_message = [
        isinstance(m, Mapping) and isinstance(m.get("content"), str) and "role" in m
        for m in messages
    ]
    if isinstance(inputs, str):
        need = "the prompt is a text, so a reply is a text, or None at the end"
    elif not messages or not all(is_message):
        need = (
            "a reply is a text, a message with a role and a content, a list of messages, or "
            "None at the end"
        )
    elif any(message["role"] == "assistant" for message in messages):
        need = "the assistant is the policy, and only the policy writes its messages"
    else:
        return [dict(message) for message in messages]
    raise CallError(
        "exception", f"returned {raw!r:.80} ({type(raw).__name__}); {need}", type(raw).__name__
    )
