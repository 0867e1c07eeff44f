"""One rank that is sharded over itself, on an accelerator, computes what the plain path does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.distributed import sharded

from gruppo import distributed as dist
from gruppo.distributed import sharding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NAMES = [
    "untied head",
    "tied head, float32",
    "bfloat16",
    "adapter",
    "shared critic, float32",
    "separate critic",
]
NAMES += ["own forward, packed rows", "weights on the CPU", "denoiser", "restoration with a critic"]
DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """A process group of one rank: --distributed.shard needs two, and a GPU machine often has one
    GPU."""
    store = torch.distributed.FileStore(str(Path(tmp_path_factory.mktemp("group")) / "store"), 1)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, device_id=DEVICE
    )
    yield
    sharding._mesh = None
    dist.shutdown()


@pytest.mark.parametrize("name", NAMES)
def test_a_forced_shard_of_one_rank_equals_the_plain_path(one_rank, monkeypatch, name):
    monkeypatch.setattr(sharding, "_requested", True)  # models are made on the CPU, and moved
    expected = sharded.three_steps(name, "sgd", device=DEVICE)
    got = sharded.three_steps(name, "sgd", device=DEVICE, is_forced=True)
    assert got.keys() == expected.keys()
    # sums on a GPU have no fixed order; float64 has digits enough for all
    limit = 1e-10 if sharded.SETUPS[name].dtype == torch.float64 else 1e-4
    limit = 3e-2 if name == "bfloat16" else limit
    for key, tensor in expected.items():
        if not key.startswith(("stat", "own")):
            far = (got[key].cpu() - tensor.cpu()).abs().max() / tensor.cpu().abs().max()
            assert float(far) <= limit, key
