"""Classes as prompts, each with an image of its class as the target, from tensors in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from gruppo.data.cursor import Cursor
from gruppo.data.epochs import Epochs, split_by_hash
from gruppo.types import DataError, Prompt


class LabelledImages:
    """An endless stream over N images: each once an epoch, with its class as the prompt.

    ``id`` is the class, so that all prompts of a class share their history; ``inputs`` its number, ``target`` the image
    [C, H, W] in [0, 1], and ``meta`` holds ``label`` and the image's place in the data, ``index``. What is held out
    goes by the content of the images, so duplicates fall on one side.
    """

    columns = ("target", "label", "index")

    def __init__(
        self,
        images: UInt8[Tensor, "N C H W"],
        labels: Int[Tensor, "N"],
        *,
        seed: int,
        held_out_fraction: float = 0.1,
        name: str = "the images",
    ) -> None:
        if images.dtype != torch.uint8 or images.ndim != 4 or len(images) != len(labels) or not len(images):
            raise DataError(
                f"{name}: {images.dtype} of shape {tuple(images.shape)} with {len(labels)} labels; it needs bytes "
                "(uint8) [N, C, H, W], of one image at least, and a label for each."
            )
        self.name, self.seed = name, seed
        self._images, self._labels = images, labels.long()
        keys = [image.numpy().tobytes().hex() for image in images]
        self._train, held_out = split_by_hash(keys, held_out_fraction, name)
        self._held_out = self._in_turns(held_out)
        self._epochs = Epochs(len(self._train), seed)
        self._fingerprint = hashlib.sha256(images.numpy().tobytes() + self._labels.numpy().tobytes()).hexdigest()
        identity = {"fingerprint": self._fingerprint, "seed": seed, "held_out_images": len(held_out)}
        self._cursor = Cursor(name, identity)

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts of the stream."""
        first = self._cursor.position
        self._cursor.position += n
        return [self._prompt(self._train[self._epochs.at(draw)], draw) for draw in range(first, first + n)]

    def held_out(self, n: int) -> list[Prompt]:
        """At most n evaluation prompts, class by class in turns, the same ones in the same order in every run."""
        return [self._prompt(index, place) for place, index in enumerate(self._held_out[:n])]

    @property
    def classes(self) -> int:
        """How many there are: numbers from 0."""
        return int(self._labels.max()) + 1

    @property
    def training_images(self) -> tuple[Float[Tensor, "n C H W"], Int[Tensor, "n"]]:
        """All images that are learned from, and their labels: for a classifier."""
        return self._of(self._train)

    @property
    def held_out_images(self) -> tuple[Float[Tensor, "n C H W"], Int[Tensor, "n"]]:
        """All images that are held out, and their labels: for an evaluation."""
        return self._of(self._held_out)

    def fingerprint(self) -> str:
        """SHA-256 of all images and labels, in their order."""
        return self._fingerprint

    def state_dict(self) -> dict[str, Any]:
        return self._cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._cursor.load_state_dict(state)

    def _of(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self._images[indices] / 255, self._labels[indices]

    def _in_turns(self, indices: list[int]) -> list[int]:
        """The first of each class, then the second of each, and so on."""
        seen: dict[int, int] = {}
        turns: list[tuple[int, int, int]] = []
        for index in indices:
            label = int(self._labels[index])
            seen[label] = seen.get(label, -1) + 1
            turns.append((seen[label], label, index))
        return [index for _, _, index in sorted(turns)]

    def _prompt(self, index: int, draw: int) -> Prompt:
        label = int(self._labels[index])
        return Prompt(str(label), label, self._images[index] / 255, {"label": label, "index": index}, draw)
