"""A sheet of pictures: a line for each prompt, with a few words beside it and below its pictures. Needs Pillow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeGuard

import numpy as np
from jaxtyping import Float
from torch import Tensor

from gruppo.core.images import to_bytes

SIDE, LARGEST = 112, 256
"""Pixels that the longer side of a small picture is brought near to, and that no picture on a sheet exceeds."""
NOT_FINITE = (255, 0, 200)
"""Colour of a pixel that is NaN or infinite, which no level stands for."""
INK, FAINT, PAPER = "#222222", "#6f6f6f", "#ffffff"
EDGE, GAP, NARROWEST, LABEL = 14, 8, 56, 180
"""Pixels: around the sheet, between pictures, of the narrowest column, and of the widest words beside a line."""
TITLE_SIZE, LABEL_SIZE, SIZE = 17, 15, 13
FONTS = ("NotoSansCJK-Regular.ttc", "wqy-microhei.ttc", "msyh.ttc", "PingFang.ttc", "DejaVuSans.ttf", "Arial.ttf")
"""Looked for on the machine where Pillow's own font lacks a character."""
UNKNOWN = "\uffff"
"""No font has it, so that what is drawn for it is what is drawn for any character that is lacking."""

Box = tuple[int, int, int, int]
"""Left, top, right and bottom, as Pillow crops."""


@dataclass(frozen=True, eq=False)
class Cell:
    """A picture as it stands on a sheet, and what is written below it; the first words in ink, the others faint."""

    picture: Any
    words: Sequence[str] = ()


@dataclass(frozen=True, eq=False)
class Line:
    """Pictures beside each other; None leaves a place empty."""

    words: str
    cells: Sequence[Cell | None]


