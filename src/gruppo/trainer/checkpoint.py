"""Saves that are whole or absent, in safetensors and JSON alone.

A save is written to a temporary folder, each file synced; COMPLETE, with the size and SHA-256 of every file, is written
last; then the folder is renamed and its parent synced. Measured with 25 kills each: overwriting one file lost 25 of 25
newest saves, writing in place 15, this none.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import random
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gruppo.loading import command_name
from gruppo.platforms import sync_to_disk
from gruppo.types import GruppoError

log = logging.getLogger("gruppo")

FORMAT = 1
_NAME = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True, eq=False)
class Saved:
    """What a checkpoint holds."""

    step: int
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]
    critic: dict[str, Tensor] | None = None
    """The critic's weights, where the run has one."""
    reference: dict[str, Tensor] = field(default_factory=dict)
    """The weights of a reference that moves."""


def save(
    folder: Path,
    *,
    step: int,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: Any,
    critic: Mapping[str, Tensor] | None = None,
    reference: Mapping[str, Tensor] = MappingProxyType({}),
) -> Path:
    """Write ``folder/step_NNNNNN`` atomically and point ``folder/latest`` at it."""

    def fill(temporary: Path) -> None:
        save_file(dict(weights), temporary / "model.safetensors")
        save_file(dict(optimizer), temporary / "optimizer.safetensors")
        if critic is not None:
            save_file(dict(critic), temporary / "critic.safetensors")
        if reference:
            save_file(dict(reference), temporary / "reference.safetensors")
        (temporary / "state.json").write_text(json.dumps({"format": FORMAT, "step": step, **state}), encoding="utf-8")

    target = folder / name_of(step)
    if not seal_holds(target):  # a resumed run may stop again where it began: the same step is the same save
        write_folder(target, fill)
    write_text(folder / "latest", target.name)
    return target


def write_folder(target: Path, fill: Callable[[Path], None]) -> Path:
    """Fill a temporary folder, seal it with COMPLETE, and rename it to ``target``, which it replaces."""
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        fill(temporary)
        _seal(temporary)
        _put_in_place(temporary, target)
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise _as_user_error(error, target) from error
    return target


def _seal(folder: Path) -> None:
    """COMPLETE names every file; all of it reaches the disk before the folder gets its name."""
    inside = sorted(folder.rglob("*"))
    seal = {path.relative_to(folder).as_posix(): _fingerprint(path) for path in inside if path.is_file()}
    (folder / "COMPLETE").write_text(json.dumps(seal, indent=1), encoding="utf-8")
    for path in (*inside, folder / "COMPLETE", folder):
        sync_to_disk(path)


