"""Degraded images as prompts and clean ones as targets, in crops."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gruppo.core.images import random_crop, random_flip, to_bytes
from gruppo.data.captions import KINDS
from gruppo.data.cursor import Cursor
from gruppo.data.degrade import Degradation
from gruppo.data.epochs import Epochs, split_by_hash
from gruppo.data.errors import check_fraction
from gruppo.data.scenes import Scene, Shelf, in_unit_range, size_of
from gruppo.seeds import generator_at
from gruppo.types import DataError, GruppoError, Prompt

log = logging.getLogger("gruppo")

CROP = 64


class ImagePairs:
    """An endless stream of square crops: ``inputs`` is degraded, ``target`` clean, both [C, crop, crop] in [0, 1].

    An image comes once an epoch. Crop, flip or quarter turn, strengths and noise of a prompt hang on (seed, draw); both
    images of a pair get the same. ``id`` is the image's name; ``meta`` holds it as ``image``, and the strength of each
    step of the degradation by its name. Whole images are held out. Their crops do not overlap, hang on no seed and
    come in turns, the same ones in every run.

    ``crop`` 0: whole images, all of one size. ``held_out``: names, in place of the share by the hash of the names.
    """

    def __init__(
        self,
        scenes: Mapping[str, Scene],
        *,
        seed: int,
        degradation: Degradation | None = None,
        crop: int = CROP,
        channels: int = 3,
        flips: bool = True,
        held_out_fraction: float = 0.1,
        held_out: Collection[str] = (),
        name: str = "the images",
    ) -> None:
        if channels not in (1, 3):
            raise GruppoError(f"channels={channels} is neither 1 (grey) nor 3 (colour). Set one of them.")
        if crop < 0:
            raise GruppoError(f"crop={crop} is no square of pixels; set {CROP}, or 0 for whole images.")
        self.name, self.seed, self.crop, self.channels, self.flips = name, seed, crop, channels, flips
        self.degradation = degradation
        further = dict.fromkeys(name for scene in scenes.values() for name in scene.meta)
        self.columns = ("target", "image", *(degradation.names if degradation else ()), *further)
        self.unreadable: dict[str, str] = {}
        """Why each file that is no whole image was left out."""
        self._shelf = Shelf(channels)
        self._sizes = self._checked(scenes)
        self._scenes = {name: scenes[name] for name in self._sizes}
        self._train, self._held_out = self._split(list(self._scenes), held_out_fraction, held_out)
        self._epochs = Epochs(len(self._train), seed)
        identity = {"fingerprint": self.fingerprint(), "seed": seed, "held_out_images": len(self._held_out)}
        self._cursor = Cursor(name, identity)

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts. Draws rise, with a gap for each image that turns out to be cut short."""
        prompts: list[Prompt] = []
        draw, failed = self._cursor.position, 0
        while len(prompts) < n:
            prompt = self._drawn(self._train[self._epochs.at(draw)], draw)
            draw, failed = draw + 1, failed + 1 if prompt is None else 0
            if prompt is not None:
                prompts.append(prompt)
            elif failed >= 2 * len(self._train):
                last = next(reversed(self.unreadable.values()))
                raise DataError(f"no image of {self.name} can be read. {last} Mend or remove them.")
        self._cursor.position = draw
        return prompts

    def held_out(self, n: int) -> list[Prompt]:
        """At most n evaluation prompts: crops of the held-out images side by side, in an order of their own."""
        found: list[Prompt] = []
        for name, top, left in self._held_out_crops():
            if len(found) == n:
                break
            prompt = self._held_out_crop(name, top, left, len(found))
            found += [prompt] if prompt is not None else []
        return found

    def fingerprint(self) -> str:
        """SHA-256 of the names and sizes of all images, and of how prompts are made of them."""
        what = [sorted(self._sizes.items()), self._of_files(), self._held_out, str(self.degradation), self.crop]
        return hashlib.sha256(json.dumps([*what, self.channels, self.flips]).encode()).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        return self._cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._cursor.load_state_dict(state)

    # --- prompts ---

    def _drawn(self, name: str, draw: int) -> Prompt | None:
        images = self._images(name)
        if images is None:
            return None
        generator = generator_at(self.seed, "crop", draw)
        images = random_crop(images, self.crop, generator) if self.crop else images
        images = random_flip(images, generator) if self.flips else images
        return self._prompt(name, images, generator, draw)

    def _held_out_crop(self, name: str, top: int, left: int, place: int) -> Prompt | None:
        images = self._images(name)
        if images is None:
            return None
        height, width = self._crop_of(name)
        cut = [image[..., top : top + height, left : left + width] for image in images]
        return self._prompt(name, cut, generator_at("held out", name, top, left), place)

    def _prompt(self, name: str, images: Sequence[Tensor], generator: torch.Generator, draw: int) -> Prompt:
        """Of a clean crop, and its degraded one where there is a pair."""
        clean, degraded = in_unit_range(images[0]), in_unit_range(images[-1])
        strengths: dict[str, float] = {}
        if self.degradation is not None:
            degraded, strengths = self.degradation(degraded, generator)
        return Prompt(name, degraded, clean, {"image": name} | strengths | dict(self._scenes[name].meta), draw)

    def _crop_of(self, name: str) -> tuple[int, int]:
        return (self.crop, self.crop) if self.crop else self._sizes[name]

    def _held_out_crops(self) -> list[tuple[str, int, int]]:
        """The first of each image, then the second of each, and so on."""
        turns: list[tuple[int, str, int, int]] = []
        for name in self._held_out:
            (height, width), (h, w) = self._sizes[name], self._crop_of(name)
            tops, lefts = range(0, height - h + 1, h), range(0, width - w + 1, w)
            places = [(top, left) for top in tops for left in lefts]
            order = torch.randperm(len(places), generator=generator_at("held out", name)).tolist()
            turns += [(turn, name, *places[index]) for turn, index in enumerate(order)]
        return [(name, top, left) for _, name, top, left in sorted(turns)]

    def _images(self, name: str) -> list[Tensor] | None:
        """Clean, then degraded where there is one; None of a file that is cut short."""
        scene = self._scenes[name]
        try:
            images = [self._shelf.get(of) for of in (scene.clean, scene.degraded) if of is not None]
        except DataError as problem:
            self._leave_out(name, str(problem))
            return None
        if any(tuple(image.shape[1:]) != self._sizes[name] for image in images):
            self._leave_out(name, f"the image {name} has another size than its file says.")
            return None
        return images

    # --- what there is ---

    def _checked(self, scenes: Mapping[str, Scene]) -> dict[str, tuple[int, int]]:
        """Height and width of each image that can be used. Pairs that do not match are refused, and small images."""
        sizes: dict[str, tuple[int, int]] = {}
        for name, scene in scenes.items():
            try:
                size = size_of(scene.clean, self.channels, name)
                other = size if scene.degraded is None else size_of(scene.degraded, self.channels, name)
            except DataError as problem:
                if isinstance(scene.clean, Tensor):
                    raise
                self._leave_out(name, str(problem))
                continue
            if other != size:
                raise DataError(
                    f"the pair {name} of {self.name} does not match: degraded {other[0]} x {other[1]}, clean {size[0]} "
                    f"x {size[1]} pixels. Resize the degraded image to the size of the clean one."
                )
            sizes[name] = size
        if not sizes:
            raise DataError(f"{self.name} holds no image that can be read; it needs {', '.join(KINDS)} files.")
        self._check_whole(sizes)
        small = [name for name, size in sizes.items() if min(size) < self.crop]
        if small:
            height, width = sizes[small[0]]
            raise DataError(
                f"{len(small)} of {len(sizes)} images of {self.name} are smaller than the crop of {self.crop} pixels, "
                f"first {small[0]} with {height} x {width}. Set crop={min(map(min, sizes.values()))}, or remove them."
            )
        return sizes

    def _check_whole(self, sizes: Mapping[str, tuple[int, int]]) -> None:
        """Without a crop, images need one size, and a square one to be turned."""
        if self.crop:
            return
        first, size = next(iter(sizes.items()))
        if other := next((name for name, own in sizes.items() if own != size), None):
            raise DataError(
                f"{self.name} has images of several sizes, {first} with {size[0]} x {size[1]} and {other} with "
                f"{sizes[other][0]} x {sizes[other][1]}; whole images are restored together. Set crop={CROP}."
            )
        if self.flips and size[0] != size[1]:
            raise DataError(f"{self.name} has images of {size[0]} x {size[1]}, which no turn fits. Set flips=false.")

    def _split(self, names: list[str], fraction: float, held_out: Collection[str]) -> tuple[list[str], list[str]]:
        check_fraction(fraction)
        if held_out and fraction:
            chosen = [name for name in names if name in held_out]
            rest = [name for name in names if name not in held_out]
            if chosen and rest:
                return rest, chosen
        train, kept = split_by_hash(names, fraction, self.name)
        return [names[index] for index in train], [names[index] for index in kept]

    def _of_files(self) -> list[Any]:
        """Sizes of files, so that another image under an old name is seen; of tensors, their content."""
        return [
            of.stat().st_size if isinstance(of, Path) else hashlib.sha256(to_bytes(of).numpy().tobytes()).hexdigest()
            for scene in self._scenes.values()
            for of in (scene.clean, scene.degraded)
            if of is not None
        ]

    def _leave_out(self, name: str, why: str) -> None:
        if name not in self.unreadable:
            self.unreadable[name] = why
            log.warning("left out: %s %d so far.", why, len(self.unreadable))
