"""Servers that die, hang or answer wrongly: no row is lost, doubled or changed, and none is waited
for without end."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import processes, tiny
from tests.engines.fake_vllm import RESET, SLOW, TRUNCATED, FakeServer, Fault, engine_of
from tests.engines.test_vllm import SAMPLING, requests

from gruppo import api
from gruppo.config import serialization
from gruppo.engines.vllm import VllmEngine
from gruppo.engines.vllm import engine as engine_module
from gruppo.engines.vllm import weights as weight_check
from gruppo.modalities.text import TextPolicy, from_pretrained
from gruppo.types import EngineLost, GruppoError, Rollouts

TIMEOUT_S, HANGING_S = 20.0, 3.0
"""The second is waited for: a loaded machine must sample a row of the sound server in less."""


@pytest.fixture(scope="module")
def policy() -> TextPolicy:
    return from_pretrained(tiny.model(seed=1), compute="float32")


@pytest.fixture(autouse=True)
def short_pauses_and_few_probes(monkeypatch):
    monkeypatch.setattr(engine_module, "BACK_OFF_S", 0.001)
    monkeypatch.setattr(weight_check, "PROBES", 6)


@pytest.fixture(scope="module")
def sound() -> Iterator[FakeServer]:
    server = FakeServer(tiny.model())
    yield server
    server.close()


@pytest.fixture(scope="module")
def expected(policy, sound, tmp_path_factory) -> Rollouts:
    """What a sound server samples."""
    engine = engine_of(policy, [sound], tmp_path_factory.mktemp("sound"))
    engine.sync(policy, 1)
    rollouts = engine.generate(requests(3, 2, 3, 2), SAMPLING, seed=0)
    engine.close()
    return rollouts


@contextmanager
def published(
    policy: TextPolicy, *urls: str, folder: Path, timeout_s: float = TIMEOUT_S
) -> Iterator[VllmEngine]:
    engine = engine_of(policy, urls, folder, timeout_s=timeout_s)
    try:
        engine.sync(policy, 1)
        yield engine
    finally:
        engine.close()


def require_same(rollouts: Rollouts, expected: Rollouts) -> None:
    assert torch.equal(rollouts.actions, expected.actions) and torch.equal(
        rollouts.mask, expected.mask
    )
    assert (
        torch.equal(rollouts.group_ids, expected.group_ids) and rollouts.finish == expected.finish
    )
    torch.testing.assert_close(
        rollouts.sampler_logprobs, expected.sampler_logprobs, rtol=0, atol=1e-5
    )


# --- processes that a signal ends or stops --------------------------------------------------------


@contextmanager
def process(moment: int, number: int) -> Iterator[tuple[str, int]]:
    """A server in a process of its own that sends itself a signal at its n-th request: its address
    and process."""

    def serve(send: Any) -> None:
        server = FakeServer(tiny.model())
        numbers = itertools.count(1)  # of requests, which come in several threads
        if number == signal.SIGKILL:
            server.seconds_per_row = (
                10.0  # no row is answered before: fewer than three failures leave it in use
            )

        def before(path: str, body: Any) -> None:
            if path != "/metrics" and next(numbers) == moment:
                os.kill(os.getpid(), number)

        server.before = before
        send.send(server.url)
        threading.Event().wait()

    receive, send = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=serve, args=(send,), daemon=True)
    child.start()
    try:
        yield receive.recv(), child.pid or 0
    finally:
        child.kill()
        child.join()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX")
@pytest.mark.parametrize("moment", range(1, 11))
def test_a_server_killed_at_any_of_its_requests_costs_nothing_but_time(
    policy, sound, expected, tmp_path, moment
):
    """The first six are those of a publish, the others those of rows."""
    with (
        process(moment, signal.SIGKILL) as (url, _),
        published(policy, url, sound.url, folder=tmp_path) as engine,
    ):
        require_same(engine.generate(requests(3, 2, 3, 2), SAMPLING, seed=0), expected)
        assert [replica.label is None for replica in engine.replicas] == [True, False]
        engine.sync(policy, 2)  # it is gone for good
        require_same(engine.generate(requests(3, 2, 3, 2), SAMPLING, seed=0), expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX")
@pytest.mark.parametrize("moment", [3, 8], ids=["as it loads", "as it samples"])
def test_a_stopped_server_is_left_and_taken_back_with_the_next_weights(
    policy, sound, expected, tmp_path, moment
):
    with (
        process(moment, signal.SIGSTOP) as (url, pid),
        published(policy, url, sound.url, folder=tmp_path, timeout_s=HANGING_S) as engine,
    ):
        require_same(
            engine.generate(requests(3, 2, 3, 2), SAMPLING, seed=0), expected
        )  # returns while it is stopped
        assert engine.replicas[0].label is None
        assert ("no token" if moment == 8 else "had no answer within 3") in engine.replicas[0].why
        os.kill(pid, signal.SIGCONT)
        engine.sync(policy, 2)
        assert all(replica.label is not None for replica in engine.replicas)
        rollouts = engine.generate(requests(3, 2, 3, 2), SAMPLING, seed=0)
        require_same(rollouts, expected)
        assert torch.equal(rollouts.policy_version, rollouts.mask * 2)


# --- answers --------------------------------------------------------------------------------------


def raising(code: int, times: int = 10**9) -> Callable[[FakeServer], None]:
    """Fail the first requests of rows."""

    def break_server(server: FakeServer) -> None:
        left = [times]

        def before(path: str, body: Any) -> None:
            if path.endswith("generate") and left[0]:
                left[0] -= 1
                raise Fault(code)

        server.before = before

    return break_server


def answering(change: Callable[[Any], Any]) -> Callable[[FakeServer], None]:
    def break_server(server: FakeServer) -> None:
        server.answer = lambda path, body, answer: (
            change(answer) if path.endswith("generate") else answer
        )

    return break_server


def with_choice(**entries: Any) -> Callable[[Any], Any]:
    return lambda answer: {**answer, "choices": [{**answer["choices"][0], **entries}]}


def shortened(answer: Any) -> Any:
    choice = answer["choices"][0]
    return {**answer, "choices": [{**choice, "token_ids": choice["token_ids"][:-1]}]}


FAULTS = {
    "connections are reset": raising(RESET),
    "HTTP 500": raising(500),
    "answers end in their middle": raising(TRUNCATED),
    "answers come a byte at a time": raising(SLOW),
    "something that is not JSON": answering(lambda answer: "<html>busy</html>"),
    "JSON of another kind": answering(lambda answer: {"object": "list"}),
    "aborted": answering(with_choice(finish_reason="abort")),
    "a token is missing": answering(shortened),
    "other weights": answering(
        with_choice(weight_versions=[{"version": "default", "start": 0, "end": 8}])
    ),
    "versions without end": answering(
        with_choice(weight_versions=[{"version": "default", "start": 0, "end": 10**13}])
    ),
    "no version": answering(with_choice(weight_versions=None)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_server_does_not_answer_well_is_sampled_elsewhere(
    policy, sound, expected, tmp_path, fault
):
    broken = FakeServer(tiny.model())
    timeout_s = HANGING_S if "byte at a time" in fault else TIMEOUT_S
    try:
        with published(
            policy, broken.url, sound.url, folder=tmp_path, timeout_s=timeout_s
        ) as engine:
            FAULTS[fault](broken)
            require_same(engine.generate(requests(3, 2, 3, 2), SAMPLING, seed=0), expected)
            assert engine.replicas[0].label is None and engine.replicas[0].why
            broken.before, broken.answer = (
                lambda path, body: None,
                lambda path, body, answer: answer,
            )
            engine.sync(policy, 2)
            assert engine.replicas[0].label is not None
            require_same(engine.generate(requests(3, 2, 3, 2), SAMPLING, seed=0), expected)
    finally:
        broken.close()


def test_a_server_that_was_started_again_is_given_the_weights_again(policy, expected, tmp_path):
    """It is the only one, and holds the weights that it was started with."""
    server = FakeServer(tiny.model())
    port = server.http.server_port
    with published(policy, server.url, folder=tmp_path, timeout_s=20) as engine:
        server.close()
        again = threading.Timer(0.2, lambda: started.append(FakeServer(tiny.model(), port=port)))
        started: list[FakeServer] = []
        again.start()
        require_same(engine.generate(requests(3, 2, 3, 2), SAMPLING, seed=0), expected)
        started[0].close()


def test_a_request_that_every_server_refuses_is_an_error_of_the_request(policy, sound, tmp_path):
    with published(policy, sound.url, folder=tmp_path) as engine:
        raising(400, times=1)(sound)
        with pytest.raises(GruppoError, match=r"refuses a request"):
            engine.generate(requests(1), SAMPLING, seed=0)
        sound.before = lambda path, body: None


# --- runs -----------------------------------------------------------------------------------------


def config(folder: Path, servers: list[FakeServer], **changes: Any) -> Any:
    options = {
        "engine__kind": "vllm",
        "engine__urls": [server.url for server in servers],
        "engine__timeout_s": 3,
    }
    return tiny.config(
        folder, **options, steps=3, evaluation__prompts=0, saving__every=0, **changes
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Iterator[Path]:
    """A run that nothing disturbs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_check, "PROBES", 6)
        servers = [FakeServer(tiny.model()) for _ in range(2)]
        yield api.start(config(tmp_path_factory.mktemp("whole"), servers)).folder
        for server in servers:
            server.close()


