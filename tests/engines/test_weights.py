"""Servers that do not hold the published weights, or do not report what they sampled from: the
check of the weights refuses each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests import processes, tiny
from tests.engines.fake_vllm import FakeServer, load_weights, score
from tests.engines.test_vllm import SAMPLING, asked, requests, require_logprobs
from tests.trainer import runs

from gruppo import api
from gruppo.config import serialization
from gruppo.distributed import collectives, sharding
from gruppo.engines.vllm import VllmEngine, WeightCheck, weights
from gruppo.engines.vllm.client import ServerError
from gruppo.modalities.common.lora import inject
from gruppo.modalities.text import TextPolicy, from_pretrained
from gruppo.types import EngineLost, Prompt

PROMPTS = [Prompt(str(n), f"{n} + {n * n % 17} = ?") for n in range(40)]


@pytest.fixture(autouse=True)
def few_probes(monkeypatch):
    monkeypatch.setattr(weights, "PROBES", 12)


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
    checker = WeightCheck(policy, PROMPTS, SAMPLING, max_mismatch=0.2)
    urls = [server.url for server in servers]
    engine = VllmEngine(policy, urls, tmp_path / "published", checker=checker, timeout_s=5)
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


def left_out(engine: VllmEngine) -> list[bool]:
    return [replica.label is None for replica in engine.replicas]


# --- limits by hand ---


def check_of(new: torch.Tensor, limit: float) -> tuple[WeightCheck, Any]:
    """A check of a server with a measured limit, which was seen to hold log-probs of 0."""
    check = WeightCheck.__new__(WeightCheck)
    check.new = new
    check.refused = set()
    check.standings = {0: weights.Standing(torch.zeros(4), limit, is_measured=True)}
    return check, SimpleNamespace(number=0)


@pytest.mark.parametrize(
    ("server", "is_right"),
    [
        ([2.0, 0, 0, 0], True),
        ([2.0, 0.5, 0, 0], True),  # 0.25 nats root mean square
        ([2.0, 0, 0, 0.7], False),  # 0.35
        ([1.5, 0, 0, 0], True),  # 0.25, and it follows 0.75 of the update
        ([1.0, 0, 0, 0], False),
        ([0.0, 0, 0, 0], False),
        ([2.0, 0, 0, float("nan")], False),
    ],
)
def test_an_error_beyond_the_limit_or_an_update_that_is_not_followed_is_refused(server, is_right):
    check, replica = check_of(torch.tensor([2.0, 0, 0, 0]), 0.3)
    if is_right:
        check.judge(replica, torch.tensor(server))
    else:
        with pytest.raises(ServerError, match="does not hold the weights"):
            check.judge(replica, torch.tensor(server))
    assert check.needs_canary(replica) != is_right and bool(check.refused) != is_right


def test_a_fault_in_the_first_weights_is_not_taken_for_rounding():
    """Three times the error of the first weights is a server's limit, but never more than the
    canary's."""
    check, replica = check_of(torch.full((4,), 0.01), 0.6)
    known = check.standings[0]
    known.is_measured = False
    check.judge(replica, torch.full((4,), 0.5))
    assert known.limit == 0.6
    check.new = torch.full((4,), 0.7)
    with pytest.raises(ServerError, match="does not hold the weights"):
        check.judge(replica, torch.zeros(4))


def test_a_part_that_is_left_behind_is_seen_below_the_limit():
    """An error of 0.29 nats, of an update of 0.65: half of it is not followed."""
    check, replica = check_of(torch.full((4,), 0.65), 0.3)
    with pytest.raises(ServerError, match=r"follow 0\.55 of the update and are 0\.29 nats"):
        check.judge(replica, torch.full((4,), 0.36))


@pytest.mark.parametrize("size", [1e-4, 3e-3, 0.03])
def test_right_servers_are_not_refused_and_no_stale_one_is_used_beyond_three_times_its_rounding(
    size,
):
    """40 of 225 tokens had 97% of the squares of a real update; rounding is partly kept."""
    generator = torch.Generator().manual_seed(0)

    def normal() -> torch.Tensor:
        return torch.randn(192, generator=generator, dtype=torch.float64)

    refused = 0
    for _ in range(20):
        check, replica = check_of(torch.zeros(192, dtype=torch.float64), 3 * 0.05)
        check.standings[0].previous = check.new
        kept = normal()
        stale = 0.05 * normal()
        is_stale_used = True
        for _ in range(30):
            change = normal() * normal().exp()
            check.new = check.new + size * change / change.square().mean().sqrt()
            noise = 0.05 * (0.8 * kept + 0.6 * normal())
            try:
                check.judge(replica, check.new + noise)
            except ServerError:
                refused += 1
            drift = float((stale - check.new).square().mean().sqrt())
            other, _ = check_of(check.new, 3 * 0.05)
            other.standings[0].previous = torch.zeros(192, dtype=torch.float64)
            try:
                other.judge(replica, stale)
            except ServerError:
                is_stale_used = False
            assert drift <= 3 * 0.05 or not is_stale_used
    assert refused == 0


