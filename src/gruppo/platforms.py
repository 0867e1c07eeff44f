"""Differences between systems: file locks, syncing to disk, memory, processors, a GPU that works,
signals."""

from __future__ import annotations

import ctypes
import math
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import torch

try:
    import fcntl
    import resource
except ImportError:  # Windows has neither
    fcntl = resource = None  # type: ignore[assignment]


def lock_file(path: Path) -> IO[str]:
    """Open a file, which is created, and lock it exclusively until it is closed or the process
    ends.

    Raises BlockingIOError if another process, or another lock of this one, holds it; OSError if the
    file cannot be written.
    """
    file = path.open("a+", encoding="utf-8")
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        elif sys.platform == "win32":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    except OSError as error:
        file.close()
        raise BlockingIOError(error.errno, error.strerror, str(path)) from error
    return file


def sync_to_disk(path: Path) -> None:
    """Write a file, or the names in a folder, through to the disk. Windows cannot sync a folder: it
    is skipped."""
    is_windows = os.name == "nt"
    if is_windows and path.is_dir():
        return
    # Windows syncs no handle that cannot write
    handle = os.open(path, os.O_RDWR if is_windows else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def peak_memory_gib() -> float:
    """Peak resident memory of this process in GiB; NaN on Windows."""
    if resource is None:
        return math.nan
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def free_bytes(device: torch.device, root: Path = Path("/")) -> int:
    """Memory that can still be allocated: on the accelerator, or on this machine and in this
    process's cgroups (version 2)."""
    import psutil  # type: ignore[import-untyped]
    import torch

    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    limits = [psutil.virtual_memory().available + psutil.swap_memory().free]
    group = _read(root / "proc/self/cgroup").partition("0::/")[2].partition("\n")[0]
    own = root / "sys/fs/cgroup" / group
    # the limit of each group less its use; pages of files can be dropped
    for folder in (own, *own.parents):
        limit, used = (_read(folder / name).strip() for name in ("memory.max", "memory.current"))
        if limit.isdigit() and used.isdigit():  # "max" is no limit
            files = re.findall(r"^(?:in)?active_file (\d+)", _read(folder / "memory.stat"), re.M)
            limits.append(max(int(limit) - int(used) + sum(map(int, files)), 0))
    return min(limits)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def usable_processors() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def spin_briefly_beside_other_jobs() -> None:
    """Let threads that wait for the next operation sleep early if other jobs leave too few
    processors for them all.

    libgomp's threads spin for milliseconds before they sleep: the fastest way alone, but with one
    other job on two processors a step takes 47 s in place of 24 (docs/dev/performance.md). libgomp
    reads the variable when torch is imported; what the user has set stays.
    """
    jobs = Path("/proc/loadavg")
    is_set = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ)
    if "torch" in sys.modules or is_set or not jobs.is_file():
        return
    requested = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    threads = int(requested) if requested.isdecimal() else usable_processors()
    if threads == 1:
        return
    others = []  # other threads of the machine that run; some do so for a moment only
    for _ in range(5):
        others.append(int(jobs.read_text().split()[3].partition("/")[0]) - 1)
        time.sleep(0.002)
    if min(others) + threads > (os.cpu_count() or 1):
        # libgomp's own number for more threads than processors
        os.environ["GOMP_SPINCOUNT"] = "1000"


@cache
def usable_cuda() -> tuple[bool, str]:
    """Whether torch can compute on this rank's CUDA device; if there is one that it cannot use, the
    reason.

    torch says so only in a warning (a driver that is too old), or when the first kernel runs (a GPU
    that this build has no kernels for, or whose memory another process holds).
    """
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if torch.cuda.is_available():
                device = int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()
                return float(torch.ones(2, device=f"cuda:{device}").sum()) == 2, ""
            problem = next(
                (str(each.message) for each in caught if "CUDA" in str(each.message)), ""
            )
        except RuntimeError as error:
            problem = str(error)
    problem = problem.removeprefix("CUDA initialization: ").partition(". ")[0]
    return False, (problem.splitlines() or [""])[0].rstrip(".")


def stop_signals() -> list[signal.Signals]:
    """Signals that stop a run, which is then saved; SIGHUP only if it is not ignored, as it is
    under nohup.

    Schedulers send SIGUSR1 before a time limit. Windows has only SIGTERM and SIGINT.
    """
    names = {"SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"}
    is_ignored = "SIGHUP" in dir(signal) and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    if is_ignored:
        names.remove("SIGHUP")
    return [number for number in signal.Signals if number.name in names]


def ends_with_parent() -> Callable[[], None] | None:
    """A ``preexec_fn`` by which a child gets SIGTERM when the thread that starts it ends, also
    where this process is killed; None on systems other than Linux."""
    if sys.platform != "linux":
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()

    def request() -> None:
        libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died before
            os._exit(1)

    return request
