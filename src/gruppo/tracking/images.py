"""Images on a sheet: a row for each prompt, with its label beside and captions below the images. Needs Pillow."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

from gruppo.core.images import to_uint8
from gruppo.tracking.formatting import ARRAYS

MIN_SIDE, MAX_SIDE = 112, 256
"""Pixels: small images are enlarged to about the first, and none exceeds the second."""
NOT_FINITE = (255, 0, 200)
"""Magenta marks pixels that are NaN or infinite."""
INK, FAINT, PAPER = "#222222", "#6f6f6f", "#ffffff"
MARGIN, GAP, MIN_COLUMN, MAX_LABEL = 14, 8, 56, 180
"""Pixels: around the sheet, between images, the narrowest column, and the widest label."""
TITLE, LABEL, CAPTION = 17, 15, 13
"""Sizes of text."""
LEADING = {TITLE: 22, LABEL: 20, CAPTION: 17}
"""Pixels from one line of text to the next, by its size."""
FONTS = (
    "NotoSansCJK-Regular.ttc",
    "wqy-microhei.ttc",
    "msyh.ttc",
    "PingFang.ttc",
    "DejaVuSans.ttf",
    "Arial.ttf",
)
"""System fonts that are tried where Pillow's own lacks a character."""
MISSING = "\uffff"
"""In no font: how it is drawn is how any missing character is drawn."""
PNG = b"\x89PNG\r\n\x1a\n"

Box = tuple[int, int, int, int]
"""Left, top, right and bottom, as ``PIL.Image.crop`` takes them."""


@dataclass(frozen=True, eq=False)
class Cell:
    """A PIL image on a sheet, with a caption and a fainter note below it."""

    image: Any
    caption: str = ""
    note: str = ""
    source: Any = None
    """Where the image is from; not drawn."""


@dataclass(frozen=True, eq=False)
class SheetRow:
    """Images side by side; None leaves a place empty."""

    label: str
    cells: Sequence[Cell | None]


def is_image(value: Any) -> bool:
    """Whether a value can be drawn: a float tensor [C, H, W] of 1 or 3 channels, PNG bytes, a PIL image or a figure."""
    if isinstance(value, Tensor):
        return (
            value.is_floating_point()
            and value.ndim == 3
            and value.shape[0] in (1, 3)
            and min(value.shape) > 0
        )
    if isinstance(value, bytes):
        return value.startswith(PNG)
    # A value cannot be of a class whose module was never imported.
    classes = {"matplotlib.figure": "Figure", "PIL.Image": "Image"}
    return any(
        isinstance(value, getattr(sys.modules[m], name))
        for m, name in classes.items()
        if sys.modules.get(m)
    )


def has_pixels(value: Any) -> bool:
    """Whether a value is no text for a terminal: an image, or any other array."""
    return is_image(value) or isinstance(value, ARRAYS)


def to_pil(image: Any) -> Any:
    """The image as an RGB PIL image of at most ``MAX_SIDE`` pixels a side.

    A tensor in [0, 1] is rounded to the 8 bits of a file; a small one is enlarged by an integer factor, so that each
    pixel is a square. Pixels that are not finite become magenta.
    """
    from PIL import Image

    if isinstance(image, Tensor):
        image = image.detach().float().cpu()
        levels = (
            to_uint8(image.nan_to_num()).permute(1, 2, 0).expand(-1, -1, 3).numpy().copy()
        )  # [H, W, 3]
        levels[~image.isfinite().all(dim=0).numpy()] = NOT_FINITE
        factor = max(
            1, round(MIN_SIDE / max(levels.shape[:2]))
        )  # whole, so that squares stay equal
        image = Image.fromarray(
            np.ascontiguousarray(levels.repeat(factor, axis=0).repeat(factor, axis=1))
        )
    elif isinstance(image, bytes):
        image = Image.open(io.BytesIO(image))
    elif not isinstance(image, Image.Image):  # a matplotlib figure
        image.savefig(file := io.BytesIO(), format="png")
        image = Image.open(file)
    image = image.convert("RGB")
    image.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.LANCZOS)
    return image


