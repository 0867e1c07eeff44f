"""The estimated memory of a rank is what it holds."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import memory_table
from tests import processes
from torch.distributed.tensor import DTensor

from gruppo import distributed as dist
from gruppo.distributed import sharding
from gruppo.distributed.memory import WeightCounts, gathered_bytes, state_bytes

PAGE = Path(__file__).parents[2] / "docs/guides/many-gpus.md"


def llama(is_tied: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, tie_word_embeddings=is_tied, **sizes))


def held(out: str, *, is_lora: bool, is_tied: bool) -> None:
    """Bytes that this rank holds after a step, and the most that were gathered at a time."""
    dist.init(60)
    model = llama(is_tied)
    if is_lora:  # the layers' norms stand for an adapter
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layernorm" in name)
    sharding.shard(model, mode="fsdp", device=torch.device("cpu"))
    gathered = [0]

    def measure(*_: Any) -> None:
        whole = {id(p): p.nbytes for p in model.parameters() if not isinstance(p, DTensor)}
        gathered.append(sum(whole.values()))

    for block in model.model.layers:
        block.self_attn.register_forward_hook(measure)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    sharding.forward(
        model, lambda: model(torch.arange(8)[None]).logits.float().logsumexp(-1).sum()
    ).backward()
    optimizer.step()
    local = sharding.local
    states = [
        value for state in optimizer.state.values() for value in state.values() if value.dim()
    ]
    result = {
        "weights": sum(local(p).nbytes for p in model.parameters()),
        "gradients": sum(local(p.grad).nbytes for p in trained),
        "AdamW state": sum(local(value).nbytes for value in states),
        "gathered": max(gathered),
    }
    (Path(out) / f"{dist.rank()}.json").write_text(json.dumps(result))
    dist.shutdown()


def held_in_turn(ports: list[int], out: str) -> None:
    for number, (is_lora, is_tied) in enumerate([(False, False), (False, True), (True, False)]):
        os.environ["MASTER_PORT"] = str(ports[number])
        folder = Path(out) / str(number)
        folder.mkdir(exist_ok=True)
        held(str(folder), is_lora=is_lora, is_tied=is_tied)


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> list[list[dict[str, float]]]:
    folder = tmp_path_factory.mktemp("held")
    processes.run_ranks(2, held_in_turn, processes.free_ports(3), str(folder), folder=folder)
    return [
        [json.loads((folder / f"{case}/{rank}.json").read_text()) for rank in range(2)]
        for case in range(3)
    ]


@pytest.mark.parametrize(
    ("case", "is_lora", "is_tied"), [(0, False, False), (1, False, True), (2, True, False)]
)
def test_what_a_rank_holds_is_what_the_formulas_say(measured, case, is_lora, is_tied):
    model = llama(is_tied)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_lora or "layernorm" in name)
    counts = WeightCounts.of(model)
    state = state_bytes(
        counts, shards=2, base_bytes=4 * (counts.total - counts.trained) if is_lora else 0
    )
    weights = sum(
        size for name, size in state.items() if "gradients" not in name and "AdamW" not in name
    )
    expected = {
        "weights": weights,
        "gradients": state["gradients, float32"],
        "AdamW state": state["AdamW state, float32"],
    }
    for rank in measured[case]:
        for name, size in expected.items():
            assert rank[name] == pytest.approx(size, rel=0.01), name
        # of the gathered weights: the root and the block that computes; another block may be
        # fetched ahead
        assert rank["gathered"] == 4 * (counts.root + counts.largest_block)
        assert (
            rank["gathered"]
            <= gathered_bytes(counts, shards=2, compute_bytes=4)["gathered in a step"]
        )


def test_the_table_of_the_guide_is_that_of_the_formulas():
    assert "\n".join(memory_table.rows()) in PAGE.read_text(encoding="utf-8")


def test_the_table_by_hand():
    """70B on 64 GPUs: 16 bytes a weight, shared; the root, two blocks, and the gradients of the
    root or a block."""
    full = WeightCounts(total=72_000, trained=72_000, largest_block=800, root=1300)
    assert (
        memory_table.gigabytes(full, 64) == (16 * 72_000 / 64 + 2 * (1300 + 1600) + 6 * 1300) / 1e9
    )
