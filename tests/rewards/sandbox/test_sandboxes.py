"""Other sandboxes than the jail on this machine: in a container, on a SandboxFusion server, of the
user's own."""

from __future__ import annotations

import http.server
import json
import shlex
import shutil
import subprocess
import sys
import threading
import time
from functools import cache

import pytest
from tests.rewards.kernels import jailed

from gruppo import http as requests
from gruppo.rewards import resolve_reward
from gruppo.rewards.code import CodeTests, code_tests
from gruppo.rewards.sandbox import jail as jail_module
from gruppo.rewards.sandbox.backends import SandboxFusion
from gruppo.rewards.sandbox.jail import Jail, probe
from gruppo.rewards.sandbox.protocol import CaseResult, SandboxError, SandboxLimits
from gruppo.timeouts import CallError
from gruppo.types import GruppoError

DOUBLE = ["assert double(2) == 4", "assert double('a') == 'aa'", "assert double(1.5) == 3"]
TEXTS = [
    f"```python\ndef double(x):\n    return {body}\n```" for body in ("2 * x", "x + 2", "1 / 0")
]
BWRAP = "bwrap --ro-bind / / --dev /dev --proc /proc --unshare-all --die-with-parent --"


@cache
def lacks_bubblewrap() -> str | None:
    if not shutil.which("bwrap"):
        return "bubblewrap is not installed"
    tried = subprocess.run([*shlex.split(BWRAP), "/bin/true"], capture_output=True, text=True)
    return f"bubblewrap does not run here: {tried.stderr.strip()}" if tried.returncode else None


def contained(test):
    return jailed(
        pytest.mark.skipif(lacks_bubblewrap() is not None, reason=str(lacks_bubblewrap()))(test)
    )


def python_in_bwrap(python: str = sys.executable) -> str:
    return f"{BWRAP} {shlex.quote(python)}"


# --- the jail in a container of the user's


@contained
def test_the_jail_runs_in_a_container_and_holds_there(monkeypatch):
    """The probe tries to read a file of this machine, which the container shows: the jail inside
    refuses it."""
    monkeypatch.setenv("HF_TOKEN", "a secret")
    assert probe(tuple(shlex.split(python_in_bwrap()))) is None
    reward = resolve_reward(f"code_tests:workers=1,sandbox={python_in_bwrap()}")
    assert reward(TEXTS, tests=[DOUBLE] * 3) == [1.0, 1 / 3, 0.0]
    with Jail(
        SandboxLimits(case_s=0.3, program_s=2), command=shlex.split(python_in_bwrap())
    ) as jail:
        program = "import os, sys, time\ndef f(): time.sleep(99)"
        facts = [
            ["os.getpid() < 50"],
            ["dict(os.environ)"],
            ["hash('a')"],
            ["f()"],
            ["sys.flags.no_site"],
        ]
        found = jail.calls(program, facts)
    with Jail() as ours:
        hashed = ours.calls("", [["hash('a')"]])[0].value
    assert [result.value for result in found] == [[True], [{}], hashed, None, [1]] and found[
        3
    ].status == "timeout"


@contained
def test_a_container_without_landlock_has_the_other_layers_and_is_refused_where_it_shows_our_files(
    monkeypatch,
):
    """As gVisor, whose kernel has no Landlock."""
    plain = jail_module.sources
    monkeypatch.setattr(
        jail_module,
        "sources",
        lambda *names: plain(*names).replace(
            b"_RESTRICT_SELF = 444, 445", b"_RESTRICT_SELF = 9444, 445"
        ),
    )
    assert b"9444" in jail_module.sources("lockdown")
    assert (
        probe.__wrapped__(tuple(shlex.split(python_in_bwrap())))
        == "a program in it could read a file"
    )
    hidden = BWRAP.removesuffix("--") + "--tmpfs /tmp --"
    assert probe.__wrapped__((*shlex.split(hidden), sys.executable)) is None


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("no-such-program run python3", "no-such-program cannot be started"),
        (
            "sh -c 'echo no such image >&2; exit 125'",
            "the jail ended with status 125: no such image",
        ),
        ("echo hello", "it printed .*hello.*, which is no answer"),
    ],
)
def test_a_command_that_starts_no_jail_is_refused_in_one_line_with_its_own_error(command, why):
    with pytest.raises(GruppoError, match=why) as refused:
        code_tests(sandbox=command)
    assert "\n" not in str(refused.value) and "podman run --rm -i" in str(refused.value)


