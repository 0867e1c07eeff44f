"""Degraded images as prompts and clean ones as targets: photographs, one folder, two folders;
degradations on the fly with addressed random strengths."""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate, pad

from gruppo.core.images import (
    apply_symmetry,
    from_pillow,
    gaussian_blur,
    quantize,
    to_pillow,
    to_uint8,
)
from gruppo.data.images import SUFFIXES, image_size, list_images, package_file, read_image
from gruppo.data.source import (
    IndexedSource,
    digest_of,
    in_turns,
    leave_out,
    split_by_hash,
)
from gruppo.loading import (
    did_you_mean,
    import_extra,
    install_command,
    split_names,
    split_options,
    typed_options,
)
from gruppo.seeds import generator_at
from gruppo.types import DataError, GruppoError, Prompt

log = logging.getLogger("gruppo")

CROP = 64
DECODED = 32
"""Decoded images that are kept in memory."""
FORMS = (
    "one of photos:noise=25; degrade:FOLDER:blur=1-2,noise=10-50; pairs:DEGRADED:CLEAN. Options "
    "include crop=64, "
    "channels=1 and flips=false"
)
PHOTOGRAPHS = {
    "astronaut": ("skimage", "data/astronaut.png"),
    "chelsea": ("skimage", "data/chelsea.png"),
    "coffee": ("skimage", "data/coffee.png"),
    "hubble": ("skimage", "data/hubble_deep_field.jpg"),
    "ihc": ("skimage", "data/ihc.png"),
    # without its right view, which shows the same scene and would cross the split
    "motorcycle": ("skimage", "data/motorcycle_left.png"),
    "retina": ("skimage", "data/retina.jpg"),
    "rocket": ("skimage", "data/rocket.jpg"),
    "china": ("sklearn", "datasets/images/china.jpg"),
    "flower": ("sklearn", "datasets/images/flower.jpg"),
    "grace_hopper": ("matplotlib", "mpl-data/sample_data/grace_hopper.jpg"),
}
"""Real photographs that Python packages contain, by package and file, in the order of the stream:
nothing is downloaded, no package is imported."""
HELD_OUT = ("chelsea", "coffee", "flower")
"""Photographs for evaluation: an animal, still lifes, a person. None of them shares a scene with
another."""


# --- degradations ---------------------------------------------------------------------------------

Image = Float[Tensor, "C H W"]
Images = Float[Tensor, "B C H W"]


def add_noise(images: Images, levels: float, generator: torch.Generator) -> Images:
    """Gaussian noise with a standard deviation in levels of 255."""
    return images + levels / 255 * torch.randn(images.shape, generator=generator)


def downscale(images: Images, factor: float, _: Any) -> Images:
    """Mean of each square, resized to the original size by bicubic interpolation."""
    height, width = images.shape[-2:]
    side = int(factor)
    # padded to whole squares, and cut again: the size stays the same
    padded = pad(images, (0, -width % side, 0, -height % side), mode="replicate")
    small = avg_pool2d(padded, side)
    resized = interpolate(small, size=padded.shape[-2:], mode="bicubic", align_corners=False)
    return resized[..., :height, :width]


def compress(images: Images, quality: float, _: torch.Generator) -> Images:
    """One image through JPEG."""
    pillow = import_extra("PIL.Image", "images", "degrading images to JPEG")
    file = io.BytesIO()
    to_pillow(images[0]).save(file, "JPEG", quality=int(quality))
    return from_pillow(pillow.open(file))[None]


@dataclass(frozen=True)
class DegradationKind:
    """One kind of degradation."""

    apply: Callable[..., Images]
    """Degraded images, from images [B, C, H, W], a strength between ``low`` and ``high``, and a
    generator."""
    low: float
    high: float
    unit: str
    is_whole: bool = False
    """Strengths are integers."""


