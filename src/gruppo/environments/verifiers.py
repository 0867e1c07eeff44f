"""Environments of verifiers: ``verifiers:NAME``.

They drive the conversation and call the model, which here is a policy that answers in batches. So
each conversation is a task of theirs, which waits at each call of the model for the policy's next
answer.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import lru_cache, partial
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
    named = [data for data in (config.data, config.evaluation.data) if is_taskset(data)]
    specs = {spec, *(data.removeprefix("verifiers:") for data in named)}
    return partial(Verifiers, {name: open_loop(name) for name in sorted(specs)})


class EnvironmentLoop:
    """Runs the coroutines of one environment, in an event loop and a thread of its own."""

    def __init__(self, spec: str) -> None:
        taskset = open_taskset(spec)
        from gruppo.environments import verifiers_traces as backend  # imports the package

        self.play = backend.play
        self.loop = asyncio.new_event_loop()
        self.exits = AsyncExitStack()
        self.env = backend.open_environment(taskset, f"verifiers:{spec}")
        run = self.loop.run_forever
        self.thread = threading.Thread(target=run, name="gruppo-verifiers", daemon=True)
        self.thread.start()
        self.run(self.exits.enter_async_context(backend.serving(self.env)))
        atexit.register(self.close)

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float | None = None) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def close(self) -> None:
        """Stop the servers of the environment."""
        with suppress(Exception):
            self.run(self.exits.aclose(), CLOSE_TIMEOUT_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(CLOSE_TIMEOUT_S)


open_loop = lru_cache(maxsize=4)(EnvironmentLoop)


class Verifiers:
    """One conversation. Its reward is the score of the task, or of the rubric."""

    def __init__(self, loops: Mapping[str, EnvironmentLoop]) -> None:
        self._loops = loops
        self._loop: Any = None
        self._known: list[Message] = []

    def reset(
        self, taskset: str, task_index: int, prompt: Sequence[Mapping[str, Any]]
    ) -> list[Message] | None:
        """Start the environment's task, up to its first call of the model."""
        self._loop, self._known = self._loops[taskset], messages_of(prompt)
        return self._loop.run(self._start(task_index)) or None  # mostly []: the prompt alone

    def step(self, text: str) -> list[Message] | None:
        """Answer the environment's call; return the messages that its next call adds."""
        self._known.append({"role": "assistant", "content": text})
        return self._loop.run(self._answer(text))

    def get_reward(self) -> float:
        """The score, after the environment has ended, which a limit of the policy may have kept
        from it."""
        return self._loop.run(self._score())

    def close(self) -> None:
        if self._loop is not None:
            self._loop.loop.call_soon_threadsafe(self._task.cancel)

    # --- in the loop ---

    async def _start(self, index: int) -> list[Message] | None:
        self._calls: asyncio.Queue[list[Message] | None] = asyncio.Queue()
        """The messages of each call of the model; None at the end."""
        self._answers: asyncio.Queue[str | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._loop.play(self._loop.env, index, self._ask))
        self._task.add_done_callback(lambda task: self._calls.put_nowait(None))
        return await self._next()

    async def _ask(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The policy's answer; raises ConversationOver where it gives none."""
        self._calls.put_nowait(messages_of(messages))
        text = await self._answers.get()
        if text is None:
            raise ConversationOver
        return text

    async def _answer(self, text: str | None) -> list[Message] | None:
        self._answers.put_nowait(text)
        return await self._next()

    async def _next(self) -> list[Message] | None:
        """Wait for the environment: the messages with which it goes on, or None where it has
        ended."""
        call = await self._calls.get()
        if call is None:
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

    async def _score(self) -> float:
        while not self._task.done():
            await self._answer(None)
        return self._task.result()


def messages_of(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Roles and texts of messages; other content is refused."""
    if any(not isinstance(message["content"], str) for message in messages):
        raise ValueError("the environment writes messages that are not texts")
    return [{"role": str(m["role"]), "content": m["content"]} for m in messages]
