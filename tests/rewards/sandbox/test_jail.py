"""The jail: what a program in it can do, what it cannot, and that an attempt costs it its case and
nobody else."""

from __future__ import annotations

import ast
import ctypes
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.rewards.kernels import jailed

from gruppo.rewards.sandbox import jail as jail_module
from gruppo.rewards.sandbox import lockdown
from gruppo.rewards.sandbox.jail import (
    ATTEMPTS,
    MAX_BYTES,
    CaseResult,
    Jail,
    SandboxError,
    SandboxLimits,
    probe,
    require_jail,
)
from gruppo.rewards.sandbox.plain_data import DEEPEST, NotPlain, decode, encode
from gruppo.rewards.sandbox.program import LOCKED
from gruppo.types import GruppoError

REFUSED = "PermissionError"


@pytest.fixture(scope="module")
def jail():
    with Jail(SandboxLimits(case_s=0.25, program_s=0.75, memory_mib=256)) as opened:
        yield opened


@pytest.fixture(scope="module")
def patient():
    """For what is ended by another limit than time, on a busy machine too."""
    with Jail(SandboxLimits(case_s=10, program_s=30, memory_mib=256)) as opened:
        yield opened


def tried(
    jail: Jail,
    expression: str,
    program: str = "import os, sys, ctypes, socket, subprocess, threading",
) -> str:
    """What one expression gives: its value as text, or why there is none."""
    result = jail.calls(program, [[expression]])[0]
    return repr(result.value[0]) if result.status == "value" else result.message


def tried_each(
    jail: Jail, expressions: list[str], program: str = "import os, sys, ctypes, socket"
) -> dict[str, str]:
    """``tried``, of expressions that all run in one process."""
    results = jail.calls(program, [[expression] for expression in expressions])
    texts = [
        repr(result.value[0]) if result.status == "value" else result.message for result in results
    ]
    return dict(zip(expressions, texts, strict=True))


