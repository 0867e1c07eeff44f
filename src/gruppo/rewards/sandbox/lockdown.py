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

    ``packages``: imported modules that programs may use.
    """

    def __init__(self, packages: Sequence[ModuleType] = ()) -> None:
        machine = platform.machine()
        if machine not in NUMBERS:
            raise OSError(errno.ENOSYS, f"no table of system calls for {machine}")
        # Assembled here and not in each child.
        self._seccomp = _SECCOMP[machine]
        self._filter = _filter(machine)
        self._watch = _program(
            _line(_LOAD, 0)
            + _line(_JUMP_IF_EQUAL, NUMBERS[machine]["clone"], 1)
            + _line(_RETURN, _ALLOW)
            + _line(_RETURN, _ASK)
        )
        abi = _call(libc.syscall, _CREATE_RULESET, None, 0, 1)
        # Handle all that this Landlock knows, so that all of it is denied: files, TCP, abstract
        # sockets and signals.
        rights = max(count for version, count in _FILE_RIGHTS_OF_ABI if abi >= version)
        handled = [(1 << rights) - 1, _TCP, _SCOPES][: 1 + (abi >= 4) + (abi >= 6)]
        packed = struct.pack(f"={len(handled)}Q", *handled)
        rules = _call(libc.syscall, _CREATE_RULESET, _buffer(packed), len(packed), 0)
        # out of the way of a child's own descriptors
        self.rules = fcntl.fcntl(rules, fcntl.F_DUPFD_CLOEXEC, 200)
        os.close(rules)
        for path in _readable(packages):
            try:
                fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue  # gone, or closed to us anyway
            allowed = _READ_FILE | _READ_DIR if path.is_dir() else _READ_FILE
            rule = _buffer(struct.pack("=Qi", allowed, fd))
            _call(libc.syscall, _ADD_RULE, self.rules, 1, rule, 0)
            os.close(fd)

    def watch_threads(self, sender: _socket.socket) -> None:
        """Make this process ask before each new thread; send the descriptor for
        ``answer_clone``."""
        _call(libc.prctl, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        flags = (_SET_FILTER, _NEW_LISTENER)
        listener = _call(libc.syscall, self._seccomp, *flags, self._watch[0])
        descriptor = struct.pack("i", listener)
        sender.sendmsg([b"1"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, descriptor)])

    def apply(self, *, memory: int, cpu_s: int) -> None:
        """Confine this process. ``memory``: bytes of address space. ``cpu_s``: a last limit, for
        all its cases."""
        _call(libc.prctl, _PR_SET_DUMPABLE, 0, 0, 0, 0)
        limits = dict.fromkeys(("FSIZE", "CORE", "MEMLOCK", "MSGQUEUE"), 0)
        for name, most in {**limits, "AS": memory, "CPU": cpu_s, "NOFILE": 64}.items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
        header, no_capabilities = _buffer(struct.pack("=Ii", 0x20080522, 0)), _buffer(bytes(24))
        _call(libc.capset, header, no_capabilities)
        _call(libc.prctl, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _call(libc.syscall, _RESTRICT_SELF, self.rules, 0)
        os.close(self.rules)
        own_pid = struct.pack("=I", os.getpid())
        own, _code = _program(self._filter.replace(struct.pack("=I", ANY_PID), own_pid))
        _call(libc.prctl, _PR_SET_SECCOMP, _MODE_FILTER, own, 0, 0)


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


def _buffer(data: bytes) -> ctypes.Array:
    return ctypes.create_string_buffer(data, len(data))


def _program(code: bytes) -> tuple[ctypes.Array, ctypes.Array]:
    """A BPF program's header, and its code, which has to live as long."""
    buffer = _buffer(code)
    return _buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))), buffer


def _call(function: Any, *arguments: int | ctypes.Array | None) -> int:
    """Call a function of the C library; raise OSError if it fails."""
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    answer = int(function(*words))
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
    folders = {Path(path).resolve() for path in sys.path if Path(path).is_dir()}
    yield from folders - roots  # lib-dynload elsewhere
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    libraries = {
        Path(line[line.index("/") :]).parent for line in maps if "/" in line and ".so" in line
    }
    for folder in libraries:
        yield from (file for file in folder.glob("*.so*") if file.is_file())