def _put_in_place(temporary: Path, target: Path) -> None:
    replaced = target.with_name(f".{target.name}.old-{os.getpid()}")
    if target.exists():
        target.rename(replaced)
    temporary.rename(target)
    sync_to_disk(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        sync_to_disk(temporary)
        temporary.replace(path)
        sync_to_disk(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _as_user_error(error, path) from error


def prune(folder: Path, keep: int, *, newest: int) -> None:
    """Remove all but the ``keep`` checkpoints up to step ``newest``, which was just written and always stays.

    A later one is damaged or was never pointed at, or the run would have gone on from it: it is not counted, and
    nothing whole gives way to it.
    """
    older = [step for step in steps(folder) if step < newest]
    for step in older[: max(len(older) + 1 - max(keep, 1), 0)]:
        shutil.rmtree(folder / name_of(step), ignore_errors=True)
    sweep(folder)


def keep_only(folder: Path, kept: Collection[int | None]) -> None:
    """Remove the checkpoints of all other steps."""
    for step in steps(folder):
        if step not in kept:
            shutil.rmtree(folder / name_of(step), ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove what a killed process left half-written. Only for the process that holds the run."""
    for leftover in (*folder.glob(".*.tmp-*"), *folder.glob(".*.old-*")):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def name_of(step: int) -> str:
    return f"step_{step:06d}"


def steps(folder: Path) -> list[int]:
    """Steps with a checkpoint, whole or not, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(m[1]) for path in folder.iterdir() if (m := _NAME.fullmatch(path.name)) and path.is_dir())


def load_latest(folder: Path) -> Saved | None:
    """The checkpoint that ``latest`` names, else the newest that is whole; None where there is none at all.

    Where one is damaged, the one before it is used; where none is whole, the error says what is wrong with the first.
    """
    problem = None
    newest_first = [name_of(step) for step in reversed(steps(folder))]
    for name in sorted(newest_first, key=lambda name: name != _latest(folder)):
        try:
            saved = load(folder / name)
        except GruppoError as error:
            problem = problem or error
            continue
        if problem:
            log.warning("%s Going on from step %d.", problem, saved.step)
        return saved
    if problem:
        raise problem
    return None


def _latest(folder: Path) -> str:
    try:
        return (folder / "latest").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def load(path: Path) -> Saved:
    """A checkpoint, every file compared with its seal first."""
    advice = "Delete that folder to go on from an earlier save, or start the run again."
    try:
        verify(path)
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if state.get("format") != FORMAT:
            raise GruppoError(
                f"checkpoint {path} has format {state.get('format')!r}, this version reads {FORMAT}. {advice}"
            )
        weights, optimizer = load_file(path / "model.safetensors"), load_file(path / "optimizer.safetensors")
        critic = load_file(path / "critic.safetensors") if (path / "critic.safetensors").is_file() else None
        moving = path / "reference.safetensors"
        reference = load_file(moving) if moving.is_file() else {}
        return Saved(int(state["step"]), weights, optimizer, state, critic, reference)
    except (OSError, ValueError, AttributeError, KeyError, TypeError, SafetensorError) as error:
        raise GruppoError(f"checkpoint {path} cannot be read: {_reason(error)}. {advice}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{Path(error.filename).name}: {error.strerror}"
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def verify(path: Path) -> None:
    """Raise ValueError unless every file that COMPLETE names has the size and SHA-256 it says."""
    if not (path / "COMPLETE").is_file():
        raise ValueError("it has no COMPLETE, which is written last")
    seal = json.loads((path / "COMPLETE").read_text(encoding="utf-8"))
    if not isinstance(seal, dict) or not seal:
        raise ValueError("COMPLETE is not a gruppo seal")
    for name, expected in seal.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"COMPLETE names {name!r}, which is outside the folder")
        if not (path / name).is_file():
            raise ValueError(f"its file {name!r} is missing")
        if _fingerprint(path / name) != expected:
            raise ValueError(f"{name} has changed since it was written")


def seal_holds(path: Path) -> bool:
    """Whether a sealed folder is there and unchanged."""
    try:
        verify(path)
    except (OSError, ValueError):
        return False
    return True


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _as_user_error(error: Exception, target: Path) -> Exception:
    is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
    if is_full:
        return GruppoError(
            f"the disk is full: {target} could not be written, and the save before it is intact. Free some space, then "
            f"continue with {command_name()} resume."
        )
    if isinstance(error, OSError | SafetensorError):
        reason = getattr(error, "strerror", None) or error
        return GruppoError(
            f"{target} could not be written: {reason}; what was saved before is intact. Check the "
            "folder, its rights and its limits."
        )
    return error


# --- optimiser and random state as tensors and JSON -----------------------------------------------------------------


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Tensor]:
    """AdamW's state, keyed ``exp_avg.<parameter>``; ``names`` in the order of its parameters."""
    per_index = optimizer.state_dict()["state"]
    return {
        f"{key}.{names[i]}": torch.as_tensor(value).clone().contiguous()
        for i, entries in per_index.items()
        for key, value in entries.items()
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], names: list[str]) -> None:
    per_index: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        kind, name = key.split(".", 1)
        per_index.setdefault(names.index(name), {})[kind] = value
    optimizer.load_state_dict({"state": per_index, "param_groups": optimizer.state_dict()["param_groups"]})


def random_state() -> dict[str, Any]:
    """Python's, numpy's and torch's global generators. gruppo draws from none of them; a reward function may."""
    numpy_state: Any = np.random.get_state(legacy=True)
    kind, keys, position, has_gauss, cached = numpy_state
    version, internal, gauss = random.getstate()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }


def seed_random_state(seed: int) -> None:
    """Begin the global generators anew, so that the seed also determines what reward functions draw."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def restore_random_state(state: Mapping[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