def children_of(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return []


def programs_of(supervisor: int) -> list[int]:
    """Running programs: children of its handlers."""
    return [program for handler in children_of(supervisor) for program in children_of(handler)]


# --- what works


@jailed
def test_a_kernel_that_has_its_parts_has_the_jail():
    assert probe() is None


@jailed
def test_calls_give_plain_data_and_errors_are_told(jail):
    program = "def f(x): return [x, {x: (x, None, 1.5)}, {x}, b'a', 1j]\ndef g(): return 1 / 0"
    first, second, third = jail.calls(program, [["f(2)", "f('a')[0]"], ["g()"], ["h()"]])
    assert first.value == [[2, {2: (2, None, 1.5)}, {2}, b"a", 1j], "a"]
    assert (second.status, second.message) == ("error", "ZeroDivisionError: division by zero")
    assert third.message == "NameError: name 'h' is not defined"


@jailed
def test_a_script_reads_its_input_however_it_likes_and_its_output_is_what_it_printed(jail):
    readers = [
        "sys.stdin.read()",
        "open(0).read()",
        "os.read(0, os.fstat(0).st_size).decode()",
        "'\\n'.join(sys.stdin)",
    ]
    for reader in [*readers, "input() + ' ' + input()", "sys.stdin.buffer.read().decode()"]:
        results = jail.script(
            f"import os, sys\nprint(sum(map(int, ({reader}).split())))", ["1 2\n3", "4\n5\n"]
        )
        assert [result.value for result in results] == ["6\n", "9\n"], reader
    late = "import atexit, os, sys, threading\natexit.register(lambda: os.write(1, b'last'))\n"
    late += (
        "threading.Thread(target=lambda: print('from a thread', flush=True)).start()\nsys.exit()"
    )
    assert jail.script(late, [""])[0].value == "from a thread\nlast"
    assert (
        jail.script("print('fine', flush=True)\nimport os; os._exit(0)", [""])[0].value == "fine\n"
    )


@jailed
@pytest.mark.parametrize(
    "program",
    [
        "out = open(1, 'w')\nout.write('42')",
        "out = open(1, 'w')\nout.write('2')\nprint(4, end='')",
        "import os\nout = os.fdopen(1, 'w')\nprint('42', file=out)",
        "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer)\nprint('42')",
        "import io, sys\nout = io.TextIOWrapper(sys.stdout.buffer)\nout.write('42')",
        "import io, sys\nprint('42')\nsys.stdout = io.StringIO()\nprint('no')",
        "import sys\nprint('42')\nsys.stdout.close()",
        "import sys\nprint('42')\nsys.stdout = None",
        "import sys\nclass O:\n    def write(self, text): sys.__stdout__.write(text)\nsys.stdout = "
        "O()\nprint('42')",
        "class Late:\n    def __del__(self): print('42')\nlate = Late()\nlate.own = late",
    ],
)
def test_what_a_script_wrote_is_there_however_it_wrote_it(jail, program):
    (result,) = jail.script(program, [""])
    assert (result.status, (result.value or result.message).strip()) == ("value", "42")


@jailed
def test_a_program_is_compiled_as_a_file_of_its_own(jail):
    """Without the ``from __future__`` of the jail, and with the names of typing, as on LeetCode."""
    assert tried(jail, "f.__annotations__['x'] is int", "def f(x: int): pass") == "True"
    program = "class Solution:\n    def cast(self, x: List[int]) -> Optional[int]: return x[0]"
    assert jail.calls(program, [["cast([3])"]], entry="cast")[0].value == [3]
    shadow = "List = 5\nfrom collections import Counter"
    assert tried(jail, "List, Counter('a')['a'], 'List' in globals()", shadow) == "(5, 1, True)"


@jailed
def test_a_line_that_a_program_forged_has_as_many_values_as_were_asked_for(jail):
    forge = (
        "import sys\nframe = sys._getframe()\nwhile 'report' not in frame.f_locals: frame = "
        "frame.f_back\n"
    )
    forge += "frame.f_locals['report'](-1, 'v', 'null')\n"
    for text in ('["l", []]', '["l", [true, true]]', '{"a": 1}', "true"):
        (result,) = jail.calls(forge + f"frame.f_locals['report'](0, 'v', {text!r})", [["1"]])
        assert (result.status, result.message) == ("error", "it is not plain data")


@jailed
def test_a_signal_without_a_name_is_told_by_its_number(jail):
    assert tried(jail, "os.kill(os.getpid(), 40)") == "the process was ended by signal 40"


@jailed
def test_where_memory_runs_out_the_kernel_ends_the_jail_and_not_the_trainer(jail):
    assert Path(f"/proc/{jail._process.pid}/oom_score_adj").read_text() == "1000\n"


@jailed
def test_a_program_that_sleeps_has_the_time_of_a_case_and_no_more(jail):
    """With a limit on the clock of ten times as much, it would return before the end of that."""
    program = "import time, threading\ndef f(x): time.sleep(x)\ndef g(x): threading.Event().wait(x)"
    results = jail.calls(program, [["f(0.01)"], ["f(1.5)"], ["g(1.5)"]])
    assert [result.status for result in results] == ["value", "timeout", "timeout"]
    assert [
        each.status for each in jail.script("import time; time.sleep(float(input()))", ["1.5", "0"])
    ] == [
        "timeout",
        "value",
    ]


@jailed
def test_time_for_which_a_program_waits_for_a_processor_does_not_count():
    """Five others on its processor: it waits for longer than it may sleep."""
    with Jail(SandboxLimits(case_s=0.5, program_s=2)) as own:
        os.sched_setaffinity(own._process.pid, one := {min(os.sched_getaffinity(0))})
        for handler in children_of(own._process.pid):
            os.sched_setaffinity(handler, one)
        spin = f"import os\nos.sched_setaffinity(0, {one})\nprint(flush=True)\nwhile True: pass"
        command = [sys.executable, "-S", "-c", spin]
        # each in a session of its own, as the jail is: the kernel deals time out to sessions first
        others = [
            subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
            for _ in range(5)
        ]
        try:
            for other in others:  # until all of them are on that processor
                other.stdout.readline()
            work = (
                "import time\ndef f():\n    while time.process_time() < began + 0.2: "
                "pass\nbegan = time.process_time()"
            )
            assert own.calls(work, [["f()"]])[0].status == "value"
        finally:
            for other in others:
                other.kill()
                other.wait()


@jailed
@pytest.mark.silent_bug(42)
def test_no_program_finds_what_an_earlier_one_returned_printed_or_was_asked():
    """A system call that reads memory reports what is not mapped and does not crash."""
    secret = "okapi" + "-4711-" * 3
    search = """
import ctypes, gc, os, re
libc, found, ends = ctypes.CDLL(None), set(), os.pipe()
def scan(start, end):
    for page in range(start, end, 4096):
        if libc.write(ends[1], ctypes.c_void_p(page), 4096) == 4096:
            found.update(re.findall(b"oka" + b"pi(?:-4711-)+", os.read(ends[0], 4096)))
def f():
    places = {id(each) >> 22 for each in gc.get_objects()} | {id(str(n)) >> 22 for n in range(9)}
    sizes = 10, 1000, 10**5, 10**6
    places |= {ctypes.addressof(ctypes.create_string_buffer(size)) >> 22 for size in sizes}
    for place in places: scan(place << 22, (place + 1) << 22)
    return sorted(found)
"""
    with Jail(SandboxLimits(case_s=10, program_s=20)) as own:
        own.calls(f"# {secret}\ndef f(x): return x + {secret!r}", [[f"f({secret!r})"]] * 3)
        own.script("print(input())", [secret] * 3)
        assert tried(own, "f()", search) == "[]"
        assert "okapi-4711" in tried(own, "f()", f"kept = {secret!r}\n{search}")  # it would find it


@jailed
def test_a_script_that_ends_badly_has_no_output(jail):
    program = (
        "print('right')\nx = input()\nif x == 'raise': 1 / 0\nif x == 'exit': raise SystemExit(3)\n"
    )
    program += "if x == 'die': import os; os.abort()"
    results = jail.script(program, ["raise", "exit", "die", "no"])
    assert [result.status for result in results] == ["error"] * 3 + ["value"]
    assert [result.message for result in results[:2]] == [
        "ZeroDivisionError: division by zero",
        "the process ended with status 3",
    ]
    assert results[2].message == "the process was ended by SIGABRT"


@jailed
def test_the_standard_library_can_be_imported_and_used_and_nothing_installed_can(jail, patient):
    program = """
import asyncio, bz2, csv, ctypes, datetime, decimal, email, hashlib, lzma, sqlite3, statistics
import unittest, uuid, zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
@dataclass
class Point:
    x: "int" = 1
async def late():
    await asyncio.sleep(0.01)
    return 7
def all_of_it():
    with ThreadPoolExecutor(4) as pool:
        squares = list(pool.map(abs, [-1, 2]))
    year = datetime.datetime.strptime("2020", "%Y").year
    row = sqlite3.connect(":memory:").execute("select 3").fetchone()
    return asyncio.run(late()), squares, year, Point().x, row
"""
    assert tried(patient, "all_of_it()", program) == "(7, [1, 2], 2020, 1, (3,))"
    for name in ("torch", "numpy", "gruppo", "pip", "pytest"):
        assert tried(jail, "1", f"import {name}").startswith(
            f"ModuleNotFoundError: No module named '{name}'"
        )


@jailed
def test_hashes_and_random_numbers_are_the_same_in_each_run():
    program = "import random\ndef f(): return random.random(), hash('a'), list({'a', 'b', 'c'})"
    found = set()
    for _ in range(2):
        with Jail() as jail:
            found |= {tried(jail, "f()", program), tried(jail, "f()", program)}
    assert len(found) == 1


# --- what does not


@jailed
def test_no_file_of_ours_can_be_read_and_no_folder_listed(jail, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("expected answers")
    link = tmp_path / "link"
    link.symlink_to(secret)
    files = [
        secret,
        link,
        Path(__file__),
        Path(jail_module.__file__),
        Path.home() / ".bashrc",
        Path("/etc/passwd"),
    ]
    processes = [
        "/proc/self/maps",
        "/proc/self/mem",
        "/proc/1/environ",
        f"/proc/{os.getpid()}/environ",
        "/dev/null",
    ]
    files += [f"/proc/{os.getpid()}/fd/0", f"/proc/self/root{secret}", f"/usr/lib/../..{secret}"]
    folders = [tmp_path, "/", "/tmp", Path.home(), "/proc", Path(jail_module.__file__).parent]
    attempts = [f"open({str(file)!r}, 'rb').read()" for file in [*files, *processes]]
    attempts += [f"os.listdir({str(folder)!r})" for folder in folders]
    for attempt, found in tried_each(jail, attempts).items():
        assert REFUSED in found, attempt
    assert tried(jail, "sys.path") and tried(jail, "open(os.__file__).read()[:3]") == "'r\"\"'"


@jailed
def test_nothing_can_be_written_changed_or_removed(jail, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("whole")
    before = victim.stat()
    path, folder = repr(str(victim)), repr(str(tmp_path))
    attempts = [
        *(f"open({path}, {mode!r})" for mode in ("w", "a", "x", "r+", "w+")),
        *(
            f"os.open({path}, os.{flag})"
            for flag in ("O_TRUNC", "O_RDWR", "O_CREAT", "O_WRONLY | os.O_APPEND")
        ),
        *(
            f"os.open({folder}, os.O_TMPFILE | os.O_RDWR)",
            f"os.truncate({path}, 0)",
            f"os.unlink({path})",
        ),
        *(
            f"os.rename({path}, {folder} + '/b')",
            f"os.link({path}, {folder} + '/b')",
            f"os.mkdir({folder} + '/d')",
        ),
        *(
            f"os.symlink('/', {folder} + '/b')",
            f"os.chmod({path}, 0)",
            f"os.utime({path}, (0, 0))",
            f"os.rmdir({folder})",
        ),
        *(
            f"os.mkfifo({folder} + '/p')",
            f"os.setxattr({path}, 'user.a', b'b')",
            "os.memfd_create('m')",
        ),
        *("__import__('tempfile').mkdtemp()", "os.chdir('/tmp')", "os.readlink('/proc/self/exe')"),
    ]
    for attempt, found in tried_each(jail, attempts).items():
        assert REFUSED in found or "No usable temporary directory" in found, (attempt, found)
    after = victim.stat()
    assert (victim.read_text(), os.listdir(tmp_path)) == ("whole", ["victim"])
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


@jailed
def test_there_is_no_network(jail):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        attempts = [
            f"socket.create_connection(('127.0.0.1', {port}))",
            "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
            "socket.socket(socket.AF_INET6)",
            "socket.socket(socket.AF_UNIX)",
            "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
            "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
            f"__import__('urllib.request').request.urlopen('http://127.0.0.1:{port}', timeout=1)",
        ]
        for attempt, found in tried_each(jail, attempts).items():
            assert "Operation not permitted" in found, attempt
        with pytest.raises(TimeoutError):
            server.accept()


@jailed
def test_no_process_or_program_is_started_and_none_is_left(jail):
    for attempt in [
        "os.fork()",
        "os.forkpty()",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "os.execv('/bin/true', ['true'])",
        "subprocess.run(['/bin/true'])",
        "__import__('multiprocessing').Process(target=print).start()",
        "ctypes.CDLL(None, use_errno=True).vfork()",
    ]:
        found = tried(jail, attempt)
        assert REFUSED in found or found == "-1", (attempt, found)
    assert tried(jail, "os.system('true')") != "0"
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    assert jail.calls(bomb, [["1"]])[0].status == "timeout"
    assert programs_of(jail._process.pid) == []


@jailed
def test_no_one_else_can_be_signalled_limited_or_traced(jail):
    us, supervisor = os.getpid(), jail._process.pid
    before = (os.sched_getaffinity(us), os.getpriority(os.PRIO_PROCESS, us))
    for pid in (us, supervisor):
        attempts = [
            *(
                f"os.kill({pid}, 9)",
                f"os.killpg({pid}, 9)",
                f"os.kill(-{pid}, 9)",
                f"os.pidfd_open({pid})",
            ),
            *(
                f"__import__('resource').prlimit({pid}, 0, (1, 1))",
                f"os.setpriority(os.PRIO_PROCESS, {pid}, 19)",
            ),
            *(
                f"os.sched_setaffinity({pid}, [0])",
                f"__import__('fcntl').fcntl(1, 8, {pid})",
                "os.setsid()",
            ),
            f"__import__('fcntl').ioctl(1, 0x8901, ({pid}).to_bytes(4, 'little'))",
        ]
        for attempt, found in tried_each(jail, attempts).items():
            assert REFUSED in found, attempt
    assert REFUSED in tried(jail, "os.kill(0, 9)") and REFUSED in tried(jail, "os.kill(-1, 9)")
    assert (os.sched_getaffinity(us), os.getpriority(os.PRIO_PROCESS, us)) == before
    assert tried(jail, "os.kill(os.getpid(), 9)") == "the process was ended by SIGKILL"
    assert tried(jail, "6 * 7") == "42"


RAW = lockdown._numbers(  # of x86-64
    """
    ptrace=101 mount=165 umount2=166 setns=308 unshare=272 bpf=321 perf_event_open=298 keyctl=250
    io_uring_setup=425 userfaultfd=323 process_vm_readv=310 pidfd_getfd=438 memfd_secret=447
    shmget=29 socket=41 connect=42 execve=59 execveat=322 fork=57 vfork=58 rt_sigqueueinfo=129
    tkill=200 chroot=161 pivot_root=155 init_module=175 reboot=169 syslog=103 personality=135
    modify_ldt=154 open_by_handle_at=304 name_to_handle_at=303 kcmp=312 add_key=248 mq_open=240
    landlock=446 seccomp=317 setuid=105 setresuid=117 capset=126 truncate=76 creat=85 linkat=265
    renameat2=316 sendmsg=46
    """
)


@jailed
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are x86-64's")
def test_calls_of_the_kernel_that_reach_outside_are_refused_to_native_code_too(jail):
    program = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def errno_of(number, *arguments):
    return 0 if libc.syscall(number, *map(ctypes.c_long, arguments)) >= 0 else ctypes.get_errno()
"""
    found = tried_each(
        jail, [f"errno_of({number}, 1, 1, 1, 1)" for number in RAW.values()], program
    )
    assert len(found) == len(RAW) and set(found.values()) == {"1"}  # EPERM
    thread = 0x00010000
    others = {
        "clone": (56, 17),
        "clone3": (435, 0, 88),
        "openat2": (437, -100, 0, 0, 24),
        "x32 read": (0x40000000, 0),
    }
    refused = {
        name: tried(jail, f"errno_of{arguments}", program) for name, arguments in others.items()
    }
    assert refused == {"clone": "1", "clone3": "38", "openat2": "38", "x32 read": "1"}
    assert (
        tried(jail, f"errno_of(56, {thread})", program) == "22"
    )  # a thread is let through, to be refused as malformed
    assert tried(jail, "errno_of(157, 38, 0)", program) == "1"  # prctl


@jailed
def test_the_environment_is_empty_and_no_descriptor_of_ours_is_open(jail, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a secret")
    with Jail() as own:
        assert tried(own, "(dict(os.environ), os.getenv('HF_TOKEN'))") == "({}, None)"
        assert b"HF_TOKEN" not in Path(f"/proc/{own._process.pid}/environ").read_bytes()
        scan = "[fd for fd in range(3000) if __import__('contextlib').suppress and is_open(fd)]"
        program = (
            "import os\ndef is_open(fd):\n    try:\n        os.fstat(fd)\n    except OSError:\n    "
            "    return False\n"
            "    return True"
        )
        assert tried(own, scan, program) == "[0, 1, 2, 3]"


# --- what ends a program


@jailed
def test_an_endless_loop_costs_its_case_and_the_others_are_kept(jail):
    program = "def f(x):\n    while x == 1: pass\n    return x"
    results = jail.calls(program, [["f(0)"], ["f(1)"], ["f(2)"]])
    assert [result.status for result in results] == ["value", "timeout", "value"]
    assert (results[0].value, results[2].value) == ([0], [2])
    assert [
        each.status for each in jail.script("x = input()\nwhile x == '1': pass", ["0", "1", "2"])
    ] == [
        "value",
        "timeout",
        "value",
    ]


@jailed
def test_a_program_has_a_time_for_all_its_cases(jail):
    began = time.monotonic()
    results = jail.calls("def f():\n    while True: pass", [["f()"]] * 20)
    statuses = [result.status for result in results]
    assert set(statuses[:3]) == {"timeout"} and set(statuses[5:]) == {"not_run"}
    assert time.monotonic() - began < 10 * 0.75 + 3


@jailed
@pytest.mark.parametrize(
    "hang",
    [
        "import threading\ndef f(): threading.Event().wait()",
        "import os, time\ndef f():\n    os.close(3)\n    time.sleep(1000)",
        "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nsignal.signal(2, 1)\ndef f(): "
        "time.sleep(1000)",
        "while True: pass\ndef f(): pass",
    ],
)
def test_one_that_waits_or_hides_is_ended_too(hang):
    began = time.monotonic()
    with Jail(SandboxLimits(case_s=0.05, program_s=0.1, memory_mib=256)) as own:
        result = own.calls(hang, [["f()"]])[0]
        assert (
            result.status == "timeout"
            and result.message == "over 0.05 s for the case or 0.1 s in all"
        )
        assert time.monotonic() - began < 10 and programs_of(own._process.pid) == []


@jailed
def test_memory_threads_and_output_have_an_end(patient):
    assert tried(patient, "len('x' * 2 * 10**9)") == "MemoryError: "
    grow = "def f():\n    kept = []\n    while True: kept.append(bytearray(10**7))"
    assert "MemoryError" in tried(patient, "f()", grow)
    assert tried(patient, "'x' * 10**7") == "too much output"
    assert patient.script("while True: print('x' * 10000)", [""])[0].message == "too much output"
    for junk in ("b'x' * 10000", "b'\\n' * 10000"):
        assert (
            tried(patient, "f()", f"import os\ndef f():\n    while True: os.write(3, {junk})")
            == "too much output"
        )
    longest = MAX_BYTES - 1
    assert patient.script(f"print('x' * {longest})", [""])[0].value == "x" * longest + "\n"
    printed = f"print('x' * {MAX_BYTES})"
    assert patient.script(printed, [""])[0].message == "too much output"
    assert patient.calls("", [[f"'x' * {MAX_BYTES}"]])[0].status == "error"
    assert patient.calls("", [[f"'x' * ({MAX_BYTES} - 100)"]])[0].status == "value"


@jailed
def test_printed_text_counts_whole_where_a_report_arrives_in_the_middle_of_it():
    """On a busy machine the supervisor reads 64 KiB of output before the report that the process is
    confined."""
    from gruppo.rewards.sandbox.supervisor import Child

    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    child = Child(process.pid, 3, 4, -1, "nonce", range(0), room=100)
    child._take(4, b"x" * 80)
    child._take(3, f"nonce {LOCKED} v \n".encode())
    assert not child.end_reason and LOCKED in child.reports
    child._take(4, b"x" * 80)
    process.communicate()
    assert child.end_reason == "too much output"


@jailed
def test_all_cases_share_a_budget_and_one_that_overruns_it_costs_only_itself(patient):
    """Each value alone fits; a thousand of them would be 5 GB in the trainer."""
    results = patient.calls(
        "def f(n): return 'x' * n", [[f"f({n})"] for n in [5_000_000] * 3 + [10**7, 5]]
    )
    assert [result.status for result in results] == ["value", "error", "error", "error", "value"]
    assert {result.message for result in results[1:4]} == {"too much output"}
    printed = patient.script("print('x' * int(input()))", ["5000000"] * 3 + ["5"])
    assert [result.status for result in printed] == ["value", "error", "error", "value"]


@jailed
def test_a_short_text_of_many_items_is_not_decoded(patient):
    (result,) = patient.calls("", [["[()] * 60_000"]])
    assert (result.status, result.message) == ("value", "") and len(result.value[0]) == 60_000
    (result,) = patient.calls("", [["[None] * 300_000"]])
    assert (result.status, result.message) == ("error", "it has too many items")
    results = patient.calls("", [["[None] * 150_000"]] * 3)
    assert [result.status for result in results] == ["value", "error", "error"]


def test_a_line_that_grows_is_read_in_linear_time():
    """Quadratic, 64 MB in pieces of 4 KiB would be copied 16,000 times: half a terabyte."""
    from gruppo.rewards.sandbox.supervisor import Child

    child = Child(0, 0, None, -1, "ab", range(1), 1 << 30)
    child._take(0, b"ab 0 v ")
    for _ in range(1 << 14):
        child._take(0, b"x" * 4096)
    child._take(0, b"\nab 1 v x\n")
    assert len(child.reports[0][1]) == 1 << 26 and [*child.reports] == [0]


@jailed
def test_a_65th_thread_is_refused_however_short_its_life_is():
    """Counted at each start: a program that starts and ends its threads between two looks would
    have any number."""
    program = (
        "import threading\nthreading.stack_size(32768)\ngate = threading.Event()\ndef "
        "f(n):\n    gate.clear()\n"
    )
    program += (
        "    each = [threading.Thread(target=gate.wait, daemon=True) for _ in range(n)]\n   "
        " started = 1\n    try:\n"
    )
    program += (
        "        for one in each: one.start(); started += 1\n    except RuntimeError: "
        "pass\n    gate.set()\n"
    )
    program += "    for one in each[:started - 1]: one.join()\n    return started"
    with Jail(SandboxLimits(case_s=10, program_s=30)) as own:
        results = own.calls(program, [["f(62)"], ["f(63)"], ["f(64)"], ["f(200)"]])
    assert [result.value for result in results] == [[63], [64], [64], [64]]


@jailed
def test_what_ends_the_process_costs_one_case_and_is_told(jail):
    program = (
        "import os, ctypes\ndef f(x):\n    if x == 1: os._exit(0)\n    if x == 2: "
        "ctypes.string_at(0)\n"
    )
    program += "    return x"
    results = jail.calls(program, [["f(0)"], ["f(1)"], ["f(2)"], ["f(3)"]])
    assert [result.status for result in results] == ["value", "error", "error", "value"]
    assert [result.message for result in results[1:3]] == [
        "the process ended with status 0",
        "the process was ended by SIGSEGV",
    ]
    assert [each.message for each in jail.calls("import os; os._exit(0)", [["1"], ["2"]])] == [
        "the process ended with status 0"
    ] * 2
    assert jail.calls("import sys; sys.exit(0)", [["1"]])[0].message == "SystemExit: 0"


@jailed
def test_no_limit_can_be_raised_again(jail):
    program = "import resource\ndef up(kind): resource.setrlimit(kind, (1 << 40, 1 << 40))"
    for kind in ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_CORE"):
        assert (
            tried(jail, f"up(resource.{kind})", program)
            == "ValueError: not allowed to raise maximum limit"
        )


@jailed
def test_nothing_is_left_when_the_trainer_is_killed(tmp_path):
    trainer = (
        "from gruppo.rewards.sandbox.jail import Jail, SandboxLimits\n"
        "jail = Jail(SandboxLimits(case_s=60, program_s=60))\n"
        "print(jail._process.pid, flush=True)\njail.calls('', [[\"__import__('time').sleep(99)\"]])"
    )
    source = str(Path(jail_module.__file__).parents[3])
    with subprocess.Popen(
        [sys.executable, "-c", trainer],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": source},
    ) as process:
        supervisor = int(process.stdout.readline())
        wait_until(lambda: programs_of(supervisor))
        left = [supervisor, *children_of(supervisor), *programs_of(supervisor)]
        process.kill()
    wait_until(lambda: not any(map(is_running, left)))


def wait_until(is_so, patience_s: float = 30.0) -> None:
    deadline = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --- failures of the jail itself


@jailed
def test_a_jail_whose_interpreter_was_killed_says_so():
    with Jail() as jail:
        jail.end()
        with pytest.raises(SandboxError, match="the jail ended"):
            jail.calls("", [["1"]])


@jailed
def test_a_process_that_cannot_be_locked_runs_nothing():
    with Jail() as jail:
        vars(jail.limits)["memory_mib"] = 1 << 60  # a limit that no kernel takes
        with pytest.raises(SandboxError, match="a process could not be locked: OverflowError"):
            jail.calls("", [["1"]])


def test_a_machine_without_a_jail_is_refused_in_one_line_with_what_to_do(monkeypatch):
    for problem in ("it needs Linux, and this is darwin", "Landlock cannot be used"):
        monkeypatch.setattr(jail_module, "probe", lambda *_, problem=problem: problem)
        with pytest.raises(GruppoError, match=problem) as refused:
            require_jail()
        assert (
            "\n" not in str(refused.value)
            and "seccomp" in str(refused.value)
            and "file.py:function" in str(refused.value)
        )


def test_another_system_than_linux_has_no_jail(monkeypatch):
    monkeypatch.setattr(jail_module.sys, "platform", "darwin")
    assert probe.__wrapped__() == "it needs Linux, and this is darwin"
    with pytest.raises(GruppoError, match="it needs Linux"):
        Jail()


OUTSIDE = ("jail",)


def test_the_sandbox_imports_the_standard_library_alone_and_the_trainers_end_runs_anywhere():
    folder, outside = Path(jail_module.__file__).parent, {}
    for file in folder.glob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        names = {
            alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
        }
        names |= {
            node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level
        }
        outside[file.stem] = {
            name for name in names if name.partition(".")[0] not in sys.stdlib_module_names
        }
        if file.stem in OUTSIDE or file.stem in ("plain_data", "program"):
            assert not names & {"fcntl", "resource", "pwd", "termios"}
    ours = "gruppo.rewards.sandbox."
    for name in OUTSIDE:
        assert {each for each in outside.pop(name) if not each.startswith(ours)} <= {"gruppo.types"}
    assert not any(outside.values())


@jailed
@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_the_probe_names_an_attempt_that_succeeds(monkeypatch, attempt):
    monkeypatch.setitem(ATTEMPTS, attempt, "'it worked'")
    assert probe.__wrapped__() == f"a program in it could {attempt}"


@jailed
def test_the_probe_wants_a_program_to_run(monkeypatch):
    monkeypatch.setattr(jail_module, "_BARE", 'print(\'{"refused": "Landlock cannot be used"}\')')
    assert probe.__wrapped__() == "Landlock cannot be used"
    monkeypatch.setattr(jail_module, "_BARE", "raise SystemExit(3)")
    assert probe.__wrapped__() == "the jail ended with status 3"


@jailed
def test_the_probe_wants_a_script_to_run(monkeypatch):
    monkeypatch.setattr(
        Jail, "script", lambda *_: [CaseResult("error", message="memfd_create is refused")]
    )
    assert (
        probe.__wrapped__()
        == "a script that prints 6 * 7 does not run in it: memfd_create is refused"
    )


@pytest.mark.parametrize(
    "limits",
    [
        {"case_s": 0},
        {"program_s": -1},
        {"memory_mib": 16},
        {"memory_mib": 1 << 44},
        {"case_s": float("nan")},
    ],
)
def test_limits_that_are_none_are_refused(limits):
    with pytest.raises(GruppoError, match="cannot limit a program"):
        SandboxLimits(**limits)


# --- plain data


class Sly(int):
    def __eq__(self, other):
        return True

    def __repr__(self):
        return "42"

    def __format__(self, spec):
        return "2a"

    __hash__ = int.__hash__
    __index__ = __int__ = lambda self: 42


class SlyList(list):
    def __iter__(self):
        return iter([1, 2])

    def __len__(self):
        return 2


def test_plain_data_come_back_as_they_were_and_of_the_base_type():
    from collections import Counter, OrderedDict, namedtuple

    value = [
        None,
        True,
        -7,
        1.5,
        float("inf"),
        "\u4f60\ud800\n",
        b"\0",
        (1,),
        {2},
        frozenset({3}),
        {(1, "a"): [{}]},
        2j,
    ]
    back = decode(encode(value))
    assert back == value and [type(x) for x in back] == [type(x) for x in value]
    assert decode(encode(10**10_000)) == 10**10_000 and decode(encode(float("nan"))) != decode(
        encode(float("nan"))
    )
    pair = namedtuple("pair", "a b")(1, 2)
    assert decode(encode([Counter("aab"), OrderedDict(b=1), pair])) == [
        {"a": 2, "b": 1},
        {"b": 1},
        (1, 2),
    ]
    assert "\n" not in encode("\n\r\u2028")


def test_a_subclass_is_read_as_its_base_whatever_it_says_of_itself():
    assert decode(encode(Sly(7))) == 7 and decode(encode(SlyList([9]))) == [9]


@pytest.mark.parametrize(
    "value", [object(), print, int, iter([]), range(3), Exception("x"), {1: object()}, [lambda: 1]]
)
def test_other_objects_are_not_plain(value):
    with pytest.raises(NotPlain):
        encode(value)


def test_what_is_nested_too_deep_or_forged_is_not_plain():
    deep: list = []
    for _ in range(DEEPEST + 1):
        deep = [deep]
    with pytest.raises(NotPlain, match="deeper than 100"):
        encode(deep)
    assert decode(encode(deep[0])) == deep[0]
    forged = '["l",[' * (DEEPEST + 2) + "]]" * (DEEPEST + 2)
    with pytest.raises(NotPlain, match="deeper than 100"):
        decode(forged)
    for line in [
        "",
        "x",
        "1",
        "[1]",
        '["i", 5]',
        '["q", 1]',
        '["s", [["l", []]]]',
        '["d", [1]]',
        "[" * 10**5,
        '["f", "x"]',
    ]:
        with pytest.raises(NotPlain):
            decode(line)


@pytest.mark.parametrize("tag", ["s", "z", "d"])
def test_a_table_of_items_that_hash_alike_is_not_filled(tag):
    alike = [["i", format(n * (2**61 - 1), "x")] for n in range(1, 10_000)]
    apart = [["i", format(n, "x")] for n in range(1, 10_000)]
    began = time.process_time()
    for items, is_refused in [(alike, True), (apart, False)]:
        line = json.dumps([tag, [[item, None] for item in items] if tag == "d" else items])
        if is_refused:
            with pytest.raises(NotPlain, match="equal hashes"):
                decode(line)
        else:
            assert len(decode(line)) == 9_999
    assert time.process_time() - began < 5


# --- the table of calls

HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


@pytest.mark.parametrize("machine", HEADERS)
def test_the_numbers_of_the_kernels_calls_are_those_of_its_headers(machine):
    if not HEADERS[machine].is_file():
        pytest.skip(f"{HEADERS[machine]} is not installed")
    text = HEADERS[machine].read_text()
    defined = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text))
    defined = {
        {"fstatat": "newfstatat"}.get(name, name): int(number) for name, number in defined.items()
    }
    assert {name: defined.get(name) for name in lockdown.NUMBERS[machine]} == lockdown.NUMBERS[
        machine
    ]


def test_no_call_that_reaches_outside_is_in_a_table():
    reaching = {
        "socket",
        "connect",
        "bind",
        "execve",
        "execveat",
        "fork",
        "vfork",
        "ptrace",
        "mount",
        "unlink",
        "unlinkat",
    }
    reaching |= {
        "rename",
        "truncate",
        "ftruncate",
        "chmod",
        "fchmod",
        "io_uring_setup",
        "bpf",
        "unshare",
        "setns",
        "tkill",
    }
    for table in lockdown.NUMBERS.values():
        assert not reaching & table.keys()
    assert ctypes.sizeof(ctypes.c_long) == 8
