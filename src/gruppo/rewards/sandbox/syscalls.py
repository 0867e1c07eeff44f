"""The system calls that a jailed program may make, and their numbers; all others are refused with
EPERM.

Left out are those that reach outside the process: sockets that connect, new processes and programs,
signals to others, files that are written, names that are made, changed or read as links, tracing,
mounts, rights, shared memory. Numbers: arch/x86/entry/syscalls/syscall_64.tbl and
include/uapi/asm-generic/unistd.h of Linux.
"""

from __future__ import annotations

Condition = tuple[int, int, tuple[int, ...]]
"""(argument, mask, values): the argument's lower 32 bits under the mask are one of the values."""

ALL = 0xFFFFFFFF
_THREAD, _SET_NAME, _UNIX, _STREAM = 0x00010000, 15, 1, 1
_WRITES = (
    0o1 | 0o2 | 0o100 | 0o1000 | 0o20000000
)  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, and O_TMPFILE's own bit
_ON_FDS = (
    0,
    1,
    2,
    3,
    4,
    1030,
)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC: not F_SETOWN
_TERMINAL = (
    0x5401,
    0x5413,
    0x541B,
    0x5421,
    0x5450,
    0x5451,
)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX


def _numbers(text: str) -> dict[str, int]:
    """From ``name=number`` words."""
    return {name: int(number) for name, _, number in (word.partition("=") for word in text.split())}


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
CONDITIONS: dict[str, tuple[Condition, ...]] = {
    "open": ((1, _WRITES, (0,)),),
    "openat": ((2, _WRITES, (0,)),),
    "clone": ((0, _THREAD, (_THREAD,)),),
    "kill": ((0, ALL, (ANY_PID,)),),
    "tgkill": ((0, ALL, (ANY_PID,)),),
    "prlimit64": ((0, ALL, (0, ANY_PID)),),
    "prctl": ((0, ALL, (_SET_NAME,)),),
    "socketpair": ((0, ALL, (_UNIX,)), (1, 0xF, (_STREAM,))),
    "fcntl": ((1, ALL, _ON_FDS),),
    "ioctl": ((1, ALL, _TERMINAL),),
}
"""Conditions on the arguments of system calls that a process may make only in part."""
