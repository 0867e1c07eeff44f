"""The jail in a container of the user's, and packages in it."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from functools import cache

import pytest
from tests.rewards.kernels import jailed

from gruppo.rewards import resolve_reward
from gruppo.rewards.code import code_tests
from gruppo.rewards.sandbox import jail as jail_module
from gruppo.rewards.sandbox.jail import Jail, SandboxLimits, probe
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
        lambda: plain().replace(b"_RESTRICT_SELF = 444, 445", b"_RESTRICT_SELF = 9444, 445"),
    )
    assert b"9444" in jail_module.sources()
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
        ("echo hello", "it printed .*hello.*, which is not an answer"),
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
    with pytest.raises(GruppoError, match=r"a package cannot be imported .No module named 'nunpy'"):
        code_tests(packages="nunpy")
