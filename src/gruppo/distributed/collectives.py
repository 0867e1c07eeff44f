"""Collectives over ranks. Each is the identity in a world of size 1, so callers need no branch."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as td
from torch import Tensor

from gruppo.distributed.heartbeat import ROUNDS, Heartbeat
from gruppo.types import GruppoError, Stat

__all__ = ["RankLost", "all_gather", "all_max", "all_sum", "fail_together", "init", "is_main", "merge_stats", "rank"]
__all__ += ["shutdown", "sum_gradients", "world_size"]

LARGE_BYTES, BUCKET_BYTES = 2**20, 8 * 2**20
"""A gradient that is summed by itself; smaller ones that are summed together."""


class RankLost(GruppoError):
    """Another rank is dead, stopped or late. The run can be resumed."""

    exit_code = 75


_heartbeat: Heartbeat | None = None
_processes: list[str] = []
"""Of each rank, its process and machine."""
_timeout_s, _advice = 0.0, ""
_lost: RankLost | None = None
"""Raised by the first collective that failed: later ones would wait again."""


def init(timeout_s: float = 1800, *, advice: str = "") -> None:
    """Join the process group that ``torchrun`` describes in the environment, if any; gloo on CPUs.

    A collective ends with RankLost if another rank has ended, or does not join it within ``timeout_s``. ``advice``, a
    sentence, is added to the error.
    """
    global _heartbeat, _processes, _timeout_s, _advice
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1 or td.is_initialized():
        return
    # NCCL then waits and raises an error as gloo does, instead of ending the process
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    _timeout_s, _advice, interval_s = timeout_s, advice, min(timeout_s / 30, 1.0)
    timeout = timedelta(seconds=timeout_s - ROUNDS * interval_s)  # the rest is for finding the lost rank
    try:
        store, number, count = next(td.rendezvous("env://", timeout=timeout))
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        td.init_process_group(backend, store=store, rank=number, world_size=count, timeout=timeout)
        _heartbeat = Heartbeat(td.PrefixStore("gruppo", store), number, count, interval_s=interval_s)
        _processes = [""] * count
        _processes = [
            text.decode() for text in all_gather(f" (process {os.getpid()} on {socket.gethostname()})".encode())
        ]
    except (td.DistError, ValueError) as error:  # ValueError: MASTER_ADDR is not set
        raise RankLost(
            f"the {os.environ['WORLD_SIZE']} ranks did not meet within {timeout_s:g} s ({str(error).splitlines()[0]}). "
            "Check that all of them were started and reach MASTER_ADDR, or set --distributed.timeout-s higher."
        ) from error


def shutdown() -> None:
    global _heartbeat, _lost
    if _heartbeat is not None:
        _heartbeat.close()
    _heartbeat = _lost = None
    if td.is_initialized():
        td.destroy_process_group()


@contextmanager
def _naming_lost_ranks() -> Iterator[None]:
    """For a collective: where it fails because of another rank, RankLost names that one."""
    global _lost
    if _lost is not None:
        raise _lost
    try:
        yield
    except RuntimeError as error:
        lost = [] if _heartbeat is None else _heartbeat.lost_ranks()
        if not lost and "timed out" not in str(error).lower():
            raise
        what = f"waited {_timeout_s:g} s for another rank, which is alive: set --distributed.timeout-s higher"
        if lost:
            names = " and ".join(f"rank {number}{_processes[number]}" for number in lost)
            what = f"cannot continue: {names} {'has' if len(lost) == 1 else 'have'} ended or stopped"
        _lost = RankLost(f"rank {rank()} {what}. {_advice}")
        raise _lost from error


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
        with _naming_lost_ranks():
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
    with _naming_lost_ranks():
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
    if failure is not None:
        with suppress(RankLost):  # as others cannot be told, they have left
            all_max(1)
        raise failure
    if all_max(0):
        raise GruppoError("another rank failed; its message says why and what to do.")


def sum_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Sum gradients over ranks in place. A parameter without one counts as zero, so that all ranks agree.

    Small ones in buckets: a collective takes a fixed time. Large ones in place, without a copy.
    """
    if world_size() == 1:
        return
    buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        if gradient.nbytes >= LARGE_BYTES and gradient.is_contiguous():
            with _naming_lost_ranks():
                td.all_reduce(gradient)
            continue
        bucket = buckets.setdefault((gradient.dtype, gradient.device), [])
        bucket.append(gradient)
        if sum(gradient.nbytes for gradient in bucket) >= BUCKET_BYTES:
            _sum_bucket(bucket)
            bucket.clear()
    for bucket in filter(None, buckets.values()):
        _sum_bucket(bucket)


def _sum_bucket(gradients: list[Tensor]) -> None:
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    with _naming_lost_ranks():
        td.all_reduce(flat)
    for gradient, total in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


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
