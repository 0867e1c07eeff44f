"""Tools that the policy may call: schemas, calls with deadlines, results as text."""

from __future__ import annotations

import queue
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gruppo.timeouts import (
    CallError,
    TimedCall,
    abandoned_count,
    function_name,
    start_call,
)
from gruppo.types import GruppoError

COUNTS = ("calls", "failed", "timeout", "unparsed", "truncated")
"""Counters of each conversation: calls; those that failed, were late, could not be parsed, or were
truncated."""
CONCURRENT = 64
"""Calls that run at the same time."""
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
        raise GruppoError(f"""{what} {function_name(fn)!r} cannot be shown to a model: {why}. Give every argument a type
            hint, and a docstring with a line for each under Args:.""") from None


def safe_text(value: Any, limit: int) -> tuple[str, bool]:
    """Text of a result, and whether it was longer than ``limit`` characters: control characters
    become escapes.

    Of a list of content blocks, as multimodal tools return, the texts.
    """
    if (
        isinstance(value, list)
        and value
        and all(isinstance(part, Mapping) and "text" in part for part in value)
    ):
        value = "\n".join(str(part["text"]) for part in value)
    text = (
        value if isinstance(value, str) else str(value)
    )  # a subclass of str may print itself differently
    shown = text[:limit].replace("\r\n", "\n")
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), shown), len(
        text
    ) > limit


class CallThread:
    """A thread for the calls of one environment: some objects, such as connections, belong to the
    thread that made them."""

    was_late = False
    """Whether its thread was left to a late call; further ones are made in another."""
    _calls: queue.SimpleQueue[Callable[[], None] | None] | None = None

    def start(self, run: Callable[[], None]) -> None:
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            start_call(
                partial(_make_all, self._calls)
            )  # of this queue: after ``stop``, the object gets another one
        self._calls.put(run)

    def stop(self) -> None:
        """End the thread after the call that is under way."""
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None


def _make_all(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (run := calls.get()) is not None:
        run()


@dataclass(eq=False)
class Calls:
    """Calls that are made one after another; after ``max_late`` late ones, the rest are skipped."""

    waiting: list[Callable[[], Any]]
    worker: CallThread | None = None
    max_late: int | None = None
    late: int = 0
    results: list[Any] = field(default_factory=list)
    """What each call returned, or the ``CallError`` that it ended in."""


def run_calls(rows: Mapping[int, Calls], timeout_s: float | None) -> None:
    """Make the calls of all rows, those of different rows at the same time; fill in their results.

    Without a timeout they run in the caller's thread, row by row. A late call is left behind in its
    thread, where it cannot be stopped, and its row goes on in another one.
    """
    if timeout_s is None:
        for calls in rows.values():
            while calls.waiting:
                calls.results.append(_result(start_call(calls.waiting.pop(0), inline=True)))
        return
    ready = deque(calls for calls in rows.values() if calls.waiting)
    running, finished = dict[TimedCall, Calls](), queue.SimpleQueue[TimedCall]()

    def go_on(calls: Calls, result: Any) -> None:
        calls.results.append(result)
        if (
            calls.late == calls.max_late
        ):  # each costs timeout_s, and the others would probably be late too
            skipped = CallError("timeout", f"skipped: {calls.late} replies of this turn were late")
            calls.results += [skipped] * len(calls.waiting)
            calls.waiting.clear()
        if calls.waiting:
            ready.append(calls)

    while ready or running:
        while ready and len(running) < CONCURRENT:
            calls = ready.popleft()
            fn = calls.waiting.pop(0)
            if abandoned_count() >= MAX_HANGING:
                go_on(
                    calls,
                    CallError("timeout", f"not called: {MAX_HANGING} calls are still hanging"),
                )
                continue
            call = TimedCall(fn, timeout_s)
            call.on_done = partial(finished.put, call)
            running[call] = calls
            (start_call if calls.worker is None else calls.worker.start)(call.run)
        if not running:  # none of the calls that were ready was made
            continue
        left_s = min(call.started for call in running) + timeout_s - time.monotonic()
        with suppress(queue.Empty):
            call = finished.get(timeout=min(max(left_s, 0.001), 1.0))
            if call in running:  # else it came too late
                go_on(running.pop(call), _result(call))
        for call in [call for call in running if time.monotonic() - call.started >= timeout_s]:
            calls = running.pop(call)
            call.abandon()
            if calls.worker is not None:
                calls.worker.stop()
                calls.worker.was_late = True
            calls.late += 1
            go_on(calls, CallError("timeout", f"no answer within {timeout_s:.3g} s"))


def _result(call: TimedCall) -> Any:
    try:
        return call.result()
    except CallError as error:
        return error
    except GruppoError as error:  # of user code: not a mistake in the options of the run
        return CallError.from_exception(error)


def check_names(schemas: Sequence[Mapping[str, Any]]) -> None:
    """Refuse two tools of one name: the policy could not say which one it calls."""
    names = [schema["function"]["name"] for schema in schemas]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise GruppoError(f"two tools have the name {twice!r}. Rename one of them.")