KINDS: Mapping[str, DegradationKind] = {
    "noise": DegradationKind(add_noise, 0, 255, "levels of 255"),
    "blur": DegradationKind(lambda x, std, _: gaussian_blur(x, std), 0, 20, "pixels"),
    "downscale": DegradationKind(downscale, 1, 16, "times smaller a side", is_whole=True),
    "dark": DegradationKind(lambda x, share, _: x * share, 0.01, 1, "share of the light"),
    "jpeg": DegradationKind(compress, 1, 100, "quality", is_whole=True),
}


@dataclass(frozen=True)
class Degradation:
    """Steps applied in the order in which they are written: ``blur=0.5-2,noise=10-50,jpeg=40``.

    A range draws the strength for each image. The result is what a file of 8 bits would hold, in
    [0, 1].
    """

    steps: tuple[tuple[str, float, float], ...]
    """Kind, lowest and highest strength."""

    @classmethod
    def parse(cls, text: str) -> Degradation:
        """``kind=strength`` or ``kind=low-high``, separated by commas."""
        steps = []
        for name, strength in split_options(text, DataError).items():
            if name not in KINDS:
                raise DataError(f"""the degradation {text!r} has a step {name!r}; there are
                    {", ".join(KINDS)}.{did_you_mean(name, KINDS)}""")
            kind = KINDS[name]
            first, _, last = strength.partition("-")
            try:
                low, high = float(first), float(last or first)
            except ValueError:
                low = high = -1.0
            is_odd = kind.is_whole and (low % 1 or high % 1)
            if not kind.low <= low <= high <= kind.high or is_odd:
                raise DataError(f"""the degradation {text!r} has {name}={strength}; it needs
                    {"whole " if kind.is_whole else ""}numbers from {kind.low:g} to {kind.high:g}
                    ({kind.unit}), one or a range low-high.""")
            steps.append((name, low, high))
        if not steps:
            raise DataError(f"the degradation {text!r} has no step; write one such as noise=25.")
        return cls(tuple(steps))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _, _ in self.steps)

    def __str__(self) -> str:
        return ",".join(
            f"{name}={low:g}" + (f"-{high:g}" if high > low else "")
            for name, low, high in self.steps
        )

    def __call__(self, image: Image, generator: torch.Generator) -> tuple[Image, dict[str, float]]:
        """The degraded image, and the strength of each step by its name."""
        strengths: dict[str, float] = {}
        for name, low, high in self.steps:
            # drawn also where low equals high: a range in place of a number keeps the noise of
            # later steps
            uniform = float(torch.rand((), generator=generator, dtype=torch.float64))
            strengths[name] = low + uniform * (high - low)
            if KINDS[name].is_whole:  # + 1: the highest integer is as likely as the others
                strengths[name] = float(int(low + uniform * (high - low + 1)))
            image = KINDS[name].apply(image[None], strengths[name], generator)[0]
        return quantize(image), strengths


