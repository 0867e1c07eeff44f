"""A call that never gives the interpreter lock back ends its process, with a message that names it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time

from tests import processes
from tests.rewards.fakes import rollouts_of

from gruppo import watchdog
from gruppo.rewards import RewardSet
from gruppo.timeouts import call_with_timeout


def holds(completions):
    re.match(r"(a+)+$", "a" * 40 + "b")
    return [0.0] * len(completions)


def score_what_holds_the_lock(folder: str) -> None:
    watchdog.GRACE_S, watchdog.PATIENCE_S, watchdog.run_folder = 0.2, 0.2, folder
    RewardSet(holds, timeout_s=0.1).score(rollouts_of("a"))


def test_a_call_that_holds_the_lock_past_its_deadline_ends_the_process_and_names_the_function(
    tmp_path,
):
    child = processes.start(score_what_holds_the_lock, str(tmp_path), folder=tmp_path / "child")
    assert child.wait() == -signal.SIGKILL
    assert child.err.startswith(
        "gruppo: reward 'holds' has held Python's interpreter lock (GIL) for 0.4 s"
    )
    assert (
        f"gruppo resume {tmp_path}" in child.err
        and "test_watchdog.py" in child.err
        and "in holds" in child.err
    )
    assert (tmp_path / "log.txt").read_text() == child.err  # what the next command can point to


def test_a_process_that_was_suspended_past_the_limit_goes_on():
    """Its timer runs out when it continues; it holds no lock, and says so within the patience."""
    sleeper = subprocess.Popen(["sleep", "60"])
    command = [sys.executable, "-I", "-S", "-c", watchdog._WATCHER, str(sleeper.pid), "2.0"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    ) as watcher:
        assert watcher.stdin is not None
        watcher.stdin.write(b"\0it hangs\x1f\nTimeout!\nThread 1\n")
        time.sleep(0.3)
        watcher.stdin.write(b"\0it hangs\x1f\n")
        time.sleep(0.3)
        assert sleeper.poll() is None
        watcher.stdin.write(b"Timeout!\nThread 1\n")
        assert sleeper.wait(30) == -signal.SIGKILL


def long_calls() -> None:
    watchdog.GRACE_S, watchdog.PATIENCE_S = 0.0, 0.0
    call_with_timeout(lambda: time.sleep(0.5), None)


def test_a_call_without_a_deadline_is_not_watched(tmp_path):
    assert processes.start(long_calls, folder=tmp_path).wait() == 0
