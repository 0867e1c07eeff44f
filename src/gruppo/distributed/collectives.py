"""Collectives over ranks. Each is the identity in a world of size 1, so callers need no branch."""

from __future__ import annotations

import atexit
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as td
from torch import Tensor

from gruppo.distributed.heartbeat import ROUNDS, Heartbeat, RankFailure
from gruppo.loading import describe_error
from gruppo.types import GruppoError, Stat

__all__ = [
    "Failed",
    "RankLost",
    "all_gather",
    "all_max",
    "all_sum",
    "fail_together",
    "init",
    "is_main",
]
__all__ += [
    "is_reported",
    "leaving",
    "merge_stats",
    "phase",
    "rank",
    "record_error",
    "restarts",
    "share_failure",
]
__all__ += ["set_advice", "shutdown", "sum_gradients", "waiting", "world_size"]

LARGE_BYTES, BUCKET_BYTES = 2**20, 8 * 2**20
"""A gradient that is summed by itself; smaller ones that are summed together."""


class RankLost(GruppoError):
    """Another rank is dead, stopped or late. The run can be resumed."""

    exit_code = 75


class Failed(GruppoError):
    """Another rank has failed; the message is that rank's."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


EARLY_S = 60.0
"""How long a rank that fails before the ranks have met waits for the others."""

_heartbeat: Heartbeat | None = None
_processes: list[str] = []
"""Of each rank, its process and machine."""
_timeout_s, _advice = 0.0, ""
_left: GruppoError | None = None
"""Raised by every collective after one that failed, and after this rank has failed: they would wait
for nobody."""
_PHASE = "_gruppo_phase"
"""Attribute of an error that names the phase in which it was raised."""
_shared: Exception | None = None
"""The last error of this rank that the others know."""


# --- start and end --------------------------------------------------------------------------------


def restarts() -> int:
    """How often ``torchrun --max-restarts`` has started the processes again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def set_advice(sentence: str) -> None:
    """Add a sentence to the errors of lost ranks."""
    global _advice
    _advice = sentence


def init(
    timeout_s: float = 1800,
    *,
    is_sharded: bool = False,
) -> None:
    """Join the process group that ``torchrun`` describes in the environment, if any.

    A collective ends with RankLost if another rank has ended, or does not join it within
    ``timeout_s``. GRUPPO_DIST_BACKEND=gloo lets several ranks share a GPU, which nccl refuses.
    """
    global _heartbeat, _processes, _timeout_s
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return
    _timeout_s, interval_s = timeout_s, min(timeout_s / 30, 1.0)
    if td.is_initialized():
        return
    # FSDP computes while it communicates: there the watchdog ends a rank that waits for too long
    if not is_sharded:
        # NCCL then waits and raises an error as gloo does, instead of ending the process
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    timeout = timedelta(
        seconds=timeout_s - ROUNDS * interval_s
    )  # the rest is for finding the lost rank
    named = "gloo"
    if torch.cuda.is_available():
        named = f"cpu:gloo,cuda:{os.environ.get('GRUPPO_DIST_BACKEND', 'nccl')}"
    try:
        store, number, count = next(td.rendezvous("env://", timeout=timeout))
        td.init_process_group(named, store=store, rank=number, world_size=count, timeout=timeout)
        shared = td.PrefixStore("gruppo", store)
        _heartbeat = Heartbeat(
            shared, number, count, interval_s=interval_s, limit_s=timeout_s, on_stuck=_end_stuck
        )
        _processes = [
            ""
        ] * count  # not known yet: an error of the collective below reads one entry per rank
        own = f" (process {os.getpid()} on {socket.gethostname()})"
        _processes = [text.decode() for text in all_gather(own.encode())]
    except (td.DistError, ValueError) as error:  # ValueError: MASTER_ADDR is not set
        ranks, reason = os.environ["WORLD_SIZE"], str(error).splitlines()[0]
        raise RankLost(
            f"the {ranks} ranks did not meet within {timeout_s:g} s ({reason})",
            advice="""Check that all of them were started and reach MASTER_ADDR, or set
                $distributed.timeout_s higher""",
        ) from error
    atexit.register(shutdown)  # a thread that still runs while Python ends may abort the process


