"""Environments of verifiers: ``verifiers:NAME``.

They drive the conversation and call the model, which here is a policy that answers in batches. So
each conversation is a coroutine of theirs, which waits at each call of the model for the policy's
next answer.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from functools import lru_cache, partial
from queue import SimpleQueue
from typing import Any

from gruppo.tasksets import is_taskset, open_taskset

CLOSE_TIMEOUT_S = 5.0
Message = dict[str, str]


class ConversationOver(Exception):
    """The policy writes no further answer."""


def verifiers_factory(spec: str, config: Any) -> Callable[[], Any]:
    """Factory of conversations about the tasks of ``spec``, and of the data of the run and of its
    evaluations.

    The columns ``taskset`` and ``task_index`` of the data say which task it is.
    """
    named = {
        data.removeprefix("verifiers:")
        for data in (config.data, config.evaluation.data)
        if is_taskset(data)
    }
    return partial(Verifiers, {name: open_loop(name) for name in sorted({spec} | named)})


class EnvironmentLoop:
    """Runs the coroutines of one environment, in an event loop and a thread of its own."""

    def __init__(self, spec: str) -> None:
        taskset = open_taskset(spec)
        from gruppo.environments import verifiers_traces as backend  # imports the package

        self.backend = backend
        self.loop = asyncio.new_event_loop()
        self.exits = AsyncExitStack()
        self.env = backend.open_environment(taskset, f"verifiers:{spec}")
        self.thread = threading.Thread(
            target=self.loop.run_forever, name="gruppo-verifiers", daemon=True
        )
        self.thread.start()
        self.start(self.exits.enter_async_context(self.backend.serving(self.env))).result()
        atexit.register(self.close)

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self) -> None:
        """Stop the servers of the environment."""
        with suppress(Exception):
            self.start(self.exits.aclose()).result(CLOSE_TIMEOUT_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(CLOSE_TIMEOUT_S)


open_loop = lru_cache(maxsize=4)(EnvironmentLoop)


class Verifiers:
    """One conversation. Its reward is the score of the task, or of the rubric."""

    def __init__(self, loops: Mapping[str, EnvironmentLoop]) -> None:
        self._loops = loops
        self._calls: SimpleQueue[list[Message] | Future] = SimpleQueue()
        """The messages of each call of the model, and the finished coroutine at the end."""
        self._known: list[Message] = []
        self._run: Future | None = None
        self.metrics: dict[str, float] = {}

    def reset(
        self, taskset: str, task_index: int, prompt: Sequence[Mapping[str, Any]]
    ) -> list[Message] | None:
        """Start the environment's coroutine, up to its first call of the model."""
        self._loop, self._known = self._loops[taskset], messages_of(prompt)
        self._run = self._loop.start(self._loop.backend.play(self._loop.env, task_index, self._ask))
        self._run.add_done_callback(self._calls.put)  # after its calls, in the same queue
        return self._next() or None  # mostly [], since the first call has the prompt alone

    def step(self, text: str) -> list[Message] | None:
        """Answer the environment's call; return the messages that its next call adds."""
        self._known.append({"role": "assistant", "content": text})
        self._loop.loop.call_soon_threadsafe(self._resume, text)
        return self._next()

    def get_reward(self) -> float:
        """The score, after the environment has ended, which a limit of the policy may have kept
        from it."""
        assert self._run is not None
        while not self._run.done():
            self._loop.loop.call_soon_threadsafe(self._resume, None)
            self._next()
        reward, self.metrics = self._run.result()
        return reward

    def close(self) -> None:
        if self._run is not None:
            self._run.cancel()

    def _next(self) -> list[Message] | None:
        """Wait for the environment: the messages with which it goes on, or None where it has
        ended."""
        call = self._calls.get()
        if isinstance(call, Future):
            call.result()  # raises what the environment raised
            return None
        before, added = call[: len(self._known)], call[len(self._known) :]
        # what the policy wrote may come back without spaces around it
        is_kept = [
            a == b or b["role"] == "assistant" for a, b in zip(before, self._known, strict=False)
        ]
        if len(before) < len(self._known) or not all(is_kept):
            raise ValueError(
                "the environment rewrote the history of the conversation, which a policy cannot "
                "follow"
            )
        self._known = call
        return added

    # --- in the thread of the loop ---

    async def _ask(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The policy's answer; raises ConversationOver where it gives none."""
        self._answer: asyncio.Future[str] = self._loop.loop.create_future()
        self._calls.put(messages_of(messages))
        return await self._answer

    def _resume(self, text: str | None) -> None:
        if not self._answer.done():  # it may have been cancelled with the environment's coroutine
            if text is None:
                self._answer.set_exception(ConversationOver())
            else:
                self._answer.set_result(text)


def messages_of(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Roles and texts of messages; other content is refused."""
    if any(not isinstance(message["content"], str) for message in messages):
        raise ValueError("the environment writes messages that are not texts")
    return [{"role": str(m["role"]), "content": m["content"]} for m in messages]
