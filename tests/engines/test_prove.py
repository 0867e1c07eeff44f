"""Servers that do not hold the published weights, or do not report what they sampled from: the
proof refuses each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests import tiny
from tests.engines.fake_vllm import FakeServer, load_weights, score
from tests.engines.test_vllm import SAMPLING

from gruppo.engines.vllm import Proof, VllmEngine, prove
from gruppo.modalities.text import TextPolicy, from_pretrained
from gruppo.types import EngineLost, Prompt

PROMPTS = [Prompt(str(n), f"{n} + {n * n % 17} = ?") for n in range(40)]


@pytest.fixture(autouse=True)
def few_probes(monkeypatch):
    monkeypatch.setattr(prove, "PROBES", 12)


@pytest.fixture
def policy() -> TextPolicy:
    return from_pretrained(tiny.model(seed=1), compute="float32")


@pytest.fixture
def servers() -> Iterator[list[FakeServer]]:
    started = [FakeServer(tiny.model(seed=1)) for _ in range(2)]
    yield started
    for server in started:
        server.close()


@pytest.fixture
def engine(servers, policy, tmp_path) -> Iterator[VllmEngine]:
    proof = Proof(policy, PROMPTS, SAMPLING, max_mismatch=0.2)
    engine = VllmEngine(
        policy, [server.url for server in servers], tmp_path / "published", proof=proof, timeout_s=5
    )
    engine.check(32)
    yield engine
    engine.close()


@torch.no_grad()
def update(policy: TextPolicy, size: float, seed: int) -> None:
    """Change every weight by noise of this relative size."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.module.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter += size * parameter.square().mean().sqrt() * noise
    policy.refresh(force=True)


def canaries(server: FakeServer) -> int:
    folders = [
        body["kwargs"]["weights_path"] for path, body in server.log if path == "/collective_rpc"
    ]
    return sum("canary" in folder for folder in folders)


def rounded(server: FakeServer, nats: float) -> None:
    """Give the log-probs of prompts noise that depends on the tokens and, in part, on the
    weights."""

    def answer(path: str, body: Any, answer: Any) -> Any:
        for place, entry in enumerate(
            answer.get("prompt_logprobs") or () if isinstance(answer, dict) else ()
        ):
            for value in (entry or {}).values():
                address = (*body["token_ids"], place)
                kept, new = (
                    random.Random(hash(address)),
                    random.Random(hash((*address, value["logprob"]))),
                )
                value["logprob"] += nats * (0.8 * kept.gauss(0, 1) + 0.6 * new.gauss(0, 1))
        return answer

    server.answer = answer


# --- good servers ---


def test_good_servers_are_admitted_by_one_canary_and_proved_by_each_update(engine, servers, policy):
    for version in range(4):
        engine.sync(policy, version)
        metrics = engine.metrics()
        assert all(replica.label for replica in engine.replicas)
        assert metrics["engine/proof_slope"] == pytest.approx(1, abs=1e-3)
        assert metrics["engine/undecided"] == 0
        update(policy, 1e-3, version)
    assert [canaries(server) for server in servers] == [1, 1]


def test_the_weights_are_the_same_after_a_canary_and_random_numbers_too(engine, policy):
    before = {name: tensor.clone() for name, tensor in policy.module.state_dict().items()}
    state = torch.get_rng_state()
    engine.sync(policy, 0)
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in policy.module.state_dict().items()
    )
    assert torch.equal(state, torch.get_rng_state())


def test_updates_that_prove_nothing_for_long_bring_a_canary(engine, servers, policy, monkeypatch):
    monkeypatch.setattr(prove, "UNDECIDED", 3)
    monkeypatch.setattr(prove, "LEAST_NATS", 0.01)
    for server in servers:
        rounded(server, 0.005)
    undecided = []
    for version in range(5):
        engine.sync(policy, version)
        undecided.append(engine.metrics()["engine/undecided"])
        assert all(replica.label for replica in engine.replicas)
        update(policy, 1e-6, version)
    assert undecided == [0, 2, 2, 2, 0]
    assert [canaries(server) for server in servers] == [2, 2]


# --- servers with a fault from the beginning ---


def stale_head(policy: TextPolicy, weights: dict[str, torch.Tensor]) -> None:
    policy.module.load_state_dict(
        {name: x for name, x in weights.items() if name != "lm_head.weight"}, strict=False
    )


def without_layer(policy: TextPolicy, weights: dict[str, torch.Tensor]) -> None:
    policy.module.load_state_dict(
        {name: x for name, x in weights.items() if ".layers.1." not in name}, strict=False
    )


def nothing(policy: TextPolicy, weights: dict[str, torch.Tensor]) -> None:
    pass


