"""The scripts in examples/launch start a run, and continue it where its folder exists."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "examples/launch"
SLURM = {
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_ID": "41234",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
}
SLURM |= {"SLURM_CPUS_PER_TASK": "8", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}


def launch(script: str, folder: Path, env: dict[str, str], *args: str) -> tuple[int, str]:
    """Exit code and output of a script, whose launchers are stubs that print or run what they are
    given."""
    stubs = {
        "torchrun": 'echo torchrun "$@"',
        "srun": 'shift; exec "$@"',
        "scontrol": 'case $1 in show) printf "n1\\nn2\\n";; *) echo scontrol "$@";; esac',
        "python": "echo RANK=$RANK LOCAL_RANK=$LOCAL_RANK WORLD_SIZE=$WORLD_SIZE "
        '$MASTER_ADDR:$MASTER_PORT "$@"\nexit $CODE',
    }
    (folder / "bin").mkdir(exist_ok=True)
    for name, body in stubs.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    env = {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "CODE": "0", **env}
    done = subprocess.run(
        [SCRIPTS / script, *args], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert not done.stderr
    return done.returncode, done.stdout.strip()


@pytest.mark.skipif(os.name != "posix", reason="shell scripts")
@pytest.mark.parametrize(
    ("script", "env", "before"),
    [
        (
            "one_machine.sh",
            {"GPUS": "2"},
            "torchrun --standalone --nproc-per-node 2 --max-restarts 3 -m gruppo",
        ),
        (
            "several_machines.sh",
            {"MAIN": "n1", "MACHINES": "2"},
            "torchrun --nnodes 2 --nproc-per-node gpu --max-restarts 3 --rdzv-backend c10d "
            "--rdzv-endpoint n1:29400 "
            "--rdzv-id r -m gruppo",
        ),
        ("slurm.sbatch", SLURM, "RANK=3 LOCAL_RANK=1 WORLD_SIZE=4 n1:21234 -m gruppo"),
    ],
)
def test_a_script_starts_a_run_and_continues_it(tmp_path, script, env, before):
    started = launch(script, tmp_path, env, "r", "arithmetic", "--steps", "3")
    assert started == (0, f"{before} train arithmetic --name r --runs-dir runs --steps 3")
    (tmp_path / "runs/r").mkdir(parents=True)
    (tmp_path / "runs/r/config.json").touch()
    assert launch(script, tmp_path, env, "r", "arithmetic", "--steps", "3") == (
        0,
        f"{before} resume runs/r",
    )


@pytest.mark.skipif(os.name != "posix", reason="shell scripts")
def test_a_slurm_job_that_was_stopped_is_queued_again(tmp_path):
    code, out = launch("slurm.sbatch", tmp_path, SLURM | {"CODE": "75"}, "r", "arithmetic")
    assert code == 75 and out.endswith("\nscontrol requeue 41234")
    code, out = launch("slurm.sbatch", tmp_path, SLURM | {"CODE": "4"}, "r", "arithmetic")
    assert code == 4 and "requeue" not in out
