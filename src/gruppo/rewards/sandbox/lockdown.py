"""Irrevocable confinement of a process and its threads: files, network, other processes, memory.
Linux only.

Layers, each of which holds by itself: no new rights (prctl), no capabilities, limits of resources,
Landlock for what can be opened, and a seccomp filter for the system calls that may be made at all.
"""

from __future__ import annotations

import _socket
import contextlib
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from .syscalls import ABSENT, ANY_PID, AUDIT, CONDITIONS, NUMBERS

# Landlock: the same numbers on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FILE_RIGHTS_OF_ABI = ((1, 13), (2, 14), (3, 15), (5, 16))
"""Number of rights over files that Landlock knows from this version on."""
_TCP, _SCOPES = 0b11, 0b11
LAST_DESCRIPTOR = 1024
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "idlelib", "turtledemo", "__pycache__"}
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_FILTER, _NEW_LISTENER, _CONTINUE = 1, 1 << 3, 1
_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # SECCOMP_IOCTL_NOTIF_RECV and _SEND
_ALLOW, _ASK, _ERRNO, _KILL = 0x7FFF0000, 0x7FC00000, 0x00050000, 0x80000000
_LOAD, _AND, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06  # instructions of classic BPF

libc = ctypes.CDLL(None, use_errno=True)


