"""What the launcher does when a process ends: restart, give up, stop in order. Processes are shell
scripts."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests import processes
from tests.launch.launches import Scripts, launch

from gruppo.errors import EngineLost
from gruppo.launch import supervise
from gruppo.launch.supervise import ChildProcess, Supervisor
from gruppo.platforms import lock_file
from gruppo.types import GruppoError

pytestmark = pytest.mark.skipif(os.name != "posix", reason="shell scripts")


GONE = "while kill -0 $(cat {}/pid) 2>/dev/null; do sleep 0.01; done"
"""A script that waits until the supervisor has seen the process end: before, it is a zombie that
takes signals."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "POLL_S", 0.01)
    monkeypatch.setattr(supervise, "answers", lambda url: True)


def until(file: Path) -> str:
    """A script that waits for a file. Servers that die wait for one of the trainers, as these start
    when all answer."""
    return f"while [ ! -e {file} ]; do sleep 0.01; done"


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("codes", "expected"),
    [((3, 75), 3), ((75, 2), 2), ((4, 4), 4), ((0, 0), 0), ((0, 3), 3)],
    ids=str,
)
def test_what_a_restart_would_not_change_ends_the_launch_with_its_exit_code(
    tmp_path, codes, expected
):
    scripts = Scripts({f"trainer{rank}": [f"exit {code}"] for rank, code in enumerate(codes)})
    assert Supervisor(launch(tmp_path, trainers=2, servers=1), scripts).run() == expected
    assert [scripts.lives(name) for name in ("server0", "trainer0", "trainer1")] == [1, 1, 1]


@pytest.mark.parametrize(
    ("ends", "expected"),
    [("kill -9 $$", 75), ("exit 75", 75), ("exit 5", 5), ("exit 1", 1), ("exit 137", 75)],
)
def test_trainers_that_keep_dying_are_given_up(tmp_path, ends, expected, caplog):
    scripts = Scripts({"trainer0": [ends]})
    given = launch(tmp_path, servers=0, max_restarts=2)
    assert Supervisor(given, scripts).run() == expected
    assert scripts.lives("trainer0") == 3
    assert f"{given.folder} can be continued" in caplog.text


def test_a_terminal_that_is_gone_ends_neither_the_run_nor_the_clean_up(tmp_path, monkeypatch):
    """As with gruppo launch ... | head, or where ssh has lost its connection."""
    read, write = os.pipe()
    os.close(read)
    scripts = Scripts({"trainer0": ["echo step 1; sleep 0.1; echo step 2"]})
    supervisor, code = Supervisor(launch(tmp_path, servers=1), scripts), None
    with (
        pytest.raises(BrokenPipeError),
        open(write, "w") as closed,
    ):  # as it is closed: the text is still in it
        monkeypatch.setattr(sys, "stdout", closed)
        code = supervisor.run()
    assert code == 0 and supervisor.servers[0].process.poll() is not None


def test_all_ranks_are_started_again_when_one_has_died(tmp_path):
    """The others notice it themselves, save and end; they are not killed before."""
    done = tmp_path / "saved"
    scripts = Scripts(
        {
            "trainer0": [f"sleep 0.3; touch {done}; exit 75", "exit 0"],
            "trainer1": ["kill -9 $$", "exit 0"],
        }
    )
    assert Supervisor(launch(tmp_path, trainers=2, servers=0), scripts).run() == 0
    assert done.exists() and scripts.lives("trainer0") == scripts.lives("trainer1") == 2


def test_ranks_that_do_not_notice_it_are_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, "GRACE_S", 0.1)
    scripts = Scripts(
        {"trainer0": ["exec sleep 100", "exit 0"], "trainer1": ["kill -9 $$", "exit 0"]}
    )
    assert Supervisor(launch(tmp_path, trainers=2, servers=0), scripts).run() == 0


def test_a_server_that_died_is_started_again_on_its_port_while_the_trainers_go_on(tmp_path):
    begun, again = tmp_path / "begun", tmp_path / "again"
    server = [f"{until(begun)}; kill -9 $$", f"touch {again}; exec sleep 100"]
    scripts = Scripts({"server1": server, "trainer0": [f"touch {begun}; {until(again)}"]})
    supervisor = Supervisor(launch(tmp_path, servers=2), scripts)
    assert supervisor.run() == 0
    assert scripts.lives("server1") == 2 and scripts.lives("trainer0") == 1


