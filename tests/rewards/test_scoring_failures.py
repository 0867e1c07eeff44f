"""A failing reward costs the rows that fail, never the run, and never scores 0."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest
from tests.rewards.fakes import rollouts_of

from gruppo import timeouts
from gruppo.rewards import RewardSet


def kinds_of(outcome):
    return [(failure.row, failure.kind) for failure in outcome.failures]


def test_only_the_row_that_raises_is_unscored_and_the_record_names_error_file_and_line():
    def reward(completions):
        return [1.0 / len(text) for text in completions]

    outcome = RewardSet(reward).score(rollouts_of(["a", "", "bb", "c"]))
    assert outcome.rewards.isnan().tolist() == [False, True, False, False]
    assert outcome.parts["reward"].isnan().tolist() == [False, True, False, False]
    assert outcome.rewards[[0, 2, 3]].tolist() == [1.0, 0.5, 1.0]
    assert kinds_of(outcome) == [(1, "exception")]
    line = reward.__code__.co_firstlineno + 1
    assert (
        outcome.failures[0].message
        == f"ZeroDivisionError: float division by zero (test_scoring_failures.py:{line})"
    )
    assert outcome.failures[0].reward == "reward"


def test_an_async_reward_that_leaves_costs_its_rows_and_the_next_call_is_answered():
    async def leaves(completions):
        if "bad" in completions:
            raise SystemExit(3)
        return [1.0] * len(completions)

    outcome = RewardSet(leaves, timeout_s=20).score(rollouts_of(["a", "bad"]))
    assert (
        outcome.rewards.isnan().tolist() == [False, True]
        and "SystemExit: 3" in outcome.failures[0].message
    )


@pytest.mark.parametrize("returned", [[1.0], [1.0, 2.0], [1.0, 2.0, 3.0, 4.0]])
def test_a_wrong_count_fails_every_row_and_is_not_asked_again_row_by_row(returned):
    calls_seen = []

    def reward(completions):
        calls_seen.append(len(completions))
        return returned  # asked about one row alone, [1.0] would pass for its reward

    outcome = RewardSet(reward).score(rollouts_of(["a", "", "bb"]))
    assert calls_seen == [3] and kinds_of(outcome) == [(0, "count"), (1, "count"), (2, "count")]
    assert outcome.rewards.isnan().all()
    assert outcome.failures[0].message == f"returned {len(returned)} rewards for 3 completions"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [(None, "exception"), (0.5, "exception"), ([[0.5]] * 8, "exception"), ([], "count")],
)
def test_an_answer_that_is_no_list_of_numbers_fails_every_row(answer, kind):
    outcome = RewardSet(lambda completions: answer).score(rollouts_of("abcdefgh"))
    assert kinds_of(outcome) == [(row, kind) for row in range(8)]


def test_a_function_that_always_raises_the_same_error_is_called_five_times_and_not_once_per_row():
    calls_seen = []

    def reward(completions):
        calls_seen.append(len(completions))
        raise KeyError("label")

    outcome = RewardSet(reward).score(rollouts_of("x" * 100))
    assert calls_seen == [100, 1, 1, 1, 1]
    assert len(outcome.failures) == 100 and outcome.rewards.isnan().all()


def test_four_bad_rows_at_the_front_with_other_errors_do_not_stop_the_rest():
    def reward(completions):
        if len(completions) > 1:
            raise ValueError("the batch")
        if completions[0] == "bad":
            raise ValueError("a row")
        return [1.0]

    outcome = RewardSet(reward).score(rollouts_of(["bad"] * 5 + ["good"]))
    assert outcome.rewards.isnan().tolist() == [True] * 5 + [False]


def slow(completions):
    if "slow" in completions:
        time.sleep(1.5)
    return [float(len(text)) for text in completions]


@pytest.mark.silent_bug(23)
def test_after_a_timeout_of_the_batch_only_the_hung_rows_are_unscored():
    began = time.monotonic()
    outcome = RewardSet(slow, timeout_s=0.3).score(rollouts_of(["a", "slow", "bb"]))
    assert time.monotonic() - began < 1.2
    assert kinds_of(outcome) == [(1, "timeout")] and outcome.rewards[[0, 2]].tolist() == [1.0, 2.0]
    outcome = RewardSet(slow, timeout_s=0.4).score(rollouts_of(["slow"] * 5 + ["a"]))
    assert "not reached: other rows used up a further 0.4 s" in outcome.failures[-1].message


@pytest.mark.silent_bug(23)
def test_timeouts_work_off_the_main_thread():
    outcomes = []
    reward = RewardSet(slow, timeout_s=0.2)
    thread = threading.Thread(
        target=lambda: outcomes.append(reward.score(rollouts_of(["slow", "a"])))
    )
    thread.start()
    thread.join()
    assert kinds_of(outcomes[0]) == [(0, "timeout")] and outcomes[0].rewards[1] == 1.0


def test_abandoned_calls_are_counted_until_they_end():
    release = threading.Event()
    while before := timeouts.abandoned_count():  # calls of other tests
        time.sleep(0.1)
    with pytest.raises(timeouts.CallError, match="no answer within"):
        timeouts.call_with_timeout(release.wait, 0.05)
    assert timeouts.abandoned_count() == before + 1
    release.set()
    time.sleep(0.1)
    assert timeouts.abandoned_count() <= before


def test_an_async_function_that_hangs_is_cancelled_and_its_rows_time_out():
    cancelled = threading.Event()

    async def reward(completions):
        try:
            await asyncio.sleep(30 if "slow" in completions else 0)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return [1.0] * len(completions)

    outcome = RewardSet(reward, timeout_s=0.3).score(rollouts_of(["slow", "a"]))
    assert kinds_of(outcome) == [(0, "timeout")] and outcome.rewards[1] == 1.0 and cancelled.wait(2)


def test_an_async_function_that_blocks_the_event_loop_does_not_block_the_next_one():
    async def blocks(completions):
        return slow(completions)

    async def works(completions):
        return [1.0] * len(completions)

    assert kinds_of(RewardSet(blocks, timeout_s=0.2).score(rollouts_of(["slow"]))) == [
        (0, "timeout")
    ]
    assert RewardSet(works, timeout_s=1.0).score(rollouts_of(["a"])).rewards.tolist() == [1.0]


def test_without_a_timeout_the_function_runs_in_the_callers_thread_and_failures_stay_per_row():
    threads = []

    def reward(completions):
        threads.append(threading.current_thread())
        return [1.0 / len(text) for text in completions]

    outcome = RewardSet(reward, timeout_s=None).score(rollouts_of(["a", ""]))
    assert set(threads) == {threading.current_thread()} and kinds_of(outcome) == [(1, "exception")]


def test_a_function_that_sets_a_signal_is_told_how_to_run():
    import signal

    def reward(completions):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return [1.0]

    assert (
        "--scoring.timeout-s None" in RewardSet(reward).score(rollouts_of("a")).failures[0].message
    )
    assert RewardSet([reward], timeout_s=None).score(rollouts_of("a")).rewards.tolist() == [1.0]


@pytest.mark.slow
@pytest.mark.silent_bug(23)
def test_a_hung_reward_does_not_keep_the_process_from_exiting():
    code = """
import time
from tests.rewards.fakes import rollouts_of
from gruppo.rewards import RewardSet
async def hangs_too(completions): time.sleep(300)
for fn in (lambda completions: time.sleep(300), hangs_too):
    print([f.kind for f in RewardSet(fn, timeout_s=0.2).score(rollouts_of("ab")).failures])
"""
    path = [p for p in sys.path if p]
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{code}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n")[:2] == ["['timeout', 'timeout']"] * 2
