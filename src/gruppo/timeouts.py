"""Calls of Python objects with a soft deadline, in threads.

Daemon threads, not signals: they work outside the main thread and never keep a process alive. A
call that is late is left behind; one that hangs in C and keeps the interpreter lock stops
everything, which only ``gruppo.worker`` survives.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import inspect
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gruppo.errors import DataError, GruppoError
from gruppo.loading import did_you_mean, visible

FailureKind = Literal["exception", "timeout", "count", "not_finite"]
this_thread = threading.local()
"""``call``: the call that this thread makes, if any."""
_abandoned: list[TimedCall] = []
_loop: asyncio.AbstractEventLoop | None = None
_loop_lock = threading.Lock()


class CallError(Exception):
    """A call without a usable answer. Two errors with the same ``identity`` are the same error."""

    def __init__(self, kind: FailureKind, message: str, identity: Hashable = None) -> None:
        super().__init__(message)
        self.kind, self.message, self.identity = kind, message, (kind, identity)

    @classmethod
    def from_exception(cls, error: BaseException) -> CallError:
        return cls("exception", describe_error(error), (type(error), error_message(error)))


@dataclass(eq=False)
class TimedCall:
    """One call of a function; ``done`` is set when it has returned or raised."""

    fn: Callable[[], Any]
    on_done: Callable[[], None] = lambda: None
    done: threading.Event = field(default_factory=threading.Event)
    value: Any = None
    error: BaseException | None = None
    future: Future | None = None
    """The coroutine that the call waits for."""

    def run(self) -> None:
        import torch

        this_thread.call = self
        try:
            with torch.no_grad():
                self.value = self.fn()
        except (
            BaseException
        ) as error:  # SystemExit too: sys.exit() in a reward does not end the run
            self.error = error
            is_main = threading.current_thread() is threading.main_thread()
            if is_main and isinstance(error, KeyboardInterrupt):
                raise
        finally:
            self.done.set()
            self.on_done()

    def result(self) -> Any:
        """Value of a finished call. Raises CallError for an exception; GruppoErrors pass
        through."""
        if self.error is None:
            return self.value
        if isinstance(self.error, (CallError, GruppoError)):
            raise self.error
        raise CallError.from_exception(self.error) from self.error

    def abandon(self) -> None:
        """Stop waiting. A coroutine is cancelled; a thread runs on, counted by
        ``abandoned_count``."""
        global _loop
        _abandoned.append(self)
        loop, responded = _loop, threading.Event()
        if self.future is None or loop is None:
            return
        self.future.cancel()
        # A coroutine that blocks (time.sleep, a synchronous request) holds the event loop: later
        # calls get a new one.
        loop.call_soon_threadsafe(responded.set)
        if not responded.wait(0.5):
            with _loop_lock:
                _loop = None if _loop is loop else _loop


class CallThread:
    """A daemon thread that makes one call after another, with the context variables and the CUDA
    device of the thread that started it."""

    was_late = False
    """Whether its thread was left to a late call; further ones are made in another."""
    thread: threading.Thread | None = None

    def start(self, fn: Callable[[], Any], on_done: Callable[[], None] = lambda: None) -> TimedCall:
        call = TimedCall(fn, on_done)
        if self.thread is None:
            self._calls: queue.SimpleQueue[TimedCall | None] = queue.SimpleQueue()
            torch: Any = sys.modules.get("torch")
            device = torch.cuda.current_device() if torch and torch.cuda.is_initialized() else None
            self.thread = threading.Thread(
                target=contextvars.copy_context().run,
                args=(_make_calls, self._calls, device),
                name="gruppo-call",
                daemon=True,
            )
            self.thread.start()
        self._calls.put(call)
        return call

    def stop(self) -> None:
        """End the thread after the calls that were started."""
        if self.thread is not None:
            self._calls.put(None)
            self.thread = None


def _make_calls(calls: queue.SimpleQueue[TimedCall | None], device: int | None) -> None:
    if device is not None:  # the current device is per thread, and a new thread starts at 0
        import torch

        torch.cuda.set_device(device)
    while (call := calls.get()) is not None:
        call.run()


def start_call(fn: Callable[[], Any]) -> TimedCall:
    """Run ``fn`` in a thread of its own."""
    thread = CallThread()
    call = thread.start(fn)
    thread.stop()
    return call


def call_inline(fn: Callable[[], Any]) -> Any:
    """Value of ``fn()``, called in this thread. Raises CallError when it raises."""
    call = TimedCall(fn)
    call.run()
    return call.result()


def call_with_timeout(fn: Callable[[], Any], timeout_s: float | None) -> Any:
    """Value of ``fn()``. Raises CallError when it raises or takes longer. None: no deadline, in the
    caller's thread."""
    if timeout_s is None:
        return call_inline(fn)
    call = start_call(fn)
    if not call.done.wait(timeout_s):
        call.abandon()
        raise late_error(timeout_s)
    return call.result()


