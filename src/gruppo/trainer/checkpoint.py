"""Checkpoints that are complete or absent, in safetensors and JSON.

All ranks that hold a part write it to one temporary folder. The last to be done adds COMPLETE, with
the size and SHA-256 of every file, renames the folder and syncs its parent. So a save needs no
message between ranks, and is made even where a rank fails alone, as its error ends the others.
Measured with 25 kills each: overwriting one file lost 25 of 25 newest saves, writing in place 15,
this none.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from gruppo.trainer.shards import Shard, read
from gruppo.types import GruppoError

log = logging.getLogger("gruppo")

FORMAT = 2
"""Raised where older versions' checkpoints can no longer be read; 1 had other files of shards."""
REQUIRED = ("model", "optimizer")
"""Files of every checkpoint; of some also the critic's and the reference's."""
VISIBLE_S = 60.0
"""Seconds until what one machine has written must be seen by another. NFS keeps names for up to 60
s."""
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


@dataclass(frozen=True, eq=False)
class Save:
    """A checkpoint ``.../step_NNNNNN`` that ``ranks`` processes write, each its part."""

    target: Path
    ranks: int = 1
    after_commit: Callable[[], None] = lambda: None
    """Called on the rank that commits the checkpoint."""

    @property
    def shared_folder(self) -> Path:
        """Where all ranks write before the checkpoint has its name."""
        return self.target.with_name(f".{self.target.name}.tmp-ranks")

    def done(self, rank: int) -> Path:
        """The file that names all others of a rank, and is written after them."""
        return self.shared_folder / f"rank-{rank:05d}.json"

    def write(
        self, files: Mapping[str, Mapping[str, Shard]], state: Mapping[str, Any], rank: int = 0
    ) -> None:
        """Write the part of a rank, and commit the checkpoint if no other rank's is missing.

        ``files``: of each, the rank's slices of tensors. ``state``: what the first rank writes as
        JSON.
        """
        with explained_failures(self.target):
            try:
                self._write(files, state, rank)
                self._commit()
            except Exception:
                if self.ranks == 1:
                    sweep(self.target.parent)
                raise

    def _write(
        self, files: Mapping[str, Mapping[str, Shard]], state: Mapping[str, Any], rank: int
    ) -> None:
        folder = self.shared_folder
        paths = []
        folder.mkdir(parents=True, exist_ok=True)
        # from 1 to the number of ranks, as Hugging Face numbers the parts of a model
        part = f"-shard-{rank + 1:05d}-of-{self.ranks:05d}" if self.ranks > 1 else ""
        for name, shards in files.items():
            if shards or rank == 0:  # before the first update, the optimizer has no tensors
                paths.append(folder / f"{name}{part}.safetensors")
                tensors = {key: shard.data for key, shard in shards.items()}
                offsets = {key: {"saved_offsets": shard.offset} for key, shard in shards.items()}
                # the format of torch.distributed.checkpoint's Hugging Face storage, whose own
                # writer would need messages between ranks
                metadata = {"DCP_SHARDING_INFO": json.dumps(offsets)} if part else None
                save_file(tensors, paths[-1], metadata=metadata)
        if rank == 0:
            paths.append(folder / "state.json")
            text = json.dumps({"format": FORMAT, "step": _step_of(self.target), **state})
            paths[-1].write_text(text, encoding="utf-8")
        for path in paths:
            sync_to_disk(path)
        partial = self.done(rank).with_name(f".rank-{rank:05d}.json")
        seal = {path.name: fingerprint(path) for path in paths}
        partial.write_text(json.dumps(seal), encoding="utf-8")
        sync_to_disk(partial)
        partial.replace(self.done(rank))  # from now on another rank may rename the folder

    def _commit(self) -> None:
        """Seal the checkpoint and give it its name, if the files of all ranks are there."""
        done = [self.done(rank) for rank in range(self.ranks)]
        if not all(path.is_file() for path in done):
            return
        sealed = self.target.with_name(f".{self.target.name}.tmp-{os.getpid()}")
        try:
            self.shared_folder.rename(sealed)
        except FileNotFoundError:  # another rank was the last too, and this is its to commit
            return
        seal: dict[str, Any] = {}
        for path in done:
            seal |= read_json(sealed / path.name)
            (sealed / path.name).unlink()
        _put_in_place(sealed, self.target, seal, written=())
        replace_file(self.target.parent / "latest", self.target.name)
        self.after_commit()

    def check_committed(self) -> None:
        """Wait until the checkpoint is complete, after all ranks have written theirs."""
        until = time.monotonic() + VISIBLE_S
        while self.shared_folder.exists() or not (self.target / SEAL).is_file():
            with explained_failures(self.target):
                self._commit()
            if time.monotonic() > until:
                ranks = range(self.ranks)
                missing = [str(rank) for rank in ranks if not self.done(rank).is_file()]
                raise GruppoError(
                    f"""{self.target} is incomplete: the shards of rank {", ".join(missing)} are not
                        in its folder, and all ranks write to one""",
                    advice="Give a $runs_dir that all machines share",
                )
            time.sleep(0.05)


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
            files = [path for path in inside if path.is_file()]
            seal = {path.relative_to(temporary).as_posix(): fingerprint(path) for path in files}
            _put_in_place(temporary, target, seal, written=inside)
        except Exception:
            remove(temporary)
            raise


