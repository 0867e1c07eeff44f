"""An environment: a function that replies to what the policy wrote, called with a deadline."""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gruppo.timeouts import (
    CallError,
    accepted_keywords,
    call_with_timeout,
    function_name,
    require_columns,
    run_awaitable,
    start_call,
)
from gruppo.types import GruppoError, Prompt
from gruppo.watchdog import watching

PROVIDED = ("text", "messages", "state", "turn", "seed", "prompt")
"""Keywords that every environment can ask for, besides the columns of the data."""
MAX_LATE_REPLIES = 4
"""Late replies in one turn after which the remaining conversations of the turn fail too."""

Reply = list[dict[str, str]] | str
"""Messages in a conversation; a text where the prompt is a text."""


@dataclass(frozen=True, eq=False)
class ReplyRequest:
    """One conversation at the point where the environment has to reply."""

    prompt: Prompt
    completion: Any
    """Everything after the prompt, of the policy and the environment, in the form of the prompt: messages or a text."""
    text: str
    """What the policy has just written."""
    turn: int
    seed: int
    state: dict[str, Any] = field(default_factory=dict)


class Environment:
    """Replies by a function that is called for one conversation at a time, with the keywords in its signature.

    ``text`` is what the policy has just written, ``messages`` the whole conversation with its prompt (the text so far,
    where the prompt is a text), ``turn`` 1 after the first answer, ``state`` a dict of this conversation, empty at
    first, which rewards can ask for, and ``seed`` a number that is the same whenever the run is repeated; further
    keywords are the columns of the data, with ``Prompt.target`` as ``answer`` and ``target``.

    The function returns None where the conversation is over; or a text, which becomes a user's message; or a message
    with a role and a content; or a list of messages. An ``async`` function is called for all conversations of a turn at
    the same time, any other for one after another. An exception, or a reply that takes longer than ``timeout_s``
    seconds, costs only its own conversation.
    """

    def __init__(
        self, fn: Callable[..., Any], *, turns: int = 8, max_reply_tokens: int = 256, timeout_s: float | None = 60.0
    ) -> None:
        if not callable(fn) or isinstance(fn, type | Environment):
            need = "one such as def reply(text, state). For a class, give an instance with __call__."
            raise GruppoError(f"the environment is {fn!r:.80} ({type(fn).__name__}), not a function; it needs {need}")
        self.fn, self.turns, self.max_reply_tokens, self.timeout_s = fn, turns, max_reply_tokens, timeout_s
        self.name = function_name(fn)
        self.is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)
        self._parameters, self._takes_all = accepted_keywords(fn, f"environment {self.name!r}")
        self._one_at_a_time, self._clock = threading.Lock(), threading.Lock()
        self.elapsed_s = 0.0
        """Seconds spent in ``replies`` so far."""

    def check(self, columns: Collection[str]) -> None:
        """Refuse a function that asks for a column that the data do not have."""
        require_columns(f"environment {self.name!r}", self._parameters, columns, PROVIDED)

    def replies(self, requests: Mapping[int, ReplyRequest]) -> dict[int, Reply | CallError | None]:
        """By the same key: the reply, None at the end of the conversation, or why there is no reply."""
        # an engine with lag converses in several threads; the wait for another one is not counted
        with nullcontext() if self.is_async else self._one_at_a_time:
            began = time.perf_counter()
            try:
                return self._concurrent(requests) if self.is_async else self._sequential(requests)
            finally:
                with self._clock:
                    self.elapsed_s += time.perf_counter() - began

    def _sequential(self, requests: Mapping[int, ReplyRequest]) -> dict[int, Any]:
        """Call for one conversation after another in one thread; in a new thread after each late reply."""
        answers: dict[int, Any] = {}
        for _ in range(MAX_LATE_REPLIES):
            waiting = {key: request for key, request in requests.items() if key not in answers}
            began, is_over = [time.monotonic()], threading.Event()
            work = partial(self._call_each, waiting, answers, began, is_over)
            if self.timeout_s is None:
                call_with_timeout(work, None)
                return answers
            with watching(f"environment {self.name!r}", self.timeout_s) as beat:
                call = start_call(work)
                while not call.done.wait(max(began[0] + self.timeout_s - time.monotonic(), 0.001)):
                    beat()
                    if time.monotonic() - began[0] >= self.timeout_s:
                        break
                else:
                    call.result()
                    return answers
            is_over.set()
            call.abandon()
            late = [key for key in waiting if key not in answers][:1]
            answers |= dict.fromkeys(late, CallError("timeout", f"no answer within {self.timeout_s:.3g} s"))
        # each late reply costs timeout_s, and the others would probably be late too
        problem = CallError("timeout", f"skipped: {MAX_LATE_REPLIES} replies of this turn were late")
        return answers | dict.fromkeys((key for key in requests if key not in answers), problem)

    def _call_each(
        self,
        requests: Mapping[int, ReplyRequest],
        answers: dict[int, Any],
        began: list[float],
        is_over: threading.Event,
    ) -> None:
        """Fill ``answers`` until ``is_over``; ``began`` holds the time at which the current call began."""
        for key, request in requests.items():
            if is_over.is_set():  # a thread cannot be stopped, but it must not call the function any more
                return
            began[0] = time.monotonic()
            try:
                raw = self.fn(**self._keywords(request))
                raw = run_awaitable(raw) if inspect.isawaitable(raw) else raw
                answer: Reply | CallError | None = parse_reply(raw, request.prompt.inputs)
            except CallError as problem:
                answer = problem
            except (Exception, SystemExit) as error:
                answer = CallError.from_exception(error)
            if not is_over.is_set():
                answers[key] = answer

    def _concurrent(self, requests: Mapping[int, ReplyRequest]) -> dict[int, Any]:
        """Call for all conversations at the same time, in one event loop."""

        async def reply(request: ReplyRequest) -> Any:
            deadline = asyncio.timeout(self.timeout_s)
            try:
                async with deadline:
                    raw = await self.fn(**self._keywords(request))
                return parse_reply(raw, request.prompt.inputs)
            except CallError as problem:
                return problem
            except (Exception, SystemExit) as error:  # SystemExit would end the event loop
                # a TimeoutError of the function itself is an ordinary exception
                if isinstance(error, TimeoutError) and deadline.expired():
                    return CallError("timeout", f"no answer within {self.timeout_s:.3g} s")
                return CallError.from_exception(error)

        async def reply_all() -> list[Any]:
            return await asyncio.gather(*map(reply, requests.values()))

        # a timeout cannot interrupt a coroutine that blocks the event loop
        deadline = None if self.timeout_s is None else self.timeout_s + 1.0
        try:
            answers = call_with_timeout(lambda: run_awaitable(reply_all()), deadline, f"environment {self.name!r}")
        except CallError as problem:
            if problem.kind == "timeout":
                text = f"no answer within {self.timeout_s:.3g} s: a coroutine blocks, and all others with it"
                problem = CallError("timeout", f"{text}. Await what takes time, or write def instead of async def.")
            return dict.fromkeys(requests, problem)
        return dict(zip(requests, answers, strict=True))

    def _keywords(self, request: ReplyRequest) -> dict[str, Any]:
        """Arguments of the function: copies, apart from the state, so that it cannot change the data."""
        prompt, completion = request.prompt, request.completion
        targets = {} if prompt.target is None else {"answer": prompt.target, "target": prompt.target}
        messages = prompt.inputs + completion if isinstance(prompt.inputs, str) else [*prompt.inputs, *completion]
        values = {**targets, **prompt.meta, "messages": messages, "prompt": prompt.inputs}
        values |= {name: getattr(request, name) for name in ("text", "state", "turn", "seed")}
        values |= dict.fromkeys(name for name, required in self._parameters.items() if required and name not in values)
        return {
            name: copy.deepcopy(value) if isinstance(value, list | dict) and name != "state" else value
            for name, value in values.items()
            if self._takes_all or name in self._parameters
        }


def parse_reply(raw: Any, inputs: Any) -> Reply | None:
    """Convert what an environment returned to messages, or to a text if the prompt is one; else raise CallError."""
    if raw is None or (isinstance(raw, str) and isinstance(inputs, str)):
        return raw
    if isinstance(raw, str):
        return [{"role": "user", "content": raw}]
    messages = [raw] if isinstance(raw, Mapping) else list(raw) if isinstance(raw, Sequence) else []
    is_message = [isinstance(m, Mapping) and isinstance(m.get("content"), str) and "role" in m for m in messages]
    if isinstance(inputs, str):
        need = "the prompt is a text, so a reply is a text, or None at the end"
    elif not messages or not all(is_message):
        need = "a reply is a text, a message with a role and a content, a list of messages, or None at the end"
    elif any(message["role"] == "assistant" for message in messages):
        need = "the assistant is the policy, and only the policy writes its messages"
    else:
        return [dict(message) for message in messages]
    raise CallError("exception", f"returned {raw!r:.80} ({type(raw).__name__}); {need}", type(raw).__name__)
