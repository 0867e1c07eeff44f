"""Calls of environments and tools: schemas, deadlines, results as text."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from gruppo.timeouts import (
    CallError,
    CallThread,
    abandoned_count,
    call_inline,
    function_name,
    late_error,
    start_call,
)
from gruppo.types import GruppoError

COUNTS = ("calls", "failed", "timeout", "unparsed", "truncated")
"""Counters of each conversation: calls; those that failed, were late, could not be parsed, or were
truncated."""
CONCURRENT = 64
"""Conversations whose calls run at the same time."""
MAX_HANGING = 256
"""Calls past their deadline and still running, beyond which no tool is called: their threads cannot
be stopped."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def tool_schema(fn: Callable[..., Any], what: str = "tool") -> dict[str, Any]:
    """JSON schema of a function from its signature and its Google-style docstring, as chat
    templates read it."""
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(fn)
    except Exception as error:
        why = " ".join(" ".join(map(str, error.args)).split()).rstrip(".")
        raise GruppoError(f"""{what} {function_name(fn)!r} cannot be shown to a model: {why}.
            Give every argument a type hint, and a docstring with a line for each under
            Args:.""") from None


def check_names(schemas: Sequence[Mapping[str, Any]]) -> None:
    """Refuse two tools of one name: the policy could not say which one it calls."""
    names = [schema["function"]["name"] for schema in schemas]
    if len({*names}) < len(names):
        raise GruppoError(f"two of the tools {', '.join(names)} have one name. Rename one of them.")


def safe_text(value: Any, limit: int) -> tuple[str, bool]:
    """A result as text with control characters as escapes, and whether it was cut at ``limit``
    characters. Content blocks, as multimodal tools return, are joined."""
    is_list = isinstance(value, list) and bool(value)
    if is_list and all(isinstance(part, Mapping) and "text" in part for part in value):
        value = "\n".join(str(part["text"]) for part in value)
    text = str(value)
    shown = text[:limit].replace("\r\n", "\n")
    escaped = _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), shown)
    return escaped, len(text) > limit


async def call(fn: Callable[[], Any], thread: CallThread, timeout_s: float | None) -> Any:
    """Value of ``fn()``; raises CallError for an exception or after ``timeout_s``.

    Without a timeout it runs in the caller's thread. A late call is left behind in its thread,
    where it cannot be stopped, and further ones are made in another.
    """
    try:
        if timeout_s is None:
            return call_inline(fn)
        if abandoned_count() >= MAX_HANGING:
            raise CallError("timeout", f"not called: {MAX_HANGING} calls are still hanging")
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def on_done() -> None:
            with suppress(RuntimeError):  # a late call, after the loop has ended
                loop.call_soon_threadsafe(done.set)

        timed = thread.start(fn, on_done)
        try:
            await asyncio.wait_for(done.wait(), timeout_s)
        except TimeoutError:
            timed.abandon()
            thread.stop()
            thread.was_late = True
            raise late_error(timeout_s) from None
        return timed.result()
    except GruppoError as error:  # of user code: not a mistake in the options of the run
        raise CallError.from_exception(error) from error


def run_all(coroutines: Sequence[Coroutine[Any, Any, Any]], timeout_s: float | None) -> list[Any]:
    """The result of each coroutine, or the CallError that it ended in.

    They run at the same time, in an event loop of their own; without a timeout one after another
    in the caller's thread, where they wait for nothing.
    """
    if timeout_s is None:
        return [_without_waiting(_result(coroutine)) for coroutine in coroutines]
    # a notebook's thread has an event loop already
    running = start_call(partial(asyncio.run, _together(coroutines)))
    running.done.wait()
    return running.result()


async def _result(coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await coroutine
    except CallError as error:
        return error


async def _together(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    places = asyncio.Semaphore(CONCURRENT)

    async def placed(coroutine: Coroutine[Any, Any, Any]) -> Any:
        async with places:
            return await _result(coroutine)

    return await asyncio.gather(*map(placed, coroutines))


def _without_waiting(coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