def shutdown() -> None:
    """Leave the process group; called at the end of the process too."""
    global _heartbeat, _left
    if _heartbeat is not None:
        _heartbeat.close()
    _heartbeat = _left = None
    if td.is_initialized():
        td.destroy_process_group()


# --- failures -------------------------------------------------------------------------------------


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Name what this rank does within the block, for the error of ranks that wait for it."""
    if _heartbeat is None:
        yield
        return
    before, _heartbeat.phase = _heartbeat.phase, name
    try:
        yield
    except Exception as error:
        if _PHASE not in vars(error):
            setattr(error, _PHASE, name)  # the innermost; the error is reported after it was left
        raise
    finally:
        if _heartbeat is not None:
            _heartbeat.phase = before


@contextmanager
def waiting() -> Iterator[None]:
    """For what waits for other ranks: where it fails because of one of them, the error names that
    rank."""
    global _left
    if _left is not None:
        raise _left
    heartbeat = _heartbeat
    if heartbeat is None:
        yield
        return
    heartbeat.calls += 1
    is_outermost = heartbeat.waiting_since is None
    heartbeat.waiting_since = heartbeat.waiting_since or time.monotonic()
    try:
        yield
    except RuntimeError as error:
        _left = _reason(heartbeat, error)
        if _left is None:
            raise
        raise _left from error
    finally:
        if is_outermost:
            heartbeat.waiting_since = None


def _reason(heartbeat: Heartbeat, error: RuntimeError) -> GruppoError | None:
    """Why a collective failed: a rank that has failed, or is lost or late; None where no other rank
    is the reason."""
    failure = heartbeat.find_failure()
    lost = [] if failure else heartbeat.lost_ranks()
    if failure is None and lost != [0]:  # rank 0 hosts the store, which may not answer
        failure = heartbeat.find_failure()
    if failure is not None:
        return _of_other(failure)
    if not lost and "timed out" not in str(error).lower():
        return None
    # Without a lost rank, those are named that have begun fewer collectives than this one.
    states = heartbeat.states
    ranks = lost or [
        number for number, (_, calls, _) in enumerate(states) if calls < heartbeat.calls
    ]
    named = (
        " and ".join(f"rank {n}{_processes[n]} in phase {states[n][2]!r}" for n in ranks)
        or "another rank"
    )
    if lost:
        return RankLost(f"""rank {rank()} cannot continue in phase {heartbeat.phase!r}: {named}
            {"has" if len(lost) == 1 else "have"} ended or stopped. {_advice}""")
    problem = f"rank {rank()} waited {_timeout_s:g} s in phase {heartbeat.phase!r} for {named}"
    return RankLost(
        f"{problem}, which is alive", advice=f"Set $distributed.timeout_s higher. {_advice}"
    )


def _failure(error: Exception) -> RankFailure:
    """What this rank tells the others of an error."""
    message, exit_code = describe_error(error)
    present = "" if _heartbeat is None else _heartbeat.phase
    return RankFailure(rank(), getattr(error, _PHASE, present), message, exit_code)


def _of_other(failure: RankFailure) -> Failed:
    where = f"rank {failure.rank}{_processes[failure.rank]} failed in phase {failure.phase!r}"
    return Failed(f"{where}: {failure.message}", failure.exit_code)


def _end_stuck() -> None:
    """End this process from another thread, since the main one stays in a collective that cannot be
    interrupted."""
    assert _heartbeat is not None
    error = _reason(_heartbeat, RuntimeError("timed out"))
    assert error is not None
    record_error(error)
    if not _heartbeat.is_reported():
        os.write(2, f"gruppo: {describe_error(error)[0]}\n".encode())
    os._exit(error.exit_code)


@contextmanager
def leaving() -> Iterator[None]:
    """Within the block, an error of this rank ends the other ranks too, each with this rank's
    message."""
    try:
        yield
    except Exception as error:
        _leave(error)
        raise


def _leave(error: Exception) -> None:
    """Report an error to the other ranks outside of collectives, which this rank no longer
    joins."""
    global _left
    if _heartbeat is None or _left is not None or isinstance(error, RankLost | Failed):
        return
    _heartbeat.publish(failure := _failure(error))
    _left = Failed(failure.message, failure.exit_code)


def is_reported(error: Exception) -> bool:
    """Leave the process group because of an error, and return whether rank 0 reports it, so that
    this rank need not.

    Called before the ranks have met too: those that reach their first collective then end.
    """
    if _heartbeat is None:
        with suppress(GruppoError):
            init(EARLY_S)
    if (heartbeat := _heartbeat) is None:
        return False
    _leave(error)
    if td.is_initialized():
        td.destroy_process_group()  # closes the connections, at which the others stop waiting
    return heartbeat.is_reported()


def record_error(error: BaseException) -> None:
    """Write the error file of this rank, as ``torch.distributed.elastic`` expects it, where a
    launcher asks for one."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        with suppress(OSError):
            get_error_handler().record_exception(error)


