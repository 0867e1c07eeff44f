"""What a process gives up, for good and for its threads: files, network, other processes, memory. Linux only.

Layers, each of which holds by itself: no new rights (prctl), no capabilities, limits of resources, Landlock for what
can be opened, and a seccomp filter for what can be asked of the kernel at all.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import resource
import signal
import struct
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from .syscalls import ABSENT, AUDIT, NUMBERS, Condition, conditions

LANDLOCK = (444, 445, 446)  # create_ruleset, add_rule, restrict_self: the same on every architecture
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FILES_OF_ABI = ((1, 13), (2, 14), (3, 15), (5, 16))
"""From this version of Landlock on, so many rights over files are known."""
_TCP, _SCOPES, _HIGH = 0b11, 0b11, 200
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "idlelib", "turtledemo", "__pycache__"}
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_PR_SET_SECCOMP, _FILTER = 22, 2
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000

libc = ctypes.CDLL(None, use_errno=True)


class Lock:
    """The files that programs may read, chosen once; ``close`` locks the calling process."""

    def __init__(self) -> None:
        self.machine = platform.machine()
        if self.machine not in NUMBERS:
            raise OSError(errno.ENOSYS, f"no table of system calls for {self.machine}")
        self.abi = _call(LANDLOCK[0], None, 0, 1)
        rules = _call(LANDLOCK[0], *_handled(self.abi), 0)
        self.rules = fcntl.fcntl(rules, fcntl.F_DUPFD_CLOEXEC, _HIGH)  # out of the way of a child's own descriptors
        os.close(rules)
        for path in _readable():
            self._allow(path)

    def close(self, *, memory: int, cpu_s: int) -> None:
        """Lock this process. ``memory``: bytes of addresses. ``cpu_s``: a last limit, for all that it ever does."""
        pid = os.getpid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _prctl(_PR_SET_DUMPABLE, 0)
        for kind, most in _limits(memory, cpu_s).items():
            resource.setrlimit(kind, (most, most))
        _drop_capabilities()
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        _call(LANDLOCK[2], self.rules, 0)
        os.close(self.rules)
        _install(_filter(self.machine, pid))

    def _allow(self, path: Path) -> None:
        """A folder with what is below it, or one file."""
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return  # gone, or closed to us anyway
        rights = _READ_FILE | _READ_DIR if path.is_dir() else _READ_FILE
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, fd))
        _call(LANDLOCK[1], self.rules, 1, rule, 0)
        os.close(fd)


def _call(number: int, *arguments: int | ctypes.Array | None) -> int:
    """A system call's answer; OSError where it is refused."""
    words = [a if isinstance(a, ctypes.Array) else None if a is None else ctypes.c_long(a) for a in arguments]
    answer = int(libc.syscall(ctypes.c_long(number), *words))
    if answer < 0:
        raise OSError(ctypes.get_errno(), f"system call {number}: {os.strerror(ctypes.get_errno())}")
    return answer


def _prctl(option: int, value: int) -> None:
    if libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def _handled(abi: int) -> tuple[ctypes.Array, int]:
    """Everything that this Landlock can take away: rights over files, TCP, abstract sockets and signals."""
    count = max(n for version, n in _FILES_OF_ABI if abi >= version)
    parts = [(1 << count) - 1, *([_TCP] if abi >= 4 else []), *([_SCOPES] if abi >= 6 else [])]
    packed = struct.pack(f"={len(parts)}Q", *parts)
    return ctypes.create_string_buffer(packed, len(packed)), len(packed)


def _readable() -> Iterator[Path]:
    """The standard library without what is installed beside it, and shared libraries, file by file."""
    roots = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}
    for root in roots:
        for entry in root.iterdir():
            if entry.name not in _NOT_STDLIB:
                yield entry
    for folder in {Path(path).resolve() for path in sys.path if Path(path).is_dir()} - roots:
        yield folder  # lib-dynload, where it stands elsewhere
    for folder in _library_folders():
        yield from (file for file in folder.glob("*.so*") if file.is_file())


def _library_folders() -> set[Path]:
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    files = {Path(line[line.index("/") :]) for line in lines if "/" in line and ".so" in line}
    return {file.parent for file in files}


def _limits(memory: int, cpu_s: int) -> dict[int, int]:
    return {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }


def _drop_capabilities() -> None:
    header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))
    if libc.capset(header, ctypes.create_string_buffer(24)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _install(program: bytes) -> None:
    code = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(code)))
    if libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_FILTER), header, ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


def _filter(machine: str, pid: int) -> bytes:
    """The program that the kernel runs at each system call: allowed, allowed for some arguments, or refused."""
    rules = conditions(pid)
    lines = [_load(4), _equals(AUDIT[machine], 1, 0), _return(_KILL), _load(0)]
    for name, number in NUMBERS[machine].items():
        body = [part for condition in rules.get(name, ()) for part in _checked(condition)]
        body += [_return(_ERRNO | errno.ENOSYS if name in ABSENT else _ALLOW)]
        lines += [_equals(number, 0, len(body)), *body]
    return b"".join([*lines, _return(_ERRNO | errno.EPERM)])


def _checked(condition: Condition) -> list[bytes]:
    argument, mask, values = condition
    compares = [_equals(value, len(values) - n, 0) for n, value in enumerate(values)]
    return [_load(16 + 8 * argument), _line(0x54, 0, 0, mask), *compares, _return(_ERRNO | errno.EPERM)]


def _line(code: int, if_true: int, if_false: int, number: int) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, number)


def _load(offset: int) -> bytes:
    return _line(0x20, 0, 0, offset)  # little endian: the lower half of an argument comes first


def _equals(number: int, if_true: int, if_false: int) -> bytes:
    return _line(0x15, if_true, if_false, number)


def _return(verdict: int) -> bytes:
    return _line(0x06, 0, 0, verdict)
