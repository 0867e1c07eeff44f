"""The scripts in examples/launch start a run, and continue it where its folder exists."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "examples/launch"


def launch(script: str, folder: Path, env: dict[str, str], *args: str) -> tuple[int, str]:
    """Exit code and output of a script, whose launchers are stubs that print or run what they are
    given."""
    stubs = {
        "torchrun": 'echo torchrun "$@"',
    }
    (folder / "bin").mkdir(exist_ok=True)
    for name, body in stubs.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    env = {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", **env}
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
