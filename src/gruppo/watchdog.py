"""Ends this process where a call with a deadline never gives the interpreter lock (GIL) back.

No thread and no signal handler runs then, and ``re.match(r"(a+)+$", "a" * 34 + "b")`` cannot be stopped from inside. A
timer of ``faulthandler``, which needs no lock, writes the traceback to a process that waits for it and kills this one.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

GRACE_S = 30.0
PATIENCE_S = 10.0
"""Seconds between the traceback and the kill. A process that was suspended gets the lock back within them."""

run_folder = ""
"""Folder of the run that is training, for the message."""

# A beat is NUL, a text, and a line end; what follows the last one is the traceback.
_WATCHER = r"""
import os, select, signal, sys
pid, patience, received = int(sys.argv[1]), float(sys.argv[2]), b""
while chunk := os.read(0, 65536):
    received = b"\0" + (received + chunk).rpartition(b"\0")[2]
    text, _, dump = received[1:].partition(b"\n")
    if not dump or not text or select.select([0], [], [], patience)[0]:
        continue
    os.kill(pid, signal.SIGKILL)
    message, _, folder = text.decode(errors="replace").partition("\x1f")
    threads = dump.decode(errors="replace").split("\n\n")
    calls = [thread for thread in threads if "timeouts.py" in thread and " in run\n" in thread]
    message = "\n".join([f"gruppo: {message}", *"\n".join(calls).split("\n")[1:5], ""])
    if os.isatty(2):
        message = "\x1b[?25h\n" + message  # the live screen hides the cursor
    os.write(2, message.encode())
    if folder:
        with open(os.path.join(folder, "log.txt"), "a", encoding="utf-8") as log:
            log.write(message)
    break
"""

_lock = threading.Lock()
_pipe: int | None = None
_waiting = 0
_fires_at = 0.0


@contextmanager
def watching(what: str, timeout_s: float | None) -> Iterator[Callable[[], None]]:
    """Within the block, end the process if the function that it yields is not called for 2 ``timeout_s`` + GRACE_S.

    The caller waits for ``what`` and calls it at least once per ``timeout_s``: a healthy call is over or abandoned by
    then. Without a deadline, nothing is watched.
    """
    global _waiting, _fires_at
    if timeout_s is None or os.name != "posix":
        yield lambda: None
        return
    limit_s = 2 * timeout_s + GRACE_S
    advice = f"Continue with: gruppo resume {run_folder}. " if run_folder else ""
    text = f"""{what} has held Python's interpreter lock (GIL) for {limit_s:g} s, and nothing inside the process can
        stop it: the process was ended. {advice}A function given as file.py:name is stopped alone, by
        --scoring.isolate."""
    beat = f"\0{' '.join(text.split())}\x1f{run_folder and os.path.abspath(run_folder)}\n".encode()

    def arm() -> None:
        global _fires_at
        with _lock:
            now = time.monotonic()
            _fires_at = max(_fires_at, now + limit_s)  # of several calls at the same time, the last
            _send(beat)
            if _pipe is not None:
                faulthandler.dump_traceback_later(_fires_at - now, file=_pipe)

    with _lock:
        _waiting += 1
    try:
        arm()
        yield arm
    finally:
        with _lock:
            _waiting -= 1
            if not _waiting:
                _fires_at = 0.0
                faulthandler.cancel_dump_traceback_later()
                _send(b"\0\n")


def _send(beat: bytes) -> None:
    """Send to the waiting process, which the first beat starts. Where none can be started, nothing is watched."""
    global _pipe
    with suppress(OSError):  # such as a full pipe
        if _pipe is None:
            receiving, _pipe = os.pipe()
            os.set_blocking(_pipe, False)
            command = [
                sys.executable,
                "-I",
                "-S",
                "-c",
                _WATCHER,
                str(os.getpid()),
                str(PATIENCE_S),
            ]
            # a session of its own: Ctrl-C ends the waiting process of a run no earlier than the run
            process = subprocess.Popen(
                command, stdin=receiving, stdout=subprocess.DEVNULL, start_new_session=True
            )
            process.returncode = 0  # never waited for: it ends when this process does
            os.close(receiving)
        os.write(_pipe, beat)


def _after_fork() -> None:
    global _pipe, _waiting, _fires_at, _lock
    if _pipe is not None:
        os.close(_pipe)
    _pipe, _waiting, _fires_at, _lock = None, 0, 0.0, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
