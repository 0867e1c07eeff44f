"""Training where modules of Unix are missing, as on Windows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gruppo import platforms
from gruppo.platforms import FileLock

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
    assert steps[-1] == 2 and (run / "final").is_dir() and not (run / ".lock-owner").exists()


@pytest.mark.parametrize("has_fcntl", [True, False])
def test_a_lock_is_held_by_one_and_can_be_taken_again_after_release(tmp_path, monkeypatch, has_fcntl):
    if not has_fcntl:
        monkeypatch.setattr(platforms, "fcntl", None)
        monkeypatch.setattr(platforms, "msvcrt", None)
    first = FileLock(tmp_path / ".lock")
    with pytest.raises(BlockingIOError):
        FileLock(tmp_path / ".lock")
    first.release()
    FileLock(tmp_path / ".lock").release()


def test_a_lock_file_of_a_killed_process_does_not_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(platforms, "fcntl", None)
    monkeypatch.setattr(platforms, "msvcrt", None)
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    Path(tmp_path, ".lock-owner").write_text(str(process.pid))
    FileLock(tmp_path / ".lock").release()