# --- pairs of images ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ImagePair:
    """A clean image and its degraded version, each a file or a tensor [C, H, W] in [0, 1]."""

    clean: Path | Tensor
    degraded: Path | Tensor | None = None
    """None: degraded on the fly."""

    @property
    def files(self) -> list[Path | Tensor]:
        """The clean image, and the degraded one if there is one."""
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
    """Stream of square crops: ``inputs`` is degraded, ``target`` clean, both [C, crop, crop] in [0,
    1].

    Each image comes once per epoch. Crop, flip or quarter turn, strengths and noise of a prompt
    depend on (seed, draw) and are the same for both images of a pair. ``id`` is the name of the
    image; ``meta`` holds it as ``image``, and the strength of each step of the degradation by its
    name. Whole images are held out: their crops do not overlap, do not depend on the seed, and take
    the images in turns.

    ``crop`` 0: whole images, all of one size. ``held_out``: names, instead of a share by the hash
    of the names.
    """
    if channels not in (1, 3) or crop < 0:
        raise GruppoError(f"""channels={channels} and crop={crop}: channels is 1 (gray) or 3
            (color), and crop a number of pixels, such as {CROP}, or 0 for whole images.""")
    unreadable: dict[str, str] = {}
    sizes = _checked_sizes(pairs, crop, name, unreadable)
    # decoding a photograph takes longer than cropping it
    read_file = lru_cache(DECODED)(lambda path: to_uint8(read_image(path, channels=channels)))

    def prompt_at(item: str | tuple[str, int, int], draw: int) -> Prompt | None:
        """Prompt of a name, at a random crop; or of a name and the top left corner of a crop."""
        n = item if isinstance(item, str) else item[0]
        try:
            images = [
                image if isinstance(image, Tensor) else read_file(image) for image in pairs[n].files
            ]
        except DataError as problem:  # a truncated file
            leave_out(unreadable, n, str(problem))
            return None
        height, width = (crop, crop) if crop else sizes[n]
        top = left = turn = 0
        if isinstance(item, str):
            generator = generator_at(seed, "crop", draw)
            if crop:
                places = (side - crop + 1 for side in sizes[n])
                top, left = (int(torch.randint(p, (), generator=generator)) for p in places)
            if flips:
                turn = int(torch.randint(8, (), generator=generator))
        else:  # without the seed: all runs see the same noise
            generator = generator_at("held out", *item)
            _, top, left = item
        images = [image[..., top : top + height, left : left + width] for image in images]
        images = [apply_symmetry(image, turn) for image in images]
        images = [(x / 255 if x.dtype == torch.uint8 else x.float()).contiguous() for x in images]
        degraded = images[-1]
        strengths: dict[str, float] = {}
        if degradation is not None:
            degraded, strengths = degradation(degraded, generator)
        return Prompt(n, degraded, images[0], {"image": n, **strengths}, draw)

    names = list(sizes)
    evaluation = [n for n in names if n in held_out] if held_out_fraction else []
    train = [n for n in names if n not in evaluation]
    if not evaluation or not train:
        indices = split_by_hash(names, held_out_fraction, name)
        train, evaluation = ([names[i] for i in part] for part in indices)
    places = in_turns(corners(n, sizes[n], crop) for n in sorted(evaluation))
    columns = ("target", "image", *(degradation.names if degradation else ()))
    facts = [sorted(sizes.items()), evaluation, str(degradation), crop, channels, flips]
    facts += [_fact(image) for n in names for image in pairs[n].files]
    source = IndexedSource(name, seed, train, places, prompt_at, columns, digest_of(facts))
    source.unreadable = unreadable
    return source


def corners(name: str, size: tuple[int, int], crop: int) -> list[tuple[str, int, int]]:
    """Top left corners of crops that lie side by side, in a random order."""
    h, w = (crop, crop) if crop else size
    tops, lefts = range(0, size[0] - h + 1, h), range(0, size[1] - w + 1, w)
    places = [(name, top, left) for top in tops for left in lefts]
    order = torch.randperm(len(places), generator=generator_at("held out", name)).tolist()
    return [places[index] for index in order]


def _fact(image: Path | Tensor) -> Any:
    """What shows that an image was replaced: the size of a file, the hash of a tensor."""
    if isinstance(image, Path):
        return image.stat().st_size
    return hashlib.sha256(to_uint8(image).numpy().tobytes()).hexdigest()


def _checked_sizes(
    pairs: Mapping[str, ImagePair], crop: int, name: str, unreadable: dict[str, str]
) -> dict[str, tuple[int, int]]:
    """Height and width of each usable image; unreadable files are left out. Refuses sizes that do
    not fit."""
    sizes: dict[str, tuple[int, int]] = {}
    for n, pair in pairs.items():
        try:
            found = {
                image_size(image) if isinstance(image, Path) else (image.shape[1], image.shape[2])
                for image in pair.files
            }
        except DataError as problem:
            leave_out(unreadable, n, str(problem))
            continue
        if len(found) > 1:
            both = " and ".join(f"{h} x {w}" for h, w in sorted(found))
            raise DataError(f"""the images {n} of {name} are a pair of {both} pixels. Resize the
                degraded image to the size of the clean one.""")
        sizes[n] = found.pop()
    if not sizes:
        raise DataError(
            f"{name} holds no image that can be read; it needs {', '.join(SUFFIXES)} files."
        )
    small = [n for n in sizes if min(sizes[n]) < crop]
    if small:
        raise DataError(f"""{len(small)} of {len(sizes)} images of {name} are smaller than the crop
            of {crop} pixels, such as {small[0]}. Set crop={min(map(min, sizes.values()))}, or
            remove them.""")
    if not crop and len(set(sizes.values())) > 1:
        raise DataError(
            f"{name} has images of several sizes; whole images need one. Set crop={CROP}."
        )
    return sizes


