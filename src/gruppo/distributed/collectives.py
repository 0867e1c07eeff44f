"""Collectives over ranks. Each is the identity in a world of one, so that callers need no branch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as td
from torch import Tensor

from gruppo.types import GruppoError, Stat


def start() -> None:
    """Join the group that ``torchrun`` describes in the environment, if it does; gloo on CPUs."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not td.is_initialized():
        td.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


def stop() -> None:
    if td.is_initialized():
        td.destroy_process_group()


def rank() -> int:
    return td.get_rank() if td.is_initialized() else 0


def world() -> int:
    return td.get_world_size() if td.is_initialized() else 1


def is_main() -> bool:
    return rank() == 0


def barrier() -> None:
    if world() > 1:
        td.barrier()


def all_sum(x: Tensor) -> Tensor:
    """The sum over ranks, as a new tensor."""
    return _reduced(x, td.ReduceOp.SUM)


def all_max(x: int) -> int:
    """The largest over ranks."""
    return int(_reduced(torch.tensor(x), td.ReduceOp.MAX)) if world() > 1 else x


def gather(data: bytes) -> list[bytes]:
    """What every rank gives, in order of rank; sent as numbers, so that nothing is unpickled."""
    if world() == 1:
        return [data]
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(world())]
    td.all_gather(sizes, torch.tensor([len(data)]))
    longest = max(int(size) for size in sizes)
    parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(world())]
    td.all_gather(parts, torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8))
    return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]


@contextmanager
def together() -> Iterator[None]:
    """For what may fail on one rank alone: the others raise as well, instead of waiting for it for ever."""
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    has_failed = all_max(int(failure is not None))
    if failure is not None:
        raise failure
    if has_failed:
        raise GruppoError("another rank could not go on; its message says why and what to do.")


def sum_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Add up gradients over ranks in place. A parameter without one counts as zero, so that all ranks agree."""
    if world() == 1:
        return
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            td.all_reduce(parameter.grad)


def merge_stats(stats: Mapping[str, Stat]) -> dict[str, Stat]:
    """Return each statistic over all ranks; a name that a rank lacks counts as empty there."""
    if world() == 1:
        return dict(stats)
    names = sorted({name for part in gather(json.dumps(sorted(stats)).encode()) for name in json.loads(part)})
    mine = [stats.get(name, Stat()) for name in names]
    sums = torch.tensor([[s.count, s.sum, s.sum_sq] for s in mine], dtype=torch.float64).reshape(-1, 3)
    ends = torch.tensor([[-s.min, s.max] for s in mine], dtype=torch.float64).reshape(-1, 2)
    sums, ends = all_sum(sums), _reduced(ends, td.ReduceOp.MAX)
    return {
        name: Stat(float(total[0]), float(total[1]), float(total[2]), -float(end[0]), float(end[1]))
        for name, total, end in zip(names, sums, ends, strict=True)
    }


def _reduced(x: Tensor, op: td.ReduceOp.RedOpType) -> Tensor:
    if world() == 1:
        return x
    x = x.clone()
    td.all_reduce(x, op=op)
    return x
