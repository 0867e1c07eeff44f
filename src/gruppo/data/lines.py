"""Lines of text with their transcripts, rendered and degraded on the fly, with or without the clean
image."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gruppo.core.images import from_pillow, quantize
from gruppo.data.degrade import Degradation, parse_data_options
from gruppo.data.images import package_file
from gruppo.data.source import IndexedSource, digest_of, split_by_hash
from gruppo.loading import import_extra
from gruppo.seeds import generator_at
from gruppo.types import DataError, GruppoError, Prompt

PACKAGE, FOLDER = "matplotlib", "mpl-data/fonts/ttf"
FONTS = tuple(
    f"DejaVu{name}.ttf" for name in ("Sans", "Sans-Bold", "SansMono", "Serif", "Serif-Bold")
)
SIGNS = "abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ23456789"
"""Without 0, 1, I, O and l, which look alike in many fonts."""
LONGEST = 7
"""Greatest length of a word."""
USAGE = (
    "lines:blur=0.5-2,noise=10-40. Options are count=4000, clean=no, set=1, height=24, width=128"
)
MARGIN = 3
"""Blank pixels on the left and on the right."""


def text_lines(
    degradation: Degradation,
    *,
    seed: int,
    count: int = 4000,
    clean: bool = True,
    number: int = 0,
    height: int = 24,
    width: int = 128,
    held_out_fraction: float = 0.1,
    name: str = "lines",
) -> IndexedSource:
    """Stream of ``count`` lines of random signs: ``inputs`` is degraded, ``target`` the clean line.

    Both are [1, height, width] in [0, 1], dark on light. ``meta`` holds the transcript as ``text``
    and each strength of the degradation by its name. Text, font, position, strengths and noise of a
    line depend on (``number``, its index) alone, so it is the same image in every run and epoch;
    the seed determines the order. Signs are independent, so a reader cannot guess them from each
    other. The held-out split goes by the transcripts. Without ``clean``, ``target`` is None.
    """
    if height < 12 or width < 2 * height:
        raise DataError(f"""{name}: lines of {height} x {width} pixels; they need a height of 12 or
            more, and twice that as width. Set height=24 and width=128.""")
    lines = [line_text(number, index, height, width) for index in range(count)]
    texts = [text for text, _ in lines]

    def prompt_at(index: int, draw: int) -> Prompt:
        image = line_image(*lines[index], number, index, height, width)
        degraded, strengths = degradation(image, generator_at("spoil", number, index))
        meta = {"text": texts[index]} | strengths
        return Prompt(f"{number}-{index}", degraded, image if clean else None, meta, draw)

    train, held_out = split_by_hash(texts, held_out_fraction, name)
    columns = (*(("target",) if clean else ()), "text", *degradation.names)
    digest = digest_of([texts, str(degradation), clean, number, height, width, held_out])
    source = IndexedSource(name, seed, train, held_out, prompt_at, columns, digest)
    source.degradation = degradation
    return source


def open_lines(rest: str, *, name: str, **options: Any) -> IndexedSource:
    """Source of ``lines:blur=0.5-2,noise=10-40,count=4000``."""
    names = ("count", "number", "height", "width", "clean")
    rest = rest.replace("set=", "number=")
    degradation, found = parse_data_options(rest, text_lines, names, USAGE)
    if degradation is None:
        raise DataError(f"data={name!r} does not say how lines are degraded; write {USAGE}.")
    return text_lines(degradation, name=name, **options, **found)


def line_text(number: int, index: int, height: int, width: int) -> tuple[str, Any]:
    """Words of random signs, as many as fit between the margins, and their font: of 0.58 to 0.7 of
    the height."""
    # without the seed: a line is the same in every run
    generator = generator_at("line", number, index)
    file = FONTS[int(torch.randint(len(FONTS), (), generator=generator))]
    sizes = (round(0.58 * height), round(0.7 * height) + 1)
    font = _load_font(file, int(torch.randint(*sizes, (), generator=generator)))
    limit = width - 2 * MARGIN
    text = longer = ""
    while font.getlength(longer) <= limit:
        text = longer
        length = int(torch.randint(3, LONGEST + 1, (), generator=generator))
        signs = torch.randint(len(SIGNS), (length,), generator=generator).tolist()
        longer = f"{text} {''.join(SIGNS[n] for n in signs)}".strip()
    while not text:  # a first word that is too long
        longer = longer[:-1]
        text = longer if font.getlength(longer) <= limit else ""
    return text, font


def line_image(
    text: str, font: Any, number: int, index: int, height: int, width: int
) -> Float[Tensor, "1 H W"]:
    """The clean line: ink of 0 to 0.3 on paper of 0.8 to 1."""
    from PIL import Image, ImageDraw

    x, y, ink, paper = torch.rand(4, generator=generator_at("place", number, index)).tolist()
    canvas = Image.new("L", (width, height), 0)
    left = round(MARGIN + x * (width - 2 * MARGIN - font.getlength(text)))
    place = (left, height / 2 + round(2 * y - 1))
    ImageDraw.Draw(canvas).text(place, text, fill=255, font=font, anchor="lm")
    ink, paper = 0.3 * ink, 0.8 + 0.2 * paper
    return quantize(paper + (ink - paper) * from_pillow(canvas))


@cache
def _load_font(name: str, size: int) -> Any:
    """A font of the installed package, which is not imported."""
    file = package_file(PACKAGE, f"{FOLDER}/{name}")
    if file is None:
        raise GruppoError(
            f"lines of text need the font {name} of {PACKAGE}; run: pip install {PACKAGE}"
        )
    fonts = import_extra("PIL.ImageFont", "images", "lines of text")
    # Pillow's own layout gives the same pixels whatever else is installed
    return fonts.truetype(str(file), size, layout_engine=fonts.Layout.BASIC)
