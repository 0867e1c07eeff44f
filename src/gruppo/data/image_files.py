"""Image files as tensors [C, H, W] in [0, 1], their sizes, and files that installed packages contain."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gruppo.data.source import nearest
from gruppo.loading import import_extra
from gruppo.types import DataError

Fit = Literal["crop", "stretch"]
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
EXIF_ORIENTATION = 0x0112


@contextmanager
def _opened(path: str | Path) -> Iterator[Any]:
    """The image opened by Pillow; any failure within is one DataError."""
    pillow = import_extra("PIL.Image", "images", f"reading {path}")
    try:
        with pillow.open(path) as image:
            yield image
    except Exception as problem:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error
        reason = " ".join(str(problem).replace(str(path), "the file").split())
        raise DataError(f"the image {path} cannot be read ({type(problem).__name__}: {reason}).") from problem


def read_image(
    path: str | Path, *, channels: int = 3, size: tuple[int, int] | None = None, fit: Fit = "crop"
) -> Float[Tensor, "C H W"]:
    """The image, upright according to its EXIF entry, in grey (1 channel) or colour (3), transparent parts on white.

    ``size``: (height, width) to resize to; "crop" keeps the proportions and cuts both sides, "stretch" does not.
    16-bit grey is rounded to 8 bits. Raises DataError for a file that is not a whole image.
    """
    with _opened(path) as file:
        from PIL import Image, ImageOps

        file.load()
        image = ImageOps.exif_transpose(file)
        if image.mode.startswith("I"):  # 16-bit grey, which convert() would clip at 255
            image = Image.fromarray((np.asarray(image).clip(0, 65535) / 257).round().astype(np.uint8))
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("L" if channels == 1 else "RGB")
        if size is not None and image.size != size[::-1]:
            resize = image.resize if fit == "stretch" else lambda *args: ImageOps.fit(image, *args)
            image = resize(size[::-1], Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(image)).reshape(*image.size[::-1], channels).permute(2, 0, 1).contiguous() / 255


def image_size(image: Path | Tensor, channels: int, name: str) -> tuple[int, int]:
    """Height and width, upright; those of a file from its header alone. Refuses a tensor that is not an image."""
    if isinstance(image, Path):
        with _opened(image) as file:
            width, height = file.size
            has_exif = file.format != "PNG" or "exif" in file.info  # else Pillow decodes all of a PNG to look for it
            is_turned = has_exif and file.getexif().get(EXIF_ORIENTATION, 1) >= 5
        return (width, height) if is_turned else (height, width)
    if image.ndim != 3 or len(image) != channels or not image.is_floating_point():
        need = f"it needs floats [{channels}, H, W]. Convert it, or set channels."
        raise DataError(f"the image {name} is {list(image.shape)} of {image.dtype}; {need}")
    low, high = (float(bound) for bound in image.aminmax())
    if not (low >= 0 and high <= 1):  # written so that NaN fails
        need = "they need to be from 0 to 1. Divide by 255, or clamp them."
        raise DataError(f"the image {name} has numbers from {low:g} to {high:g}; {need}")
    return int(image.shape[1]), int(image.shape[2])


def list_images(folder: Path) -> list[str]:
    """Paths of all images below a folder, relative to it, sorted."""
    if not folder.is_dir():
        siblings = [other.name for other in folder.parent.glob("*/")] if folder.parent.is_dir() else []
        raise DataError(f"there is no folder {folder}{nearest(folder.name, siblings)}. Check the path.")
    files = [
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.suffix.lower() in SUFFIXES and path.is_file() and not path.name.startswith(".")
    ]
    if not files:
        raise DataError(f"{folder} holds no image; it needs {', '.join(SUFFIXES)} files, there or in its subfolders.")
    return sorted(files)


def package_file(package: str, file: str) -> Path | None:
    """A file of an installed package, which is not imported; None without the package or the file."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    return next((path for folder in folders if (path := Path(folder) / file).is_file()), None)
