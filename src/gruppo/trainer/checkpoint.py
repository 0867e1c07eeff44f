"""Checkpoints that are complete or absent, in safetensors and JSON.

A checkpoint is written to a temporary folder; COMPLETE, with the size and SHA-256 of every file, is
written last; all files are synced, then the folder is renamed and its parent synced. Measured with
25 kills each: overwriting one file lost 25 of 25 newest saves, writing in place 15, this none.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from gruppo import distributed as dist
from gruppo.integrity import (
    SEAL,
    explained_failures,
    fingerprint,
    read_file,
    read_json,
    replace_file,
    verify,
)
from gruppo.platforms import sync_to_disk
from gruppo.trainer import shards
from gruppo.types import GruppoError

log = logging.getLogger("gruppo")

FORMAT = 2
"""Raised where older versions' checkpoints can no longer be read; 1 had other files of shards."""
FILES = ("model", "optimizer", "critic", "reference")
Sharded = Mapping[str, Mapping[str, Tensor]]
_NAME = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True, eq=False)
class Saved:
    """What a checkpoint holds."""

    step: int
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]
    critic: dict[str, Tensor] | None = None
    """Weights of the critic, if the run has one."""
    reference: dict[str, Tensor] = field(default_factory=dict)
    """Weights of a reference that follows the policy."""


def save(
    folder: Path,
    *,
    step: int,
    state: Mapping[str, Any],
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    critic: Mapping[str, Tensor] | None = None,
    reference: Mapping[str, Tensor] = MappingProxyType({}),
) -> Path:
    """Write ``folder/step_NNNNNN`` atomically and point ``folder/latest`` at it."""
    target = folder / name_of(step)
    if not seal_holds(
        target
    ):  # a resumed run that is stopped again before its first step writes the same save
        files = {
            "model": model,
            "optimizer": optimizer,
            "critic": critic,
            "reference": reference or None,
        }
        with replacing(target) as temporary:
            for name, tensors in files.items():
                if tensors is not None:
                    save_file(dict(tensors), temporary / f"{name}.safetensors")
            text = json.dumps({"format": FORMAT, "step": step, **state})
            (temporary / "state.json").write_text(text, encoding="utf-8")
    replace_file(folder / "latest", target.name)
    return target


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is sealed and takes the place of ``target`` if the block
    succeeds.

    A full disk and other failures to write are raised as GruppoError.
    """
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    with explained_failures(target):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            remove(temporary)
            temporary.mkdir()
            yield temporary
            inside = sorted(temporary.rglob("*"))
            seal = {
                path.relative_to(temporary).as_posix(): fingerprint(path)
                for path in inside
                if path.is_file()
            }
            (temporary / SEAL).write_text(json.dumps(seal, indent=1), encoding="utf-8")
            put_in_place(temporary, target, [*inside, temporary / SEAL, temporary])
        except Exception:
            remove(temporary)
            raise


def put_in_place(temporary: Path, target: Path, written: Iterable[Path]) -> None:
    """Rename a folder to ``target``, after all that was ``written`` has reached the disk."""
    replaced = target.with_name(f".{target.name}.old-{os.getpid()}")
    for path in written:
        sync_to_disk(path)
    if target.is_dir():  # a folder cannot be renamed onto another one that holds files
        target.rename(replaced)
    temporary.replace(target)
    sync_to_disk(target.parent)
    remove(replaced)


def remove(path: Path) -> None:
    """Delete a file, a folder or a link, if it exists and can be deleted."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def prune(folder: Path, keep: int, *, newest: int) -> None:
    """Remove all but the ``keep`` checkpoints up to step ``newest``, which was just written and
    always stays.

    A later one is damaged or was never pointed at, since the run would have continued from it: it
    is not counted and not removed.
    """
    older = [step for step in steps(folder) if step < newest]
    # the newest counts as one of those that are kept
    for step in older[: max(len(older) + 1 - max(keep, 1), 0)]:
        remove(folder / name_of(step))
    sweep(folder)


def sweep(folder: Path) -> None:
    """Remove the partial writes of a killed process. Only for the process that holds the run's
    lock."""
    for leftover in leftovers(folder):
        remove(leftover)


def leftovers(folder: Path) -> list[Path]:
    """Partial writes of a killed process."""
    return [*folder.glob(".*.tmp-*"), *folder.glob(".*.old-*")]


