"""Calls of Python objects with a soft deadline, in threads.

Daemon threads, not signals: they work outside the main thread and never keep a process alive. A
call that is late is left behind; one that hangs in C and keeps the interpreter lock stops
everything, which only ``gruppo.worker`` survives.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import difflib
import inspect
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gruppo.errors import DataError, GruppoError
from gruppo.loading import visible

FailureKind = Literal["exception", "timeout", "count", "not_finite"]
this_thread = threading.local()
"""``call``: the call that this thread makes, if any."""
_abandoned: list[TimedCall] = []
_loop: asyncio.AbstractEventLoop | None = None
_loop_thread: threading.Thread | None = None
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
    """One call of a function, in a daemon thread or in the caller's."""

    fn: Callable[[], Any]
    timeout_s: float | None = None
    on_done: Callable[[], None] = lambda: None
    done: threading.Event = field(default_factory=threading.Event)
    started: float = field(default_factory=time.monotonic)
    value: Any = None
    error: BaseException | None = None
    future: Future | None = None
    """The coroutine that the call waits for."""
    thread: threading.Thread | None = None

    def run(self, device: int | None = None) -> None:
        import torch

        if device is not None:
            torch.cuda.set_device(
                device
            )  # the current device is per thread, and a new thread starts at 0
        this_thread.call = self
        try:
            with torch.no_grad():
                self.value = self.fn()
        except (
            BaseException
        ) as error:  # SystemExit too: a reward that calls sys.exit() does not end the run
            self.error = error
            if (
                isinstance(error, KeyboardInterrupt)
                and threading.current_thread() is threading.main_thread()
            ):
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
        if self.future is None or _loop is None:
            return
        self.future.cancel()
        # A coroutine that blocks (time.sleep, a synchronous request) holds the event loop: later
        # calls get a new one.
        loop, responded = _loop, threading.Event()
        loop.call_soon_threadsafe(responded.set)
        if not responded.wait(0.5):
            with _loop_lock:
                _loop = None if _loop is loop else _loop


def start_call(
    fn: Callable[[], Any],
    timeout_s: float | None = None,
    *,
    on_done: Callable[[], None] = lambda: None,
    inline: bool = False,
) -> TimedCall:
    """Run ``fn`` in a daemon thread of its own, with the caller's context variables and CUDA
    device.

    With ``inline``, run it to its end in the caller's thread.
    """
    call = TimedCall(fn, timeout_s, on_done)
    if inline:
        call.run()
    else:
        torch = sys.modules.get("torch")
        device = (
            torch.cuda.current_device()
            if torch is not None and torch.cuda.is_initialized()
            else None
        )
        run = contextvars.copy_context().run
        call.thread = threading.Thread(
            target=run, args=(call.run, device), name="gruppo-reward", daemon=True
        )
        call.thread.start()
    return call


def call_with_timeout(fn: Callable[[], Any], timeout_s: float | None) -> Any:
    """Value of ``fn()``. Raises CallError when it raises or takes longer. None: no deadline, in the
    caller's thread."""
    call = start_call(fn, timeout_s, inline=timeout_s is None)
    if not call.done.wait(timeout_s):
        call.abandon()
        raise CallError("timeout", f"no answer within {timeout_s:.3g} s")
    return call.result()


def interrupt_after(fn: Callable[[], Any], timeout_s: float) -> Any:
    """Value of ``fn()``, code of ours or of libraries; ``CallError`` after ``timeout_s``, when its
    thread is stopped at the next line of Python. Its own exceptions pass."""
    call = start_call(fn, timeout_s)
    if not call.done.wait(timeout_s):
        assert call.thread is not None
        thread = ctypes.c_ulong(call.thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(SystemExit))
        raise CallError("timeout", f"no answer within {timeout_s:.3g} s")
    if call.error is not None:
        raise call.error
    return call.value


def awaited(value: Any) -> Any:
    """The value, awaited on the shared event loop if it is awaitable."""
    return run_awaitable(value) if hasattr(value, "__await__") else value


def run_awaitable(awaitable: Awaitable[Any]) -> Any:
    """Value of an awaitable, run on the one event loop that all async functions share between
    calls.

    A client that a reward opened on the loop stays usable in the next step.
    """
    global _loop, _loop_thread

    async def body() -> tuple[Any, SystemExit | None]:
        try:
            return await awaitable, None
        except SystemExit as error:  # it would end the event loop
            return None, error

    with _loop_lock:
        if _loop is None or _loop_thread is None or not _loop_thread.is_alive():
            _loop = asyncio.new_event_loop()
            _loop_thread = threading.Thread(
                target=_loop.run_forever, name="gruppo-reward-loop", daemon=True
            )
            _loop_thread.start()
        loop = _loop
    future = this_thread.call.future = asyncio.run_coroutine_threadsafe(body(), loop)
    value, exit_error = future.result()
    if exit_error is not None:
        raise exit_error
    return value


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
    text, hint = error_message(error).splitlines(), ""
    # math-verify raises an error of its own from Python's
    if any(
        "signal only works in main thread" in error_message(cause)
        for cause in (error, error.__cause__)
    ):
        hint = (
            "; it sets a signal, which needs a main thread: give the function as file.py:name, "
            "with --scoring.isolate, "
            "or set --scoring.timeout-s None"
        )
    return f"{type(error).__name__}: {visible(text[0][:300]) if text else ''}{place}{hint}"


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
    for name, is_required in parameters.items():
        if is_required and name not in {*provided, *columns}:
            nearest = difflib.get_close_matches(name, [*columns, *provided], n=1, cutoff=0.5)
            guess = f" Did you mean {nearest[0]!r}?" if nearest else ""
            has = ", ".join(sorted(columns)) or "no columns"
            if provided:
                has += f" (and every {what.split()[0]} can ask for {', '.join(provided)})"
            raise DataError(f"""{what} asks for {name!r}, which the data do not have; they have:
                {has}.{guess} Rename the argument, give it a default, or add the column.""")
