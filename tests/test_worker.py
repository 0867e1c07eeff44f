"""Worker processes: whose answers are read, how much of their output, and what ends with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.rewards.fakes import rollouts_of

from gruppo.rewards import RewardSet, resolve_reward
from gruppo.rewards.remote import RewardWorkers

CODE = r'''
import gc, os, sys, time
from multiprocessing.connection import Connection


def lengths(completions):
    return [float(len(text)) for text in completions]


def forks(completions):
    if os.fork() == 0:
        time.sleep(0.2)  # both go on, and both return
    return lengths(completions)


def forges(completions):
    for item in gc.get_objects():
        if isinstance(item, Connection):
            item.send_bytes(b'{"number": 1, "values": [9.0], "metrics": [], "extras": []}')
    return lengths(completions)


def floods(completions):
    for _ in range(300):
        os.write(1, b"x" * (1 << 20))
    os.write(1, b"\nafter\n")
    return lengths(completions)


def logs_a_lot(completions, log_extra):
    log_extra("text", ["x" * (65 << 20) for _ in completions])
    return lengths(completions)


def leaves_children(completions, answer):
    """A process in the background, as daemons are started; then a call that does not end."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            null = os.open(os.devnull, os.O_RDWR)
            for number in range(3):
                os.dup2(null, number)
            with open(answer[0], "a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(120)
        os._exit(0)
    with open(answer[0], "a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(120)
'''

TRAINER = """
import resource, sys
from tests.rewards.fakes import rollouts_of
from gruppo.rewards.remote import RewardWorkers
from gruppo.rewards import RewardSet, resolve_reward

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

rewards = RewardSet(resolve_reward(sys.argv[1], RewardWorkers()), timeout_s=60.0)
before = peak()
scores = rewards.score(rollouts_of(["aa"], targets=[sys.argv[2]]))
print("GREW", peak() - before, *scores.rewards.tolist(), file=sys.stderr)
"""


@pytest.fixture
def code(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(CODE)
    return file


def reward(code, name, timeout_s=20.0):
    return RewardSet(resolve_reward(f"{code}:{name}", RewardWorkers()), timeout_s=timeout_s)


def trainer(code, name, output, **options):
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", TRAINER, f"{code}:{name}", str(output)]
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, text=True, **options)


def pids(file: Path, count: int) -> list[int]:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        found = file.read_text().split() if file.exists() else []
        if len(found) >= count:
            return [*map(int, found)]
        time.sleep(0.05)
    raise AssertionError("they were not started")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def end_within(seconds: float, processes: list[int]) -> bool:
    until = time.monotonic() + seconds
    while any(map(is_running, processes)) and time.monotonic() < until:
        time.sleep(0.05)
    left = [pid for pid in processes if is_running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return not left


def test_a_forked_copy_of_a_reward_process_gives_no_answers(code):
    rewards = reward(code, "forks", timeout_s=None)
    for size in (1, 2, 3):
        assert rewards.score(rollouts_of(["a" * size])).rewards.tolist() == [float(size)]
        time.sleep(0.5)  # until the copy has answered too


def test_an_answer_to_another_request_leaves_its_rows_unscored_and_ends_the_process(code):
    scores = reward(code, "forges").score(rollouts_of(["aa"]))
    assert scores.rewards.isnan().all()
    assert "answered another request than the last one" in scores.failures[0].message


def test_an_answer_beyond_the_limit_is_one_line(code):
    scores = reward(code, "logs_a_lot").score(rollouts_of(["aa"]))
    assert scores.rewards.isnan().all()
    assert scores.failures[0].message == "its answer has 65 MiB; 64 MiB are the most"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_output_without_a_line_end_is_cut_and_fills_no_memory(code, tmp_path):
    with (tmp_path / "out").open("w") as output:
        process = trainer(code, "floods", "", stdout=output, stderr=subprocess.PIPE)
        _, errors = process.communicate(timeout=120)
    grew, score = errors.partition("GREW ")[2].split()
    assert int(grew) < 100 and float(score) == 2.0  # MiB
    shown = (tmp_path / "out").read_text()
    assert len(shown) < 100_000 and shown.endswith("(the rest of this line is cut)\nafter\n")


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere, processes that leave the session are not found"
)
def test_a_call_past_its_deadline_ends_with_all_that_it_has_started(code, tmp_path):
    scores = reward(code, "leaves_children", timeout_s=2.0).score(
        rollouts_of(["aa"], targets=[str(tmp_path / "pids")])
    )
    assert scores.rewards.isnan().all()
    assert end_within(10, pids(tmp_path / "pids", 2))


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere, processes that leave the session are not found"
)
def test_a_killed_trainer_leaves_no_process_behind(code, tmp_path):
    process = trainer(code, "leaves_children", tmp_path / "pids", stderr=subprocess.DEVNULL)
    try:
        started = pids(tmp_path / "pids", 2)
    finally:
        process.kill()
        process.wait()
    assert end_within(10, started)
