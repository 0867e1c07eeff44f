"""A Slurm job: the script that is submitted, and the processes as steps of the job that runs it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gruppo.launch.child import ChildProcess, Process
from gruppo.launch.commands import Launch
from gruppo.types import GruppoError

RANK = (
    "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_STEP_NUM_TASKS "
    "LOCAL_WORLD_SIZE=${SLURM_STEP_TASKS_PER_NODE%%[!0-9]*} "
    'MASTER_ADDR=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1); exec "$@"'
)
"""What torchrun would tell a rank."""
NODE = 'echo "$SLURMD_NODENAME" > "$0"; exec "$@"'
"""Names the machine on which Slurm has placed a server."""


def script(launch: Launch, args: Sequence[str]) -> str:
    """The script of a job that runs ``gruppo launch`` with these arguments, after the lines of the template."""
    template = launch.chosen.template
    if not template:
        raise GruppoError("""--on slurm needs --template FILE, a shell script with the #SBATCH lines of your cluster;
            examples/launch/cluster.sh is one.""")
    try:
        lines = Path(template).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise GruppoError(f"--template {template} cannot be read ({error}). Give a shell script.") from None
    if not any(re.match(r"#SBATCH\s+([^#]*\s)?(--partition[=\s]\s*|-p\s*)\w", line) for line in lines):
        raise GruppoError(f"""{template} names no partition. Add the line #SBATCH --partition=NAME; sinfo lists their
            names.""")
    chosen, python = launch.chosen, shlex.quote(sys.executable)
    name, output = (shlex.quote(str(text)) for text in (launch.config.name, launch.log("slurm").absolute()))
    own = [f"--job-name={name}", f"--ntasks={chosen.trainers + chosen.servers}"]
    # the launcher gets the signal ten minutes before the time limit; the trainers finish their step and save
    own += ["--signal=B:USR1@600", "--requeue", "--open-mode=append", f"--output={output}"]
    own = [f"#SBATCH {option}" for option in own]
    at = args.index("--") if "--" in args else len(args)
    # a job that is queued again continues the run of this name
    named = [] if any(arg.partition("=")[0] == "--name" for arg in args[:at]) else ["--name", launch.config.name]
    command = shlex.join([*args[:at], *named, *args[at:]])
    return "\n".join(["#!/bin/bash", *own, *lines, f"exec {python} -m gruppo launch {command}"])


def submit(launch: Launch, text: str) -> str:
    """Submit the job; return its number."""
    file = launch.folder / "logs" / "launch.sbatch"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n", encoding="utf-8")
    try:
        done = subprocess.run(["sbatch", "--parsable", str(file)], capture_output=True, text=True)
    except OSError as error:
        raise GruppoError(f"sbatch cannot be run ({error.strerror}). Submit {file} on a machine with Slurm.") from None
    if done.returncode:
        raise GruppoError(f"sbatch refuses {file}: {' '.join(done.stderr.split())}. Correct the template.")
    return done.stdout.strip().partition(";")[0]


class Steps:
    """Steps of the job of which this process is the script."""

    def __init__(self, launch: Launch, start: Callable[..., Process] = ChildProcess) -> None:
        self.launch, self._start, self.starts = launch, start, 0
        # jobs that follow each other may share a machine
        self.first = launch.chosen.port or 20000 + 32 * int(os.environ["SLURM_JOB_ID"]) % 10000
        self.is_out_of_time = False
        signal.signal(signal.SIGUSR1, self._stop)

    def _stop(self, *_: Any) -> None:
        self.is_out_of_time = True
        raise KeyboardInterrupt

    def _srun(self, tasks: int, gpus: int, *options: str) -> list[str]:
        cpus = os.environ.get("SLURM_CPUS_PER_TASK")
        options += (f"--cpus-per-task={cpus}",) if cpus else ()
        # all GPUs of a machine are visible to its ranks, which NCCL needs to connect them directly
        options += (f"--gpus={gpus}", "--gpu-bind=none") if "SLURM_GPUS_ON_NODE" in os.environ else ()
        # where the template has --export=NONE, a step would have neither the key nor the addresses of the servers
        return ["srun", f"--ntasks={tasks}", "--exact", "--export=ALL", *options, "bash", "-c"]

    def _host(self, number: int) -> Path:
        return self.launch.folder / "logs" / f"server{number}.host"

    def start_server(self, number: int) -> Process:
        if self._start is ChildProcess:  # not where the command is only printed
            self._host(number).unlink(missing_ok=True)
        command = [*self._srun(1, self.launch.gpus_per_server), NODE, str(self._host(number))]
        command += self.launch.server_command("0.0.0.0", self.first + number)
        return self._start(command, self.launch.environment(), self.launch.log(f"server{number}"))

    def url(self, number: int) -> str:
        host = self._host(number)
        name = host.read_text(encoding="utf-8").strip() if host.is_file() else ""
        return f"http://{name}:{self.first + number}" if name else ""

    def start_trainers(self, urls: Sequence[str]) -> list[Process]:
        count, self.starts = self.launch.chosen.trainers, self.starts + 1
        output = f"--output={self.launch.log('trainer%t').absolute()}"
        srun = self._srun(count, count, output, "--open-mode=append")
        env = {"MASTER_PORT": str(self.first + self.launch.chosen.servers + self.starts)}
        command = [*srun, RANK, "bash", *self.launch.trainer_command(urls)]
        return [self._start(command, self.launch.environment(urls) | env, self.launch.log("srun"))]

    def close(self) -> None:
        """Put the job back into the queue if its time is over; not one that was canceled."""
        if self.is_out_of_time:
            subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=False)