def _line(code: int, number: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """An instruction of a BPF program."""
    return struct.pack("=HBBI", code, if_true, if_false, number)


def _filter(machine: str) -> bytes:
    """Assemble the BPF program of seccomp: system calls are allowed, allowed for some arguments, or
    refused."""
    refused = _line(_RETURN, _ERRNO | errno.EPERM)
    lines = [_line(_LOAD, 4), _line(_JUMP_IF_EQUAL, AUDIT[machine], 1), _line(_RETURN, _KILL)]
    lines.append(_line(_LOAD, 0))
    for name, number in NUMBERS[machine].items():
        body = []
        for argument, mask, values in CONDITIONS.get(name, ()):
            # Little endian: the lower half of an argument comes first.
            body += [_line(_LOAD, 16 + 8 * argument), _line(_AND, mask)]
            for n, value in enumerate(values):
                body.append(_line(_JUMP_IF_EQUAL, value, len(values) - n))
            body.append(refused)
        body.append(_line(_RETURN, _ERRNO | errno.ENOSYS if name in ABSENT else _ALLOW))
        lines += [_line(_JUMP_IF_EQUAL, number, 0, len(body)), *body]
    return b"".join([*lines, refused])


# --- the system calls -----------------------------------------------------------------------------
#
# All others are refused with EPERM. Left out are those that reach outside the process: sockets that
# connect, new processes and programs, signals to others, files that are written, names that are
# made, changed or read as links, tracing, mounts, rights, shared memory. Numbers:
# arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h of Linux.


def _numbers(text: str) -> dict[str, int]:
    """From ``name=number`` words."""
    words = [word.partition("=") for word in text.split()]
    return {name: int(number) for name, _, number in words}


NUMBERS = {
    "x86_64": _numbers(
        """
        read=0 write=1 open=2 close=3 stat=4 fstat=5 lstat=6 poll=7 lseek=8 mmap=9 mprotect=10
        munmap=11 brk=12 rt_sigaction=13 rt_sigprocmask=14 rt_sigreturn=15 ioctl=16 pread64=17
        readv=19 writev=20 access=21 pipe=22 select=23 sched_yield=24 mremap=25 madvise=28 dup=32
        dup2=33 nanosleep=35 getitimer=36 alarm=37 setitimer=38 getpid=39 sendto=44 recvfrom=45
        shutdown=48 getsockname=51 socketpair=53 getsockopt=55 clone=56 exit=60 kill=62 uname=63
        fcntl=72 getcwd=79 gettimeofday=96 getrlimit=97 getrusage=98 times=100 getuid=102 getgid=104
        geteuid=107 getegid=108 getppid=110 rt_sigpending=127 rt_sigtimedwait=128 sigaltstack=131
        prctl=157 arch_prctl=158 gettid=186 time=201 futex=202 sched_getaffinity=204 getdents64=217
        set_tid_address=218 restart_syscall=219 clock_gettime=228 clock_getres=229
        clock_nanosleep=230 exit_group=231 epoll_wait=232 epoll_ctl=233 tgkill=234 openat=257
        newfstatat=262 faccessat=269 pselect6=270 ppoll=271 set_robust_list=273 epoll_pwait=281
        eventfd2=290 epoll_create1=291 dup3=292 pipe2=293 prlimit64=302 getrandom=318 membarrier=324
        statx=332 rseq=334 clone3=435 openat2=437 faccessat2=439
        """
    ),
    "aarch64": _numbers(
        """
        getcwd=17 eventfd2=19 epoll_create1=20 epoll_ctl=21 epoll_pwait=22 dup=23 dup3=24 fcntl=25
        ioctl=29 faccessat=48 openat=56 close=57 pipe2=59 getdents64=61 lseek=62 read=63 write=64
        readv=65 writev=66 pread64=67 pselect6=72 ppoll=73 newfstatat=79 fstat=80 exit=93
        exit_group=94 set_tid_address=96 futex=98 set_robust_list=99 nanosleep=101 getitimer=102
        setitimer=103 clock_gettime=113 clock_getres=114 clock_nanosleep=115 sched_getaffinity=123
        sched_yield=124 restart_syscall=128 kill=129 tgkill=131 sigaltstack=132 rt_sigaction=134
        rt_sigprocmask=135 rt_sigpending=136 rt_sigtimedwait=137 rt_sigreturn=139 times=153
        uname=160 getrlimit=163 getrusage=165 prctl=167 gettimeofday=169 getpid=172 getppid=173
        getuid=174 geteuid=175 getgid=176 getegid=177 gettid=178 socketpair=199 getsockname=204
        sendto=206 recvfrom=207 getsockopt=209 shutdown=210 brk=214 munmap=215 mremap=216 clone=220
        mmap=222 mprotect=226 madvise=233 prlimit64=261 getrandom=278 membarrier=283 statx=291
        rseq=293 clone3=435 openat2=437 faccessat2=439
        """
    ),
}
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The architecture, as a seccomp filter sees it (AUDIT_ARCH of linux/audit.h)."""
ABSENT = ("clone3", "openat2")
"""These take their arguments through a pointer, which a filter cannot read; the C library does
without them."""
ANY_PID = 0x7E57C0DE
"""Stands for the process in a filter that is not yet its own."""
_ALL = 0xFFFFFFFF
_THREAD, _SET_NAME, _UNIX, _STREAM = 0x00010000, 15, 1, 1
# O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, and O_TMPFILE's own bit
_WRITES = 0o1 | 0o2 | 0o100 | 0o1000 | 0o20000000
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC: not F_SETOWN
_ON_FDS = (0, 1, 2, 3, 4, 1030)
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_TERMINAL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
CONDITIONS: dict[str, tuple[tuple[int, int, tuple[int, ...]], ...]] = {
    "open": ((1, _WRITES, (0,)),),
    "openat": ((2, _WRITES, (0,)),),
    "clone": ((0, _THREAD, (_THREAD,)),),
    "kill": ((0, _ALL, (ANY_PID,)),),
    "tgkill": ((0, _ALL, (ANY_PID,)),),
    "prlimit64": ((0, _ALL, (0, ANY_PID)),),
    "prctl": ((0, _ALL, (_SET_NAME,)),),
    "socketpair": ((0, _ALL, (_UNIX,)), (1, 0xF, (_STREAM,))),
    "fcntl": ((1, _ALL, _ON_FDS),),
    "ioctl": ((1, _ALL, _TERMINAL),),
}
"""Conditions on the arguments of system calls that a process may make only in part: (argument,
mask, values), the argument's lower 32 bits under the mask are one of the values."""
