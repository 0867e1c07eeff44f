"""Degraded images as prompts and clean ones as targets, in crops."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gruppo.core.images import random_crop, random_symmetry, to_uint8
from gruppo.data.degrade import Degradation
from gruppo.data.image_files import SUFFIXES, ImageCache, image_size
from gruppo.data.source import IndexedSource, check_fraction, leave_out, split_by_hash
from gruppo.seeds import generator_at
from gruppo.types import DataError, GruppoError, Prompt

CROP = 64


@dataclass(frozen=True, eq=False)
class ImagePair:
    """A clean image and its degraded version, each a file or a tensor [C, H, W] in [0, 1]."""

    clean: Path | Tensor
    degraded: Path | Tensor | None = None
    """None: degraded on the fly."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Further columns, such as the text in the image."""

    @property
    def images(self) -> list[Path | Tensor]:
        return [self.clean] if self.degraded is None else [self.clean, self.degraded]


def image_pairs(
    pairs: Mapping[str, ImagePair],
    *,
    seed: int,
    degradation: Degradation | None = None,
    crop: int = CROP,
    channels: int = 3,
    flips: bool = True,
    held_out_fraction: float = 0.1,
    held_out: Collection[str] = (),
    name: str = "the images",
) -> IndexedSource:
    """Stream of square crops: ``inputs`` is degraded, ``target`` clean, both [C, crop, crop] in [0, 1].

    Each image comes once per epoch. Crop, flip or quarter turn, strengths and noise of a prompt depend on (seed, draw)
    and are the same for both images of a pair. ``id`` is the name of the image; ``meta`` holds it as ``image``, and
    the strength of each step of the degradation by its name. Whole images are held out: their crops do not overlap,
    do not depend on the seed, and take the images in turns.

    ``crop`` 0: whole images, all of one size. ``held_out``: names, instead of a share by the hash of the names.
    """
    if channels not in (1, 3):
        raise GruppoError(f"channels={channels} is neither 1 (grey) nor 3 (colour). Set one of them.")
    if crop < 0:
        raise GruppoError(f"crop={crop} is not a number of pixels; set {CROP}, or 0 for whole images.")
    check_fraction(held_out_fraction)
    unreadable: dict[str, str] = {}
    sizes = _checked_sizes(pairs, channels, name, unreadable)
    _check_crop(sizes, crop, flips, name)
    names = list(sizes)
    evaluation = [n for n in names if n in held_out] if held_out_fraction else []
    train = [n for n in names if n not in evaluation]
    if not evaluation or not train:
        split = split_by_hash(names, held_out_fraction, name)
        train, evaluation = ([names[index] for index in part] for part in split)
    cache = ImageCache(channels)

    def read(n: str) -> list[Tensor] | None:
        """The clean image, then the degraded one if there is one. None for a truncated file."""
        try:
            images = [cache(image) for image in pairs[n].images]
        except DataError as problem:
            leave_out(unreadable, n, str(problem))
            return None
        if any(tuple(image.shape[1:]) != sizes[n] for image in images):
            leave_out(unreadable, n, f"the image {n} has a different size than its file's header.")
            return None
        return images

    def make_prompt(n: str, images: Sequence[Tensor], generator: torch.Generator, draw: int) -> Prompt:
        clean, degraded = (
            (image / 255 if image.dtype == torch.uint8 else image.float()).contiguous()
            for image in (images[0], images[-1])
        )
        strengths: dict[str, float] = {}
        if degradation is not None:
            degraded, strengths = degradation(degraded, generator)
        return Prompt(n, degraded, clean, {"image": n} | strengths | dict(pairs[n].meta), draw)

    def prompt_at(n: str, draw: int) -> Prompt | None:
        images = read(n)
        if images is None:
            return None
        generator = generator_at(seed, "crop", draw)
        images = random_crop(images, crop, generator) if crop else images
        images = random_symmetry(images, generator) if flips else images
        return make_prompt(n, images, generator, draw)

    def held_out_prompt_at(place: tuple[str, int, int, int, int], draw: int) -> Prompt | None:
        n, top, left, height, width = place
        images = read(n)
        if images is None:
            return None
        crops = [image[..., top : top + height, left : left + width] for image in images]
        return make_prompt(n, crops, generator_at("held out", n, top, left), draw)

    def held_out_items() -> list[tuple[str, int, int, int, int]]:
        """Crops side by side in a random order: the first of each image, then the second of each, and so on."""
        turns: list[tuple[int, str, int, int, int, int]] = []
        for n in evaluation:
            (height, width), (h, w) = sizes[n], (crop, crop) if crop else sizes[n]
            corners = [(top, left) for top in range(0, height - h + 1, h) for left in range(0, width - w + 1, w)]
            order = torch.randperm(len(corners), generator=generator_at("held out", n)).tolist()
            turns += [(turn, n, *corners[index], h, w) for turn, index in enumerate(order)]
        return [place[1:] for place in sorted(turns)]

    # sizes of files show that an image was replaced under its old name; tensors are hashed
    contents = [
        x.stat().st_size if isinstance(x, Path) else hashlib.sha256(to_uint8(x).numpy().tobytes()).hexdigest()
        for n in names
        for x in pairs[n].images
    ]
    facts = [sorted(sizes.items()), contents, evaluation, str(degradation), crop, channels, flips]
    further = dict.fromkeys(column for pair in pairs.values() for column in pair.meta)
    return IndexedSource(
        name,
        seed,
        train,
        held_out_items,
        prompt_at,
        ("target", "image", *(degradation.names if degradation else ()), *further),
        hashlib.sha256(json.dumps(facts).encode()).hexdigest(),
        {"held_out_images": len(evaluation)},
        held_out_prompt_at=held_out_prompt_at,
        degradation=degradation,
        unreadable=unreadable,
    )


