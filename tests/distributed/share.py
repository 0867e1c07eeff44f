"""What two ranks compute with the collectives, for test_ranks.py, as plain numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gruppo import distributed as dist
from gruppo.distributed import collectives
from gruppo.types import GruppoError, Stat

F32, F64 = torch.float32, torch.float64


def primitives() -> dict[str, Any]:
    mine = torch.tensor([1.0, 2.0]) * 10 ** dist.rank()
    total = dist.all_sum(mine)
    stat = {0: Stat(2, 5, 13, 2, 3), 1: Stat()}[dist.rank()]
    names = {"b": Stat.of(torch.tensor([7.0 - dist.rank()])), "a": stat}
    names = (
        names if dist.rank() == 0 else dict(reversed(names.items()))
    )  # the order of names must not matter
    torch.distributed.barrier()
    return {
        "rank": dist.rank(),
        "world": dist.world_size(),
        "is main": dist.is_main(),
        "sum": total.tolist(),
        "mine after": mine.tolist(),
        "max": dist.all_max(10 + 3 * dist.rank()),
        "gathered": [part.decode() for part in dist.all_gather(b"x" * (3 * dist.rank()) + b"end")],
        "together": agreed(),
        "buckets": buckets(),
        "without gradient": without_gradient(),
        "merged": {
            n: [s.count, s.sum, s.sum_sq, s.min, s.max] for n, s in dist.merge_stats(names).items()
        },
    }


def without_gradient() -> list[Any]:
    """Gradients of a trained parameter that has none on any rank, of one that has it on rank 0, and
    of a frozen one."""
    unused, on_one, frozen = (nn.Parameter(torch.ones(2)) for _ in range(3))
    frozen.requires_grad_(False)
    if dist.is_main():
        on_one.grad = torch.full((2,), 3.0)
    dist.sum_gradients([unused, on_one, frozen])
    return [None if p.grad is None else p.grad.tolist() for p in (unused, on_one, frozen)]


def buckets() -> bool:
    """Whether gradients summed in buckets equal those summed one by one, to the last bit; several
    dtypes and sizes."""
    collectives.LARGE_BYTES, collectives.BUCKET_BYTES = 400, 300
    generator = torch.Generator().manual_seed(dist.rank())
    shapes = [(3,), (50,), (7,), (20, 10), (90,), (0,), (1,)]
    parameters = [
        nn.Parameter(torch.zeros(shape, dtype=kind)) for shape in shapes for kind in (F32, F64)
    ]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    apart = nn.Parameter(torch.zeros(20, 10))  # its gradient is not contiguous
    apart.grad = torch.randn(10, 20, generator=generator).t()
    expected = [
        dist.all_sum(parameter.grad)
        for parameter in (*parameters, apart)
        if parameter.grad is not None
    ]
    dist.sum_gradients([*parameters, apart])
    return all(map(torch.equal, [parameter.grad for parameter in (*parameters, apart)], expected))


def agreed() -> list[str]:
    """What each rank is told where nothing, the other rank, or both fail."""
    result = []
    for failing in ((), (0,), (1,), (0, 1)):
        try:
            with dist.fail_together():
                if dist.rank() in failing:
                    raise GruppoError(f"rank {dist.rank()}")
            result.append("")
        except GruppoError as error:
            result.append(str(error))
    return result


def main(out: Path) -> None:
    torch.set_num_threads(1)
    dist.init()
    (out / f"{dist.rank()}.json").write_text(json.dumps(primitives()))
    dist.shutdown()