def share_failure(error: Exception | None, status: int = 0, *, in_step: bool = False) -> int:
    """A collective: raise where any rank has an error, else return the largest ``status`` of all
    ranks.

    ``in_step``: the error came where the others may be in a collective that this rank has not
    joined, as in the forward of a sharded model. Then they are told through the store, and this
    rank does not wait for them.
    """
    global _shared
    if error is not None:
        if in_step or world_size() == 1:
            _leave(error)
        elif (
            not isinstance(error, RankLost | Failed) and error is not _shared
        ):  # else the others know
            _shared = error
            with suppress(RankLost, Failed):  # the other ranks may have ended
                all_max(_FAILED)
                all_gather(json.dumps(vars(_failure(error))).encode())
        raise error
    if (worst := all_max(status)) < _FAILED:
        return worst
    raise _of_other(RankFailure(**next(filter(None, map(json.loads, all_gather(b"null"))))))


_FAILED = 1_000_000


@contextmanager
def fail_together() -> Iterator[None]:
    """Raise on all ranks when one raises, so that the others do not wait for it in a collective
    forever."""
    try:
        yield
    except Exception as error:
        share_failure(error)
    else:
        share_failure(None)


# --- collectives ----------------------------------------------------------------------------------


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
        with waiting():
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
    with waiting():
        td.all_gather(sizes, torch.tensor([len(data)]))
        longest = max(int(size) for size in sizes)
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(world_size())]
        td.all_gather(
            parts, torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        )
    return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]


def sum_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Sum gradients over ranks in place. A parameter without one counts as zero, so that all ranks
    agree.

    Small ones in buckets: a collective takes a fixed time. Large ones in place, without a copy.
    """
    if world_size() == 1:
        return
    full, filling = list[list[Tensor]](), dict[tuple[torch.dtype, torch.device], list[Tensor]]()
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        if gradient.nbytes >= LARGE_BYTES and gradient.is_contiguous():
            with waiting():
                td.all_reduce(gradient)
            continue
        bucket = filling.setdefault((gradient.dtype, gradient.device), [])
        bucket.append(gradient)
        if sum(gradient.nbytes for gradient in bucket) >= BUCKET_BYTES:
            full.append(filling.pop((gradient.dtype, gradient.device)))
    for bucket in [*full, *filling.values()]:
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        with waiting():
            td.all_reduce(flat)
        for gradient, total in zip(
            bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True
        ):
            gradient.copy_(total.view_as(gradient))
        del flat, total, gradient  # before the next bucket is copied


def merge_stats(stats: Mapping[str, Stat]) -> dict[str, Stat]:
    """Return each statistic over all ranks; a name that a rank lacks counts as empty there."""
    stats = Stat.read(stats)
    if world_size() == 1:
        return stats
    names = sorted(
        {
            name
            for part in all_gather(json.dumps(sorted(stats)).encode())
            for name in json.loads(part)
        }
    )
    local = [stats.get(name, Stat()) for name in names]
    sums = torch.tensor([[s.count, s.sum, s.sum_sq] for s in local], dtype=torch.float64).reshape(
        -1, 3
    )
    ends = torch.tensor([[-s.min, s.max] for s in local], dtype=torch.float64).reshape(-1, 2)
    sums, ends = all_sum(sums), all_sum(ends, op=td.ReduceOp.MAX)
    rows = zip(names, sums.tolist(), ends.tolist(), strict=True)
    return {
        name: Stat(n, total, squares, -low, high) for name, (n, total, squares), (low, high) in rows
    }