class Before:
    """Loads the weights that it was given the time before."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    def __call__(self, policy: TextPolicy, weights: dict[str, torch.Tensor]) -> None:
        load_weights(policy, self.weights or weights)
        self.weights = weights


def another_model(policy: TextPolicy, weights: dict[str, torch.Tensor]) -> None:
    policy.module.load_state_dict(
        from_pretrained(tiny.model(seed=5), compute="float32").module.state_dict()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (stale_head, "lm_head was not loaded"),
        (without_layer, "model.layers.1 was not loaded"),
        (nothing, "nothing of it was loaded"),
        (Before(), "does not hold the weights"),
        (another_model, "does not hold the weights"),
    ],
    ids=["stale head", "one layer", "nothing", "previous version", "another model"],
)
def test_a_server_that_loads_wrongly_is_refused_by_the_canary_which_names_what(
    engine, servers, policy, load, reason
):
    servers[1].load = load
    engine.sync(policy, 0)
    good, bad = engine.replicas
    assert good.label == good.label_of(engine.label)
    assert bad.label is None
    assert reason in bad.why


def test_where_no_server_passes_the_run_ends_and_says_why(engine, servers, policy):
    for server in servers:
        server.load = stale_head
    with pytest.raises(EngineLost, match=r"lm_head was not loaded.*lm_head was not loaded"):
        engine.sync(policy, 0)


def test_two_addresses_of_swapped_servers_are_refused(engine, servers, policy):
    first, second = servers
    first.post_inference_v1_generate, second.post_inference_v1_generate = (
        second.post_inference_v1_generate,
        first.post_inference_v1_generate,
    )
    with pytest.raises(EngineLost, match=r"it samples from the weights .*-r1.*-r0' was published"):
        engine.sync(policy, 0)


def test_a_cache_that_is_not_cleared_is_refused(engine, servers, policy):
    servers[1].clears_cache = False
    engine.sync(policy, 0)
    assert [replica.label is None for replica in engine.replicas] == [False, True]
    assert "prefix cache" in engine.replicas[1].why


def raw(server: FakeServer) -> Callable[[str, Any, Any], Any]:
    def answer(path: str, body: Any, answer: Any) -> Any:
        if path.endswith("generate") and body["sampling_params"].get("prompt_logprobs") is None:
            content = answer["choices"][0]["logprobs"]["content"]
            ids = [*body["token_ids"], *answer["choices"][0]["token_ids"]]
            for entry, logprob in zip(
                content, score(server.policy, ids)[-len(content) :], strict=True
            ):
                entry["logprob"] = logprob
        return answer

    return answer


def off_by_one(server: FakeServer) -> Callable[[str, Any, Any], Any]:
    def answer(path: str, body: Any, answer: Any) -> Any:
        if path.endswith("generate") and body["sampling_params"].get("prompt_logprobs") is None:
            content = answer["choices"][0]["logprobs"]["content"]
            logprobs = [entry["logprob"] for entry in content]
            for entry, logprob in zip(content, [*logprobs[1:], logprobs[0]], strict=True):
                entry["logprob"] = logprob
        return answer

    return answer


@pytest.mark.parametrize("report", [raw, off_by_one])
def test_log_probs_that_are_not_those_of_sampling_are_refused(engine, servers, policy, report):
    servers[1].answer = report(servers[1])
    engine.sync(policy, 0)
    assert [replica.label is None for replica in engine.replicas] == [False, True]
    assert "log-probs of tokens that it samples" in engine.replicas[1].why


# --- servers that fail later ---


@pytest.mark.slow
@pytest.mark.parametrize(
    "load", [nothing, Before(), another_model], ids=["nothing", "previous version", "another"]
)
def test_a_server_that_begins_to_load_wrongly_is_left_out_at_once_and_comes_back(
    engine, servers, policy, load
):
    for version in range(3):
        engine.sync(policy, version)
        update(policy, 3e-3, version)
    if isinstance(load, Before):
        load(servers[1].policy, servers[1].policy.module.state_dict())
    servers[1].load = load
    engine.sync(policy, 3)
    assert [replica.label is None for replica in engine.replicas] == [False, True]
    servers[1].load = load_weights
    update(policy, 3e-3, 3)
    engine.sync(policy, 4)
    assert all(replica.label for replica in engine.replicas)
    assert canaries(servers[0]) == 1


def test_a_server_that_fails_to_load_once_is_loaded_again_by_way_of_a_canary(
    engine, servers, policy
):
    engine.sync(policy, 0)
    update(policy, 3e-3, 0)
    loads = []

    def load(other: TextPolicy, weights: dict[str, torch.Tensor]) -> None:
        loads.append(len(loads))
        if len(loads) > 1:
            load_weights(other, weights)

    servers[1].load = load
    engine.sync(policy, 1)
    assert len(loads) == 3  # nothing, the canary, the weights
    assert all(replica.label for replica in engine.replicas)


def test_a_server_that_was_ejected_needs_a_canary(engine, servers, policy):
    engine.sync(policy, 0)
    engine._run(engine._eject(engine.replicas[1], "it hung"))
    update(policy, 3e-3, 0)
    engine.sync(policy, 1)
    assert [canaries(server) for server in servers] == [1, 2]
    assert all(replica.label for replica in engine.replicas)
