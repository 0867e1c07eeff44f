"""Differences between systems: file locks, syncing to disk, memory, processors, caches, a GPU that
works, signals."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
    handle = os.open(
        path, os.O_RDWR if is_windows else os.O_RDONLY
    )  # Windows syncs no handle that cannot write
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def peak_memory_gib() -> float:
    """Peak resident memory of this process in GiB; NaN on Windows."""
    if resource is not None:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
    return math.nan


def free_bytes(device: torch.device, root: Path = Path("/")) -> int | None:
    """Memory that can still be allocated: on the accelerator, or on this machine and in this
    process's cgroups."""
    import torch

    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    limits, on_machine = list[int](), _numbers(root / "proc/meminfo")
    if "MemAvailable:" in on_machine:
        limits.append(1024 * (on_machine["MemAvailable:"] + on_machine.get("SwapFree:", 0)))
    # the limit of each group (cgroups, version 2) less its use; pages of files can be dropped
    lines = _read(root / "proc/self/cgroup").splitlines()
    group = next((line[4:] for line in lines if line.startswith("0::/")), "")
    own = root / "sys/fs/cgroup" / group
    for folder in (own, *own.parents):
        limit, used = (_read(folder / name).strip() for name in ("memory.max", "memory.current"))
        if limit.isdigit() and used.isdigit():  # "max" is no limit
            stat = _numbers(folder / "memory.stat")
            files = stat.get("inactive_file", 0) + stat.get("active_file", 0)
            limits.append(max(int(limit) - int(used) + files, 0))
    return min(limits, default=None)


def _numbers(path: Path) -> dict[str, int]:
    """First word to second, of lines such as ``MemFree: 17 kB``."""
    rows = (line.split() for line in _read(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def usable_processors() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def spin_briefly_beside_other_jobs() -> None:
    """Let threads that wait for the next operation sleep early, where other jobs leave too few
    processors for them all.

    libgomp's threads spin for milliseconds before they sleep: the fastest way alone, but beside one
    other job on two processors a step takes 47 s in place of 24 (docs/dev/performance.md). libgomp
    reads the variable when torch is imported; what the user has set stays.
    """
    jobs = Path("/proc/loadavg")
    if (
        "torch" in sys.modules
        or {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ)
        or not jobs.is_file()
    ):
        return
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    threads = int(given) if given.isdecimal() else usable_processors()
    # other threads of the machine that run or could run; of one moment, others than jobs are among
    # them
    running = []
    for _ in range(5 if threads > 1 else 0):
        running.append(int(jobs.read_text().split()[3].partition("/")[0]) - 1)
        time.sleep(0.002)
    if running and min(running) + threads > (os.cpu_count() or 1):
        os.environ["GOMP_SPINCOUNT"] = (
            "1000"  # libgomp's own number for more threads than processors
        )


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


@cache
def cache_bytes(root: Path = Path("/")) -> tuple[int, int]:
    """Bytes of a core's second-level cache and of the last-level cache; 1 MiB and 8 MiB
    where Linux does not tell them."""
    levels = dict[int, int]()
    for folder in root.glob("sys/devices/system/cpu/cpu0/cache/index*"):
        with suppress(OSError, ValueError):
            kind, level, size = (
                (folder / name).read_text("utf-8").strip() for name in ("type", "level", "size")
            )
            if kind != "Instruction":
                levels[int(level)] = int(size.rstrip("KM")) * {"K": 2**10, "M": 2**20}.get(
                    size[-1], 1
                )
    known = {level: size for level, size in levels.items() if level > 1 and size > 0}
    return known.get(2, 2**20), max(known.values(), default=2**23)


def stop_signals() -> list[signal.Signals]:
    """Signals that stop a run, which is then saved; SIGHUP only if it is not ignored, as it is
    under nohup.

    Schedulers send SIGUSR1 before a time limit. Windows has only SIGTERM and SIGINT.
    """
    known = [
        getattr(signal, name)
        for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
        if hasattr(signal, name)
    ]
    return [
        number
        for number in known
        if number.name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN
    ]


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


class _StreamFunctions(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("read", "write", "seek", "close")]


@contextmanager
def no_clean_exit(message: str, status: int) -> Iterator[None]:
    """Within, C code that calls ``exit`` ends this process with ``message`` on standard error and
    ``status``.

    ``exit`` raises nothing in Python, but it flushes the streams of the C library. Two of them have
    a buffered text and write functions that are ``write`` and ``_exit``. Without effect where the C
    library cannot make them, as on macOS.
    """
    libc = ctypes.CDLL(None) if os.name == "posix" else None
    if libc is None or not (hasattr(libc, "fopencookie") and hasattr(libc, "__fpurge")):
        yield
        return
    libc.fopencookie.restype = ctypes.c_void_p
    # The stream that was opened last is flushed first.
    streams = list[ctypes.c_void_p]()
    for argument, function in ((status, libc._exit), (2, libc.write)):
        functions = _StreamFunctions(write=ctypes.cast(function, ctypes.c_void_p))
        streams.append(
            ctypes.c_void_p(libc.fopencookie(ctypes.c_void_p(argument), b"w", functions))
        )
        libc.fputs(message.encode()[:4000] + b"\n", streams[-1])  # less than a buffer

    def purge() -> None:
        while streams:
            libc.__fpurge(streams[-1])
            libc.fclose(streams.pop())

    os.register_at_fork(after_in_child=purge)
    try:
        yield
    finally:
        purge()