# --- where images come from -----------------------------------------------------------------------


def open_restoration(rest: str, *, name: str, **options: Any) -> IndexedSource:
    """Source of ``photos:noise=25``, ``degrade:FOLDER:noise=25`` or ``pairs:DEGRADED:CLEAN``."""
    kind, *folders = split_names(name)
    # The last part has the options, unless it is a path, which may hold "=" too.
    is_option = folders and "=" in folders[-1] and not Path(folders[-1]).exists()
    text = folders.pop() if is_option else ""
    names = ("crop", "channels", "flips")
    written = split_options(text, DataError)
    steps = ",".join(f"{name}={written[name]}" for name in written if name not in names)
    degradation = Degradation.parse(steps) if steps else None
    chosen = {name: value for name, value in written.items() if name in names}
    found = typed_options(image_pairs, chosen, FORMS, DataError)
    if len(folders) != {"photos": 0, "degrade": 1, "pairs": 2}[kind] or not all(folders):
        raise DataError(f"cannot read data={name!r}; write {FORMS}.")
    if (kind == "pairs") is not (degradation is None):
        raise DataError(f"""data={name!r}: pairs are degraded already, and all else needs a
            degradation; write {FORMS}.""")
    paths = [Path(folder).expanduser() for folder in folders]
    if kind == "photos":
        pairs = {photo: ImagePair(path) for photo, path in photographs().items()}
        found["held_out"] = HELD_OUT
    elif kind == "degrade":
        pairs = {file: ImagePair(paths[0] / file) for file in list_images(paths[0])}
    else:
        pairs = find_pairs(*paths)
    label = " and ".join(folders) or kind
    return image_pairs(pairs, degradation=degradation, name=label, **options, **found)


def find_pairs(degraded: Path, clean: Path) -> dict[str, ImagePair]:
    """Images of the same name in both folders, whatever their file types."""
    of_degraded, of_clean = _by_stem(degraded), _by_stem(clean)
    unpaired = sorted(of_degraded.keys() ^ of_clean.keys())
    if unpaired:
        has = degraded if unpaired[0] in of_degraded else clean
        raise DataError(f"""{len(unpaired)} images are unpaired: {", ".join(unpaired[:5])}
            ({unpaired[0]} is in {has} alone). Rename, add or remove images.""")
    return {n: ImagePair(of_clean[n], of_degraded[n]) for n in sorted(of_clean)}


def _by_stem(folder: Path) -> dict[str, Path]:
    """Images of a folder by their path without its suffix."""
    files: dict[str, Path] = {}
    for file in list_images(folder):
        stem = file.rpartition(".")[0]
        if stem in files:
            raise DataError(f"""{folder} holds both {files[stem].name} and {Path(file).name}: one
                name for two images. Rename one.""")
        files[stem] = folder / file
    return files


def photographs() -> dict[str, Path]:
    """Name to file of the installed photographs. Missing ones are logged."""
    paths = {name: package_file(*file) for name, file in PHOTOGRAPHS.items()}
    found = {name: path for name, path in paths.items() if path is not None}
    if not found:
        raise GruppoError(f"""the photographs need scikit-image, scikit-learn or matplotlib, and
            none of them is installed; run: {install_command("photos")}""")
    if missing := PHOTOGRAPHS.keys() - found.keys():
        packages = ", ".join(sorted({PHOTOGRAPHS[name][0] for name in missing}))
        counts = len(missing), len(PHOTOGRAPHS), ", ".join(sorted(missing)), packages
        log.warning("%d of %d photographs are missing (%s); they are in %s.", *counts)
    return found
