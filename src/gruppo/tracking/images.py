"""Images of a run: what can be drawn, and sheets of them. Needs Pillow."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gruppo.core.images import to_uint8
from gruppo.tracking.formatting import ARRAYS

MIN_SIDE, MAX_SIDE = 112, 256
"""Pixels: small images are enlarged to about the first, and none exceeds the second."""
NOT_FINITE = (255, 0, 200)
"""Magenta marks pixels that are NaN or infinite."""
GAP = 4
"""Pixels between images."""
COLUMNS = 8
PNG = b"\x89PNG\r\n\x1a\n"

Box = tuple[int, int, int, int]
"""Left, top, right and bottom, as ``PIL.Image.crop`` takes them."""


def is_image(value: Any) -> bool:
    """Whether a value is a float tensor [C, H, W] of 1 or 3 channels, PNG bytes or a PIL image."""
    if isinstance(value, Tensor):
        is_shape = value.ndim == 3 and value.shape[0] in (1, 3) and value.numel() > 0
        return is_shape and value.is_floating_point()
    if isinstance(value, bytes):
        return value.startswith(PNG)
    return hasattr(value, "thumbnail")  # of Pillow


def has_pixels(value: Any) -> bool:
    """Whether a value is not text for a terminal: an image, or any other array."""
    return is_image(value) or isinstance(value, ARRAYS)


def to_pil(image: Any) -> Any:
    """The image as an RGB PIL image of at most ``MAX_SIDE`` pixels a side.

    A tensor in [0, 1] is rounded to 8 bits; a small one is enlarged by an integer factor, so that
    each pixel is a square.
    """
    from PIL import Image

    if isinstance(image, Tensor):
        image = image.detach().float().cpu()
        levels = to_uint8(image.nan_to_num()).permute(1, 2, 0).expand(-1, -1, 3).numpy().copy()
        levels[~image.isfinite().all(dim=0).numpy()] = NOT_FINITE
        factor = max(1, round(MIN_SIDE / max(levels.shape[:2])))
        image = Image.fromarray(levels.repeat(factor, axis=0).repeat(factor, axis=1))
    elif isinstance(image, bytes):
        image = Image.open(io.BytesIO(image))
    image = image.convert("RGB")
    image.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.LANCZOS)
    return image


def make_sheet(images: Sequence[Any], columns: int = COLUMNS) -> tuple[Any, list[Box]]:
    """Images in rows of ``columns``, in cells of one size; return the box of each as well."""
    from PIL import Image

    images = [to_pil(image) for image in images]
    width = max(image.width for image in images) + GAP
    height = max(image.height for image in images) + GAP
    rows = math.ceil(len(images) / columns)
    size = (min(columns, len(images)) * width + GAP, rows * height + GAP)
    sheet, boxes = Image.new("RGB", size, "white"), list[Box]()
    for i, image in enumerate(images):
        left, top = GAP + i % columns * width, GAP + i // columns * height
        sheet.paste(image, (left, top))
        boxes.append((left, top, left + image.width, top + image.height))
    return sheet, boxes
