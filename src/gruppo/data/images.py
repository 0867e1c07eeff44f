"""A folder of images as prompts with targets."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gruppo.data.captions import entries_of
from gruppo.data.cursor import Cursor
from gruppo.data.epochs import Epochs, split_by_hash
from gruppo.data.pixels import Fit, read_image
from gruppo.types import DataError, GruppoError, Prompt

log = logging.getLogger("gruppo")

ATTEMPTS = 100
"""So many files in a row that are no images end the run."""


class ImageFolder:
    """An endless stream over the png, jpg and webp files of a folder and its subfolders, ``target`` being the image.

    Captions, if there are any, are the prompts: from ``captions.jsonl``, ``metadata.jsonl`` or ``metadata.csv`` in the
    folder (a column ``file_name``, another ``caption`` or ``text``; further columns go to ``meta``), or from a .txt
    file beside each image; an image without one is left out, and counted. Without captions the subfolders are classes,
    and the prompt is the class's number, ``label``; without subfolders it is an empty text.

    A file that is no whole image is left out with one line that names it; ``unreadable`` holds those met so far. Held
    out are captions, or, where there are none, files. Images are read when they are drawn; see ``read_image``.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        seed: int,
        size: int | tuple[int, int] | None = None,
        channels: int = 3,
        fit: Fit = "crop",
        held_out_fraction: float = 0.1,
    ) -> None:
        if channels not in (1, 3):
            raise GruppoError(f"channels={channels} is neither 1 (grey) nor 3 (colour). Set one of them.")
        self.folder, self.name, self.seed = Path(folder).expanduser(), str(folder), seed
        self.size = (size, size) if isinstance(size, int) else size
        self.channels, self.fit = channels, fit
        self._entries = entries_of(self.folder)
        self.columns = ("target", *dict.fromkeys(name for entry in self._entries for name in entry.meta))
        keys = [
            entry.inputs if entry.inputs and isinstance(entry.inputs, str) else entry.file for entry in self._entries
        ]
        self._train, self._held_out = split_by_hash(keys, held_out_fraction, self.name)
        self._epochs = Epochs(len(self._train), seed)
        self.unreadable: dict[str, str] = {}
        identity = {"fingerprint": self.fingerprint(), "seed": seed, "held_out_images": len(self._held_out)}
        self._cursor = Cursor(self.name, identity)

    @property
    def classes(self) -> list[str]:
        """The subfolders in the order of their numbers, where they are the classes; none where captions or nothing are
        asked for."""
        named = {entry.inputs: entry.id for entry in self._entries if isinstance(entry.inputs, int)}
        return [named[number] for number in sorted(named)]

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts whose images can be read. Draws rise, with a gap for each that cannot."""
        prompts: list[Prompt] = []
        draw, failed = self._cursor.position, 0
        while len(prompts) < n:
            prompt = self._prompt(self._train[self._epochs.at(draw)], draw)
            draw, failed = draw + 1, failed + 1 if prompt is None else 0
            if prompt is not None:
                prompts.append(prompt)
            elif failed >= min(ATTEMPTS, 2 * len(self._train)):
                last = next(reversed(self.unreadable.values()))
                raise DataError(f"{failed} images of {self.name} in a row cannot be read. {last} Mend or remove them.")
        self._cursor.position = draw
        return prompts

    def held_out(self, n: int) -> list[Prompt]:
        """At most n evaluation prompts, the same ones in the same order in every run."""
        found: list[Prompt] = []
        for index in self._held_out:
            if len(found) == n:
                break
            prompt = self._prompt(index, len(found))
            found += [prompt] if prompt is not None else []
        return found

    def fingerprint(self) -> str:
        """SHA-256 of the names and sizes of all files, what is asked for with each, and how they are read."""
        files = [[e.file, (self.folder / e.file).stat().st_size, e.inputs, dict(e.meta)] for e in self._entries]
        what = [files, self.size, self.channels, self.fit]
        return hashlib.sha256(json.dumps(what, default=str).encode()).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        return self._cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._cursor.load_state_dict(state)

    def _prompt(self, index: int, draw: int) -> Prompt | None:
        entry = self._entries[index]
        image = self._image(entry.file)
        return None if image is None else Prompt(entry.id, entry.inputs, image, dict(entry.meta), draw)

    def _image(self, file: str) -> Tensor | None:
        try:
            return read_image(self.folder / file, channels=self.channels, size=self.size, fit=self.fit)
        except DataError as problem:
            if file not in self.unreadable:
                self.unreadable[file] = str(problem)
                log.warning("left out: %s %d of %d so far.", problem, len(self.unreadable), len(self._entries))
            return None