def is_picture(value: Any) -> TypeGuard[Tensor]:
    """Whether it can be drawn: floats [C, H, W] of one or three channels."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 3 and _is_shape(*value.shape)


def picture_of(image: Float[Tensor, "C H W"]) -> Any:
    """The picture in the 8 bits of a file. A small one is enlarged by a whole factor, each pixel a square.

    A pixel that is not finite is magenta. One of more than ``LARGEST`` pixels a side is made smaller.
    """
    from PIL import Image

    image = image.detach().float().cpu()
    levels = to_bytes(image.nan_to_num()).permute(1, 2, 0).expand(-1, -1, 3).numpy().copy()  # [H, W, 3]
    levels[~image.isfinite().all(dim=0).numpy()] = NOT_FINITE
    height, width = levels.shape[:2]
    factor = max(1, round(SIDE / max(height, width)))
    picture = Image.fromarray(np.ascontiguousarray(levels.repeat(factor, axis=0).repeat(factor, axis=1)))
    picture.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
    return picture


def draw(
    lines: Sequence[Line], *, title: str, heads: Mapping[int, str] | None = None
) -> tuple[Any, list[list[Box | None]]]:
    """The sheet, and the box of each picture by line and place.

    ``heads``: words above the column of that number, which stands a little apart from the one before it.
    """
    from PIL import Image, ImageDraw

    heads = heads or {}
    hand = _Hand([title, *heads.values(), *(words for line in lines for words in _said(line))])
    beside = [hand.wrapped(line.words, LABEL_SIZE, LABEL, most=8) for line in lines]
    label = max((hand.length(words, LABEL_SIZE) for wrapped in beside for words in wrapped), default=0)
    lefts, widths, right = _columns(lines, heads, EDGE + label + (2 * GAP if label else 0))
    below = [_below(line, widths, hand) for line in lines]
    tops, bottom = _rows(lines, beside, below, EDGE + height(TITLE_SIZE) + GAP + (height(SIZE) if heads else 0))
    right = max(right, EDGE + hand.length(title, TITLE_SIZE))
    sheet = Image.new("RGB", (right + EDGE, bottom + EDGE), PAPER)
    pen = ImageDraw.Draw(sheet)
    hand.write(pen, (EDGE, EDGE), title, TITLE_SIZE)
    for column, words in heads.items():
        hand.write(pen, (lefts[column], tops[0] - height(SIZE)), words, SIZE, FAINT)
    boxes = []
    for line, top, labels, of_cells in zip(lines, tops, beside, below, strict=True):
        from_top = max((_tallest(line) - len(labels) * height(LABEL_SIZE)) // 2, 0)
        for n, words in enumerate(labels):
            hand.write(pen, (EDGE, top + from_top + n * height(LABEL_SIZE)), words, LABEL_SIZE)
        boxes.append([_paste(sheet, cell, (left, top)) for cell, left in zip(line.cells, lefts, strict=False)])
        for left, of_cell in zip(lefts, of_cells, strict=False):
            for n, (words, colour) in enumerate(of_cell):
                hand.write(pen, (left, top + _tallest(line) + 2 + n * height(SIZE)), words, SIZE, colour)
    return sheet, boxes


def height(size: int) -> int:
    """From one line of words to the next."""
    return round(1.3 * size)


def _paste(sheet: Any, cell: Cell | None, at: tuple[int, int]) -> Box | None:
    if cell is None:
        return None
    sheet.paste(cell.picture, at)
    return (*at, at[0] + cell.picture.width, at[1] + cell.picture.height)


def _said(line: Line) -> list[str]:
    return [line.words, *(words for cell in line.cells if cell is not None for words in cell.words)]


def _is_shape(channels: int, height: int, width: int) -> bool:
    return channels in (1, 3) and height > 0 and width > 0


# --- where things stand -----------------------------------------------------------------------------------------------


def _columns(lines: Sequence[Line], heads: Mapping[int, str], left: int) -> tuple[list[int], list[int], int]:
    """Left end and width of each column, and the right end of the last."""
    count = max((len(line.cells) for line in lines), default=0)
    lefts, widths = [], []
    for column in range(count):
        in_it = [line.cells[column] for line in lines if column < len(line.cells)]
        wide = max([NARROWEST, *(cell.picture.width for cell in in_it if cell is not None)])
        left += 2 * GAP if column in heads and column else 0
        lefts.append(left)
        widths.append(wide)
        left += wide + GAP
    return lefts, widths, left - GAP


def _rows(
    lines: Sequence[Line], beside: Sequence[Sequence[str]], below: Sequence[Sequence[Sequence[Any]]], top: int
) -> tuple[list[int], int]:
    """Top of each line, and the bottom of the last."""
    tops = []
    for line, labels, words in zip(lines, beside, below, strict=True):
        tops.append(top)
        pictures = _tallest(line) + max((len(of_cell) for of_cell in words), default=0) * height(SIZE)
        top += max(pictures, len(labels) * height(LABEL_SIZE)) + GAP
    return tops, top - GAP


def _tallest(line: Line) -> int:
    return max((cell.picture.height for cell in line.cells if cell is not None), default=0)


def _below(line: Line, widths: Sequence[int], hand: _Hand) -> list[list[tuple[str, str]]]:
    """Of each cell the words below it as they are broken, with their colours."""
    found = []
    for cell, width in zip(line.cells, widths, strict=False):
        said = enumerate(cell.words if cell is not None else ())
        found.append([(part, FAINT if n else INK) for n, words in said for part in hand.wrapped(words, SIZE, width)])
    return found


# --- words ------------------------------------------------------------------------------------------------------------


class _Hand:
    """Writes all words of a sheet in one font: Pillow's own, or the first that lacks fewer of their characters."""

    def __init__(self, texts: Sequence[str]) -> None:
        letters = sorted({letter for text in texts for letter in text if not letter.isascii()})
        there = [name for name in ("", *FONTS) if _opened(name, SIZE) is not None] if letters else [""]
        self._name = min(there, key=lambda name: sum(_lacks(name, letter) for letter in letters))

    def write(self, pen: Any, at: tuple[int, int], text: str, size: int, colour: str = INK) -> None:
        pen.text(at, text, fill=colour, font=_opened(self._name, size))

    def length(self, text: str, size: int) -> int:
        """In pixels."""
        return math.ceil(_opened(self._name, size).getlength(text))

    def wrapped(self, text: str, size: int, width: int, *, most: int = 2) -> list[str]:
        """At most ``most`` lines of ``width`` pixels, broken between words where there are some."""
        rest, found = text.strip(), list[str]()
        while rest:
            count = self._fitting(rest, size, width)
            if count == len(rest):
                return [*found, rest]
            if len(found) == most - 1:
                return [*found, rest[: self._fitting(rest, size, width - self.length("...", size))].rstrip() + "..."]
            space = rest.rfind(" ", 0, count + 1)
            end = space if space > 0 else max(count, 1)
            found.append(rest[:end].rstrip())
            rest = rest[end:].lstrip()
        return found

    def _fitting(self, text: str, size: int, width: int) -> int:
        """How many of its first characters are at most so wide."""
        low, high = 0, min(len(text), width)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.length(text[:middle], size) <= width else (low, middle - 1)
        return low


@cache
def _lacks(name: str, letter: str) -> bool:
    font = _opened(name, SIZE)
    return bytes(font.getmask(letter)) == bytes(font.getmask(UNKNOWN))


@cache
def _opened(name: str, size: int) -> Any:
    """A font of the machine, or None where it is not there; "" is Pillow's own."""
    from PIL import ImageFont

    try:
        return ImageFont.truetype(name, size) if name else ImageFont.load_default(size)
    except OSError:
        return None
