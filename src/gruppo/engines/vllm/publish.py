"""Weights as a folder that servers load: written shard by shard, with their version."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from gruppo import distributed as dist
from gruppo.platforms import sync_to_disk
from gruppo.types import GruppoError

PREFIX = "gruppo-"
"""Of the folders of versions: nothing else is deleted."""
SHARD_BYTES = 1 << 29
"""Of one file: no more than this, or one tensor, is in memory besides the model."""


@dataclass(frozen=True)
class Publication:
    """A run's folder of published versions, of which the newest two are kept. Its methods are
    collectives."""

    folder: Path

    def write(
        self, label: str, weights: Iterable[tuple[str, Tensor]], config: dict[str, Any]
    ) -> Path:
        """Write ``weights`` as the version ``label``, and return its folder. ``config``: the
        model's config.json."""
        named = iter(weights)

        def save(folder: Path) -> None:
            (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
            write_shards(folder, named)

        return self.write_folder(label, save, rest=named)

    def write_folder(
        self, label: str, save: Callable[[Path], None], rest: Iterable[Any] = ()
    ) -> Path:
        """Save into a new folder and rename it when it is complete; then delete the versions before
        the last.

        ``rest``: what all ranks gather, also if the first rank fails, such as on a full disk.
        """
        final = self.folder / label
        with dist.fail_together():
            try:
                if dist.is_main():
                    partial = self.folder / f".{label}"
                    shutil.rmtree(partial, ignore_errors=True)
                    partial.mkdir(parents=True)
                    save(partial)
                    partial.rename(final)
                    sync_to_disk(self.folder)
                    self._delete(keep=2)
            except (OSError, SafetensorError) as error:  # the second if the disk is full
                reason = getattr(error, "strerror", None) or error
                raise GruppoError(
                    f"the weights cannot be written to {self.folder} ({reason})",
                    option="engine.publish_dir",
                    advice="to a folder with space that this machine can write and the servers can "
                    "read",
                ) from error
            finally:
                for _ in rest:
                    pass
        return final

    def clear(self) -> None:
        """Delete what was published, and the folder if nothing else is in it."""
        if dist.is_main():
            self._delete(keep=0)
            for partial in self.folder.glob(f".{PREFIX}*"):
                shutil.rmtree(partial, ignore_errors=True)
            with suppress(OSError):
                self.folder.rmdir()

    def _delete(self, keep: int) -> None:
        versions = sorted(self.folder.glob(f"{PREFIX}*"), key=lambda path: path.stat().st_mtime)
        for old in versions[: len(versions) - keep]:
            shutil.rmtree(old, ignore_errors=True)


def write_shards(folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Write tensors as they come to safetensors files of at most ``SHARD_BYTES``, with the index of
    Hugging Face."""
    shard: dict[str, Tensor] = {}
    files: dict[str, str] = {}

    def flush() -> None:
        name = f"model-{len(set(files.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        files.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in weights:
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > SHARD_BYTES:
            flush()
        # a file holds no tensor twice: tied ones are copied
        shard[name] = tensor.detach().cpu().contiguous().clone()
    flush()
    index = json.dumps({"metadata": {}, "weight_map": files}, indent=2)
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
