"""An image file as a tensor [C, H, W] in [0, 1]."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gruppo.loading import import_extra
from gruppo.types import DataError

Fit = Literal["crop", "stretch"]


def read_image(
    path: str | Path, *, channels: int = 3, size: tuple[int, int] | None = None, fit: Fit = "crop"
) -> Float[Tensor, "C H W"]:
    """The image upright (by its EXIF entry), in grey (1 channel) or colour (3), what is transparent on white.

    ``size``: (height, width) to make it; "crop" keeps the proportions and cuts what is left over at both sides, and
    "stretch" does not. 16 bits of grey are rounded to 8. DataError for a file that is no whole image.
    """
    pillow = import_extra("PIL.Image", "images", f"reading {path}")
    try:
        with pillow.open(path) as file:
            file.load()
            image = _resized(_converted(_upright(file), channels), size, fit)
    except Exception as problem:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error
        reason = " ".join(str(problem).replace(str(path), "the file").split())
        raise DataError(f"the image {path} cannot be read ({type(problem).__name__}: {reason}).") from problem
    return torch.from_numpy(np.array(image)).reshape(*image.size[::-1], channels).permute(2, 0, 1).contiguous() / 255


def _upright(image: Any) -> Any:
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


def _converted(image: Any, channels: int) -> Any:
    from PIL import Image

    if image.mode.startswith("I"):  # 16 bits of grey, which convert() would clip at 255
        image = Image.fromarray((np.asarray(image).clip(0, 65535) / 257).round().astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("L" if channels == 1 else "RGB")


def _resized(image: Any, size: tuple[int, int] | None, fit: Fit) -> Any:
    from PIL import Image, ImageOps

    if size is None or image.size == size[::-1]:
        return image
    if fit == "stretch":
        return image.resize(size[::-1], Image.Resampling.LANCZOS)
    return ImageOps.fit(image, size[::-1], Image.Resampling.LANCZOS)