# --- packages


@jailed
def test_a_package_that_is_named_can_be_imported_and_no_other():
    reward = resolve_reward("code_tests:packages=numpy,workers=1")
    texts = [
        "import numpy as np\ndef f(x): return np.linalg.norm(np.fft.fft([3, 4])[:1])",
        "import numpy as np\ndef f(x): return np.int64(7)",
        "import torch\ndef f(x): return 7",
        "import numpy as np\ndef f(x): return np.array([7])",
    ]
    assert reward(texts, tests=[["assert f(1) == 7"]] * 4) == [1.0, 1.0, 0.0, 0.0]
    with Jail(packages=["numpy"]) as first, Jail(packages=["numpy"]) as second:
        draw = [["numpy.random.rand()"], ["numpy.loadtxt('/etc/passwd')"], ["open('/etc/passwd')"]]
        one, two = first.calls("import numpy", draw), second.calls("import numpy", draw)
    assert one == two and one[0].value and {each.status for each in one[1:]} == {"error"}
    with pytest.raises(GruppoError, match="there is no package 'nunpy' here"):
        code_tests(packages="nunpy")


# --- a server with the API of SandboxFusion


class FusionServer(http.server.ThreadingHTTPServer):
    """POST /run_code of SandboxFusion, for programs in Python, without any isolation; counts its
    requests."""

    def __init__(self):
        self.requests, self.failures = [], []
        super().__init__(("127.0.0.1", 0), FusionHandler)
        self.url = f"http://127.0.0.1:{self.server_port}"


class FusionHandler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(request)
        if self.path != "/run_code" or request["language"] != "python":
            return self.send_error(404)
        failure = self.server.failures.pop() if self.server.failures else None
        if isinstance(failure, int):
            return self.send_error(failure)
        answer = failure or run_as_fusion(request)
        body = json.dumps(answer).encode() if isinstance(answer, dict) else answer
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def run_as_fusion(request):
    began, result = time.monotonic(), {"status": "Finished", "return_code": None}
    process = subprocess.Popen(
        [sys.executable, "-c", request["code"]],
        stdin=-1,
        stdout=-1,
        stderr=-1,
        text=True,
        start_new_session=True,
    )
    try:
        result["stdout"], result["stderr"] = process.communicate(
            request["stdin"], request["run_timeout"]
        )
        result["return_code"] = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        result["stdout"], result["stderr"] = process.communicate()
        result["status"] = "TimeLimitExceeded"
    result["execution_time"] = time.monotonic() - began
    is_success = result["return_code"] == 0
    return {
        "status": "Success" if is_success else "Failed",
        "message": "",
        "run_result": result,
        "files": {},
    }


@pytest.fixture
def fusion(monkeypatch):
    monkeypatch.setattr(requests, "BACKOFF_S", 0.0)
    with FusionServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_programs_run_on_a_sandbox_fusion_server_and_are_compared_here(fusion):
    reward = resolve_reward(f"code_tests:sandbox={fusion.url},workers=1")
    assert reward(TEXTS, tests=[DOUBLE] * 3) == [1.0, 1 / 3, 0.0]
    script = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
    assert reward(
        [script], tests=[[{"input": "1 2", "output": "3"}, {"input": "1", "output": "1"}]]
    ) == [0.5]
    method = "```python\nclass Solution:\n    def pair(self, x: List[int]): return (x, 1)\n```"
    assert reward(
        [method], tests=[[{"args": [[2]], "output": [[2], 1]}]], entry_point=["pair"]
    ) == [1.0]
    secret = ["assert f(1) == 'okapi-4711'"]
    assert reward(["```python\ndef f(x): return 'okapi-' + '4711'\n```"], tests=[secret]) == [1.0]
    assert not any("okapi-4711" in json.dumps(request) for request in fusion.requests)


