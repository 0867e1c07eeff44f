"""Users' functions, called with a deadline: in threads, not by signals, which work off the main thread and never keep a
process alive.
"""

from __future__ import annotations

import asyncio
import contextvars
import difflib
import inspect
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import torch

from gruppo.types import DataError, GruppoError

Kind = Literal["exception", "timeout", "count", "not_finite"]
_here = threading.local()
_abandoned: list[Call] = []


class Unanswered(Exception):
    """A call gave no usable answer. Two errors with the same ``identity`` are the same error."""

    def __init__(self, kind: Kind, message: str, identity: Hashable = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.identity = (kind, identity)

    @classmethod
    def of(cls, error: BaseException) -> Unanswered:
        """Of what a function raised."""
        return cls("exception", describe(error), (type(error), str(error)))


class Call:
    """One function call, in a daemon thread or in the caller's own."""

    def __init__(self, fn: Callable[[], Any], on_done: Callable[[], None] = lambda: None) -> None:
        self.fn = fn
        self.on_done = on_done
        self.done = threading.Event()
        self.started = time.monotonic()
        self.value: Any = None
        self.error: BaseException | None = None
        self.future: Future | None = None

    def run(self) -> None:
        _here.call = self
        try:
            with torch.no_grad():
                self.value = self.fn()
        except BaseException as error:  # SystemExit too: a reward that calls sys.exit() does not end the run
            self.error = error
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise
        finally:
            self.done.set()
            self.on_done()

    def result(self) -> Any:
        """The answer of a finished call; Unanswered for an exception. Our own refusals pass through."""
        if self.error is None:
            return self.value
        if isinstance(self.error, (Unanswered, GruppoError)):
            raise self.error
        raise Unanswered.of(self.error) from self.error

    def abandon(self) -> None:
        """Stop waiting. A coroutine is cancelled; a thread cannot be and runs on, counted by ``abandoned_count``."""
        _abandoned.append(self)
        if self.future is not None:
            self.future.cancel()
            _loop.replace_if_stuck()


def start(fn: Callable[[], Any], on_done: Callable[[], None] = lambda: None, *, here: bool = False) -> Call:
    """Run ``fn`` in a daemon thread of its own, with the caller's context variables and CUDA device.

    ``here``: to its end in the caller's thread.
    """
    call = Call(fn, on_done)
    if here:
        call.run()
        return call
    context = contextvars.copy_context()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def body() -> None:
        if device is not None:
            torch.cuda.set_device(device)  # the current device is per thread, and a new thread starts at 0
        context.run(call.run)

    threading.Thread(target=body, name="gruppo-reward", daemon=True).start()
    return call


def within(fn: Callable[[], Any], timeout_s: float | None) -> Any:
    """The value of ``fn()``; Unanswered when it raises or takes longer. None: no deadline, in the caller's thread."""
    call = start(fn, here=timeout_s is None)
    if not call.done.wait(timeout_s):
        call.abandon()
        raise Unanswered("timeout", f"no answer within {timeout_s:.3g} s")
    return call.result()


def wait_for(answer: Awaitable[Any]) -> Any:
    """The value of an awaitable, run on the one event loop that all async functions share from call to call."""

    async def body() -> tuple[Any, SystemExit | None]:
        try:
            return await answer, None
        except SystemExit as error:  # it would end the event loop
            return None, error

    future = asyncio.run_coroutine_threadsafe(body(), _loop.get())
    _here.call.future = future
    value, left = future.result()
    if left is not None:
        raise left
    return value


def abandoned_count() -> int:
    """How many calls are past their deadline and still running."""
    _abandoned[:] = [call for call in _abandoned if not call.done.is_set()]
    return len(_abandoned)


def describe(error: BaseException) -> str:
    """One line: the error, and the file and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = str(error).strip().splitlines()
    hint = ""
    if "signal only works in main thread" in str(error):
        hint = "; it sets a signal: run it in the main thread, without a deadline, with --scoring.timeout-s None"
    return f"{type(error).__name__}: {text[0][:300] if text else ''}{place}{hint}"


def keywords_of(fn: Callable[..., Any], what: str) -> tuple[Mapping[str, bool], bool]:
    """Keyword to "is it required", and whether the function takes all keywords. ``what``: how errors call it."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError) as error:
        raise DataError(f"{what} has no readable signature ({error}); wrap it in a def with named arguments.") from None
    only_by_position = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if only_by_position:
        raise DataError(
            f"{what} takes {only_by_position[0]!r} by position only; such functions are called with keywords. Write it "
            "as def f(name, **kwargs)."
        )
    named = {p.name: p.default is p.empty for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)


def name_of(fn: Any) -> str:
    """The name that metrics carry: ``__name__``, through ``functools.partial``, else the name of the type."""
    fn = getattr(fn, "func", fn)
    return getattr(fn, "__name__", type(fn).__name__).strip("<>")


def missing_column(what: str, name: str, columns: Collection[str], provided: Sequence[str]) -> str:
    """That a function, "reward 'mine'", asks for a column which the data do not have."""
    nearest = difflib.get_close_matches(name, [*columns, *provided], n=1, cutoff=0.5)
    guess = f" Did you mean {nearest[0]!r}?" if nearest else ""
    has = ", ".join(sorted(columns)) or "no columns"
    return (
        f"{what} asks for {name!r}, which the data do not have; they have: {has} (and every {what.split()[0]} can ask "
        f"for {', '.join(provided)}).{guess} Rename the argument, give it a default, or add the column."
    )


class _SharedLoop:
    """An event loop in a daemon thread. A client that a reward opened on it stays usable in the next step."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread: threading.Thread | None = None

    def get(self) -> asyncio.AbstractEventLoop:
        with self.lock:
            if self.loop is None or self.thread is None or not self.thread.is_alive():
                self.loop = asyncio.new_event_loop()
                self.thread = threading.Thread(target=self.loop.run_forever, name="gruppo-reward-loop", daemon=True)
                self.thread.start()
            return self.loop

    def replace_if_stuck(self, patience_s: float = 0.5) -> None:
        """A coroutine that blocks (time.sleep, a plain request) holds the loop; later calls get a new one."""
        with self.lock:
            loop = self.loop
        if loop is None:
            return
        answered = threading.Event()
        loop.call_soon_threadsafe(answered.set)
        if not answered.wait(patience_s):
            with self.lock:
                if self.loop is loop:
                    self.loop = None


_loop = _SharedLoop()