class Lockdown:
    """Landlock rules for the files that programs may read; ``apply`` confines the calling process.

    ``is_contained``: a container protects the files too, so that Landlock may be missing, as it is
    in gVisor. ``packages``: imported modules that programs may use.
    """

    def __init__(self, *, is_contained: bool = False, packages: Sequence[ModuleType] = ()) -> None:
        self.machine, self.rules = platform.machine(), LAST_DESCRIPTOR
        if self.machine not in NUMBERS:
            raise OSError(errno.ENOSYS, f"no table of system calls for {self.machine}")
        # Assembled here and not in each child.
        self._filter = _filter(self.machine)
        self._watch = _program(
            _instruction(_LOAD, 0)
            + _instruction(_JUMP_IF_EQUAL, NUMBERS[self.machine]["clone"], 1)
            + _instruction(_RETURN, _ALLOW)
            + _instruction(_RETURN, _ASK)
        )
        try:
            self.abi = _call(libc.syscall, _CREATE_RULESET, None, 0, 1)
        except OSError:
            if not is_contained:
                raise
            self.abi = 0
            return
        # Handle all that this Landlock knows, so that all of it is denied: files, TCP, abstract
        # sockets and signals.
        rights = max(count for version, count in _FILE_RIGHTS_OF_ABI if self.abi >= version)
        handled = [
            (1 << rights) - 1,
            *([_TCP] if self.abi >= 4 else []),
            *([_SCOPES] if self.abi >= 6 else []),
        ]
        packed = struct.pack(f"={len(handled)}Q", *handled)
        rules = _call(
            libc.syscall,
            _CREATE_RULESET,
            ctypes.create_string_buffer(packed, len(packed)),
            len(packed),
            0,
        )
        self.rules = fcntl.fcntl(
            rules, fcntl.F_DUPFD_CLOEXEC, 200
        )  # out of the way of a child's own descriptors
        os.close(rules)
        for path in _readable(packages):
            try:
                fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue  # gone, or closed to us anyway
            allowed = _READ_FILE | _READ_DIR if path.is_dir() else _READ_FILE
            rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, fd))
            _call(libc.syscall, _ADD_RULE, self.rules, 1, rule, 0)
            os.close(fd)

    def watch_threads(self, sender: _socket.socket) -> None:
        """Make this process ask before each new thread; send the descriptor for ``answer_clone``.

        Nothing is sent where there is none: in gVisor, or in a container whose runtime listens
        itself.
        """
        _call(libc.prctl, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        with contextlib.suppress(OSError):
            listener = _call(
                libc.syscall, _SECCOMP[self.machine], _SET_FILTER, _NEW_LISTENER, self._watch[0]
            )
            sender.sendmsg(
                [b"1"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("i", listener))]
            )

    def apply(self, *, memory: int, cpu_s: int) -> None:
        """Confine this process. ``memory``: bytes of address space. ``cpu_s``: a last limit, for
        all its cases."""
        pid = os.getpid()
        _call(libc.prctl, _PR_SET_DUMPABLE, 0, 0, 0, 0)
        limits = {
            resource.RLIMIT_AS: memory,
            resource.RLIMIT_CPU: cpu_s,
            resource.RLIMIT_NOFILE: 64,
        }
        for kind in (
            resource.RLIMIT_FSIZE,
            resource.RLIMIT_CORE,
            resource.RLIMIT_MEMLOCK,
            resource.RLIMIT_MSGQUEUE,
        ):
            limits[kind] = 0
        for kind, most in limits.items():
            resource.setrlimit(kind, (most, most))
        no_capabilities = ctypes.create_string_buffer(24)
        _call(
            libc.capset,
            ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0)),
            no_capabilities,
        )
        _call(libc.prctl, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if self.abi:
            _call(libc.syscall, _RESTRICT_SELF, self.rules, 0)
            os.close(self.rules)
        header, _code = _program(
            self._filter.replace(struct.pack("=I", ANY_PID), struct.pack("=I", pid))
        )
        _call(libc.prctl, _PR_SET_SECCOMP, _MODE_FILTER, header, 0, 0)


def die_with(parent: int) -> None:
    """End this process when its parent ends."""
    _call(libc.prctl, _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def answer_clone(listener: int, *, is_allowed: bool) -> None:
    """Answer a process that asks for a thread; without one, it gets EAGAIN, as at the limit of a
    user."""
    request = bytearray(80)
    with contextlib.suppress(OSError):  # who asked was killed
        fcntl.ioctl(listener, _RECEIVE, request)
        answer = (0, _CONTINUE) if is_allowed else (-errno.EAGAIN, 0)
        fcntl.ioctl(listener, _SEND, struct.pack("=8sqiI", request[:8], 0, *answer))


def _program(code: bytes) -> tuple[ctypes.Array, ctypes.Array]:
    """A BPF program's header, and its code, which has to live as long."""
    buffer = ctypes.create_string_buffer(code, len(code))
    return ctypes.create_string_buffer(
        struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    ), buffer


def _call(function: Any, *arguments: int | ctypes.Array | None) -> int:
    """Call a function of the C library; raise OSError if it fails."""
    answer = int(
        function(*(ctypes.c_long(word) if isinstance(word, int) else word for word in arguments))
    )
    if answer < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{function.__name__} {arguments[0]}: {os.strerror(code)}")
    return answer


def _readable(packages: Sequence[ModuleType]) -> Iterator[Path]:
    """Yield the standard library without site-packages, packages, and shared libraries file by
    file."""
    for package in packages:
        yield from map(Path, getattr(package, "__path__", [package.__file__]))
    roots = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}
    for root in roots:
        yield from (entry for entry in root.iterdir() if entry.name not in _NOT_STDLIB)
    yield from {
        Path(path).resolve() for path in sys.path if Path(path).is_dir()
    } - roots  # lib-dynload elsewhere
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    for folder in {
        Path(line[line.index("/") :]).parent for line in lines if "/" in line and ".so" in line
    }:
        yield from (file for file in folder.glob("*.so*") if file.is_file())


def _instruction(code: int, number: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, number)


def _filter(machine: str) -> bytes:
    """Assemble the BPF program of seccomp: system calls are allowed, allowed for some arguments, or
    refused."""
    line = _instruction
    refused = line(_RETURN, _ERRNO | errno.EPERM)
    lines = [
        line(_LOAD, 4),
        line(_JUMP_IF_EQUAL, AUDIT[machine], 1),
        line(_RETURN, _KILL),
        line(_LOAD, 0),
    ]
    for name, number in NUMBERS[machine].items():
        body = []
        for argument, mask, values in CONDITIONS.get(name, ()):
            # Little endian: the lower half of an argument comes first.
            body += [line(_LOAD, 16 + 8 * argument), line(_AND, mask)]
            body += [line(_JUMP_IF_EQUAL, value, len(values) - n) for n, value in enumerate(values)]
            body.append(refused)
        body.append(line(_RETURN, _ERRNO | errno.ENOSYS if name in ABSENT else _ALLOW))
        lines += [line(_JUMP_IF_EQUAL, number, 0, len(body)), *body]
    return b"".join([*lines, refused])
