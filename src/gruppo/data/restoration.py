"""Degraded images as prompts and clean ones as targets: photographs, one folder, two folders; a reference column."""

from __future__ import annotations

import hashlib
import logging
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gruppo.core.images import random_crop, random_symmetry, to_uint8
from gruppo.data.degrade import Degradation, parse_data_options
from gruppo.data.images import SUFFIXES, image_size, list_images, package_file, read_image
from gruppo.data.source import IndexedSource, SourceWrapper, digest_of, leave_out, split_by_hash
from gruppo.loading import install_command, split_names
from gruppo.seeds import generator_at
from gruppo.types import DataError, GruppoError, Prompt

log = logging.getLogger("gruppo")

CROP = 64
CACHE_BYTES = 1 << 28
"""Decoded images that are kept in memory."""
FORMS = (
    "one of photos:noise=25; degrade:FOLDER:blur=1-2,noise=10-50; pairs:DEGRADED:CLEAN. Options include crop=64, "
    "channels=1 and flips=false"
)
PHOTOGRAPHS = tomllib.loads(
    Path(__file__).with_name("photographs.toml").read_text(encoding="utf-8")
)
DISTRIBUTIONS = {"skimage": "scikit-image", "sklearn": "scikit-learn", "matplotlib": "matplotlib"}
HELD_OUT = ("camera", "chelsea", "coffee", "flower")
"""Photographs for evaluation: an animal, still lifes, a person. None of them shares a scene with another."""


@dataclass(frozen=True, eq=False)
class ImagePair:
    """A clean image and its degraded version, each a file or a tensor [C, H, W] in [0, 1]."""

    clean: Path | Tensor
    degraded: Path | Tensor | None = None
    """None: degraded on the fly."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Further columns, such as the text in the image."""


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
        raise GruppoError(
            f"channels={channels} is neither 1 (gray) nor 3 (color). Set one of them."
        )
    if crop < 0:
        raise GruppoError(
            f"crop={crop} is not a number of pixels; set {CROP}, or 0 for whole images."
        )
    unreadable: dict[str, str] = {}
    files = {
        n: [x for x in (pair.clean, pair.degraded) if x is not None] for n, pair in pairs.items()
    }
    sizes = _checked_sizes(files, crop, channels, flips, name, unreadable)
    names = list(sizes)
    evaluation = [n for n in names if n in held_out] if held_out_fraction else []
    train = [n for n in names if n not in evaluation]
    if not evaluation or not train:
        train, evaluation = (
            [names[i] for i in part] for part in split_by_hash(names, held_out_fraction, name)
        )
    cache: dict[Path, Tensor] = {}  # decoding a photograph takes longer than cropping it

    def read(image: Path | Tensor) -> Tensor:
        """[C, H, W]: the levels from 0 to 255 of a file, a tensor unchanged."""
        if isinstance(image, Tensor) or image in cache:
            return image if isinstance(image, Tensor) else cache[image]
        levels = to_uint8(read_image(image, channels=channels))
        if sum(map(Tensor.numel, cache.values())) + levels.numel() <= CACHE_BYTES:
            cache[image] = levels
        return levels

    def prompt_at(item: str | tuple[str, tuple[int, int]], draw: int) -> Prompt | None:
        """Prompt of a name, at a random crop; or of a name and the top left corner of a crop."""
        n, corner = (item, None) if isinstance(item, str) else item
        try:
            images = [read(image) for image in files[n]]
            if any(tuple(image.shape[1:]) != sizes[n] for image in images):
                raise DataError(f"the image {n} has a different size than its file's header.")
        except DataError as problem:  # a truncated file
            leave_out(unreadable, n, str(problem))
            return None
        if corner is not None:
            (top, left), (height, width) = corner, (crop, crop) if crop else sizes[n]
            generator = generator_at(
                "held out", n, top, left
            )  # without the seed: all runs see the same noise
            images = [image[..., top : top + height, left : left + width] for image in images]
        else:
            generator = generator_at(seed, "crop", draw)
            images = random_crop(images, crop, generator) if crop else images
            images = random_symmetry(images, generator) if flips else images
        images = [(x / 255 if x.dtype == torch.uint8 else x.float()).contiguous() for x in images]
        degraded, strengths = (
            (images[-1], {}) if degradation is None else degradation(images[-1], generator)
        )
        return Prompt(n, degraded, images[0], {"image": n, **strengths, **pairs[n].meta}, draw)

    # held-out crops lie side by side, in a random order: the first of each image, then the second of each, and so on
    turns: list[tuple[int, str, tuple[int, int]]] = []
    for n in evaluation:
        (height, width), (h, w) = sizes[n], (crop, crop) if crop else sizes[n]
        corners = [
            (top, left)
            for top in range(0, height - h + 1, h)
            for left in range(0, width - w + 1, w)
        ]
        order = torch.randperm(len(corners), generator=generator_at("held out", n)).tolist()
        turns += [(turn, n, corners[index]) for turn, index in enumerate(order)]
    # sizes of files show that an image was replaced under its old name; tensors are hashed
    contents = [
        x.stat().st_size
        if isinstance(x, Path)
        else hashlib.sha256(to_uint8(x).numpy().tobytes()).hexdigest()
        for n in names
        for x in files[n]
    ]
    digest = digest_of(
        [sorted(sizes.items()), contents, evaluation, str(degradation), crop, channels, flips]
    )
    further = dict.fromkeys(column for pair in pairs.values() for column in pair.meta)
    columns = ("target", "image", *(degradation.names if degradation else ()), *further)
    places, identity = [turn[1:] for turn in sorted(turns)], {"held_out_images": len(evaluation)}
    source = IndexedSource(
        name, seed, train, places, prompt_at, columns, digest, identity, unreadable=unreadable
    )
    source.degradation = degradation
    return source