def test_the_server_gives_what_the_jail_gives(fusion):
    program = (
        "import os, time\ndef f(x):\n    if x == 1: os._exit(0)\n    if x == 2: time.sleep(99)\n"
    )
    program += "    if x == 3: return 'x' * 10**6\n    if x == 4: raise KeyError(x)\n"
    program += "    print('x'); return [x, {x: (1.5, None)}]"
    cases = [[f"f({n})"] for n in (0, 1, 2, 3, 4, 5)]
    limits = SandboxLimits(case_s=0.5, program_s=9)
    found = SandboxFusion(fusion.url + "/run_code", limits).calls(program, cases)
    assert [result.status for result in found] == [
        "value",
        "error",
        "timeout",
        "error",
        "error",
        "value",
    ]
    assert (found[0].value, found[5].value) == ([[0, {0: (1.5, None)}]], [[5, {5: (1.5, None)}]])
    assert (found[4].exception, found[4].message) == ("KeyError", "KeyError: 4")
    assert (
        SandboxFusion(fusion.url, limits).calls("import nothing_here", [["1"], ["2"]])
        == [CaseResult("error", message="ModuleNotFoundError: No module named 'nothing_here'")] * 2
    )
    script = (
        "x = input()\nif x == 'a': 1 / 0\nif x == 'b':\n    while True: pass\nprint(x * "
        "int(9e4 if x == 'c' else 1))"
    )
    results = SandboxFusion(fusion.url, limits).script(script, ["a", "b", "c", "d"])
    assert [result.status for result in results] == ["error", "timeout", "error", "value"]
    assert results[0].message == "ZeroDivisionError: division by zero" and results[3].value == "d\n"
    short = SandboxFusion(fusion.url, SandboxLimits(case_s=0.4, program_s=0.5))
    hung = short.calls(
        "def f():\n    import signal, time\n    signal.alarm(0); time.sleep(99)", [["f()"]] * 3
    )
    assert [result.status for result in hung] == ["timeout", "not_run", "not_run"]


def test_a_server_that_fails_leaves_the_row_unscored_and_one_that_is_busy_is_asked_again(fusion):
    reward = code_tests(sandbox=fusion.url, workers=1)
    fusion.failures += [503, 429]
    assert reward(TEXTS[:1], tests=[DOUBLE]) == [1.0] and not fusion.failures
    error = {"status": "SandboxError", "message": "no overlay", "run_result": {"status": "Error"}}
    for failure, why in [
        ([error], "ran nothing: no overlay"),
        ([500] * 4, "answered 500"),
        ([504] * 4, "answered 504"),
        ([b"<html>"] * 4, "something that is not JSON"),
        ([b"[]"], "ran nothing"),
    ]:
        fusion.failures += failure
        (found,) = reward(TEXTS[:1], tests=[DOUBLE])
        assert (
            isinstance(found, CallError)
            and why in found.message
            and "the sandbox failed" in found.message
        )


def test_a_server_that_is_not_there_is_refused_before_training(monkeypatch):
    monkeypatch.setattr(requests, "BACKOFF_S", 0.0)
    with pytest.raises(
        GruppoError, match=r"is not run by http://127\.0\.0\.1:9: .* attempts failed"
    ):
        code_tests(sandbox="http://127.0.0.1:9")
    with pytest.raises(GruppoError, match="packages are those of the server"):
        resolve_reward("code_tests:sandbox=http://127.0.0.1:9,packages=numpy")


# --- a sandbox of the user's own


class Table:
    """Answers from a table; ends are counted."""

    ends = 0

    def __init__(self, limits):
        self.limits = limits

    def calls(self, program, cases, *, setup="", entry=None, room=0):
        if "broken" in program:
            raise SandboxError("the table is empty")
        return [CaseResult("value", [{"f(7)": 42}.get(case[0])]) for case in cases]

    def script(self, program, inputs, *, room=0):
        return [CaseResult("value", "42\n") for _ in inputs]

    def end(self):
        Table.ends += 1

    def close(self):
        pass


def test_an_object_with_the_methods_of_the_protocol_is_a_sandbox():
    reward = CodeTests(sandbox=Table, case_s=1.5, workers=1)
    texts = ["```python\nx\n```", "```python\nbroken\n```", "```python\ny\n```"]
    first, second, third = reward(texts, tests=[["assert f(7) == 42"]] * 3)
    assert first == third == 1.0 and "the table is empty" in second.message and Table.ends == 3
    assert reward.open_sandbox().limits.case_s == 1.5
    with pytest.raises(GruppoError, match=r"a program that computes 6 \* 7 gave"):
        CodeTests(
            sandbox=type(
                "Wrong", (Table,), {"script": lambda *_, **__: [CaseResult("value", "41")]}
            )
        )