def weights(run: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(run / "final/model.safetensors")


def rows(run: Path) -> list[dict[str, Any]]:
    skipped = ("time/", "rate/", "mem/", "engine/")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: x for name, x in line.items() if not name.startswith(skipped)} for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["while rows are sampled", "while weights are published"])
def test_with_no_server_left_a_run_is_saved_and_continues_on_others(
    whole, tmp_path, monkeypatch, moment
):
    servers = [FakeServer(tiny.model()) for _ in range(2)]
    try:
        path = "generate" if moment.startswith("while rows") else "/resume"

        def before(asked: str, body: Any) -> None:
            label = json.dumps(body or {}) if path == "generate" else servers[0].version
            if asked.endswith(path) and "-v2-" in label:
                servers[0].before = servers[1].before = lambda *_: (_ for _ in ()).throw(
                    Fault(RESET)
                )
                raise Fault(RESET)

        for server in servers:
            server.before = before
        with pytest.raises(
            EngineLost, match=r"no vLLM server is left .*, then continue with: .* resume "
        ) as caught:
            api.start(config(tmp_path / "lost", servers))
        assert caught.value.exit_code == 5
        run = tmp_path / "lost/runs/run"
        assert len(rows(run)) == 2
        others = [FakeServer(tiny.model())]
        servers += others
        monkeypatch.setenv("GRUPPO_ENGINE_URLS", others[0].url)
        api.start(run)
        assert rows(run) == rows(whole)
        for name, value in weights(whole).items():
            assert torch.equal(weights(run)[name], value), name
    finally:
        for server in servers:
            server.close()


def start(settings: dict[str, Any]) -> None:
    api.start(serialization.from_dict(settings))


@pytest.mark.slow
def test_two_ranks_sample_from_the_servers_what_one_does(whole, tmp_path):
    """The first rank publishes; each asks for the rows of its own prompts."""
    servers = [FakeServer(tiny.model()) for _ in range(2)]
    try:
        settings = serialization.to_dict(config(tmp_path, servers, name="two"))
        processes.run_ranks(2, start, settings, folder=tmp_path / "two")
        one, two = (weights(run) for run in (whole, tmp_path / "runs/two"))
        for name, value in one.items():
            torch.testing.assert_close(two[name], value, rtol=0, atol=1e-5)
        for mine, theirs in zip(rows(whole), rows(tmp_path / "runs/two"), strict=True):
            assert theirs["reward/mean"] == pytest.approx(mine["reward/mean"])
    finally:
        for server in servers:
            server.close()
