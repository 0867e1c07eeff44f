"""Sharded checkpoints: every rank writes its own part, whole or absent, and any number of ranks
reads them."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests import processes, tiny
from tests.disk import NAMES, Broken, operations, raise_broken
from tests.trainer import sharded

from gruppo.config import serialization
from gruppo.trainer import checkpoint
from gruppo.trainer.shards import Shard
from gruppo.types import GruppoError

ALL = (*NAMES, "unlink")
W = torch.arange(35.0).reshape(7, 5)


def save_of(folder: Path, step: int, world_size: int) -> checkpoint.Save:
    return checkpoint.Save(folder / checkpoint.name_of(step), world_size)


def write(save: checkpoint.Save, rank: int) -> None:
    """Write one rank's part of a checkpoint whose tensors are ``W + step``, cut as FSDP cuts
    them."""
    files: dict[str, Any] = {"model": {}, "optimizer": {}}
    w = W + int(save.target.name[5:])
    rows = -(-len(w) // save.ranks)  # rounded up: the last ranks may have fewer, or none
    part = w[rank * rows : (rank + 1) * rows].clone()
    if len(part):
        files["model"]["w"] = Shard(part, [rank * rows, 0])
        files["optimizer"]["exp_avg.w"] = Shard(2 * part, [rank * rows, 0])
    save.write(files, {}, rank)


def save(folder: Path, step: int, world_size: int = 3) -> Path:
    one = save_of(folder, step, world_size)
    for rank in range(world_size):
        write(one, rank)
    return one.target


def step_of(folder: Path) -> int | None:
    """The step of what a resume would get, whose tensors are those of that step."""
    saved = checkpoint.load_latest(folder)
    if saved is None:
        return None
    assert torch.equal(saved.weights["w"], W + saved.step)
    assert torch.equal(saved.optimizer["exp_avg.w"], 2 * (W + saved.step))
    return saved.step


@pytest.mark.parametrize("world_size", [2, 3, 5, 9])
def test_one_process_reads_what_any_number_of_ranks_wrote(tmp_path, world_size):
    path = save(tmp_path, 4, world_size)
    assert step_of(tmp_path) == 4 and (tmp_path / "latest").read_text() == "step_000004"
    files = {file.name for file in path.iterdir()}
    assert {*json.loads((path / "COMPLETE").read_text())} == files - {"COMPLETE"}
    assert (
        len([name for name in files if name.startswith("model-shard")])
        == {2: 2, 3: 3, 5: 4, 9: 7}[world_size]
    )


def test_where_a_shard_is_missing_the_checkpoint_gives_way_to_the_one_before(tmp_path, caplog):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    (path / "model-shard-00002-of-00003.safetensors").unlink()
    assert (
        step_of(tmp_path) == 1
        and "model-shard-00002-of-00003.safetensors' is missing" in caplog.text
    )
    seal = json.loads((path / "COMPLETE").read_text())
    del seal["model-shard-00002-of-00003.safetensors"]
    (path / "COMPLETE").write_text(json.dumps(seal))
    with pytest.raises(GruppoError, match="shards of w are missing"):
        checkpoint.load(path)


# --- a save that is stopped at any operation ------------------------------------------------------


@pytest.fixture
def count(tmp_path, monkeypatch) -> int:
    """How many operations a save has. Nothing is synced, which would take most of a test's time."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    save(tmp_path / "counted", 1, world_size=2)
    with pytest.MonkeyPatch.context() as patch:
        calls = operations(patch, checkpoint, -1, None, ALL)
        save(tmp_path / "counted", 2, world_size=2)
    return len(calls)


@pytest.mark.silent_bug(33)
def test_a_save_that_is_stopped_at_any_operation_leaves_the_former_or_the_new_one_whole(
    tmp_path, monkeypatch, count
):
    for at in range(count):
        folder = tmp_path / str(at)
        save(folder, 1, world_size=2)
        with monkeypatch.context() as patch:
            operations(patch, checkpoint, at, raise_broken, ALL)
            with pytest.raises(Broken):
                save(folder, 2, world_size=2)
        assert step_of(folder) in (1, 2)
        checkpoint.sweep(folder)  # as a resumed run does
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]
        save(folder, 3, world_size=2)
        assert step_of(folder) == 3


@pytest.mark.parametrize("last", [0, 1])
def test_another_rank_may_commit_as_soon_as_the_last_one_is_done(tmp_path, monkeypatch, last):
    save = save_of(tmp_path, 1, 2)
    write(save, 1 - last)
    plain = Path.replace

    def replace(self: Path, target: Path) -> Path:
        moved = plain(self, target)
        if target == save.done(last):
            save._commit()
        return moved

    monkeypatch.setattr(Path, "replace", replace)
    write(save, last)
    assert step_of(tmp_path) == 1 and {path.name for path in tmp_path.iterdir()} == {
        "step_000001",
        "latest",
    }


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_disk_that_fails_at_any_operation_is_one_clear_error(
    tmp_path, monkeypatch, count, number
):
    def fail():
        raise OSError(number, os.strerror(number))

    says, raised = "the disk is full" if number == errno.ENOSPC else "could not be written", 0
    for at in range(count):
        folder = tmp_path / str(at)
        save(folder, 1, world_size=2)
        with monkeypatch.context() as patch:
            operations(patch, checkpoint, at, fail, ALL)
            try:
                save(folder, 2, world_size=2)  # a file that cannot be deleted costs nothing
            except GruppoError as error:
                assert says in str(error)
                raised += 1
        assert step_of(folder) in (1, 2)
    assert raised > count // 2


def test_ranks_that_write_to_folders_of_their_own_are_told_to_share_one(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "VISIBLE_S", 0.0)
    both = [save_of(tmp_path / str(rank), 1, 2) for rank in range(2)]
    for rank, one in enumerate(both):
        write(one, rank)
    with pytest.raises(
        GruppoError,
        match=r"the shards of rank 1 are not in its folder.*runs_dir that all machines",
    ):
        both[0].check_committed()


# --- ranks ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.silent_bug(33)
def test_what_two_ranks_save_is_restored_to_the_bit_on_one_and_four(tmp_path):
    """Weights, optimizer, critic and state; with layers of uneven shards, and a head that only one
    rank has."""
    critic = {"objective": "ppo", "critic__kind": "separate", "saving__keep": 9}
    config = serialization.to_dict(tiny.config(tmp_path, name="run", **critic))
    processes.run_ranks(2, sharded.save, config, "fsdp", [2, 4], folder=tmp_path / "two")
    one = sharded.sharded_run(config, "none")
    for step in (2, 4):
        sharded.learn(one, step - one.state.step)
        save_file(sharded.everything(one), tmp_path / f"{step}.safetensors")
    damaged = shutil.copytree(tmp_path / "runs/run", tmp_path / "runs/damaged")
    with (damaged / "checkpoints/step_000004/optimizer-shard-00002-of-00002.safetensors").open(
        "r+b"
    ) as file:
        file.seek(-4, os.SEEK_END)  # a number: one of the ranks compares this file with the seal
        file.write(b"?")
    cases = [("run", "fsdp", 4), ("run", "hybrid", 4), ("run", "none", 4), ("damaged", "fsdp", 2)]
    processes.run_ranks(4, sharded.compare, config, cases, str(tmp_path), folder=tmp_path / "four")
    again = [(f"run-{kind}-4", "none", 4) for kind in ("fsdp", "hybrid", "none")]
    sharded.compare(
        config, [("run", "none", 4), *again, ("damaged-fsdp-4", "none", 2)], str(tmp_path)
    )
