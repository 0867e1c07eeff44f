"""A function that replies to what the policy wrote, and what is held of each conversation between its calls."""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gruppo.timeouts import Unanswered, keywords_of, missing_column, name_of, start, wait_for, within
from gruppo.types import DataError, GruppoError, Prompt

PROVIDED = ("text", "messages", "state", "turn", "seed", "prompt")
"""Keywords that every environment can ask for, beside the columns of the data."""
SAME_TIMEOUTS = 4
"""Replies that came too late in one turn before the other conversations of the turn count as failed too."""

Reply = list[dict[str, str]] | str
"""Messages for a conversation; a text for a prompt that is a text."""


@dataclass(frozen=True, eq=False)
class Asked:
    """One conversation at the point where the environment is to reply."""

    prompt: Prompt
    said: Any
    """Of the policy and the environment so far, in the form of the prompt: messages, or a text."""
    text: str
    """What the policy has just written."""
    turn: int
    seed: int
    state: dict[str, Any] = field(default_factory=dict)


class Environment:
    """Replies by a function, called for one conversation at a time with keywords, and only those in its signature.

    ``text`` is what the policy has just written, ``messages`` the whole conversation with its prompt (of a prompt that
    is a text, the text so far), ``turn`` 1 after the first answer, ``state`` a dict of this conversation's own, empty
    at first, which rewards can ask for, ``seed`` a number that is the same whenever the run is repeated; and every
    column of the data, ``Prompt.target`` as ``answer`` and ``target``.

    It returns None where the conversation is over; or a text, which becomes a user's message; or a message with a role
    and a content; or a list of messages. An ``async`` function is asked for all conversations of a turn at the same
    time, any other for one after another. What it raises, and what comes later than ``timeout_s`` seconds, costs this
    conversation alone.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        turns: int = 8,
        max_reply_tokens: int = 256,
        timeout_s: float | None = 60.0,
    ) -> None:
        if not callable(fn) or isinstance(fn, type | Environment):
            raise GruppoError(
                f"the environment is {fn!r:.80} ({type(fn).__name__}), which is no function to reply with; it needs "
                "one such as def reply(text, state) that returns what is said next, or None at the end. Of a class, "
                "give an instance with __call__."
            )
        self.fn, self.turns, self.max_reply_tokens, self.timeout_s = fn, turns, max_reply_tokens, timeout_s
        self.name = name_of(fn)
        self.is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)
        self._parameters, self._takes_all = keywords_of(fn, f"environment {self.name!r}")
        self._seconds = 0.0

    def check(self, columns: Collection[str]) -> None:
        """Refuse a function that asks for a column which the data do not have."""
        known = {*PROVIDED, *columns}
        for name, required in self._parameters.items():
            if required and name not in known:
                raise DataError(missing_column(f"environment {self.name!r}", name, columns, PROVIDED))

    def replies(self, asked: Mapping[int, Asked]) -> dict[int, Reply | Unanswered | None]:
        """By the same key: what is said next, None at the end of the conversation, or why there is no reply."""
        began = time.perf_counter()
        try:
            return self._at_once(asked) if self.is_async else self._in_turn(asked)
        finally:
            self._seconds += time.perf_counter() - began

    def taken_s(self) -> float:
        """Seconds that replies took since this was last asked."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _in_turn(self, asked: Mapping[int, Asked]) -> dict[int, Any]:
        """One after another in one thread; in a new one after each reply that comes too late."""
        answers: dict[int, Any] = {}
        waiting, late = list(asked), 0
        while waiting:
            if late == SAME_TIMEOUTS:
                problem = Unanswered("timeout", f"not asked: {late} replies of this turn came too late")
                return answers | dict.fromkeys(waiting, problem)
            given = self._until_late([asked[key] for key in waiting])
            answers |= dict(zip(waiting, given, strict=False))
            waiting = waiting[len(given) :]
            late += 1
        return answers

    def _until_late(self, asked: Sequence[Asked]) -> list[Any]:
        """Of the first conversations, up to one whose reply is late."""
        answers: list[Any] = []
        begun, is_over = [time.monotonic()], threading.Event()

        def work() -> None:
            for one in asked:
                if is_over.is_set():
                    return
                begun[0] = time.monotonic()
                answer = _caught(partial(self._reply, one))
                if not is_over.is_set():
                    answers.append(answer)

        if self.timeout_s is None:
            within(work, None)
            return answers
        call = start(work)
        while not call.done.wait(max(begun[0] + self.timeout_s - time.monotonic(), 0.001)):
            if time.monotonic() - begun[0] >= self.timeout_s:
                is_over.set()
                call.abandon()
                return [*answers, Unanswered("timeout", f"no answer within {self.timeout_s:.3g} s")]
        call.result()
        return answers

    def _reply(self, asked: Asked) -> Reply | None:
        try:
            raw = self._call(asked)
            raw = wait_for(raw) if inspect.isawaitable(raw) else raw
        except (Exception, SystemExit) as error:
            raise Unanswered.of(error) from error
        return reply_of(raw, asked.prompt.inputs)

    def _at_once(self, asked: Mapping[int, Asked]) -> dict[int, Any]:
        async def kept(key: int) -> Any:
            try:
                return await self._call(asked[key])
            except SystemExit as error:  # it would end the event loop
                return error

        async def one(key: int) -> Any:
            began = time.monotonic()
            try:
                return await asyncio.wait_for(kept(key), self.timeout_s)
            except Exception as error:
                is_late = self.timeout_s is not None and time.monotonic() - began >= self.timeout_s
                if isinstance(error, TimeoutError) and is_late:
                    return Unanswered("timeout", f"no answer within {self.timeout_s:.3g} s")
                return error

        async def every() -> list[Any]:
            return list(await asyncio.gather(*(one(key) for key in asked)))

        longest = None if self.timeout_s is None else self.timeout_s + 1.0  # a coroutine that blocks is no good waiter
        try:
            raw = within(lambda: wait_for(every()), longest)
        except Unanswered as problem:
            if problem.kind == "timeout":
                said = f"no answer within {self.timeout_s:.3g} s: a coroutine blocks, and all others with it"
                problem = Unanswered("timeout", f"{said}. Await what takes time, or write def in place of async def.")
            return dict.fromkeys(asked, problem)
        return {key: _caught(partial(_answered, entry, asked[key])) for key, entry in zip(asked, raw, strict=True)}

    def _call(self, asked: Asked) -> Any:
        prompt = asked.prompt
        keywords: dict[str, Any] = {name: _own(value) for name, value in prompt.meta.items()}
        if prompt.target is not None:
            keywords = {"answer": _own(prompt.target), "target": _own(prompt.target)} | keywords
        keywords |= dict.fromkeys(
            name for name, required in self._parameters.items() if required and name not in keywords
        )
        keywords |= {
            "text": asked.text,
            "messages": messages_of(prompt.inputs, asked.said),
            "state": asked.state,
            "turn": asked.turn,
            "seed": asked.seed,
            "prompt": _own(prompt.inputs),
        }
        return self.fn(**{k: v for k, v in keywords.items() if self._takes_all or k in self._parameters})


