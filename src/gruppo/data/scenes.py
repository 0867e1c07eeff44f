"""Images in files or in memory, alone or in pairs: their sizes, what is wrong with them, and the last used ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gruppo.core.images import to_bytes
from gruppo.data.pixels import read_image
from gruppo.loading import import_extra
from gruppo.types import DataError

SHELF_BYTES = 1 << 28
"""Of decoded images that are kept: reading a photograph takes longer than cropping it."""


@dataclass(frozen=True, eq=False)
class Scene:
    """One image, in a file or in memory ([C, H, W] in [0, 1]); beside it the degraded one, or None."""

    clean: Path | Tensor
    degraded: Path | Tensor | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Further columns, such as the text that it shows."""


class Shelf:
    """Decoded images, the last used ones."""

    def __init__(self, channels: int) -> None:
        self.channels, self._held, self._bytes = channels, OrderedDict[Path, Tensor](), 0

    def get(self, of: Path | Tensor) -> Tensor:
        """[C, H, W]: of a file its levels, in bytes."""
        if isinstance(of, Tensor):
            return of
        if of not in self._held:
            image = to_bytes(read_image(of, channels=self.channels))
            self._held[of] = image
            self._bytes += image.numel()
        self._held.move_to_end(of)
        found = self._held[of]
        while self._bytes > SHELF_BYTES and len(self._held) > 1:
            self._bytes -= self._held.popitem(last=False)[1].numel()
        return found


def in_unit_range(image: Tensor) -> Float[Tensor, "C H W"]:
    return (image / 255 if image.dtype == torch.uint8 else image.float()).contiguous()


def size_of(of: Path | Tensor, channels: int, name: str) -> tuple[int, int]:
    """Height and width, upright; of a file by its header alone."""
    if isinstance(of, Tensor):
        return _size_of_tensor(of, channels, name)
    pillow = import_extra("PIL.Image", "images", f"reading {of}")
    try:
        with pillow.open(of) as file:
            width, height = file.size
            has_entry = file.format != "PNG" or "exif" in file.info  # else Pillow decodes all of a PNG to look for one
            is_turned = has_entry and file.getexif().get(0x0112, 1) >= 5
    except Exception as problem:  # as in read_image
        reason = " ".join(str(problem).replace(str(of), "the file").split())
        raise DataError(f"the image {of} cannot be read ({type(problem).__name__}: {reason}).") from problem
    return (width, height) if is_turned else (height, width)


def _size_of_tensor(image: Tensor, channels: int, name: str) -> tuple[int, int]:
    if image.ndim != 3 or len(image) != channels or not image.is_floating_point():
        raise DataError(
            f"the image {name} is {list(image.shape)} of {image.dtype}; it needs floats [{channels}, H, W]. Convert "
            "it, or set channels."
        )
    low, high = (float(bound) for bound in image.aminmax())
    if not (low >= 0 and high <= 1):  # of NaN too
        raise DataError(
            f"the image {name} has numbers from {low:g} to {high:g}; they need to be from 0 to 1. Divide by 255, or "
            "clamp them."
        )
    return int(image.shape[1]), int(image.shape[2])