# --- good servers ---


def test_good_servers_are_admitted_by_one_canary_and_checked_at_each_update(
    engine, servers, policy
):
    for version in range(4):
        engine.sync(policy, version)
        metrics = engine.metrics()
        assert left_out(engine) == [False, False]
        assert metrics["engine/error_nats"] < 1e-4
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
@pytest.mark.parametrize("resets", [True, False])
@pytest.mark.parametrize(
    "load",
    [stale_head, without_layer, nothing, Before, another_model],
    ids=["stale head", "one layer", "nothing", "previous version", "another model"],
)
def test_a_server_that_loads_wrongly_is_refused_by_the_canary(
    engine, servers, policy, load, resets
):
    servers[1].has_weight_checker = resets
    servers[1].load = Before() if load is Before else load
    engine.sync(policy, 0)
    good, bad = engine.replicas
    assert good.label == good.label_of(engine.label)
    assert bad.label is None and "does not hold the weights" in bad.why


def test_parameters_are_zeroed_before_each_load_by_servers_that_can(engine, servers, policy):
    servers[1].has_weight_checker = False
    for version in range(2):
        engine.sync(policy, version)
    first, second = ([path for path, _ in server.log] for server in servers)
    loads = [n for n, path in enumerate(first) if path == "/collective_rpc"]
    assert len(loads) == 3 and {first[n - 1] for n in loads} == {"/weight_checker"}
    assert second.count("/weight_checker") == 1  # not asked again


def test_where_no_server_passes_the_run_ends_and_says_why(engine, servers, policy):
    for server in servers:
        server.load = stale_head
    with pytest.raises(EngineLost, match=r"(does not hold the weights.*){2}"):
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
    assert left_out(engine) == [False, True]
    assert "prefix cache" in engine.replicas[1].why


def raw(server: FakeServer, ids: list[int], logprobs: list[float]) -> list[float]:
    return score(server.policy, ids)[-len(logprobs) :]


def off_by_one(server: FakeServer, ids: list[int], logprobs: list[float]) -> list[float]:
    return [*logprobs[1:], logprobs[0]]


def reporting(server: FakeServer, report: Callable[..., list[float]]) -> Callable[..., Any]:
    """Answers with other log-probs of the tokens that are sampled."""

    def answer(path: str, body: Any, answer: Any) -> Any:
        if path.endswith("generate") and body["sampling_params"].get("prompt_logprobs") is None:
            choice = answer["choices"][0]
            content = choice["logprobs"]["content"]
            ids = [*body["token_ids"], *choice["token_ids"]]
            reported = report(server, ids, [entry["logprob"] for entry in content])
            for entry, logprob in zip(content, reported, strict=True):
                entry["logprob"] = logprob
        return answer

    return answer


@pytest.mark.parametrize("report", [raw, off_by_one])
def test_log_probs_that_are_not_those_of_sampling_are_refused(engine, servers, policy, report):
    servers[1].answer = reporting(servers[1], report)
    engine.sync(policy, 0)
    assert left_out(engine) == [False, True]
    assert "log-probs of tokens that it samples" in engine.replicas[1].why


# --- servers that fail later ---


@pytest.mark.slow
@pytest.mark.parametrize("size", [1e-3, 1e-4])
@pytest.mark.parametrize(
    "load",
    [nothing, Before, stale_head, another_model],
    ids=["nothing", "older", "head", "other"],
)
def test_a_server_that_begins_to_load_wrongly_is_left_out_at_once_and_comes_back(
    engine, servers, policy, load, size
):
    servers[1].has_weight_checker = False
    for version in range(3):
        engine.sync(policy, version)
        update(policy, 10 * size, version)
    if load is Before:
        load = Before()
        load(servers[1].policy, servers[1].policy.module.state_dict())
    servers[1].load = load
    engine.sync(policy, 3)
    assert left_out(engine) == [False, True]
    servers[1].load = load_weights
    update(policy, size, 3)
    engine.sync(policy, 4)
    assert left_out(engine) == [False, False]
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
    assert left_out(engine) == [False, False]


