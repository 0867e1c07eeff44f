"""Servers on the trainer's GPU: they sleep while it updates, and wake to the next weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests import tiny
from tests.engines.fake_vllm import FakeServer, Fault
from tests.trainer import runs

from gruppo import api
from gruppo.trainer import update
from gruppo.types import GruppoError


class Sleeper(FakeServer):
    """A server with vLLM's sleep mode: at level 2 its weights are lost, and it samples only when
    all of it is awake."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.asleep: set[str] = set()
        self.wakes: list[Any] = []
        self.sleep_mode = True

    def get_server_info(self, body: Any, query: Any) -> Any:
        info = super().get_server_info(body, query)
        info["vllm_config"]["model_config"]["enable_sleep_mode"] = self.sleep_mode
        return info

    def post_sleep(self, body: Any, query: Any) -> Any:
        assert query == {"level": "2", "mode": "abort"}
        self.asleep, self.is_paused = {"weights", "kv_cache"}, True
        with torch.no_grad():
            for parameter in self.policy.module.parameters():
                parameter.zero_()
        return {"status": "sleeping", "level": 2}

    def post_wake_up(self, body: Any, query: Any) -> Any:
        self.wakes.append(query.get("tags"))
        self.asleep -= {query["tags"]} if query else {"weights", "kv_cache"}
        self.is_paused = self.is_paused and bool(
            self.asleep
        )  # vLLM resumes once all of it is awake
        return {"status": "sleeping" if self.asleep else "awake"}

    def post_collective_rpc(self, body: Any, query: Any) -> Any:
        assert self.asleep in (set(), {"kv_cache"})
        return super().post_collective_rpc(body, query)

    def post_resume(self, body: Any, query: Any) -> Any:
        assert not self.asleep
        return super().post_resume(body, query)


@pytest.fixture
def server() -> Iterator[Sleeper]:
    server = Sleeper(tiny.model())
    yield server
    server.close()


def config(tmp_path: Any, server: Sleeper, **changes: Any) -> Any:
    served = {"engine__kind": "vllm", "engine__urls": [server.url], "engine__colocated": True}
    return tiny.config(tmp_path, **served | {"steps": 2, "compute": "float32"} | changes)


@pytest.mark.slow
def test_a_server_sleeps_from_the_last_sample_of_a_step_until_its_next_weights(
    tmp_path, server, monkeypatch
):
    learn, asleep = update.backward, []

    def backward(*args: Any, **how: Any) -> Any:
        asleep.append(sorted(server.asleep))
        return learn(*args, **how)

    monkeypatch.setattr(update, "backward", backward)
    folder = api.start(config(tmp_path, server)).folder
    assert asleep and all(parts == ["kv_cache", "weights"] for parts in asleep)
    paths = [path for path, _ in server.log]
    begin = paths.index("/sleep")
    woken = [
        path
        for path in paths[begin:]
        if path not in ("/health", "/metrics", "/inference/v1/generate")
    ]
    assert woken[:8] == [
        *(
            "/sleep",
            "/wake_up",
            "/pause",
            "/collective_rpc",
            "/reset_prefix_cache",
            "/update_weight_version",
        ),
        *("/wake_up", "/resume"),
    ]
    assert server.wakes == [
        None,
        *["weights", "kv_cache"] * 2,
    ]  # at first, a server that a dead run left asleep
    assert paths.count("/sleep") == 2 and not server.asleep  # the last weights are published too
    plain = FakeServer(tiny.model())
    other = tiny.config(
        tmp_path,
        engine__kind="vllm",
        engine__urls=[plain.url],
        steps=2,
        compute="float32",
        name="b",
    )
    weights = runs.weights(api.start(other).folder)
    plain.close()
    assert torch.equal(runs.weights(folder), weights)


def test_a_server_that_a_dead_run_left_asleep_is_woken(tmp_path, server):
    server.post_sleep({}, {"level": "2", "mode": "abort"})
    api.start(config(tmp_path, server, steps=1))
    assert not server.asleep


def test_a_server_that_cannot_sleep_is_refused_before_the_first_step_and_later_left_out(
    tmp_path, server
):
    server.sleep_mode = False
    with pytest.raises(
        GruppoError, match=r"cannot sleep, .* gruppo serve MODEL -- --enable-sleep-mode, or leave"
    ):
        api.start(config(tmp_path, server))
    server.sleep_mode = True

    def fail(path: str, body: Any) -> None:
        if path == "/sleep" and len([1 for asked, _ in server.log if asked == "/sleep"]) == 1:
            raise Fault(500)

    server.before = fail
    rows = api.start(config(tmp_path, server, name="again")).folder / "metrics.jsonl"
    assert (
        rows.read_text().count('"engine/servers_count": 1.0') == 2
    )  # and used again with the next weights


def test_explain_splits_the_memory_of_one_gpu(tmp_path, server):
    text = "\n".join(api.explain(config(tmp_path, server)))
    assert "one GPU of 80.0 GiB: trainer " in text
    assert "--enable-sleep-mode --gpu-memory-utilization 0.96" in text  # 3 GiB of 80 are reserved
    assert "one GPU" not in "\n".join(
        api.explain(config(tmp_path, server, engine__colocated=False))
    )
    assert not server.log