def _checked_sizes(
    files: Mapping[str, list[Any]],
    crop: int,
    channels: int,
    flips: bool,
    name: str,
    unreadable: dict[str, str],
) -> dict[str, tuple[int, int]]:
    """Height and width of each usable image; unreadable files are left out. Refuses sizes that do not fit."""
    sizes: dict[str, tuple[int, int]] = {}
    for n, images in files.items():
        try:
            (height, width), *others = [image_size(image, channels, n) for image in images]
        except DataError as problem:
            if isinstance(images[0], Tensor):
                raise
            leave_out(unreadable, n, str(problem))
            continue
        if others and others[0] != (height, width):
            h, w = others[0]
            raise DataError(f"""the pair {n} of {name} does not match: degraded {h} x {w}, clean {height} x {width}
                pixels. Resize the degraded image to the size of the clean one.""")
        sizes[n] = height, width
    if not sizes:
        raise DataError(
            f"{name} holds no image that can be read; it needs {', '.join(SUFFIXES)} files."
        )
    if small := [n for n, size in sizes.items() if min(size) < crop]:
        h, w = sizes[small[0]]
        raise DataError(f"""{len(small)} of {len(sizes)} images of {name} are smaller than the crop of {crop} pixels,
            first {small[0]} with {h} x {w}. Set crop={min(map(min, sizes.values()))}, or remove them.""")
    first, (height, width) = next(iter(sizes.items()))
    if not crop and (
        odd := [(n, h, w) for n, (h, w) in sizes.items() if (h, w) != (height, width)]
    ):
        other, h, w = odd[0]
        raise DataError(f"""{name} has images of several sizes, {first} with {height} x {width} and {other} with {h} x
            {w}; whole images need one size. Set crop={CROP}.""")
    if not crop and flips and height != width:
        raise DataError(
            f"{name} has images of {height} x {width}, which do not fit after a turn. Set flips=false."
        )
    return sizes


# --- where images come from -------------------------------------------------------------------------------------------


