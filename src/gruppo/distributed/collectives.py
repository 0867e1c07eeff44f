"""Collectives over ranks. Each is the identity in a world of size 1, so callers need no branch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as td
from torch import Tensor

from gruppo.types import GruppoError, Stat

__all__ = ["all_gather", "all_max", "all_sum", "fail_together", "init", "is_main", "merge_stats", "rank", "shutdown"]
__all__ += ["sum_gradients", "world_size"]


def init() -> None:
    """Join the process group that ``torchrun`` describes in the environment, if any; gloo on CPUs."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not td.is_initialized():
        td.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


def shutdown() -> None:
    if td.is_initialized():
        td.destroy_process_group()


def rank() -> int:
    return td.get_rank() if td.is_initialized() else 0


def world_size() -> int:
    return td.get_world_size() if td.is_initialized() else 1


def is_main() -> bool:
    return rank() == 0


def all_sum(x: Tensor, *, op: td.ReduceOp.RedOpType = td.ReduceOp.SUM) -> Tensor:
    """Sum over ranks, or another reduction, as a new tensor."""
    if world_size() > 1:
        x = x.clone()
        td.all_reduce(x, op=op)
    return x


def all_max(x: int) -> int:
    """Maximum over ranks."""
    return int(all_sum(torch.tensor(x), op=td.ReduceOp.MAX)) if world_size() > 1 else x


def all_gather(data: bytes) -> list[bytes]:
    """Data of all ranks, in order of rank. Sent as numbers, so nothing is unpickled."""
    if world_size() == 1:
        return [data]
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(world_size())]
    td.all_gather(sizes, torch.tensor([len(data)]))
    longest = max(int(size) for size in sizes)
    parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(world_size())]
    td.all_gather(parts, torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8))
    return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]


@contextmanager
def fail_together() -> Iterator[None]:
    """Raise on all ranks when one raises, so that the others do not wait for it in a collective forever."""
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    any_failed = all_max(int(failure is not None))
    if failure is not None:
        raise failure
    if any_failed:
        raise GruppoError("another rank failed; its message says why and what to do.")


def sum_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Sum gradients over ranks in place. A parameter without one counts as zero, so that all ranks agree."""
    if world_size() == 1:
        return
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            td.all_reduce(parameter.grad)


def merge_stats(stats: Mapping[str, Stat]) -> dict[str, Stat]:
    """Return each statistic over all ranks; a name that a rank lacks counts as empty there."""
    if world_size() == 1:
        return dict(stats)
    names = sorted({name for part in all_gather(json.dumps(sorted(stats)).encode()) for name in json.loads(part)})
    local = [stats.get(name, Stat()) for name in names]
    sums = torch.tensor([[s.count, s.sum, s.sum_sq] for s in local], dtype=torch.float64).reshape(-1, 3)
    ends = torch.tensor([[-s.min, s.max] for s in local], dtype=torch.float64).reshape(-1, 2)
    sums, ends = all_sum(sums), all_sum(ends, op=td.ReduceOp.MAX)
    return {
        name: Stat(float(total[0]), float(total[1]), float(total[2]), -float(end[0]), float(end[1]))
        for name, total, end in zip(names, sums, ends, strict=True)
    }
