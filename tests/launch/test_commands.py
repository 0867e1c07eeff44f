"""What a launch starts: commands, devices, addresses, jobs; and what is refused before anything
starts."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests import processes, tiny
from tests.launch.launches import SERVER_COMMAND, launch, recipe

from gruppo.cli import serve
from gruppo.cli.options import parse_own
from gruppo.config import serialization
from gruppo.config.schema import EngineConfig, LaunchConfig, LoraConfig
from gruppo.launch import commands
from gruppo.launch.commands import Launch, devices, parse_launch
from gruppo.launch.slurm import slurm_script
from gruppo.launch.supervise import Supervisor
from gruppo.platforms import lock_file
from gruppo.types import GruppoError

TEMPLATE = "#!/bin/bash\n#SBATCH --partition=debug\nmodule() { :; }\n"
posix = pytest.mark.skipif(os.name != "posix", reason="shell scripts")


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "cluster.sh").write_text(TEMPLATE)
    return str(tmp_path / "cluster.sh")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--servers 5", r"--servers 5: a step has 4 prompts, .* Set --servers 4 or fewer"),
        ("--servers 9 --engine.lag 1", r"--servers 9: a step has 8 prompts"),
        ("--trainers 5", r"--trainers 5: a step has 4 prompts, .* Set --trainers 4 or fewer"),
        ("--trainers 0", r"trainers=0 is out of range; it needs to be at least 1"),
        ("--engine local.py:engine", r"engine=local.py:engine: --servers starts vLLM servers"),
        ("--engine vllm --engine.urls http://a", r"engine.urls: gruppo launch starts the servers"),
        ("--slurm none.sh", r"--slurm none.sh cannot be read"),
        (
            "--slurm plain.sh",
            r"plain.sh names no partition. Add the line #SBATCH --partition=NAME",
        ),
        ("--optim.lr -1", r"optim.lr=-1 is out of range"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_starts(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.sh").write_text("#SBATCH --time=1\n# partition: gpu\nsleep 1\n")
    assert processes.exit_code(["launch", recipe(tmp_path), *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line
    assert not (tmp_path / "runs").exists()


def test_options_of_a_launch_stand_anywhere_among_those_of_the_run():
    for words in ("r --dry-run --steps 3 --trainers=2", "r --trainers 2 --steps 3 --dry-run=True"):
        chosen, rest = parse_own(words.split(), LaunchConfig(), "launch")
        assert chosen.dry_run and chosen.trainers == 2 and rest == ["r", "--steps", "3"]


def test_a_python_without_vllm_is_refused(tmp_path, capsys, monkeypatch):
    file = recipe(tmp_path)
    monkeypatch.setattr(commands, "find_vllm", serve.find_vllm)
    monkeypatch.setenv("VLLM_PYTHON", sys.executable)
    assert processes.exit_code(["launch", file]) == 2
    assert f"{sys.executable} has no vLLM. Install it" in capsys.readouterr().err
    assert not (tmp_path / "runs/run/config.json").exists()


def test_the_commands_are_those_of_train_and_serve_and_then_of_resume(tmp_path):
    config = replace(tiny.config(tmp_path), lora=LoraConfig(rank=4), compute="float32")
    given = launch(tmp_path, words=["--steps", "3"])
    given = replace(given, config=config, vllm=("--max-model-len", "64"))
    gruppo = f"{sys.executable} -m gruppo"
    assert " ".join(SERVER_COMMAND(given, "127.0.0.1", 81)) == (
        f"{gruppo} serve {config.model} --host 127.0.0.1 --port 81 --lora-rank 4 -- "
        "--dtype float32 --max-model-len 64"
    )
    train = f"{gruppo} train recipe.json --steps 3"
    assert " ".join(given.train_command(["a", "b"])) == f"{train} --engine vllm --engine.urls a b"
    alone = replace(given, options=LaunchConfig(servers=0))
    assert " ".join(alone.train_command([])) == train
    assert " ".join(given.resume_command()) == f"{gruppo} resume {given.folder}"
    trusting = replace(given, config=replace(config, trust_remote_code=True), vllm=())
    assert SERVER_COMMAND(trusting, "h", 81)[-3:] == ["--dtype", "float32", "--trust-remote-code"]
    assert trusting.resume_command()[-1] == "--trust-remote-code"


def test_a_run_gets_a_name_and_one_that_exists_is_continued_with_its_own_options(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    file = recipe(tmp_path)
    config = json.loads(Path(file).read_text()) | {"name": ""}
    Path(file).write_text(json.dumps(config))
    planned = parse_launch([file])
    assert planned.words[-2:] == ("--name", planned.config.name) and planned.config.name
    config = tiny.config(
        tmp_path,
        name="begun",
        engine__kind="vllm",
        engine__urls=["http://a"],
        rollout__prompts=2,
        trust_remote_code=True,
    )
    (tmp_path / "runs/begun").mkdir(parents=True)
    saved = tmp_path / "runs/begun/config.json"
    saved.write_text(json.dumps(serialization.to_dict(config)))
    words = [file, "--name", "begun"]
    begun = parse_launch(words).config
    assert begun.rollout.prompts == 2 and not begun.trust_remote_code
    assert parse_launch([*words, "--trust-remote-code"]).config.trust_remote_code
    with pytest.raises(GruppoError, match="a step has 2 prompts"):
        parse_launch([*words, "--servers", "3"])
    saved.write_text(json.dumps(serialization.to_dict(replace(config, engine=EngineConfig()))))
    with pytest.raises(GruppoError, match="engine=the policy itself: --servers starts vLLM"):
        parse_launch(words)


def visible(given: Launch) -> list[str]:
    """CUDA_VISIBLE_DEVICES of the trainers and of each server."""
    trainers, servers = devices(given)
    return [env["CUDA_VISIBLE_DEVICES"] for env in (trainers, *servers)]


def test_trainers_get_the_first_gpus_and_servers_the_next_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    given = launch(tmp_path, trainers=2, servers=2)
    assert devices(given) == ({}, [{}, {}])  # device = cpu
    given = replace(
        given, config=replace(given.config, device="auto"), vllm=("--tensor-parallel-size", "2")
    )
    assert visible(given) == ["0,1", "2,3", "4,5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1,0,2")
    assert visible(given) == ["7,5", "3,1", "0,2"]
    shared = replace(given, config=replace(given.config, engine=EngineConfig(colocated=True)))
    assert visible(shared) == ["7,5", "7,5", "3,1"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    with pytest.raises(
        GruppoError, match=r"2 trainers and 2 servers of 2 GPUs need 6 GPUs, and 5 are here"
    ):
        devices(given)


def test_processors_are_divided_among_the_ranks_whatever_the_number_of_servers(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("gruppo.launch.commands.usable_processors", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for servers in (0, 3):
        env, _ = devices(launch(tmp_path, trainers=4, servers=servers))
        assert env == {"OMP_NUM_THREADS": "2"}
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert devices(launch(tmp_path, trainers=4, servers=0)) == ({}, [])


def test_ranks_are_told_what_torchrun_tells_them_and_one_rank_nothing(tmp_path):
    def ranks(trainers: int) -> list[dict[str, str]]:
        started = list[dict[str, str]]()
        given = launch(tmp_path, trainers=trainers, servers=0)
        Supervisor(given, lambda command, env, output: started.append(env)).start_trainers()
        return started

    assert "RANK" not in ranks(1)[0]
    names = ("MASTER_ADDR", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    first, second = ranks(2)
    assert [first[name] for name in names] == ["127.0.0.1", "0", "0", "2", "2"]
    assert [second[name] for name in names] == ["127.0.0.1", "1", "1", "2", "2"]
    assert first["MASTER_PORT"] == second["MASTER_PORT"]


def test_one_launcher_at_a_time(tmp_path, capsys):
    words = ["launch", recipe(tmp_path), "--servers", "0"]
    (tmp_path / "runs/run/logs").mkdir(parents=True)
    with lock_file(tmp_path / "runs/run/logs/.lock"):
        assert processes.exit_code(words) == 2
    assert "another gruppo launch runs" in capsys.readouterr().err


def test_a_dry_run_prints_commands_and_starts_nothing(tmp_path, capsys, monkeypatch, script):
    monkeypatch.setenv("GRUPPO_ENGINE_KEY", "secret")
    words = ["launch", recipe(tmp_path), "--trainers", "2", "--dry-run"]
    assert processes.exit_code(words) == 0
    out = capsys.readouterr().out
    names = [line for line in out.splitlines() if line.startswith("#")]
    assert names == ["# server0", "# trainer0", "# trainer1"]
    assert "RANK=1" in out and f"fake {tiny.model()} " in out and "secret" not in out
    assert processes.exit_code([*words, "--slurm", script]) == 0
    out = capsys.readouterr().out
    assert out.startswith("#!/bin/bash\n#SBATCH --job-name=run\n") and "secret" not in out
    assert not (tmp_path / "runs").exists()


# --- Slurm ----------------------------------------------------------------------------------------


def test_the_script_has_the_lines_of_the_template_and_quotes_names(tmp_path, script):
    given = launch(tmp_path, trainers=2, servers=3, slurm=script)
    lines = slurm_script(given).splitlines()
    order = [
        "#!/bin/bash",
        "#SBATCH --ntasks=5",
        "#SBATCH --signal=B:USR1@600",
        "#SBATCH --partition=debug",
        "module() { :; }",
        "TRAINERS=2",
    ]
    assert sorted(order, key=lines.index) == order
    Path(script).write_text("#SBATCH --nodes=1 -p debug\n")
    given = replace(given, config=replace(given.config, name="two 'words' $(x)"))
    lines = slurm_script(given).splitlines()
    quoted = shlex.quote("two 'words' $(x)")
    assert f"#SBATCH --job-name={quoted}" in lines
    assert f"FOLDER={shlex.quote(str(given.folder))}" in lines


STUBS = {
    "scontrol": 'case $1 in show) printf "n1\\nn2\\n";; *) echo "$@" > requeued;; esac',
    "scancel": 'echo "$@" > signalled; kill -USR1 $(cat rank.pid)',
    # two tasks of trainers, one of a server
    "srun": """echo "$@" >> srun-args; tasks=${1#--ntasks=}
while [ "$1" != bash ]; do shift; done
export SLURMD_NODENAME=n3 SLURM_STEP_NUM_TASKS=$tasks SLURM_STEP_TASKS_PER_NODE='1(x2)'
export SLURM_STEP_NODELIST=n[1-2] SLURM_LOCALID=0
for rank in $(seq $tasks); do SLURM_PROCID=$((rank - 1)) "$@" & done; wait""",
}


class Job:
    """A job whose Slurm commands are scripts; on a real one-node Slurm: see the lab notes."""

    def __init__(
        self, folder: Path, script: str, trainer: str, server: str = "", **options: int
    ) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        for name, body in STUBS.items():
            (folder / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
            (folder / "bin" / name).chmod(0o755)
        server = server or "touch up; sleep 100"
        given = launch(folder, trainers=2, slurm=script, **{"servers": 1} | options)
        self.log = given.log
        own = ["sh", "-c", trainer, "trainer"]
        text = slurm_script(given)
        text = re.sub(r"(?m)^TRAIN=.*", lambda _: f"TRAIN=({shlex.join(own)})", text)
        servers = [f"sh -c {shlex.quote(server)}"] * given.options.servers
        text = re.sub(r"(?m)^SERVERS=.*", lambda _: f"SERVERS=({shlex.join(servers)})", text)
        text = re.sub(r"(?m)^ANSWERS=.*", "ANSWERS='import os; os.stat(\"up\")'", text)
        given.log("slurm").parent.mkdir(parents=True)
        env = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "41"}
        env |= {"SLURM_CPUS_PER_TASK": "8", "SLURM_GPUS_ON_NODE": "8", "SLURM_RESTART_COUNT": "3"}
        self.process = subprocess.Popen(
            ["bash", "-c", text], cwd=folder, env=env, start_new_session=True
        )

    def wait(self) -> int:
        try:
            return self.process.wait(60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def wait_for(self, file: str) -> None:
        until = time.monotonic() + 60
        while not (self.folder / file).exists():
            assert time.monotonic() < until
            time.sleep(0.01)

    @property
    def is_requeued(self) -> bool:
        return (self.folder / "requeued").exists()


@posix
def test_a_job_starts_servers_then_ranks_and_ends_with_their_cause(tmp_path, script, monkeypatch):
    monkeypatch.setattr("secrets.randbelow", lambda _: 1000)
    job = Job(
        tmp_path,
        script,
        'env > rank$RANK; echo "$@" > arguments; [ $RANK = 1 ] || exit 75; exit 3',
    )
    assert job.wait() == 3 and not job.is_requeued
    told = dict(line.split("=", 1) for line in (tmp_path / "rank1").read_text().splitlines())
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [told[name] for name in names] == ["1", "0", "2", "1", "n1", "21001"]
    assert told["GRUPPO_ENGINE_URLS"] == "http://n3:21000" and len(told["GRUPPO_ENGINE_KEY"]) == 32
    assert (tmp_path / "arguments").read_text() == "http://n3:21000\n"
    server, trainers = (tmp_path / "srun-args").read_text().splitlines()[0::1][:2]
    common = "--exact --export=ALL --open-mode=append"
    assert server.startswith(f"--ntasks=1 {common} --output={job.log('server0')}")
    assert "--cpus-per-task=8 --gpus=1 --gpu-bind=none" in server
    assert trainers.startswith(f"--ntasks=2 {common} --output={job.log('trainer%t')}")
    assert "--gpus=2 --gpu-bind=none --kill-on-bad-exit=0 --wait=600" in trainers


SAVES = "trap 'exit 75' USR1 TERM; echo $$ > rank.pid; touch ready; while :; do sleep 0.01; done"


@posix
def test_a_job_out_of_time_saves_and_is_queued_again(tmp_path, script):
    job = Job(tmp_path, script, f"[ $RANK = 1 ] && exit 75; {SAVES}", servers=0)
    job.wait_for("ready")
    job.process.send_signal(signal.SIGUSR1)
    assert job.wait() == 75
    assert (tmp_path / "signalled").read_text() == "--signal=USR1 41\n"
    assert (tmp_path / "requeued").read_text() == "requeue 41\n"


@posix
@pytest.mark.parametrize(("allowed", "is_requeued"), [(4, True), (3, False)])
def test_a_job_with_a_lost_rank_is_queued_again_as_often_as_allowed(
    tmp_path, script, allowed, is_requeued
):
    job = Job(tmp_path, script, "kill -9 $$", servers=0, max_restarts=allowed)
    assert job.wait() == 75 and job.is_requeued == is_requeued


@posix
def test_a_job_that_is_done_or_canceled_is_not_queued_again(tmp_path, script):
    (tmp_path / "a").mkdir()
    job = Job(tmp_path / "a", script, "exit 0", servers=0)
    assert job.wait() == 0 and not job.is_requeued
    (tmp_path / "b").mkdir()
    job = Job(tmp_path / "b", script, f"[ $RANK = 1 ] && exit 75; {SAVES}", servers=0)
    job.wait_for("ready")
    job.process.send_signal(signal.SIGTERM)
    os.kill(int((tmp_path / "b/rank.pid").read_text()), signal.SIGTERM)  # scancel signals all
    assert job.wait() == 75 and not job.is_requeued


@posix
def test_a_server_that_ends_before_it_answers_ends_the_job(tmp_path, script):
    job = Job(tmp_path, script, "exit 0", server="exit 1")
    assert job.wait() == 2 and not (tmp_path / "signalled").exists()
