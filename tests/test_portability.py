"""Training without the modules, calls and signals of Unix, as on Windows; its paths and
consoles."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests import processes, tiny

from gruppo.build import with_absolute_paths
from gruppo.config.schema import Config
from gruppo.data.open import open_source
from gruppo.loading import split_names
from gruppo.modalities.restoration.modality import RESTORATION
from gruppo.platforms import lock_file
from gruppo.rewards.registry import resolve_reward

TRAIN = """
import builtins, os, signal, sys, warnings
# These need what is hidden below.
import torch, transformers, peft, rich.console, multiprocessing.connection, subprocess
for name in ("fork", "forkpty", "killpg", "getuid", "geteuid", "setsid", "getpgid",
             "sched_getaffinity", "mkfifo", "getloadavg", "pread", "pwrite", "statvfs", "chown",
             "register_at_fork"):
    delattr(os, name)
for name in ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGKILL", "SIGALRM", "SIGQUIT", "setitimer",
             "pthread_sigmask"):
    delattr(signal, name)
# Text files are UTF-8 on any system.
warnings.filterwarnings("error", category=EncodingWarning, module=r"gruppo")
plain, refused = builtins.__import__, []

def hiding(name, globals=None, *rest, **named):
    importer = (globals or {}).get("__name__", "")
    if name in ("fcntl", "resource") and importer.startswith("gruppo"):  # psutil needs them
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


@pytest.mark.slow
def test_training_runs_on_the_cpu_without_modules_calls_signals_and_encoding_of_unix(tmp_path):
    subprocess.run(
        [sys.executable, "-X", "warn_default_encoding", "-c", TRAIN, str(tmp_path)],
        check=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    run = tmp_path / "runs" / "run"
    steps = [
        json.loads(line)["step"]
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert steps[-1] == 2 and (run / "final").is_dir()


def test_a_lock_is_held_by_one_and_can_be_taken_again_after_release(tmp_path):
    first = lock_file(tmp_path / ".lock")
    with pytest.raises(BlockingIOError):
        lock_file(tmp_path / ".lock")
    first.close()
    lock_file(tmp_path / ".lock").close()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (r"C:\images", [r"C:\images"]),
        (r"C:\clean:noise=25", [r"C:\clean", "noise=25"]),
        (r"C:\noisy:D:\clean:crop=64", [r"C:\noisy", r"D:\clean", "crop=64"]),
        ("noisy:clean", ["noisy", "clean"]),
        ("a:b", ["a", "b"]),
    ],
)
def test_the_colon_of_a_windows_drive_separates_nothing(text, parts):
    assert split_names(text) == parts


def test_slashes_after_a_drive_are_those_of_windows_alone(monkeypatch):
    assert split_names("C:/noisy:/clean") == ["C", "/noisy", "/clean"]
    monkeypatch.setattr(os, "name", "nt")
    assert split_names("C:/noisy:D:/clean") == ["C:/noisy", "D:/clean"]


def test_data_models_and_rewards_are_named_by_paths_with_a_drive(tmp_path, monkeypatch):
    """Folders of such names, which are legal here too."""
    images = pytest.importorskip("PIL.Image")
    monkeypatch.chdir(tmp_path)
    for folder in ("C:\\noisy", "C:\\clean"):
        Path(folder).mkdir()
        for n in range(3):
            images.new("RGB", (64, 64), (40 * n, 9, 9)).save(Path(folder) / f"{n}.png")
    for name in (r"degrade:C:\clean:noise=25", r"pairs:C:\noisy:C:\clean", r"images:C:\clean:8"):
        source = open_source(name, seed=0)
        assert len(source.train) + len(source.evaluation) == 3
    Path("C:\\code.py").write_text(
        "def score(completions, **_):\n    return [1.0 for _ in completions]\n"
    )
    assert resolve_reward(r"C:\code.py:score")(completions=["a"]) == [1.0]
    Path("C:\\rows.jsonl").write_text('{"prompt": "a"}\n')
    assert len(open_source(r"C:\rows.jsonl", seed=0).all_items) == 1
    config = with_absolute_paths(
        Config(data=r"pairs:C:\noisy:C:\clean", reward=(r"C:\code.py:score",))
    )
    assert config.data == rf"pairs:{tmp_path}/C:\noisy:{tmp_path}/C:\clean"
    assert config.reward == (rf"{tmp_path}/C:\code.py:score",)
    config = RESTORATION.absolute_paths(
        Config(model=r"restore:C:\code.py:Net"), lambda path: f"<{path}>"
    )
    assert config.model == r"restore:<C:\code.py>:Net"


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_a_command_prints_what_its_console_cannot_show_as_escapes(encoding, monkeypatch):
    """As a redirected output on Windows: its encoding is that of the system, and other characters
    are errors."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    code = processes.exit_code(
        ["sample", tiny.model(), "\u4f60\u597d", "a", "--max-new-tokens", "2"]
    )
    sys.stdout.flush()
    assert code == 0 and r"'\u4f60\u597d' ->" in raw.getvalue().decode(encoding)
