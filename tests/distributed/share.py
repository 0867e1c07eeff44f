"""What two ranks compute with the collectives, for test_ranks.py, as plain numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gruppo import distributed as dist
from gruppo.types import GruppoError, Stat


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
        "without gradient": without_gradient(),
        "gradients": gradients(),
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


def gradients() -> bool:
    """Whether gradients of several dtypes and sizes are summed to the last bit, one that is not
    contiguous too."""
    generator = torch.Generator().manual_seed(dist.rank())
    parameters = [
        nn.Parameter(torch.zeros(shape, dtype=dtype))
        for shape in ((3,), (0,), (20, 10))
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
    ]
    grads = []
    for parameter in parameters:
        grad = torch.randn(parameter.shape[::-1], generator=generator)
        parameter.grad = grad.to(parameter.dtype).permute(*reversed(range(grad.dim())))
        grads.append(dist.all_sum(parameter.grad.contiguous()))
    dist.sum_gradients(parameters)
    return all(
        torch.equal(parameter.grad, grad) for parameter, grad in zip(parameters, grads, strict=True)
    )


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