def _put_in_place(
    temporary: Path, target: Path, seal: Mapping[str, Any], written: Iterable[Path]
) -> None:
    """Seal a folder and rename it to ``target``, after all that was ``written`` has reached the
    disk."""
    (temporary / SEAL).write_text(json.dumps(seal, indent=1), encoding="utf-8")
    for path in (*written, temporary / SEAL, temporary):
        sync_to_disk(path)
    replaced = target.with_name(f".{target.name}.old-{os.getpid()}")
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


def _step_of(path: Path) -> int:
    """The step in a checkpoint's name; -1 for anything else."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def steps(folder: Path) -> list[int]:
    """Steps with a checkpoint, whole or not, ascending."""
    found = (_step_of(path) for path in folder.glob("step_*") if path.is_dir())
    return sorted(step for step in found if step >= 0)


def load_latest(folder: Path, sharded: Sharded = MappingProxyType({})) -> Saved | None:
    """Load the checkpoint that ``latest`` names, else the newest that is whole; None if there are
    none at all.

    A damaged one is replaced by the one before. If none is whole, the error is that of the first.
    All ranks load the same one, which each of them can read.
    """
    latest = ""
    with suppress(OSError, ValueError):
        latest = read_file(folder / "latest").decode().strip()
    # the one that was completed last, then from the newest on: a later one was written but never
    # pointed at
    names = sorted(map(name_of, reversed(steps(folder))), key=lambda name: name != latest)
    problem: GruppoError | None = None
    for name in dist.gather_json(names)[0]:
        error = GruppoError(f"checkpoint {folder / name} cannot be read by another rank.")
        saved: Saved | None = None
        try:
            saved = load(folder / name, sharded)
        except GruppoError as own:
            error = own
        if dist.all_max(int(saved is None)):
            problem = problem or error
            continue
        if problem and saved is not None:
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
        files: dict[str, Any] = {
            name: read(path, name, sharded.get(name, {}))
            for name in (*REQUIRED, "critic", "reference")
        }
        for name in REQUIRED:
            if files[name] is None:
                raise ValueError(f"it has no {name}.safetensors and no shards of it")
        return Saved(
            int(state["step"]),
            files["model"],
            files["optimizer"],
            state,
            files["critic"],
            files["reference"] or {},
        )
    except (OSError, ValueError, AttributeError, KeyError, TypeError, SafetensorError) as error:
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
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
    return {
        f"{key}.{names[index]}": torch.as_tensor(value).contiguous()
        for index, entries in optimizer.state_dict()["state"].items()
        for key, value in entries.items()
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], names: list[str]
) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        kind, name = key.split(".", 1)
        state.setdefault(names.index(name), {})[kind] = value
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


def random_state() -> dict[str, Any]:
    """State of the global generators of Python, numpy and torch, which only functions of users draw
    from."""
    # lists and hex digits in place of pickles: a checkpoint may come from someone else
    numpy_state: Any = np.random.get_state(legacy=True)
    kind, keys, *rest = numpy_state
    return {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), *rest],
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
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
