"""Environments of verifiers: ``verifiers:NAME``.

They drive the conversation and call the model, which here is a policy that answers in batches. So
each conversation is a task of theirs, which waits at each call of the model for the policy's next
answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from gruppo.tasksets import is_taskset, open_taskset

Message = dict[str, str]
Ask = Callable[[Sequence[Mapping[str, Any]]], Awaitable[str]]
Play = Callable[[int, Ask], Awaitable[float]]
"""One episode of an environment: the number of its task, and how to ask the policy, to its
reward."""


class ConversationOver(Exception):
    """The policy writes no further answer."""


def verifiers_factory(spec: str, config: Any) -> Callable[[], Any]:
    """Factory of conversations about the tasks of ``spec``, and of the data of the run and of its
    evaluations.

    The columns ``taskset`` and ``task_index`` of the data say which task it is.
    """
    named = [data for data in (config.data, config.evaluation.data) if is_taskset(data)]
    specs = {spec, *(data.removeprefix("verifiers:") for data in named)}
    tasksets = {name: open_taskset(name) for name in sorted(specs)}
    from gruppo.environments.verifiers_traces import Player  # imports the package

    return partial(Verifiers, {name: Player(one, name) for name, one in tasksets.items()})


class Verifiers:
    """One conversation. Its reward is the score of the task, or of the rubric."""

    def __init__(self, plays: Mapping[str, Play]) -> None:
        self._plays = plays
        self._task: asyncio.Task[float] | None = None

    async def reset(
        self, taskset: str, task_index: int, prompt: Sequence[Mapping[str, Any]]
    ) -> list[Message] | None:
        """Start the environment's task, up to its first call of the model."""
        self._calls: asyncio.Queue[list[Message] | None] = asyncio.Queue()
        """The messages of each call of the model; None at the end."""
        self._answers: asyncio.Queue[str | None] = asyncio.Queue()
        self._known = messages_of(prompt)
        self._task = asyncio.ensure_future(self._plays[taskset](task_index, self._ask))
        self._task.add_done_callback(lambda task: self._calls.put_nowait(None))
        return await self._next() or None  # mostly []: the prompt alone

    async def step(self, text: str) -> list[Message] | None:
        """Answer the environment's call; return the messages that its next call adds."""
        self._known.append({"role": "assistant", "content": text})
        self._answers.put_nowait(text)
        return await self._next()

    async def get_reward(self) -> float:
        """The score, after the environment has ended, which a limit of the policy may have kept
        from it."""
        assert self._task is not None
        while not self._task.done():
            self._answers.put_nowait(None)
            await self._next()
        return self._task.result()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _ask(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The policy's answer; raises ConversationOver if it gives none."""
        self._calls.put_nowait(messages_of(messages))
        text = await self._answers.get()
        if text is None:
            raise ConversationOver
        return text

    async def _next(self) -> list[Message] | None:
        """Wait for the environment: the messages with which it goes on, or None if it has
        ended."""
        call = await self._calls.get()
        if call is None:
            assert self._task is not None
            self._task.result()  # raises what the environment raised
            return None
        before, added = call[: len(self._known)], call[len(self._known) :]
        # what the policy wrote may come back without spaces around it
        is_kept = [
            a == b or b["role"] == "assistant" for a, b in zip(before, self._known, strict=False)
        ]
        if len(before) < len(self._known) or not all(is_kept):
            raise ValueError("""the environment rewrote the history of the conversation, which a
                policy cannot follow""")
        self._known = call
        return added


def messages_of(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Roles and texts of messages; other content is refused."""
    if any(not isinstance(message["content"], str) for message in messages):
        raise ValueError("the environment writes messages that are not texts")
    return [{"role": str(m["role"]), "content": m["content"]} for m in messages]