def late_error(timeout_s: float) -> CallError:
    return CallError("timeout", f"no answer within {timeout_s:.3g} s")


def interrupt_after(fn: Callable[[], Any], timeout_s: float) -> Any:
    """Value of ``fn()``, code of ours or of libraries; ``CallError`` after ``timeout_s``, when its
    thread is stopped at the next line of Python. Its own exceptions pass."""
    thread = CallThread()
    call = thread.start(fn)
    assert thread.thread is not None
    ident = ctypes.c_ulong(thread.thread.ident or 0)
    thread.stop()
    if not call.done.wait(timeout_s):
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))
        raise late_error(timeout_s)
    if call.error is not None:
        raise call.error
    return call.value


def awaited(value: Any) -> Any:
    """The value; an awaitable is run on the event loop that all async functions share between
    calls, so that a client which one of them opened stays usable in the next step."""
    global _loop
    if not hasattr(value, "__await__"):
        return value

    async def body() -> Any:
        try:
            return await value
        except (SystemExit, KeyboardInterrupt) as error:  # it would end the event loop
            raise CallError.from_exception(error) from error

    with _loop_lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="gruppo-loop", daemon=True).start()
        future = this_thread.call.future = asyncio.run_coroutine_threadsafe(body(), _loop)
    return future.result()


def abandoned_count() -> int:
    """Number of calls that are past their deadline and still running."""
    _abandoned[:] = [call for call in _abandoned if not call.done.is_set()]
    return len(_abandoned)


def error_message(error: BaseException | None) -> str:
    """What an exception says; "" for one that cannot say it."""
    try:
        return str(error).strip()
    except Exception:
        return ""


def describe_error(error: BaseException) -> str:
    """One line without control characters: the error, and the file and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    lines = error_message(error).splitlines() or [""]
    hint = ""
    # math-verify raises an error of its own from Python's
    causes = error_message(error) + error_message(error.__cause__)
    if "signal only works in main thread" in causes:
        hint = (
            "; it sets a signal, which needs a main thread: give the function as file.py:name, "
            "with --scoring.isolate, or set --scoring.timeout-s None"
        )
    return f"{type(error).__name__}: {visible(lines[0][:300])}{place}{hint}"


def accepted_keywords(fn: Callable[..., Any], what: str) -> tuple[Mapping[str, bool], bool]:
    """Keywords of a function, each with whether it is required; and whether it takes any keyword.

    ``what`` is what errors call the function.
    """
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{what} has no readable signature ({error}); wrap it in a def with named arguments."
        ) from None
    positional = [
        p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty
    ]
    if positional:
        raise DataError(f"""{what} takes {positional[0]!r} by position only, but is called with
            keywords. Write it as def f(name, **kwargs).""")
    named = {
        p.name: p.default is p.empty
        for p in parameters
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)


def function_name(fn: Any) -> str:
    """Name for metrics: ``__name__``, through ``functools.partial``, else the name of the type."""
    fn = getattr(fn, "func", fn)
    return getattr(fn, "__name__", type(fn).__name__).strip("<>")


def require_columns(
    what: str, parameters: Mapping[str, bool], columns: Collection[str], provided: Sequence[str]
) -> None:
    """Refuse a function, such as "reward 'mine'", that requires a keyword which is no column of the
    data."""
    known = [*columns, *provided]
    for name, is_required in parameters.items():
        if is_required and name not in known:
            has = ", ".join(sorted(columns)) or "no columns"
            if provided:
                has += f" (and every {what.split()[0]} can ask for {', '.join(provided)})"
            raise DataError(f"""{what} asks for {name!r}, which the data do not have; they have:
                {has}.{did_you_mean(name, known)} Rename the argument, give it a default, or add
                the column.""")
