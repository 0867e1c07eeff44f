"""A Slurm job: the script that is submitted, and the processes as steps of the job that runs it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gruppo.launch.child import ChildProcess, Process
from gruppo.launch.commands import GRACE_S, Launch, with_name
from gruppo.types import GruppoError

LEAD_S, REQUEUE_S = 600, 60
"""Before the time limit: when the trainers are asked to save, and when the job is put back though
they still do."""
PLACED = 'echo "$SLURMD_NODENAME $SLURM_JOB_ID.$SLURM_STEP_ID" > "$0"; '
"""Says where Slurm has placed a step, and its number."""
RANK = PLACED + (
    "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_STEP_NUM_TASKS "
    "LOCAL_WORLD_SIZE=${SLURM_STEP_TASKS_PER_NODE%%[!0-9]*} "
    'MASTER_ADDR=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1); exec "$@"'
)
"""What torchrun would tell a rank."""


def script(launch: Launch, args: Sequence[str]) -> str:
    """The script of a job that runs ``gruppo launch`` with these arguments, after the lines of the
    template."""
    template = launch.chosen.template
    if not template:
        raise GruppoError("""--on slurm needs --template FILE, a shell script with the #SBATCH lines
            of your cluster; examples/launch/cluster.sh is one.""")
    try:
        lines = Path(template).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise GruppoError(
            f"--template {template} cannot be read ({error}). Give a shell script."
        ) from None
    if not any(
        re.match(r"#SBATCH\s+([^#]*\s)?(--partition[=\s]\s*|-p\s*)\w", line) for line in lines
    ):
        raise GruppoError(f"""{template} names no partition. Add the line #SBATCH --partition=NAME;
            sinfo lists their names.""")
    chosen, python = launch.chosen, shlex.quote(sys.executable)
    name, output = (
        shlex.quote(str(text)) for text in (launch.config.name, launch.log("slurm").absolute())
    )
    own = [f"--job-name={name}", f"--ntasks={chosen.trainers + chosen.servers}"]
    # the launcher gets the signal; the trainers finish their step and save
    own += [f"--signal=B:USR1@{LEAD_S}", "--requeue", "--open-mode=append", f"--output={output}"]
    own = [f"#SBATCH {option}" for option in own]
    command = shlex.join(with_name(args, launch.config.name))
    return "\n".join(["#!/bin/bash", *own, *lines, f"exec {python} -m gruppo launch {command}"])


def submit(launch: Launch, text: str) -> str:
    """Submit the job; return its number."""
    file = launch.folder / "logs" / "launch.sbatch"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n", encoding="utf-8")
    try:
        done = subprocess.run(["sbatch", "--parsable", str(file)], capture_output=True, text=True)
    except OSError as error:
        raise GruppoError(
            f"sbatch cannot be run ({error.strerror}). Submit {file} on a machine with Slurm."
        ) from None
    if done.returncode:
        raise GruppoError(
            f"sbatch refuses {file}: {' '.join(done.stderr.split())}. Correct the template."
        )
    return done.stdout.strip().partition(";")[0]


class SlurmStep(ChildProcess):
    """A step of the job, through its srun."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], output: Path) -> None:
        self._output = output
        output.with_suffix(".step").unlink(
            missing_ok=True
        )  # of the step before; srun is yet to be placed
        super().__init__(command, env, output)

    def terminate(self) -> None:
        if self._process.poll() is None and not self._signal(
            "TERM"
        ):  # srun answers SIGTERM by killing its tasks
            super().terminate()

    def kill(self) -> None:
        if self._code is None:
            self._signal("KILL")  # that of srun leaves its tasks
        super().kill()

    def _signal(self, name: str) -> bool:
        """Signal the tasks of the step; False if it has none yet."""
        if number := placed(self._output)[1]:
            # its error says that the step has ended
            subprocess.run(
                ["scancel", f"--signal={name}", number], check=False, capture_output=True
            )
        return bool(number)


def placed(output: Path) -> tuple[str, str]:
    """Machine and number of the step with this log; "" while they are not known."""
    file = output.with_suffix(".step")
    words = file.read_text(encoding="utf-8").split() if file.is_file() else []
    return (words[0], words[1]) if len(words) > 1 else ("", "")


class Steps:
    """Steps of the job of which this process is the script."""

    def __init__(self, launch: Launch, start: Callable[..., Process] = SlurmStep) -> None:
        self.launch, self._start, self.starts = launch, start, 0
        # jobs that follow each other may share a machine
        self.first = launch.chosen.port or 20000 + 32 * int(os.environ["SLURM_JOB_ID"]) % 10000
        self.is_out_of_time = False
        signal.signal(signal.SIGUSR1, self._stop)

    def _stop(self, *_: Any) -> None:
        self.is_out_of_time = True
        # a longer save is cut off, and the run continues from its last checkpoint
        timer = threading.Timer(LEAD_S - REQUEUE_S, self.close)
        timer.daemon = True
        timer.start()
        raise KeyboardInterrupt

    def _srun(self, tasks: int, gpus: int, *options: str) -> list[str]:
        cpus = os.environ.get("SLURM_CPUS_PER_TASK")
        options += (f"--cpus-per-task={cpus}",) if cpus else ()
        # all GPUs of a machine are visible to its ranks, which NCCL needs to connect them directly
        options += (
            (f"--gpus={gpus}", "--gpu-bind=none") if "SLURM_GPUS_ON_NODE" in os.environ else ()
        )
        # where the template has --export=NONE, a step would have neither the key nor the addresses
        # of the servers
        return ["srun", f"--ntasks={tasks}", "--exact", "--export=ALL", *options, "bash", "-c"]

    def start_server(self, number: int) -> Process:
        output = self.launch.log(f"server{number}")
        command = [
            *self._srun(1, self.launch.gpus_per_server),
            f'{PLACED}exec "$@"',
            str(output.with_suffix(".step")),
        ]
        command += self.launch.server_command("0.0.0.0", self.first + number)
        return self._start(command, self.launch.environment(), output)

    def url(self, number: int) -> str:
        host, _ = placed(self.launch.log(f"server{number}"))
        return f"http://{host}:{self.first + number}" if host else ""

    def start_trainers(self, urls: Sequence[str]) -> list[Process]:
        count, self.starts = self.launch.chosen.trainers, self.starts + 1
        options = [f"--output={self.launch.log('trainer%t').absolute()}", "--open-mode=append"]
        # whatever slurm.conf says, the others have time to save when a rank ends, and ones that
        # hang are ended
        srun = self._srun(count, count, *options, "--kill-on-bad-exit=0", f"--wait={GRACE_S:.0f}")
        env = {"MASTER_PORT": str(self.first + self.launch.chosen.servers + self.starts)}
        output = self.launch.log("srun")
        command = [
            *srun,
            RANK,
            str(output.with_suffix(".step")),
            *self.launch.trainer_command(urls),
        ]
        return [self._start(command, self.launch.environment(urls) | env, output)]

    def close(self) -> None:
        """Put the job back into the queue if its time is over; not one that was canceled."""
        if self.is_out_of_time:
            subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=False)
