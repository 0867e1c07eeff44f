"""What a launch starts: commands, devices, addresses; and what is refused before anything
starts."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import processes, tiny
from tests.launch.launches import FAKE, launch, recipe

from gruppo.cli.options import parse_own
from gruppo.config import serialization
from gruppo.config.schema import EngineConfig, LaunchConfig, LoraConfig
from gruppo.launch import commands, slurm, supervise
from gruppo.launch.commands import Launch, claim, parse_launch
from gruppo.launch.places import Local, rank_environments
from gruppo.platforms import lock_file
from gruppo.types import GruppoError

TEMPLATE = "#!/bin/bash\n#SBATCH --partition=debug\nmodule load python\n"


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "cluster.sh").write_text(TEMPLATE)
    return str(tmp_path / "cluster.sh")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--servers 5",
            r"--servers 5: at most 4 groups are sampled at a time, .* Set --servers 4 or fewer",
        ),
        ("--servers 9 --engine.lag 1", r"--servers 9: at most 8 groups"),
        ("--trainers 5", r"--trainers 5: a step has 4 prompts, .* Set --trainers 4 or fewer"),
        ("--trainers 0", r"trainers=0 is out of range; it needs to be at least 1"),
        ("--servers -1", r"servers=-1 is out of range"),
        ("--servers two", r"--servers two: it needs a whole number"),
        ("--on moon", r"--on moon: it needs one of 'local', 'slurm', 'ray'"),
        ("--engine local.py:engine", r"--engine local.py:engine: --servers starts vLLM servers"),
        ("--engine.urls http://a", r"engine.urls: gruppo launch starts the servers"),
        ("--on slurm", r"--on slurm needs --template FILE"),
        ("--on slurm --template none.sh", r"--template none.sh cannot be read"),
        (
            "--on slurm --template plain.sh",
            r"plain.sh names no partition. Add the line #SBATCH --partition=NAME",
        ),
        ("--engine.lag -1", r"engine.lag=-1 is out of range"),
        ("--optim.lr -1", r"optim.lr=-1.0 is out of range"),
        ("--on slurm --port 70000", r"port=70000 is out of range"),
        (
            "--server-command 'a",
            r"--server-command cannot be split into words \(No closing quotation\)",
        ),
        ("-- --max-model-len 9", r"--server-command is the whole command of a server"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_starts(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(commands, "log", None)  # nothing is logged
    (tmp_path / "plain.sh").write_text("#SBATCH --time=1\n# partition: gpu\nsleep 1\n")
    file = recipe(tmp_path)
    own, mark, vllm = words.partition("-- --")
    fake = [] if "--server-command" in own else ["--server-command", FAKE]
    args = ["launch", file, *fake, *own.split(), *(mark + vllm).split()]
    assert processes.exit_code(args) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("r --dry-run --steps 3", (True, 1)),
        ("r --steps 3 --dry-run", (True, 1)),
        ("r --dry-run false --trainers=2 --steps 3", (False, 2)),
        ("r --trainers 2 --steps 3 --dry-run=True", (True, 2)),
    ],
)
def test_options_of_a_launch_stand_anywhere_among_those_of_the_run(words, expected):
    chosen, rest = parse_own(words.split(), LaunchConfig(), "launch")
    assert (chosen.dry_run, chosen.trainers) == expected and rest == ["r", "--steps", "3"]


def test_a_python_without_vllm_and_a_port_in_use_are_refused(tmp_path, capsys):
    file = recipe(tmp_path)
    assert processes.exit_code(["launch", file, "--server-python", sys.executable]) == 2
    assert f"{sys.executable} has no vLLM. Install it" in (error := capsys.readouterr().err)
    assert "--server-python PATH" in error
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert (
            processes.exit_code(["launch", file, "--server-command", FAKE, "--port", str(port)])
            == 2
        )
    assert f"port {port} is in use" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_commands_are_those_of_train_and_serve_and_then_of_resume(tmp_path):
    config = replace(tiny.config(tmp_path), lora=LoraConfig(rank=4), compute="float32")
    given = launch(
        tmp_path, words=["--steps", "3"], servers=1, server_command="", server_python="/p"
    )
    given = replace(given, config=config, vllm=("--max-model-len", "64"))
    gruppo = f"{sys.executable} -m gruppo"
    assert " ".join(given.server_command("127.0.0.1", 81)) == (
        f"{gruppo} serve {config.model} --host 127.0.0.1 --port 81 --lora-rank 4 --python /p -- "
        f"--dtype float32 "
        "--max-model-len 64"
    )
    train = f"{gruppo} train recipe.json --steps 3"
    assert " ".join(given.trainer_command([])) == train
    assert " ".join(given.trainer_command(["a", "b"])) == f"{train} --engine vllm --engine.urls a b"
    given.folder.mkdir(parents=True)
    (given.folder / "config.json").touch()
    assert " ".join(given.trainer_command(["a"])) == f"{gruppo} resume {given.folder}"
    assert given.environment(["a", "b"])["GRUPPO_ENGINE_URLS"] == "a,b"
    trusting = replace(given, config=replace(config, trust_remote_code=True), vllm=())
    assert trusting.server_command("h", 81)[-3:] == ["--dtype", "float32", "--trust-remote-code"]
    assert trusting.trainer_command(["a"])[-1] == "--trust-remote-code"


def test_a_servers_own_command_gets_model_and_address_and_keeps_other_braces(tmp_path):
    given = launch(
        tmp_path, server_command="""serve {model} --at {host}:{port} --config '{"a": 1}'"""
    )
    assert given.server_command("h", 81) == [
        "serve",
        tiny.model(),
        "--at",
        "h:81",
        "--config",
        '{"a": 1}',
    ]


def test_a_run_gets_a_name_and_one_that_exists_is_continued_with_its_own_options(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    file = recipe(tmp_path)
    config = json.loads(Path(file).read_text()) | {"name": ""}
    Path(file).write_text(json.dumps(config))
    planned = parse_launch([file, "--server-command", FAKE])
    assert planned.words[-2:] == ("--name", planned.config.name) and planned.config.name
    changes = {
        "engine__kind": "vllm",
        "engine__urls": ["http://a"],
        "rollout__prompts": 2,
        "trust_remote_code": True,
    }
    config = tiny.config(tmp_path, name="begun", **changes)
    (tmp_path / "runs/begun").mkdir(parents=True)
    (tmp_path / "runs/begun/config.json").write_text(json.dumps(serialization.to_dict(config)))
    words = [file, "--name", "begun", "--server-command", FAKE]
    begun = parse_launch(words).config
    assert begun.rollout.prompts == 2 and not begun.trust_remote_code
    assert parse_launch([*words, "--trust-remote-code"]).config.trust_remote_code
    with pytest.raises(GruppoError, match="at most 2 groups"):
        parse_launch([*words, "--servers", "3"])
    local = replace(config, engine=EngineConfig())
    (tmp_path / "runs/begun/config.json").write_text(json.dumps(serialization.to_dict(local)))
    with pytest.raises(
        GruppoError, match="begun samples with the policy itself, and --servers starts vLLM servers"
    ):
        parse_launch(words)


def envs(given: Launch) -> list[tuple[str, str | None]]:
    """Devices of each process that a launch on this machine starts."""
    started = []
    place = Local(
        given,
        lambda command, env, output: started.append((output.stem, env.get("CUDA_VISIBLE_DEVICES"))),
    )
    for number in range(given.chosen.servers):
        place.start_server(number)
    place.start_trainers([])
    return started


def test_trainers_get_the_first_gpus_and_servers_the_next_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    given = launch(tmp_path, trainers=2, servers=2)
    assert {devices for _, devices in envs(given)} == {None}  # device = cpu
    given = replace(
        given, config=replace(given.config, device="auto"), vllm=("--tensor-parallel-size", "2")
    )
    assert envs(given) == [
        ("server0", "2,3"),
        ("server1", "4,5"),
        ("trainer0", "0,1"),
        ("trainer1", "0,1"),
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1,0,2")
    assert envs(given)[0] == ("server0", "3,1")
    shared = replace(given, config=replace(given.config, engine=EngineConfig(colocated=True)))
    assert envs(shared)[:2] == [("server0", "7,5"), ("server1", "3,1")]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    with pytest.raises(
        GruppoError, match=r"2 trainers and 2 servers of 2 GPUs need 6 GPUs, and 5 are here"
    ):
        Local(given)


def test_processors_are_divided_among_the_ranks_whatever_the_number_of_servers(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("gruppo.launch.places.usable_processors", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for servers in (0, 3):
        assert Local(launch(tmp_path, trainers=4, servers=servers)).trainer_env == {
            "OMP_NUM_THREADS": "2"
        }
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert Local(launch(tmp_path, trainers=4)).trainer_env == {}


def test_ranks_are_told_what_torchrun_tells_them():
    assert rank_environments(["a"], 1) == [{}]
    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    told = [tuple(env[name] for name in names) for env in rank_environments(["a", "a", "b"], 81)]
    assert told == [
        ("a", "81", "0", "0", "3", "2"),
        ("a", "81", "1", "1", "3", "2"),
        ("a", "81", "2", "0", "3", "1"),
    ]


def test_one_launcher_at_a_time_which_waits_for_a_trainer_that_still_saves(tmp_path, monkeypatch):
    given = launch(tmp_path)
    with ExitStack() as first:
        claim(given, first)
        with pytest.raises(GruppoError, match="another gruppo launch runs"):
            claim(given, ExitStack())
    saving = lock_file(given.folder / ".lock")
    monkeypatch.setattr(commands.time, "sleep", lambda seconds: saving.close())
    with ExitStack() as second:
        claim(given, second)
    monkeypatch.undo()
    monkeypatch.setattr(commands, "SAVING_S", 0.0)
    with (
        lock_file(given.folder / ".lock"),
        pytest.raises(GruppoError, match="another process is writing to"),
    ):
        claim(given, ExitStack())


@pytest.mark.skipif(os.name != "posix", reason="shell scripts")
def test_a_ray_job_runs_the_same_command_on_one_node(tmp_path, monkeypatch, capfd):
    words = ["launch", recipe(tmp_path), "--server-command", FAKE, "--on", "ray"]
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert processes.exit_code(words) == 2
    assert 'ray cannot be run (No such file or directory). Install "ray[default]"' in (
        " ".join(capfd.readouterr().err.split())
    )
    stub = tmp_path / "bin/ray"
    stub.write_text("#!/bin/sh\necho $@\nexit 7\n")
    stub.chmod(0o755)
    assert processes.exit_code(words) == 7
    out = capfd.readouterr().out
    assert out.startswith(f"job submit --submission-id=run -- {sys.executable} -m gruppo launch")
    assert "--on" not in out and "--name run" in out


# --- Slurm ----------------------------------------------------------------------------------------


def test_a_dry_run_prints_commands_and_starts_nothing(tmp_path, capsys, monkeypatch, script):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("GRUPPO_ENGINE_KEY", "secret")
    words = ["launch", recipe(tmp_path), "--trainers", "2", "--server-command", FAKE, "--dry-run"]
    assert processes.exit_code(words) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("#")] == [
        "# server0",
        "# trainer0",
        "# trainer1",
    ]
    assert "RANK=1" in out and f"fake {tiny.model()} " in out and "secret" not in out
    assert processes.exit_code([*words, "--on", "slurm", "--template", script]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n#SBATCH --job-name=run\n")
    assert not (tmp_path / "runs").exists()


def test_the_script_has_the_lines_of_the_template_and_the_command_with_a_name(tmp_path, script):
    given = launch(tmp_path, trainers=2, servers=3, template=script)
    lines = slurm.script(
        given, ["r.toml", "--engine.lag", "1", "--", "--max-model-len", "9"]
    ).splitlines()
    assert (
        lines[0] == "#!/bin/bash"
        and "#SBATCH --ntasks=5" in lines
        and "#SBATCH --signal=B:USR1@600" in lines
    )
    assert (
        lines.index("#SBATCH --ntasks=5")
        < lines.index("#SBATCH --partition=debug")
        < lines.index("module load python")
    )
    assert (
        lines[-1] == f"exec {sys.executable} -m gruppo launch r.toml --engine.lag 1 --name run -- "
        f"--max-model-len 9"
    )
    assert slurm.script(given, ["r.toml", "--name=run"]).endswith("launch r.toml --name=run")
    Path(script).write_text("#SBATCH --nodes=1 -p debug\n")
    assert "#SBATCH --nodes=1 -p debug" in slurm.script(given, ["r.toml"])
    given = replace(given, config=replace(given.config, name="two words"))
    lines = slurm.script(given, ["r.toml"]).splitlines()
    assert (
        "#SBATCH --job-name='two words'" in lines
        and f"#SBATCH --output='{given.log('slurm')}'" in lines
    )


@pytest.fixture
def sigusr1() -> Iterator[None]:
    """Its handler is restored."""
    handler = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, handler)


@pytest.mark.skipif(os.name != "posix", reason="shell scripts")
def test_a_job_is_submitted_and_steps_are_started_with_srun(tmp_path, monkeypatch, script, sigusr1):
    """Slurm's commands are scripts here; a launch on a real one-node Slurm is in the lab notes."""
    stubs = {
        "sbatch": "echo 41; cp $2 submitted",
        "scontrol": 'case $1 in show) printf "n1\\nn2\\n";; *) echo "$@" > requeued;; esac',
        "scancel": 'echo "$@" > canceled',
        "srun": 'echo "$@" > srun-args; while [ "$1" != bash ]; do shift; done; export '
        "SLURMD_NODENAME=n3\n"
        "export SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_STEP_NUM_TASKS=4 "
        "SLURM_STEP_TASKS_PER_NODE='2(x2)'\n"
        'SLURM_STEP_ID=7 SLURM_STEP_NODELIST=n[1-2] exec "$@"',
    }
    (tmp_path / "bin").mkdir()
    for name, body in stubs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    given = launch(
        tmp_path, trainers=4, servers=2, template=script, server_command="echo {host} {port}"
    )
    assert slurm.submit(given, slurm.script(given, ["r.toml"])) == "41"
    assert (tmp_path / "submitted").read_text().endswith("launch r.toml --name run\n")
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    given.log("server1").with_suffix(".step").write_text("n9 41.6\n")
    supervise.show(
        replace(given, chosen=replace(given.chosen, on="slurm"))
    )  # a dry run beside a launch
    steps = slurm.Steps(given)
    assert steps.url(0) == "" and steps.url(1) == "http://n9:21313"
    wait(steps.start_server(1))
    assert (
        given.log("server1").read_text() == "0.0.0.0 21313\n" and steps.url(1) == "http://n3:21313"
    )
    assert (tmp_path / "canceled").read_text() == "--signal=KILL 41.7\n"  # what srun has left
    assert (
        (tmp_path / "srun-args")
        .read_text()
        .startswith("--ntasks=1 --exact --export=ALL --cpus-per-task=8 --gpus=1 --gpu-bind=none")
    )
    monkeypatch.setattr(Launch, "trainer_command", lambda self, urls: ["env"])
    (trainers,) = steps.start_trainers(["http://n3:21313"])
    wait(trainers)
    told = dict(
        line.split("=", 1) for line in given.log("srun").read_text().splitlines() if "=" in line
    )
    expected = {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "n1",
    }
    assert expected.items() <= told.items() and told["MASTER_PORT"] == "21315"
    assert told["GRUPPO_ENGINE_URLS"] == "http://n3:21313"
    words = (tmp_path / "srun-args").read_text()
    assert f"--ntasks=4 --exact --export=ALL --output={given.log('trainer%t')}" in words
    assert "--kill-on-bad-exit=0 --wait=600" in words
    (tmp_path / "canceled").unlink()
    monkeypatch.setattr(Launch, "trainer_command", lambda self, urls: ["sleep", "100"])
    (trainers,) = steps.start_trainers([])
    wait_for(lambda: slurm.placed(given.log("srun"))[1] != "")
    trainers.terminate()
    assert (tmp_path / "canceled").read_text() == "--signal=TERM 41.7\n" and trainers.poll() is None
    trainers.kill()
    assert (tmp_path / "canceled").read_text() == "--signal=KILL 41.7\n"
    wait(trainers)
    steps.close()
    assert not (tmp_path / "requeued").exists()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGUSR1)
    steps.close()
    assert (tmp_path / "requeued").read_text() == "requeue 41\n"
    (tmp_path / "requeued").unlink()
    monkeypatch.setattr(slurm, "LEAD_S", slurm.REQUEUE_S)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGUSR1)
    wait_for((tmp_path / "requeued").exists)  # also where a save never ends


def wait(process: Any) -> None:
    wait_for(lambda: process.poll() is not None)


def wait_for(has_happened: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not has_happened():
        assert time.monotonic() < until
        time.sleep(0.01)