def test_a_server_that_ends_before_it_answers_ends_the_launch_with_its_last_line(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(supervise, "answers", lambda url: False)
    scripts = Scripts({"server1": ["echo loading; echo no such model; exit 2"]})
    with pytest.raises(
        GruppoError,
        match=r"server1 ended with code 2 before it answered: no such model .*server1\.log",
    ):
        Supervisor(launch(tmp_path, servers=2), scripts).run()
    assert scripts.lives("trainer0") == 0


def test_trainers_start_again_with_the_servers_that_are_left(tmp_path):
    scripts = Scripts(
        {"server0": [f"echo $$ > {tmp_path}/pid; {until(tmp_path / 'begun')}; exit 1"]}
    )
    scripts.scripts["trainer0"] = [
        f"touch {tmp_path}/begun; {GONE.format(tmp_path)}; exit 5",
        "exit 0",
    ]
    supervisor = Supervisor(launch(tmp_path, servers=2, max_restarts=1), scripts)
    supervisor.restarts["server0"] = 1  # the one restart is spent
    assert supervisor.run() == 0
    first, second = (
        env["GRUPPO_ENGINE_URLS"].split(",") for name, env in scripts.started if name == "trainer0"
    )
    assert len(first) == 2 and second == first[1:]


def test_without_a_server_left_the_launch_ends_with_code_5(tmp_path):
    scripts = Scripts(
        {"server0": [f"echo $$ > {tmp_path}/pid; {until(tmp_path / 'begun')}; exit 1"]}
    )
    scripts.scripts["trainer0"] = [f"touch {tmp_path}/begun; {GONE.format(tmp_path)}; exit 5"]
    supervisor = Supervisor(launch(tmp_path, servers=1, max_restarts=1), scripts)
    supervisor.restarts["server0"] = 1
    with pytest.raises(EngineLost, match="no server is left") as caught:
        supervisor.run()
    assert caught.value.exit_code == 5


def test_trainers_start_when_no_rank_of_before_writes_to_the_run_any_more(tmp_path, monkeypatch):
    """A lost rank may leave one that saves. The second trainers would be refused: exit code 2."""
    given = launch(tmp_path, servers=0)
    given.folder.mkdir(parents=True)
    saving = lock_file(given.folder / ".lock")
    scripts, waits = Scripts({"trainer0": ["exit 0"]}), list[int]()

    def wait(seconds: float) -> None:
        waits.append(len(scripts.started))
        if len(waits) == 2:
            saving.close()

    monkeypatch.setattr(supervise.time, "sleep", wait)
    assert Supervisor(given, scripts).run() == 0 and waits[:2] == [0, 0]


class Interrupting(Scripts):
    """Ctrl-C, as often as given, once the trainers have begun."""

    times = 1

    def __call__(self, command: Any, env: Any, output: Path) -> Any:
        child = super().__call__(command, env, output)
        plain = child.poll

        def poll() -> int | None:
            if self.times and (output.parent / "ready").exists():
                self.times -= 1
                raise KeyboardInterrupt
            return plain()

        if output.stem == "trainer0":
            child.poll = poll
        return child


def test_a_signal_lets_the_trainers_save_before_the_servers_end(tmp_path):
    given = launch(tmp_path, servers=1)
    logs, order = given.folder / "logs", tmp_path / "order"
    trainer = (
        f"trap 'sleep 0.2; echo trainer >> {order}; exit 75' TERM; touch {logs}/ready; while "
        f":; do sleep 0.01; done"
    )
    server = f"trap 'echo server >> {order}; exit 0' TERM; while :; do sleep 0.01; done"
    assert Supervisor(given, Interrupting({"server0": [server], "trainer0": [trainer]})).run() == 75
    assert order.read_text().split() == ["trainer", "server"]


def test_a_second_signal_ends_everything_at_once(tmp_path):
    given = launch(tmp_path, servers=1)
    logs = given.folder / "logs"
    stubborn = (
        f"trap '' TERM; echo $$ > {logs}/pid; touch {logs}/ready; while :; do sleep 0.01; done"
    )
    scripts = Interrupting({"trainer0": [stubborn]})
    scripts.times = 2
    assert Supervisor(given, scripts).run() == 75
    deadline = time.monotonic() + 30  # a killed process needs its turn to end
    while is_alive(int((logs / "pid").read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_a_process_has_started_ends_with_it(tmp_path):
    """A server whose gruppo serve was killed would hold its port."""
    child = ChildProcess(
        ["sh", "-c", f"sleep 100 & echo $! > {tmp_path}/pid; kill -9 $$"], {}, tmp_path / "logs/log"
    )
    assert child.wait() == -signal.SIGKILL
    child.kill()
    deadline = time.monotonic() + 30
    while is_alive(int((tmp_path / "pid").read_text())) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(int((tmp_path / "pid").read_text()))


def start_and_wait(folder: str) -> None:
    script = (
        f"trap 'touch {folder}/saved; exit 75' TERM; touch {folder}/ready; while :; do sleep "
        f"0.01; done"
    )
    ChildProcess(["sh", "-c", script], {}, Path(folder) / "logs/log")
    time.sleep(100)


@pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="Linux asks a child to end with its parent"
)
def test_processes_of_a_launcher_that_was_killed_are_asked_to_end(tmp_path):
    launcher = processes.start(start_and_wait, str(tmp_path), folder=tmp_path / "launcher")
    launcher.wait_for((tmp_path / "ready").exists)
    launcher.kill()
    deadline = time.monotonic() + 30
    while not (tmp_path / "saved").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (tmp_path / "saved").exists()


def test_the_output_of_the_first_rank_is_shown_once(tmp_path, capsys):
    given = launch(tmp_path, trainers=2, servers=0)
    given.log("trainer0").parent.mkdir(parents=True)
    given.log("trainer0").write_text("of an earlier launch\n")
    scripts = Scripts(
        {"trainer0": ["echo step 1; sleep 0.1; echo step 2"], "trainer1": ["echo hidden"]}
    )
    assert Supervisor(given, scripts).run() == 0
    assert capsys.readouterr().out == "step 1\nstep 2\n"
    assert given.log("trainer1").read_text() == "hidden\n"