def name_of(step: int) -> str:
    return f"step_{step:06d}"


def steps(folder: Path) -> list[int]:
    """Steps with a checkpoint, whole or not, ascending."""
    if not folder.is_dir():
        return []
    return sorted(
        int(m[1])
        for path in folder.iterdir()
        if (m := _NAME.fullmatch(path.name)) and path.is_dir()
    )


def load_latest(folder: Path, sharded: Sharded = MappingProxyType({})) -> Saved | None:
    """Load the checkpoint that ``latest`` names, else the newest that is whole; None if there are
    none at all.

    A damaged one gives way to the one before. If none is whole, the error is that of the first. All
    ranks load the same one, which each of them can read.
    """
    problem, latest = None, ""
    with suppress(OSError, ValueError):
        latest = read_file(folder / "latest").decode().strip()
    # the one that was completed last, then from the newest on: a later one was written but never
    # pointed at
    names = sorted(map(name_of, reversed(steps(folder))), key=lambda name: name != latest)
    for name in json.loads(dist.all_gather(json.dumps(names).encode())[0]):
        saved, error = (
            None,
            GruppoError(f"checkpoint {folder / name} cannot be read by another rank."),
        )
        try:
            saved = load(folder / name, sharded)
        except GruppoError as own:
            error = own
        if dist.all_max(int(saved is None)):
            problem = problem or error
            continue
        assert saved is not None
        if problem:
            log.warning("%s Continuing from step %d.", problem, saved.step)
        return saved
    if problem:
        raise problem
    return None


def load(path: Path, sharded: Sharded = MappingProxyType({})) -> Saved:
    """Load a checkpoint, after comparing every file with its seal.

    ``sharded``: DTensors of this run by file and name. Of these, only this rank's slices are read,
    and as they must be read by all ranks, each compares its share of the files.
    """
    advice = "Delete that folder to continue from an earlier save, or start the run again."
    try:
        verify(path, share=slice(dist.rank(), None, dist.world_size()) if sharded else slice(None))
        state = read_json(path / "state.json")
        if state.get("format") != FORMAT:
            raise GruppoError(f"""checkpoint {path} has format {state.get("format")!r}, this version
                reads {FORMAT}. {advice}""")
        files = {name: shards.read(path, name, sharded.get(name, {})) for name in FILES}
        if (lost := next((name for name in FILES[:2] if files[name] is None), None)) is not None:
            raise ValueError(f"it has no {lost}.safetensors and no shards of it")
        model, optimizer, critic, reference = (files[name] for name in FILES)
        return Saved(
            int(state["step"]), model or {}, optimizer or {}, state, critic, reference or {}
        )
    except (OSError, ValueError, AttributeError, KeyError, TypeError, SafetensorError) as error:
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.filename:
            reason = f"{Path(error.filename).name}: {error.strerror}"
        raise GruppoError(f"checkpoint {path} cannot be read: {reason}. {advice}") from error


def seal_holds(path: Path) -> bool:
    """Whether a sealed folder is there and unchanged."""
    with suppress(OSError, ValueError):
        verify(path)
        return True
    return False


# --- optimizer and random state as tensors and JSON -----------------------------------------------


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Tensor]:
    """AdamW's state, not copied, keyed ``exp_avg.<parameter>``; ``names`` in the order of its
    parameters."""
    tensors: dict[str, Tensor] = {}
    for i, entries in optimizer.state_dict()["state"].items():
        tensors |= {
            f"{key}.{names[i]}": torch.as_tensor(value).contiguous()
            for key, value in entries.items()
        }
    return tensors


def restore_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], names: list[str]
) -> None:
    per_index: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        kind, name = key.split(".", 1)
        per_index.setdefault(names.index(name), {})[kind] = value
    optimizer.load_state_dict(
        {"state": per_index, "param_groups": optimizer.state_dict()["param_groups"]}
    )


def random_state() -> dict[str, Any]:
    """State of the global generators of Python, numpy and torch, which only functions of users draw
    from."""
    # lists and hex digits in place of pickles: a checkpoint may come from someone else
    numpy_state: Any = np.random.get_state(legacy=True)
    kind, keys, position, has_gauss, cached = numpy_state
    version, internal, gauss = random.getstate()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }


def seed_random_state(seed: int) -> None:
    """Seed the global generators, so that the seed also determines the random numbers of reward
    functions."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def restore_random_state(state: Mapping[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
