"""Weights that arrive at vLLM servers while they sample: rows keep their tokens and go on with the
new weights."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests import tiny
from tests.engines.fake_vllm import FakeServer, engine_of
from tests.engines.test_vllm import SAMPLING, asked, requests
from tests.trainer import runs

from gruppo import api
from gruppo.config.schema import Config, EngineConfig
from gruppo.engines.vllm import VllmEngine
from gruppo.engines.vllm import engine as engine_module
from gruppo.modalities.common.lora import inject
from gruppo.modalities.text import TextPolicy, from_pretrained
from gruppo.trainer.loop import check_mismatch
from gruppo.types import MicroBatch, NumericalStop, Prompt, Request, Rollouts, Sampling


@pytest.fixture
def servers() -> Iterator[list[FakeServer]]:
    started = [FakeServer(tiny.model()) for _ in range(2)]
    yield started
    for server in started:
        server.close()


def change(policy: TextPolicy) -> None:
    with torch.no_grad():
        for parameter in policy.module.parameters():
            if parameter.requires_grad:
                parameter.add_(
                    0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
                )


def overtaken(
    engine: VllmEngine, policy: TextPolicy, servers: list[FakeServer], sampling: Sampling
) -> Rollouts:
    """Rows that were being sampled from version 1 when version 2 was published."""
    with ThreadPoolExecutor(1) as pool:
        for server in servers:
            server.seconds_per_row = 0.5
        rows = pool.submit(engine.generate, requests(3, 3, 3, 3), sampling, seed=0)
        while not all(asked(servers)):
            time.sleep(0.01)
        for server in servers:
            server.seconds_per_row = 0.0
        change(policy)
        engine.sync(policy, 2)
        return rows.result()


def test_rows_wait_for_a_server_in_the_order_of_their_draws(servers, tmp_path, monkeypatch):
    """A trainer with lag waits for the earliest, and the order in which threads make their calls is
    random."""
    policy, server, draws = (
        from_pretrained(tiny.model(seed=1), compute="float32"),
        servers[0],
        (9, 4, 7, 2),
    )
    monkeypatch.setattr(engine_module, "MAX_INFLIGHT", 2)
    engine = engine_of(policy, [server], tmp_path)
    engine.sync(policy, 1)

    def sample(draw: int) -> tuple[int, ...]:
        engine.generate(
            [Request(Prompt(f"p{draw}", f"{draw} + 1 =", draw=draw), 2)], SAMPLING, seed=0
        )
        return tuple(asked(servers)[0][-1]["token_ids"])

    ids = {sample(draw): draw for draw in draws}
    server.log.clear()
    server.is_paused = True
    with ThreadPoolExecutor(len(draws)) as pool:
        calls = []
        for number, draw in enumerate(draws, 1):
            calls.append(pool.submit(sample, draw))
            while engine.rows_left < 2 * number:
                time.sleep(0.001)
        server.is_paused = False
        [call.result() for call in calls]
    engine.close()
    assert [
        ids[found] for found in dict.fromkeys(tuple(b["token_ids"]) for b in asked(servers)[0])
    ] == [9, 2, 4, 7]


@pytest.mark.parametrize("kind", ["all weights", "adapter"])
def test_rows_that_a_publish_overtakes_keep_their_tokens_with_the_version_that_chose_each(
    servers, tmp_path, kind
):
    adapt = partial(inject, rank=2, alpha=4.0, base=tiny.model()) if kind == "adapter" else None
    policy = from_pretrained(tiny.model(), compute="float32", **({"adapt": adapt} if adapt else {}))
    engine = engine_of(policy, servers, tmp_path, timeout_s=20)
    engine.sync(policy, 1)
    before = copy.deepcopy(policy)
    rollouts = overtaken(engine, policy, servers, SAMPLING)
    versions = torch.where(rollouts.mask, rollouts.policy_version, 0)
    assert set(versions[rollouts.mask].tolist()) == {1, 2}
    lengths = rollouts.lengths.tolist()
    assert all(
        row[:n] == sorted(row[:n]) for row, n in zip(versions.tolist(), lengths, strict=True)
    )
    assert any(set(row[:n]) == {1, 2} for row, n in zip(versions.tolist(), lengths, strict=True))
    micro_batch = MicroBatch(torch.arange(len(rollouts)), slice(0, rollouts.actions.shape[1]))
    for version, weights in ((1, before), (2, policy)):
        own = versions == version
        scored = weights.likelihood(rollouts, micro_batch).logprobs.detach()[own]
        torch.testing.assert_close(scored, rollouts.sampler_logprobs[own], rtol=0, atol=1e-4)
    assert max(lengths) <= SAMPLING.max_actions and engine.repeated == 0
    engine.close()


def test_a_row_with_a_stop_text_that_might_lie_across_two_requests_begins_again(servers, tmp_path):
    policy = from_pretrained(tiny.model(), compute="float32")
    engine = engine_of(policy, servers, tmp_path, timeout_s=20)
    engine.sync(policy, 1)
    rollouts = overtaken(engine, policy, servers, replace(SAMPLING, stop=("##",)))
    assert set(rollouts.policy_version[rollouts.mask].tolist()) == {2}
    engine.close()


@pytest.mark.slow
def test_a_run_with_lag_keeps_the_bound_and_survives_the_loss_of_a_server(servers, tmp_path):
    urls = [server.url for server in servers]
    chosen = tiny.config(
        tmp_path,
        engine__kind="vllm",
        engine__urls=urls,
        engine__lag=1,
        engine__timeout_s=5,
        steps=5,
    )
    chosen = api.change(chosen, {"engine__max_mismatch": 0.01, "rollout__group_size": 8})
    for server in servers:
        server.seconds_per_row = 0.02
    with api.Trainer.open(chosen) as trainer:
        for step in trainer.steps:
            lags = step.step - 1 - step.rollouts.policy_version[step.rollouts.mask]
            assert int(lags.min()) >= 0 and int(lags.max()) <= 1
            if step.step == 2:
                servers[0].close()
        trainer.finish()
    rows = [row for row in runs.metrics(Path(chosen.runs_dir) / chosen.name) if "lag/max" in row]
    assert [row["lag/max"] for row in rows][1:] == [1] * 4
    assert rows[-1]["engine/servers_count"] == 1


@pytest.mark.parametrize(
    ("lag", "mean", "of_lag_0", "count", "stops"),
    [
        (0, 0.3, 0.3, 100, True),
        (0, 0.1, 0.3, 100, False),
        (1, 0.3, 0.1, 100, False),
        (1, 0.1, 0.3, 100, True),
        (1, 0.3, 0.3, 99, False),
        (1, 0.3, math.nan, 0, False),
    ],
)
def test_with_lag_only_actions_of_the_newest_weights_decide_if_there_are_enough(
    lag, mean, of_lag_0, count, stops
):
    engine = EngineConfig("vllm", urls=("http://a",), lag=lag)
    run: Any = SimpleNamespace(config=Config(engine=engine), state=SimpleNamespace(version=3))
    metrics = {"mismatch/mean_nats": mean, "mismatch/lag_0_mean_nats": of_lag_0}
    with pytest.raises(NumericalStop, match=r"are 0\.3 nats") if stops else nullcontext():
        check_mismatch(run, metrics | {"mismatch/lag_0_count": float(count)})
    check_mismatch(run, {})  # only demonstrations were learned from


def test_servers_that_the_first_rank_has_paused_to_publish_are_not_taken_for_hanging(
    servers, tmp_path, monkeypatch
):
    policy = from_pretrained(tiny.model(), compute="float32")
    engine = engine_of(policy, servers[:1], tmp_path, timeout_s=5)
    engine.sync(policy, 1)
    (replica,) = engine.replicas
    replica.inflight, replica.progress_at = 1, 0.0
    engine._is_publishing = True
    engine._run(engine._watch_one(replica, 1.0))
    assert replica.label is not None
    monkeypatch.setattr(engine, "_on_main", lambda *_, **__: None)  # as on ranks after the first
    engine.sync(policy, 2)
    engine._run(engine._watch_one(replica, 1.0))
    assert replica.label is not None
    replica.progress_at = 0.0
    engine._run(engine._watch_one(replica, 1.0))
    assert replica.label is None
    engine.close()


def test_closing_ends_calls_that_are_sampling(servers, tmp_path):
    policy = from_pretrained(tiny.model(), compute="float32")
    engine = engine_of(policy, servers[:1], tmp_path)
    engine.sync(policy, 1)
    servers[0].seconds_per_row = 3.0
    with ThreadPoolExecutor(1) as pool:
        rows = pool.submit(engine.generate, requests(1), SAMPLING, seed=0)
        while not asked(servers)[0]:
            time.sleep(0.01)
        engine.close()
        assert rows.exception(timeout=2.5) is not None
