"""Collectives over ranks. Each is the identity in a world of size 1, so callers need no branch."""

from __future__ import annotations

import atexit
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import astuple
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as td
from torch import Tensor

from gruppo.distributed.heartbeat import ROUNDS, Heartbeat, RankFailure, interval_of
from gruppo.loading import describe_error
from gruppo.types import GruppoError, Stat


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


def init(timeout_s: float = 1800, *, is_sharded: bool = False) -> None:
    """Join the process group that ``torchrun`` describes in the environment, if any.

    A collective ends with RankLost if another rank has ended, or does not join it within
    ``timeout_s``. GRUPPO_DIST_BACKEND=gloo lets several ranks share a GPU, which nccl refuses.
    """
    global _heartbeat, _processes, _timeout_s
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count <= 1:
        return
    _timeout_s = timeout_s
    if td.is_initialized():
        return
    # FSDP computes while it communicates: there the watchdog ends a rank that waits for too long
    if not is_sharded:
        # NCCL then waits and raises an error as gloo does, instead of ending the process
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    # the rest is for finding the lost rank
    timeout = timedelta(seconds=timeout_s - ROUNDS * interval_of(timeout_s))
    backend = "gloo"
    if torch.cuda.is_available():
        backend = f"cpu:gloo,cuda:{os.environ.get('GRUPPO_DIST_BACKEND', 'nccl')}"
    try:
        store, number, _ = next(td.rendezvous("env://", timeout=timeout))
        td.init_process_group(backend, store=store, rank=number, world_size=count, timeout=timeout)
        shared = td.PrefixStore("gruppo", store)
        _heartbeat = Heartbeat(shared, number, count, limit_s=timeout_s, on_stuck=_end_stuck)
        # not known yet: an error of the collective below reads one entry per rank
        _processes = [""] * count
        _processes = gather_json(f" (process {os.getpid()} on {socket.gethostname()})")
    except (td.DistError, ValueError) as error:  # ValueError: MASTER_ADDR is not set
        raise RankLost(
            f"""the {count} ranks did not meet within {timeout_s:g} s
                ({str(error).splitlines()[0]})""",
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
                gather_json(vars(_failure(error)))
        raise error
    if (worst := all_max(status)) < _FAILED:
        return worst
    raise _of_other(RankFailure(**next(filter(None, gather_json(None)))))


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
    sizes = torch.zeros(world_size(), dtype=torch.long)
    sizes[rank()] = len(data)
    sizes = all_sum(sizes)
    table = torch.zeros(world_size(), int(sizes.max()), dtype=torch.uint8)
    table[rank(), : len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = zip(all_sum(table), sizes.tolist(), strict=True)
    return [row[:size].numpy().tobytes() for row, size in rows]


def gather_json(value: Any) -> list[Any]:
    """Values of all ranks, in order of rank, each as JSON returns it."""
    return [json.loads(data) for data in all_gather(json.dumps(value).encode())]


def sum_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Sum gradients over ranks in place. A parameter without one counts as zero, so that all ranks
    agree."""
    if world_size() == 1:
        return
    with waiting():
        works = []
        for parameter in parameters:
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = parameter.grad.contiguous()
            works.append(td.all_reduce(parameter.grad, async_op=True))
        for work in works:
            work.wait()


def merge_stats(stats: Mapping[str, Stat]) -> dict[str, Stat]:
    """Return each statistic over all ranks; a name that a rank lacks counts as empty there."""
    own = {name: astuple(stat)[:5] for name, stat in Stat.read(stats).items()}
    merged: dict[str, Stat] = {}
    for part in gather_json(own):
        for name, numbers in part.items():
            merged[name] = merged.get(name, Stat()) + Stat(*numbers)
    return merged