def _own(value: Any) -> Any:
    """A copy of what can be changed: a function that changes it changes no data."""
    return copy.deepcopy(value) if isinstance(value, list | dict) else value


def messages_of(inputs: Any, said: Any) -> Any:
    """The prompt and what was said after it, as one: messages of one's own, or a text."""
    if isinstance(inputs, str):
        return inputs + said
    return [dict(message) for message in (*inputs, *said)]


def reply_of(raw: Any, inputs: Any) -> Reply | None:
    """What an environment returned, as messages or as a text; Unanswered where it is neither."""
    if raw is None:
        return None
    if isinstance(inputs, str):
        if isinstance(raw, str):
            return raw
        raise _not_understood(raw, "the prompt is a text, so a reply is a text, or None at the end")
    if isinstance(raw, str):
        return [{"role": "user", "content": raw}]
    messages = [raw] if isinstance(raw, Mapping) else raw
    wanted = "a reply is a text, a message with a role and a content, a list of messages, or None at the end"
    if not isinstance(messages, Sequence) or not messages:
        raise _not_understood(raw, wanted)
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str) or "role" not in message:
            raise _not_understood(raw, wanted)
        if message["role"] == "assistant":
            raise _not_understood(raw, "the assistant is the policy, for whom nobody else speaks")
    return [dict(message) for message in messages]


def _not_understood(raw: Any, wanted: str) -> Unanswered:
    return Unanswered("exception", f"returned {raw!r:.80} ({type(raw).__name__}); {wanted}", type(raw).__name__)


def _answered(entry: Any, asked: Asked) -> Reply | None:
    if isinstance(entry, Unanswered):
        raise entry
    if isinstance(entry, BaseException):
        raise Unanswered.of(entry)
    return reply_of(entry, asked.prompt.inputs)


def _caught(answer: Callable[[], Any]) -> Any:
    try:
        return answer()
    except Unanswered as problem:
        return problem