def open_pairs(data: str, *, seed: int, held_out_fraction: float = 0.1) -> IndexedSource | None:
    """Source of ``photos:noise=25``, ``degrade:FOLDER:noise=25`` or ``pairs:DEGRADED:CLEAN``; None for other data."""
    kind, _, rest = data.partition(":")
    if kind not in ("photos", "degrade", "pairs"):
        return None
    parts = split_names(rest) if rest else []
    # The last part has the options, unless it is a path, which may hold "=" too.
    text = parts.pop() if parts and "=" in parts[-1] and not Path(parts[-1]).exists() else ""
    degradation, options = parse_data_options(text, data, ("crop", "channels"), ("flips",), FORMS)
    if len(parts) != {"photos": 0, "degrade": 1, "pairs": 2}[kind] or not all(parts):
        raise DataError(f"cannot read data={data!r}; write {FORMS}.")
    if kind == "pairs" and degradation is not None:
        raise DataError(
            f"data={data!r} degrades pairs, which are degraded already. Leave {degradation} out."
        )
    if kind != "pairs" and degradation is None:
        raise DataError(f"data={data!r} does not say how images are degraded; write {FORMS}.")
    if kind == "photos":
        files = photographs(with_gray=options.get("channels") == 1)
        pairs, options["held_out"] = (
            {name: ImagePair(path) for name, path in files.items()},
            HELD_OUT,
        )
    elif kind == "degrade":
        root = Path(parts[0]).expanduser()
        pairs = {name: ImagePair(root / name) for name in list_images(root)}
    else:
        # Images of the same name in both folders are a pair, whatever their file types.
        degraded, clean = dict[str, Path](), dict[str, Path]()
        for folder, stems in zip(
            (Path(part).expanduser() for part in parts), (degraded, clean), strict=True
        ):
            for file in list_images(folder):
                if (stem := file.rpartition(".")[0]) in stems:
                    other = stems[stem].relative_to(folder).as_posix()
                    raise DataError(
                        f"{folder} holds both {other} and {file}: one name for two images. Rename one."
                    )
                stems[stem] = folder / file
        if unpaired := sorted(degraded.keys() ^ clean.keys()):
            has, lacks = parts if unpaired[0] in degraded else parts[::-1]
            shown = ", ".join(unpaired[:5]) + (", ..." if len(unpaired) > 5 else "")
            raise DataError(f"""{len(unpaired)} images are unpaired: {shown} ({unpaired[0]} is in {has} and not in
                {lacks}). Rename, add or remove images.""")
        pairs = {stem: ImagePair(clean[stem], degraded[stem]) for stem in sorted(degraded)}
    options |= {
        "seed": seed,
        "held_out_fraction": held_out_fraction,
        "name": " and ".join(parts) or kind,
    }
    return image_pairs(pairs, degradation=degradation, **options)


def photographs(*, with_gray: bool = False) -> dict[str, Path]:
    """Name to file of the installed photographs, in color unless ``with_gray``. Missing ones are logged."""
    requested = PHOTOGRAPHS["color"] | (PHOTOGRAPHS["gray"] if with_gray else {})
    if not (
        found := {
            name: path
            for name, file in requested.items()
            if (path := package_file(*file)) is not None
        }
    ):
        raise GruppoError(f"""the photographs need one of {", ".join(DISTRIBUTIONS.values())}, and none of them is
            installed; run: {install_command("photos")}""")
    if missing := [name for name in requested if name not in found]:
        packages = ", ".join(sorted({DISTRIBUTIONS[requested[name][0]] for name in missing}))
        counts = len(missing), len(requested), ", ".join(missing), packages
        log.warning("%d of %d photographs are missing (%s); install %s for them.", *counts)
    return found


class WithReference(SourceWrapper):
    """A source whose prompts have one more column, ``reference``: their degraded images restored by ``restore``.

    For rewards that compare with a frozen network. ``restore``: [N, C, H, W] to the same shape in [0, 1].
    """

    def __init__(self, source: Any, restore: Callable[[Tensor], Tensor]) -> None:
        super().__init__(source)
        self.restore = restore
        self.columns = None if source.columns is None else (*source.columns, "reference")

    def take(self, n: int) -> list[Prompt]:
        return self.add_reference(self.source.take(n))

    def held_out(self, n: int) -> list[Prompt]:
        return self.add_reference(self.source.held_out(n))

    def add_reference(self, prompts: list[Prompt]) -> list[Prompt]:
        """The same prompts with the column ``reference``."""
        restored = self.restore(torch.stack([p.inputs for p in prompts])) if prompts else ()
        return [
            replace(p, meta={**p.meta, "reference": x})
            for p, x in zip(prompts, restored, strict=True)
        ]
