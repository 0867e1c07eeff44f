"""The canary of adapters and of sharded weights, and the group of tensors that it names."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import processes, tiny
from tests.engines.fake_vllm import FakeServer
from tests.engines.test_prove import PROMPTS, few_probes, without_layer  # noqa: F401
from tests.engines.test_vllm import SAMPLING, requests, require_logprobs
from tests.trainer import runs

from gruppo import api
from gruppo.config import serialization
from gruppo.distributed import collectives, sharding
from gruppo.engines.vllm import Proof, VllmEngine, prove
from gruppo.modalities.common.lora import inject
from gruppo.modalities.text import TextPolicy, from_pretrained


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
@pytest.mark.parametrize(
    ("skipped", "reason"),
    [("layers.1.", r"layers.1 was not loaded"), ("layers.", "nothing of it was loaded")],
)
def test_a_server_without_a_part_of_an_adapter_is_refused_by_the_canary_which_names_it(
    tmp_path, skipped, reason
):
    base = tiny.model(seed=1)
    policy, servers = adapter(base), [Adapters(base), Adapters(base)]
    servers[1].skipped = skipped
    proof = Proof(policy, PROMPTS, SAMPLING, max_mismatch=0.2)
    engine = VllmEngine(
        policy, [s.url for s in servers], tmp_path / "published", proof=proof, timeout_s=20
    )
    engine.check(32)
    before = {name: tensor.clone() for name, tensor in policy.module.state_dict().items()}
    engine.sync(policy, 0)
    assert engine.replicas[0].label is not None and engine.replicas[1].label is None
    assert (
        "does not hold the weights" in engine.replicas[1].why and reason in engine.replicas[1].why
    )
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in policy.module.state_dict().items()
    )
    require_logprobs(policy, engine.generate(requests(2, 2), SAMPLING, seed=0))
    engine.close()
    for server in servers:
        server.close()


def train(settings: dict[str, Any]) -> None:
    api.start(serialization.from_dict(settings))


@pytest.mark.slow
def test_two_ranks_with_sharded_weights_publish_what_one_process_does_and_name_a_layer(
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
            assert "model.layers.1 was not loaded" in log, log
    finally:
        for server in servers:
            server.close()


def limits_of_the_canary(base: str, file: str) -> None:
    """In bfloat16, of replicated and then of sharded weights."""
    collectives.init(60)
    policy, limits = from_pretrained(base, compute="bfloat16"), []
    proof, prove.LEAST_NATS = Proof(policy, PROMPTS, SAMPLING, max_mismatch=0.2), 0.0
    for is_sharded in (False, True):
        if is_sharded:
            policy.shard(partial(sharding.shard, mode="fsdp", device=torch.device("cpu")))
        before = [sharding.local(parameter).clone() for parameter in policy.module.parameters()]
        with proof.perturbed(policy):
            limits.append(proof.canary_limit)
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
