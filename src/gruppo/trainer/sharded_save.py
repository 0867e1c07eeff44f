"""Writes the checkpoints of sharded runs: each rank its own shards, into one folder.

All ranks write to one temporary folder, and the last to be done seals and renames it. So a save
needs no message between ranks, and is made even where a rank fails alone, as its error ends the
others.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gruppo import distributed as dist
from gruppo.integrity import SEAL, explained_failures, fingerprint, read_json, replace_file
from gruppo.platforms import sync_to_disk
from gruppo.trainer import checkpoint
from gruppo.trainer.shards import Shard, own_shards, write
from gruppo.types import GruppoError

VISIBLE_S = 60.0
"""Seconds until what one machine has written must be seen by another. NFS keeps names for up to 60
s."""


@dataclass(frozen=True, eq=False)
class Save:
    """What one rank writes of a checkpoint."""

    target: Path
    files: Mapping[str, Mapping[str, Shard]]
    state: str | None
    """Content of state.json, on the one rank that writes it."""
    rank: int
    world_size: int
    after_commit: Callable[[], None] = lambda: None

    @property
    def shared_folder(self) -> Path:
        """Where all ranks write before the checkpoint has its name."""
        return self.target.with_name(f".{self.target.name}.tmp-ranks")

    def done(self, rank: int) -> Path:
        """The file that names all others of a rank, and is written after them."""
        return self.shared_folder / f"rank-{rank:05d}.json"

    def write(self) -> None:
        """Write this rank's files, and commit the checkpoint if no other rank's are missing."""
        folder, paths = self.shared_folder, list[Path]()
        with explained_failures(self.target):
            folder.mkdir(parents=True, exist_ok=True)
            for name, shards in self.files.items():
                if (
                    shards or self.rank == 0
                ):  # before the first update, the optimizer has no tensors
                    # from 1 to the number of ranks, as Hugging Face numbers the parts of a model
                    paths.append(
                        folder
                        / f"{name}-shard-{self.rank + 1:05d}-of-{self.world_size:05d}.safetensors"
                    )
                    write(paths[-1], shards)
            if self.state is not None:
                paths.append(folder / "state.json")
                paths[-1].write_text(self.state, encoding="utf-8")
            for path in paths:
                sync_to_disk(path)
            paths.append(folder / f".rank-{self.rank:05d}.json")
            paths[-1].write_text(
                json.dumps({path.name: fingerprint(path) for path in paths[:-1]}), encoding="utf-8"
            )
            sync_to_disk(paths[-1])
            paths[-1].replace(
                self.done(self.rank)
            )  # from now on another rank may rename the folder
            self.commit()

    def commit(self) -> None:
        """Seal the checkpoint and give it its name, if the files of all ranks are there."""
        done = [self.done(rank) for rank in range(self.world_size)]
        if not all(path.is_file() for path in done):
            return
        sealed = self.target.with_name(f".{self.target.name}.tmp-{os.getpid()}")
        try:
            self.shared_folder.rename(sealed)
        except FileNotFoundError:  # another rank was the last too, and this is its to commit
            return
        seal: dict[str, Any] = {}
        for path in (sealed / path.name for path in done):
            seal |= read_json(path)
            path.unlink()
        (sealed / SEAL).write_text(json.dumps(seal, indent=1), encoding="utf-8")
        checkpoint.put_in_place(
            sealed, self.target, [sealed / SEAL, sealed]
        )  # each rank has synced its own
        replace_file(self.target.parent / "latest", self.target.name)
        self.after_commit()

    def check_committed(self) -> None:
        """Wait until the checkpoint is complete, after all ranks have written theirs."""
        until = time.monotonic() + VISIBLE_S
        while self.shared_folder.exists() or not (self.target / SEAL).is_file():
            with explained_failures(self.target):
                self.commit()
            if time.monotonic() > until:
                missing = [
                    str(rank) for rank in range(self.world_size) if not self.done(rank).is_file()
                ]
                raise GruppoError(
                    f"""{self.target} is incomplete: the shards of rank {", ".join(missing)} are not
                        in its folder, and all ranks write to one""",
                    advice="Give a $runs_dir that all machines share",
                )
            time.sleep(0.05)


def save(
    target: Path,
    step: int,
    files: Mapping[str, Any],
    state: Mapping[str, Any],
    after_commit: Callable[[], None],
) -> Save:
    """Write this rank's part of a checkpoint; ``files``: the tensors of each.

    ``after_commit`` is called on the rank that commits the checkpoint.
    """
    text = json.dumps({"format": checkpoint.FORMAT, "step": step, **state})
    # an optimizer without tensors has a file too: a checkpoint without one is damaged
    own = {
        name: own_shards(tensors or {})
        for name, tensors in files.items()
        if tensors or name == "optimizer"
    }
    written = Save(
        target, own, text if dist.is_main() else None, dist.rank(), dist.world_size(), after_commit
    )
    written.write()
    return replace(written, files={})  # copies from a GPU are released
