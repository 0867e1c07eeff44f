"""Training where modules of Unix are missing, as on Windows."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from gruppo.platforms import lock_file

TRAIN = """
import builtins, sys
plain, refused = builtins.__import__, []

def hiding(name, globals=None, *rest, **named):
    if name in ("fcntl", "resource") and (globals or {}).get("__name__", "").startswith("gruppo"):  # psutil needs them
        refused.append(name)
        raise ImportError(name)
    return plain(name, globals, *rest, **named)

builtins.__import__ = hiding
from pathlib import Path
from gruppo import api
import gruppo.rewards.code
from tests import tiny
api.start(tiny.config(Path(sys.argv[1]), steps=2, saving__every=1))
assert refused
"""


def test_training_runs_on_the_cpu_without_fcntl_and_resource(tmp_path):
    subprocess.run(
        [sys.executable, "-c", TRAIN, str(tmp_path)], check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )
    run = tmp_path / "runs" / "run"
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert steps[-1] == 2 and (run / "final").is_dir()


def test_a_lock_is_held_by_one_and_can_be_taken_again_after_release(tmp_path):
    first = lock_file(tmp_path / ".lock")
    with pytest.raises(BlockingIOError):
        lock_file(tmp_path / ".lock")
    first.close()
    lock_file(tmp_path / ".lock").close()
