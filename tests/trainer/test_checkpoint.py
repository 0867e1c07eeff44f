"""Saves are whole or absent, whatever stops them."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tests import processes
from tests.disk import operations

from gruppo.trainer import checkpoint
from gruppo.trainer.shards import own_shards
from gruppo.types import GruppoError


def save(folder: Path, step: int, **state: object) -> Path:
    w = torch.arange(12.0).reshape(3, 4) + step
    return write(folder, step, {"w": w}, {"exp_avg.w": 2 * w}, state)


def write(folder: Path, step: int, model: Any, optimizer: Any, state: Any) -> Path:
    target = folder / checkpoint.name_of(step)
    files = {"model": own_shards(model), "optimizer": own_shards(optimizer)}
    checkpoint.Save(target).write(files, state)
    return target


def step_of(folder: Path) -> int | None:
    """The step of what a resume would get, after looking that its tensors are of that step."""
    saved = checkpoint.load_latest(folder)
    if saved is None:
        return None
    assert torch.equal(saved.weights["w"], torch.arange(12.0).reshape(3, 4) + saved.step)
    assert torch.equal(saved.optimizer["exp_avg.w"], 2 * saved.weights["w"])
    return saved.step


def test_what_was_saved_is_loaded_to_the_bit(tmp_path):
    save(tmp_path, 7, note="x", total=0.1)
    saved = checkpoint.load_latest(tmp_path)
    assert step_of(tmp_path) == 7 and saved.state["note"] == "x" and saved.state["total"] == 0.1
    assert (tmp_path / "latest").read_text() == "step_000007"


# --- a save that is stopped at any system call ----------------------------------------------------


def test_a_save_syncs_each_file_before_the_rename_and_the_parent_after(tmp_path, monkeypatch):
    calls = operations(monkeypatch, checkpoint, -1, None)
    save(tmp_path, 1)
    _, replace, *_ = [n for n, call in enumerate(calls) if call == "replace"]
    # model, optimizer, state, the list of them, COMPLETE, the folder
    assert calls[:replace].count("fsync") == 6
    assert calls[replace + 1] == "fsync"
    written = max(n for n, call in enumerate(calls) if call == "save_file")
    assert written < calls.index("fsync")


def save_and_die(folder: str, at: int) -> None:
    operations(pytest.MonkeyPatch(), checkpoint, at, lambda: os._exit(9))
    save(Path(folder), 2)


@pytest.mark.parametrize("at", range(0, 20))
def test_a_process_that_dies_at_any_stage_leaves_the_former_or_the_new_save_whole(tmp_path, at):
    saves = tmp_path / "checkpoints"
    save(saves, 1)
    code = processes.start(save_and_die, str(saves), at, folder=tmp_path / "child").wait()
    assert code in (0, 9)
    found = step_of(saves)
    assert found in ((1, 2) if code else (2,))
    checkpoint.prune(saves, 5, newest=found)
    assert not [path.name for path in saves.iterdir() if path.name.startswith(".")]


# --- damaged, foreign, of another format ----------------------------------------------------------


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # of a number: the file can still be read
    path.write_bytes(data)


DAMAGES = {
    "a bit flipped": lambda folder: flip_a_bit(folder / "model.safetensors"),
    "the optimiser cut short": lambda folder: os.truncate(folder / "optimizer.safetensors", 40),
    "state gone": lambda folder: (folder / "state.json").unlink(),
    "no seal": lambda folder: (folder / "COMPLETE").unlink(),
    "an empty seal": lambda folder: (folder / "COMPLETE").write_text(""),
    "a seal of another kind": lambda folder: (folder / "COMPLETE").write_text("[1]"),
    "nothing left": lambda folder: [path.unlink() for path in folder.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_newest_save_gives_way_to_the_one_before(tmp_path, damage, caplog):
    save(tmp_path, 1)
    damage(save(tmp_path, 2))
    with caplog.at_level("WARNING", "gruppo"):
        assert step_of(tmp_path) == 1
    assert "step_000002" in caplog.text and "step 1" in caplog.text


def test_latest_is_read_first_and_a_damaged_or_missing_one_costs_nothing(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "latest").write_text("step_000002")
    assert step_of(tmp_path) == 2
    for text in (b"step_000009", b"\xff", b""):
        (tmp_path / "latest").write_bytes(text)
        assert step_of(tmp_path) == 3
    (tmp_path / "latest").unlink()
    assert step_of(tmp_path) == 3


def test_a_damaged_save_is_written_anew_when_its_step_comes_again(tmp_path):
    flip_a_bit(save(tmp_path, 2) / "model.safetensors")
    save(tmp_path, 2)
    assert step_of(tmp_path) == 2


def sealed(folder: Path, files: dict[str, str]) -> None:
    with checkpoint.replacing(folder) as place:
        for name, text in files.items():
            (place / name).write_text(text)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ('{"format": 1, "step": 1}', r"has format 1, this version reads 2"),
        ('{"format": 99, "step": 1}', r"has format 99, this version reads 2"),
        ('{"format": 2}', "model.safetensors"),
        ("[]", "cannot be read"),
        ("not json", "cannot be read"),
        ('{"step": 3}', "has format None"),
    ],
)
def test_a_foreign_or_newer_format_is_one_clear_error(tmp_path, state, says):
    sealed(tmp_path / "step_000001", {"state.json": state})
    with pytest.raises(GruppoError, match=says):
        checkpoint.load_latest(tmp_path)


def test_a_seal_that_points_outside_its_folder_is_refused(tmp_path):
    folder = save(tmp_path / "a", 1)
    (tmp_path / "outside").write_text("secret")
    seal = json.loads((folder / "COMPLETE").read_text())
    for name in ("../../outside", str(tmp_path / "outside")):
        (folder / "COMPLETE").write_text(json.dumps(seal | {name: {"bytes": 6, "sha256": ""}}))
        with pytest.raises(ValueError, match="outside the folder"):
            checkpoint.verify(folder)


# --- a full disk ----------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(20))
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_full_disk_at_any_stage_is_one_clear_error_and_keeps_the_former_save(
    tmp_path, monkeypatch, at, number
):
    def fail():
        raise OSError(number, os.strerror(number))

    save(tmp_path, 1)
    calls = operations(monkeypatch, checkpoint, at, fail)
    try:
        save(tmp_path, 2)
        assert len(calls) <= at
    except GruppoError as error:
        assert ("the disk is full" if number == errno.ENOSPC else "could not be written") in str(
            error
        )
        assert error.exit_code == 2
    monkeypatch.undo()
    assert step_of(tmp_path) in (1, 2)
    assert not list(tmp_path.glob(".step*"))
    save(tmp_path, 3)
    assert step_of(tmp_path) == 3


def test_the_full_disk_that_safetensors_reports_is_recognised(tmp_path, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    save(tmp_path, 1)
    monkeypatch.setattr(checkpoint, "save_file", fail)
    with pytest.raises(GruppoError, match="the disk is full"):
        save(tmp_path, 2)
    assert step_of(tmp_path) == 1 and not list(tmp_path.glob(".step*"))


# --- pruning --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "left"), [(0, [5]), (1, [5]), (2, [4, 5]), (4, [2, 3, 4, 5]), (9, [1, 2, 3, 4, 5])]
)
def test_prune_keeps_the_newest_and_never_none(tmp_path, keep, left):
    for step in range(1, 6):
        save(tmp_path, step)
    checkpoint.prune(tmp_path, keep, newest=5)
    assert checkpoint.steps(tmp_path) == left


def test_a_damaged_later_save_never_costs_the_one_just_written(tmp_path):
    save(tmp_path, 50)
    flip_a_bit(save(tmp_path, 100) / "model.safetensors")
    assert step_of(tmp_path) == 50
    save(tmp_path, 60)  # the resumed run was stopped there
    checkpoint.prune(tmp_path, 1, newest=60)
    assert step_of(tmp_path) == 60


# --- optimiser and random state -------------------------------------------------------------------


def test_adamw_goes_on_to_the_bit_from_its_saved_state(tmp_path):
    def model_and_optimizer():
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        return module, torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1, fused=True)

    def learn(module, optimizer, steps):
        for step in steps:
            module(torch.full((5, 3), 0.1 * step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    whole, optimizer = model_and_optimizer()
    names = [name for name, _ in whole.named_parameters()]
    learn(whole, optimizer, range(6))
    half, optimizer = model_and_optimizer()
    learn(half, optimizer, range(3))
    tensors = checkpoint.optimizer_tensors(optimizer, names)
    path = write(tmp_path, 3, half.state_dict(), tensors, {})
    resumed, optimizer = model_and_optimizer()
    saved = checkpoint.load(path)
    resumed.load_state_dict(saved.weights)
    checkpoint.restore_optimizer(optimizer, saved.optimizer, names)
    learn(resumed, optimizer, range(3, 6))
    assert all(
        torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True)
    )
    assert "step.0.weight" in load_file(path / "optimizer.safetensors")


def test_random_state_survives_json_and_gives_the_same_next_numbers():
    def draw():
        return [
            random.random(),
            random.gauss(0, 1),
            float(np.random.rand()),
            float(np.random.randn()),
            float(torch.rand(1)),
        ]

    draw()
    state = json.loads(json.dumps(checkpoint.random_state()))
    first = draw()
    draw()
    checkpoint.restore_random_state(state)
    assert draw() == first
