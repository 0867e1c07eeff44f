"""A launch on a local Ray, whose actors run the real commands."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from tests.launch.launches import launch, recipe

from gruppo.launch import supervise
from gruppo.launch.commands import parse_launch
from gruppo.launch.places import InActor, Ray
from gruppo.launch.supervise import Supervisor
from gruppo.tracking.files import read_metrics
from gruppo.types import GruppoError

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
STEPS = 6


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT / "src", ROOT))))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.delenv("GRUPPO_ENGINE_KEY", raising=False)
    monkeypatch.setattr(supervise, "POLL_S", 0.1)
    handler = signal.getsignal(signal.SIGTERM)
    yield
    ray.shutdown()
    signal.signal(signal.SIGTERM, handler)


def test_a_path_that_a_node_lacks_is_one_line(tmp_path, cluster):
    place = Ray(launch(tmp_path, servers=1, server_command="/nowhere/python", on="ray"))
    try:
        with pytest.raises(
            GruppoError,
            match=r"cannot start a process .*No such file .*/nowhere/python.* same paths",
        ):
            place.start_server(0)
    finally:
        place.close()


def test_two_ranks_and_two_servers_run_on_ray_and_recover_from_a_killed_rank_and_a_lost_actor(
    tmp_path, monkeypatch, cluster
):
    file = recipe(tmp_path, steps=STEPS, distributed__shard="fsdp")
    words = [file, "--trainers", "2", "--servers", "2", "--engine.timeout-s", "5", "--on", "ray"]
    server = f"{sys.executable} -m tests.engines.fake_vllm {{model}} {{host}} {{port}}"
    planned = parse_launch([*words, "--server-command", server])
    place = Ray(planned)
    supervisor = Supervisor(planned, place)
    turn, killed = supervisor._turn, []

    def disturb() -> int | None:
        done = (
            max((row["step"] for row in read_metrics(planned.folder)), default=0)
            if supervisor.trainers
            else 0
        )
        if done >= 1 and not killed:
            killed.append(supervisor.servers[0].process)
            ray.kill(killed[0]._actor)
        elif done >= 3 and len(killed) == 1:
            killed.append(supervisor.trainers[1])
            killed[1].kill()
        return turn()

    monkeypatch.setattr(supervisor, "_turn", disturb)
    try:
        assert supervisor.run() == 0
    finally:
        place.close()
    assert len(killed) == 2 and all(isinstance(process, InActor) for process in killed)
    assert len(supervisor.failures) == len(supervisor.servers[0].failures) == 1
    assert [row["step"] for row in read_metrics(planned.folder)] == list(range(1, STEPS + 1))
    names = {"server0", "server1", "trainer0", "trainer1"}
    assert names <= {log.stem for log in (planned.folder / "logs").glob("*.log")}
