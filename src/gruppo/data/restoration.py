"""Where degraded and clean images come from: photographs, one folder, two folders; by name, and with a reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gruppo.data.captions import KINDS
from gruppo.data.degrade import Degradation
from gruppo.data.errors import nearest
from gruppo.data.pairs import ImagePairs
from gruppo.data.photos import HELD_OUT, photographs
from gruppo.data.scenes import Scene
from gruppo.types import DataError, Prompt

FORMS = (
    "photos:noise=25; degrade:FOLDER:blur=1-2,noise=10-50; pairs:DEGRADED:CLEAN. Among the options may be crop=64, "
    "channels=1 and flips=false"
)


def photos(degradation: Degradation, *, seed: int, channels: int = 3, **options: Any) -> ImagePairs:
    """Photographs of installed packages, degraded on the fly; with ``channels`` 1 those in grey too.

    Held out are ``HELD_OUT``, natural scenes, unless the share is 0.
    """
    files = photographs(with_grey=channels == 1)
    scenes = {name: Scene(path) for name, path in files.items()}
    options = {"held_out": HELD_OUT, "name": "photos"} | options
    return ImagePairs(scenes, seed=seed, degradation=degradation, channels=channels, **options)


def degraded_folder(folder: str | Path, degradation: Degradation, *, seed: int, **options: Any) -> ImagePairs:
    """The images of a folder and its subfolders, degraded on the fly."""
    root = Path(folder).expanduser()
    scenes = {name: Scene(root / name) for name in _files(root)}
    return ImagePairs(scenes, seed=seed, degradation=degradation, **{"name": str(folder)} | options)


def paired_folders(degraded: str | Path, clean: str | Path, *, seed: int, **options: Any) -> ImagePairs:
    """Images of the same name below two folders, whatever the kind of file. An image without its other is refused."""
    first, second = Path(degraded).expanduser(), Path(clean).expanduser()
    ours, theirs = (_by_stem(folder) for folder in (first, second))
    if alone := sorted(ours.keys() ^ theirs.keys()):
        has, lacks = (degraded, clean) if alone[0] in ours else (clean, degraded)
        shown = ", ".join(alone[:5]) + (", ..." if len(alone) > 5 else "")
        raise DataError(
            f"{len(alone)} images have no other of their name: {shown} (of {alone[0]} there is one in {has} and none "
            f"in {lacks}). Give every image of {degraded} one of the same name in {clean}."
        )
    scenes = {stem: Scene(second / theirs[stem], first / ours[stem]) for stem in sorted(ours)}
    return ImagePairs(scenes, seed=seed, **{"name": f"{degraded} and {clean}"} | options)


def _files(folder: Path) -> list[str]:
    if not folder.is_dir():
        beside = [other.name for other in folder.parent.glob("*/")] if folder.parent.is_dir() else []
        raise DataError(f"there is no folder {folder}{nearest(folder.name, beside)}. Check the path.")
    files = [
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.suffix.lower() in KINDS and path.is_file() and not path.name.startswith(".")
    ]
    if not files:
        raise DataError(f"{folder} holds no image; it needs {', '.join(KINDS)} files, there or in its subfolders.")
    return sorted(files)


def _by_stem(folder: Path) -> dict[str, str]:
    """Name without its kind, to file."""
    found: dict[str, str] = {}
    for file in _files(folder):
        stem = file.rpartition(".")[0]
        if stem in found:
            raise DataError(f"{folder} holds both {found[stem]} and {file}: one name for two images. Rename one.")
        found[stem] = file
    return found


# --- by name ----------------------------------------------------------------------------------------------------------


def open_pairs(data: str, *, seed: int, held_out_fraction: float = 0.1) -> ImagePairs | None:
    """What ``photos:noise=25``, ``degrade:FOLDER:noise=25`` or ``pairs:DEGRADED:CLEAN`` names; None for other data."""
    kind, _, rest = data.partition(":")
    if kind not in ("photos", "degrade", "pairs"):
        return None
    parts = rest.split(":") if rest else []
    is_said = bool(parts) and "=" in parts[-1] and not Path(parts[-1]).exists()
    steps, options = _options(parts.pop() if is_said else "", data)
    options |= {"seed": seed, "held_out_fraction": held_out_fraction}
    if len(parts) != {"photos": 0, "degrade": 1, "pairs": 2}[kind] or not all(parts):
        raise DataError(f"data={data!r} is not understood; write one of {FORMS}.")
    if kind == "pairs":
        if steps:
            raise DataError(f"data={data!r} degrades pairs, which are degraded already. Leave {steps} out.")
        return paired_folders(parts[0], parts[1], **options)
    if not steps:
        raise DataError(f"data={data!r} says nothing of how images are degraded; write one of {FORMS}.")
    degradation = Degradation.parse(steps)
    return photos(degradation, **options) if kind == "photos" else degraded_folder(parts[0], degradation, **options)


def _options(text: str, data: str) -> tuple[str, dict[str, Any]]:
    """The steps of a degradation, and what else is set."""
    steps, options = [], {}
    for part in filter(None, text.split(",")):
        name, _, value = (piece.strip() for piece in part.partition("="))
        try:
            if name in ("crop", "channels"):
                options[name] = int(value)
            elif name == "flips":
                options[name] = {"true": True, "false": False}[value.lower()]
            else:
                steps.append(part)
        except (KeyError, ValueError):
            raise DataError(f"data={data!r}: {name}={value!r} is not understood; write one of {FORMS}.") from None
    return ",".join(steps), options


class WithReference:
    """A source whose prompts have one column more, ``reference``: what ``restore`` makes of their degraded images.

    For rewards that are measured against a frozen network. ``restore``: [N, C, H, W] to the same in [0, 1].
    """

    def __init__(self, source: Any, restore: Callable[[Tensor], Tensor]) -> None:
        self.source, self.restore = source, restore
        self.columns = (*source.columns, "reference")

    def __getattr__(self, name: str) -> Any:
        """What a source has beside its prompts."""
        if name == "source":  # not there yet: copies and pickles ask before __init__
            raise AttributeError(name)
        return getattr(self.source, name)

    def take(self, n: int) -> list[Prompt]:
        return self._beside(self.source.take(n))

    def held_out(self, n: int) -> list[Prompt]:
        return self._beside(self.source.held_out(n))

    def _beside(self, prompts: list[Prompt]) -> list[Prompt]:
        if not prompts:
            return prompts
        restored = self.restore(torch.stack([prompt.inputs for prompt in prompts]))
        return [
            replace(prompt, meta={**prompt.meta, "reference": image})
            for prompt, image in zip(prompts, restored, strict=True)
        ]
