"""A call that never gives the interpreter lock back ends its process, with a message that names it."""

from __future__ import annotations

import re
import signal
import time
from contextlib import suppress
from pathlib import Path

from tests import processes
from tests.rewards.fakes import rollouts_of

from gruppo import watchdog
from gruppo.rewards import RewardSet
from gruppo.timeouts import CallError, call_with_timeout


def holds(completions):
    re.match(r"(a+)+$", "a" * 40 + "b")
    return [0.0] * len(completions)


def score_what_holds_the_lock(folder: str) -> None:
    watchdog.GRACE_S, watchdog.PATIENCE_S, watchdog.run_folder = 0.2, 0.2, folder
    RewardSet(holds, timeout_s=0.1).score(rollouts_of("a"))


def test_a_call_that_holds_the_lock_past_its_deadline_ends_the_process_and_names_the_function(tmp_path):
    child = processes.start(score_what_holds_the_lock, str(tmp_path), folder=tmp_path / "child")
    assert child.wait() == -signal.SIGKILL
    assert child.err.startswith("gruppo: reward 'holds' has held Python's interpreter lock (GIL) for 0.4 s")
    assert f"gruppo resume {tmp_path}" in child.err and "test_watchdog.py" in child.err and "in holds" in child.err
    assert (tmp_path / "log.txt").read_text() == child.err  # what the next command can point to


def suspend_in_a_call(folder: str) -> None:
    watchdog.GRACE_S, watchdog.PATIENCE_S = 0.2, 5.0
    with suppress(CallError):  # its deadline is over too
        call_with_timeout(lambda: Path(folder, "called").touch() or time.sleep(0.2), 1.0)
    Path(folder, "done").touch()


def test_a_process_that_was_suspended_past_the_limit_goes_on(tmp_path):
    """Its timer has run out when it continues, and it holds no lock."""
    child = processes.start(suspend_in_a_call, str(tmp_path), folder=tmp_path / "child")
    child.wait_for((tmp_path / "called").exists)
    child.send(signal.SIGSTOP)
    time.sleep(2 * 1.0 + 0.2 + 0.3)
    child.send(signal.SIGCONT)
    assert child.wait() == 0 and (tmp_path / "done").exists()


def long_calls() -> None:
    watchdog.GRACE_S, watchdog.PATIENCE_S = 0.0, 0.0
    call_with_timeout(lambda: time.sleep(0.5), None)


def test_a_call_without_a_deadline_is_not_watched(tmp_path):
    assert processes.start(long_calls, folder=tmp_path).wait() == 0