def _checked_sizes(
    pairs: Mapping[str, ImagePair], channels: int, name: str, unreadable: dict[str, str]
) -> dict[str, tuple[int, int]]:
    """Height and width of each usable image. Refuses pairs of different sizes; unreadable files are left out."""
    sizes: dict[str, tuple[int, int]] = {}
    for n, pair in pairs.items():
        try:
            size, *others = [image_size(image, channels, n) for image in pair.images]
        except DataError as problem:
            if isinstance(pair.clean, Tensor):
                raise
            leave_out(unreadable, n, str(problem))
            continue
        if others and others[0] != size:
            raise DataError(
                f"the pair {n} of {name} does not match: degraded {others[0][0]} x {others[0][1]}, clean {size[0]} "
                f"x {size[1]} pixels. Resize the degraded image to the size of the clean one."
            )
        sizes[n] = size
    if not sizes:
        raise DataError(f"{name} holds no image that can be read; it needs {', '.join(SUFFIXES)} files.")
    return sizes


def _check_crop(sizes: Mapping[str, tuple[int, int]], crop: int, flips: bool, name: str) -> None:
    """Refuse images smaller than the crop; without a crop, images of several sizes, and of a shape that cannot turn."""
    if small := [n for n, size in sizes.items() if min(size) < crop]:
        height, width = sizes[small[0]]
        raise DataError(
            f"{len(small)} of {len(sizes)} images of {name} are smaller than the crop of {crop} pixels, "
            f"first {small[0]} with {height} x {width}. Set crop={min(map(min, sizes.values()))}, or remove them."
        )
    first, size = next(iter(sizes.items()))
    if not crop and (other := next((n for n in sizes if sizes[n] != size), None)):
        raise DataError(
            f"{name} has images of several sizes, {first} with {size[0]} x {size[1]} and {other} with "
            f"{sizes[other][0]} x {sizes[other][1]}; whole images are restored together. Set crop={CROP}."
        )
    if not crop and flips and size[0] != size[1]:
        raise DataError(
            f"{name} has images of {size[0]} x {size[1]}, which a quarter turn does not fit. Set flips=false."
        )