def test_a_server_that_was_ejected_needs_a_canary(engine, servers, policy):
    engine.sync(policy, 0)
    engine._run(engine._eject(engine.replicas[1], "it hung"))
    update(policy, 3e-3, 0)
    engine.sync(policy, 1)
    assert [canaries(server) for server in servers] == [1, 2]
    assert left_out(engine) == [False, False]


# --- adapters and sharded weights ---


class Adapters(FakeServer):
    """Leaves the tensors of an adapter with ``skipped`` in their name as a new adapter has them:
    without effect."""

    skipped = ""

    def post_v1_load_lora_adapter(self, body: Any, query: Any) -> Any:
        answer = super().post_v1_load_lora_adapter(body, query)
        for name, parameter in self.adapters[body["lora_name"]].module.named_parameters():
            if self.skipped and self.skipped in name and parameter.requires_grad:
                parameter.data.zero_()
        return answer


def adapter(base: str) -> TextPolicy:
    return from_pretrained(
        base, compute="float32", adapt=partial(inject, rank=2, alpha=4.0, base=base)
    )


@pytest.mark.slow
@pytest.mark.parametrize("skipped", ["layers.1.", "layers."])
def test_a_server_without_a_part_of_an_adapter_is_refused_by_the_canary(tmp_path, skipped):
    base = tiny.model(seed=1)
    policy, servers = adapter(base), [Adapters(base), Adapters(base)]
    servers[1].skipped = skipped
    checker = WeightCheck(policy, PROMPTS, SAMPLING, max_mismatch=0.2)
    urls = [server.url for server in servers]
    engine = VllmEngine(policy, urls, tmp_path / "published", checker=checker, timeout_s=20)
    engine.check(32)
    engine.sync(policy, 0)
    assert left_out(engine) == [False, True]
    assert "does not hold the weights" in engine.replicas[1].why
    assert asked(servers, "/weight_checker") == [[], []]
    require_logprobs(policy, engine.generate(requests(2, 2), SAMPLING, seed=0))
    engine.close()
    for server in servers:
        server.close()


def train(settings: dict[str, Any]) -> None:
    api.start(serialization.from_dict(settings))


@pytest.mark.slow
def test_two_ranks_with_sharded_weights_publish_what_one_process_does_and_refuse_a_server(
    tmp_path: Path,
):
    """The second server never loads a layer."""
    base = tiny.model(seed=1)
    servers = [FakeServer(base), FakeServer(base)]
    servers[1].load = without_layer
    try:
        for name, count, shard in (("one", 1, "none"), ("two", 2, "fsdp")):
            engine = {"engine__kind": "vllm", "engine__urls": [server.url for server in servers]}
            config = tiny.config(
                tmp_path,
                **engine,
                model=base,
                name=name,
                steps=2,
                compute="float32",
                distributed__shard=shard,
            )
            processes.run_ranks(count, train, serialization.to_dict(config), folder=tmp_path / name)
        one, two = (runs.weights(tmp_path / "runs" / name) for name in ("one", "two"))
        torch.testing.assert_close(two, one, rtol=0, atol=1e-5)
        for name in ("one", "two"):
            assert [
                row["engine/servers_count"] for row in runs.metrics(tmp_path / "runs" / name)[-2:]
            ] == [1, 1]
            log = (tmp_path / "runs" / name / "log.txt").read_text()
            assert "does not hold the weights" in log, log
    finally:
        for server in servers:
            server.close()


def limits_of_the_canary(base: str, file: str) -> None:
    """In bfloat16, of replicated and then of sharded weights."""
    collectives.init(60)
    policy, limits = from_pretrained(base, compute="bfloat16"), []
    check, weights.LEAST_NATS = WeightCheck(policy, PROMPTS, SAMPLING, max_mismatch=0.2), 0.0
    for is_sharded in (False, True):
        if is_sharded:
            policy.shard(partial(sharding.shard, mode="fsdp", device=torch.device("cpu")))
        before = [sharding.local(parameter).clone() for parameter in policy.module.parameters()]
        with check.perturbed(policy):
            limits.append(check.canary_limit)
        after = [sharding.local(parameter) for parameter in policy.module.parameters()]
        assert all(map(torch.equal, before, after))
    if collectives.is_main():
        Path(file).write_text(json.dumps(limits))
    collectives.shutdown()


def test_the_canary_of_sharded_weights_allows_for_rounding_of_both_sides(tmp_path: Path):
    """Once 0, as scores in the compute dtype were held against themselves: every server in bfloat16
    was refused."""
    processes.run_ranks(
        2, limits_of_the_canary, tiny.model(seed=1), str(tmp_path / "limits.json"), folder=tmp_path
    )
    replicated, sharded = json.loads((tmp_path / "limits.json").read_text())
    assert 0.5 * replicated < sharded < 4 * replicated
