"""Whole runs under the launcher: two ranks with sharded weights, two servers, and what a kill
changes: nothing."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests import processes
from tests.launch.launches import Forked, recipe
from tests.trainer.runs import weights

from gruppo.launch import supervise
from gruppo.launch.commands import parse_launch
from gruppo.launch.supervise import Supervisor
from gruppo.tracking.files import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name != "posix", reason="signals")]
STEPS = 4


class Started:
    """Forked processes of a launch, by the name of their log; ``disturb`` is called whenever one is
    looked at."""

    def __init__(self, disturb: Callable[[Started], None] = lambda started: None) -> None:
        self.disturb, self.lives = disturb, dict[str, list[Forked]]()

    def __call__(self, command: list[str], env: dict[str, str], output: Path) -> Forked:
        process = Forked(command, env, output)
        plain = process.poll

        def poll() -> int | None:
            self.disturb(self)
            return plain()

        process.poll = poll
        self.lives.setdefault(output.stem, []).append(process)
        return process


def run(
    folder: Path, disturb: Callable[[Started], None] = lambda started: None
) -> tuple[int, Started]:
    """Launch two ranks and two servers; the exit code, and what was started."""
    folder.mkdir()
    words = [
        recipe(folder, steps=STEPS, distributed__shard="fsdp"),
        "--trainers",
        "2",
        "--servers",
        "2",
    ]
    words += ["--engine.timeout-s", "5"]
    planned, started = parse_launch(words), Started(disturb)
    return Supervisor(planned, started).run(), started


def steps_done(folder: Path) -> int:
    file = folder / "runs/run/metrics.jsonl"
    return (
        max((row["step"] for row in read_metrics(file.parent)), default=0) if file.exists() else 0
    )


@pytest.fixture(scope="module", autouse=True)
def quick() -> None:
    supervise.POLL_S = 0.05


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """The weights of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    code, started = run(folder)
    assert code == 0 and {name: len(lives) for name, lives in started.lives.items()} == {
        "server0": 1,
        "server1": 1,
        "trainer0": 1,
        "trainer1": 1,
    }
    assert all(process.poll() is not None for lives in started.lives.values() for process in lives)
    logs = sorted(file.name for file in (folder / "runs/run/logs").glob("*.log"))
    assert logs == ["server0.log", "server1.log", "trainer0.log", "trainer1.log"]
    last = read_metrics(folder / "runs/run")[-1]
    assert last["step"] == STEPS and last["engine/servers_count"] == 2
    assert json.loads((folder / "runs/run/manifest.json").read_text())
    return weights(folder / "runs/run")


def test_a_rank_that_is_killed_leaves_a_run_that_continues_to_the_same_weights(whole, tmp_path):
    killed: list[Forked] = []

    def disturb(started: Started) -> None:
        if not killed and steps_done(tmp_path / "run") >= 2:
            killed.append(started.lives["trainer1"][0])
            killed[0].child.send(signal.SIGKILL)

    code, started = run(tmp_path / "run", disturb)
    assert code == 0 and killed
    assert [len(started.lives[name]) for name in ("server0", "trainer0", "trainer1")] == [1, 2, 2]
    assert [row["step"] for row in read_metrics(tmp_path / "run/runs/run")] == list(
        range(1, STEPS + 1)
    )
    assert torch.equal(weights(tmp_path / "run/runs/run"), whole)


def test_a_server_that_is_killed_is_started_again_and_rejoins(whole, tmp_path):
    """The trainers are stopped until it answers, so that steps are left in which it is used."""
    killed, log = list[Forked](), tmp_path / "run/runs/run/logs/server1.log"
    trainers = list[Forked]()

    def disturb(started: Started) -> None:
        if not killed and steps_done(tmp_path / "run") >= 2:
            killed.append(started.lives["server1"][0])
            killed[0].child.send(signal.SIGKILL)
            trainers.extend(started.lives[f"trainer{rank}"][0] for rank in range(2))
            for process in trainers:
                process.child.send(signal.SIGSTOP)
        elif trainers and len(started.lives["server1"]) == 2 and supervise.answers(url(started)):
            for process in trainers:
                process.child.send(signal.SIGCONT)
            trainers.clear()

    def url(started: Started) -> str:
        return f"http://127.0.0.1:{started.lives['server1'][1].port}"

    code, started = run(tmp_path / "run", disturb)
    assert code == 0 and killed and log.exists()
    assert [
        len(started.lives[name]) for name in ("server0", "server1", "trainer0", "trainer1")
    ] == [1, 2, 1, 1]
    rows = read_metrics(tmp_path / "run/runs/run")
    assert rows[-1]["engine/servers_count"] == 2
    assert torch.equal(weights(tmp_path / "run/runs/run"), whole)


def test_a_launcher_that_is_killed_leaves_a_run_that_the_same_command_continues(tmp_path):
    """Its trainer, a process of the real command, saves and ends; the second launcher waits for
    that."""
    words = ["launch", recipe(tmp_path, steps=STEPS), "--servers", "0"]
    first = processes.gruppo(*words, folder=tmp_path / "first")
    first.wait_for(lambda: steps_done(tmp_path) >= 1)
    assert first.kill() == -signal.SIGKILL
    again = processes.gruppo(*words, folder=tmp_path / "second")
    assert again.wait(120) == 0, again.err
    log = (tmp_path / "runs/run/logs/trainer0.log").read_text()
    assert f"step {STEPS}/{STEPS}" in log and "the run is continued" in again.err
    assert [row["step"] for row in read_metrics(tmp_path / "runs/run")] == list(range(1, STEPS + 1))
    other = recipe(tmp_path, name="alone", steps=STEPS)
    alone = processes.gruppo("train", other, folder=tmp_path / "alone")
    assert alone.wait() == 0
    assert torch.equal(weights(tmp_path / "runs/run"), weights(tmp_path / "runs/alone"))