def draw(
    rows: Sequence[SheetRow], *, title: str, heads: Mapping[int, str] | None = None
) -> tuple[Any, list[list[Box | None]]]:
    """Draw a sheet; return it with the box of each image, by row and place.

    ``heads``: text above columns, by their number. Such a column stands a little apart from the one before it.
    """
    from PIL import Image, ImageDraw

    heads = heads or {}
    captions = (
        text for row in rows for cell in row.cells if cell for text in (cell.caption, cell.note)
    )
    fonts = fonts_for([title, *heads.values(), *(row.label for row in rows), *captions])
    labels = [wrap(row.label, fonts[LABEL], MAX_LABEL, max_lines=8) for row in rows]
    label_width = max(
        (math.ceil(fonts[LABEL].getlength(line)) for lines in labels for line in lines), default=0
    )
    # Columns: each is as wide as its widest image.
    x, columns = MARGIN + label_width + (2 * GAP if label_width else 0), []
    for i in range(max((len(row.cells) for row in rows), default=0)):
        widths = [
            cell.image.width for row in rows for cell in row.cells[i : i + 1] if cell is not None
        ]
        width = max([MIN_COLUMN, *widths])
        x += 2 * GAP if i in heads and i else 0
        columns.append((x, width))
        x += width + GAP
    right = max(x - GAP, MARGIN + math.ceil(fonts[TITLE].getlength(title)))
    # Rows: images, then captions; the label is centered beside the images.
    y = MARGIN + LEADING[TITLE] + GAP + (LEADING[CAPTION] if heads else 0)
    texts = [(MARGIN, MARGIN, title, TITLE, INK)]
    texts += [
        (columns[i][0], y - LEADING[CAPTION], text, CAPTION, FAINT) for i, text in heads.items()
    ]
    boxes, images = list[list[Box | None]](), list[tuple[Any, tuple[int, int]]]()
    for row, label in zip(rows, labels, strict=True):
        height = max((cell.image.height for cell in row.cells if cell is not None), default=0)
        label_height, caption_lines, row_boxes = len(label) * LEADING[LABEL], 0, list[Box | None]()
        label_y = y + max((height - label_height) // 2, 0)
        texts += [
            (MARGIN, label_y + n * LEADING[LABEL], line, LABEL, INK) for n, line in enumerate(label)
        ]
        for (left, width), cell in zip(columns, row.cells, strict=False):
            if cell is None:
                row_boxes.append(None)
                continue
            row_boxes.append((left, y, left + cell.image.width, y + cell.image.height))
            images.append((cell.image, (left, y)))
            lines = [(line, INK) for line in wrap(cell.caption, fonts[CAPTION], width)]
            lines += [(line, FAINT) for line in wrap(cell.note, fonts[CAPTION], width)]
            top, caption_lines = y + height + 2, max(caption_lines, len(lines))
            texts += [
                (left, top + n * LEADING[CAPTION], line, CAPTION, color)
                for n, (line, color) in enumerate(lines)
            ]
        boxes.append(row_boxes)
        y += max(height + caption_lines * LEADING[CAPTION], label_height) + GAP
    sheet = Image.new("RGB", (right + MARGIN, y - GAP + MARGIN), PAPER)
    pen = ImageDraw.Draw(sheet)
    for x, top, text, size, color in texts:
        pen.text((x, top), text, fill=color, font=fonts[size])
    for image, corner in images:
        sheet.paste(image, corner)
    return sheet, boxes


def fonts_for(texts: Sequence[str]) -> dict[int, Any]:
    """By size, one font for all text of a sheet: Pillow's own, or the first that lacks fewer of its characters."""
    letters = sorted({letter for text in texts for letter in text if not letter.isascii()})
    # Pillow's own font is the same on every machine; a system's is looked for only where the text is not ASCII.
    names = (
        [name for name in ("", *FONTS) if load_font(name, CAPTION) is not None] if letters else [""]
    )
    best = min(names, key=lambda name: sum(lacks(name, letter) for letter in letters))
    return {size: load_font(best, size) for size in LEADING}


@cache
def lacks(name: str, letter: str) -> bool:
    """Whether a font draws a character as it draws any that is missing."""
    font = load_font(name, CAPTION)
    return bytes(font.getmask(letter)) == bytes(font.getmask(MISSING))


@cache
def load_font(name: str, size: int) -> Any:
    """A font of the system, or None if it is not installed; "" is Pillow's own."""
    from PIL import ImageFont

    try:
        return ImageFont.truetype(name, size) if name else ImageFont.load_default(size)
    except OSError:
        return None


def wrap(text: str, font: Any, width: int, *, max_lines: int = 2) -> list[str]:
    """Break a text into lines of at most ``width`` pixels, between words where possible."""
    rest, lines = text.strip(), list[str]()
    limits = width, width - math.ceil(font.getlength("..."))
    while rest:
        # characters that fit, without and with the dots that mark a text cut short
        count, before_dots = (
            next(
                (n for n in range(len(rest)) if math.ceil(font.getlength(rest[: n + 1])) > limit),
                len(rest),
            )
            for limit in limits
        )
        if count < len(rest) and len(lines) == max_lines - 1:
            return [*lines, rest[:before_dots].rstrip() + "..."]
        space = rest.rfind(" ", 0, count + 1) if count < len(rest) else -1
        end = space if space > 0 else max(count, 1)
        lines.append(rest[:end].rstrip())
        rest = rest[end:].lstrip()
    return lines
