"""Lines of text with their transcripts, drawn and spoiled on the fly, with or without the clean image."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gruppo.core.images import as_saved
from gruppo.data.cursor import Cursor
from gruppo.data.degrade import Degradation
from gruppo.data.epochs import Epochs, split_by_hash
from gruppo.loading import import_extra
from gruppo.seeds import generator_at
from gruppo.types import DataError, GruppoError, Prompt

FORM = "lines:blur=0.5-2,noise=10-40. Among the options may be count=4000, clean=no, set=1, height=24 and width=128"
PACKAGE, FOLDER = "matplotlib", "mpl-data/fonts/ttf"
FONTS = tuple(f"DejaVu{name}.ttf" for name in ("Sans", "Sans-Bold", "SansMono", "Serif", "Serif-Bold"))
SIGNS = "abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ23456789"
"""Without 0, 1, I, O and l, which fonts draw alike."""
LONGEST = 7
"""Signs of a word at most."""
MARGIN = 3
"""Pixels left and right that no sign reaches."""


class TextLines:
    """An endless stream over ``count`` lines of random signs: ``inputs`` is spoiled, ``target`` the clean line.

    Both are [1, height, width] in [0, 1], dark on light. ``meta`` holds the transcript as ``text`` and each strength of
    the degradation by its name. A line's signs, font, place, strengths and noise hang on (``number``, its place in the
    set) alone, so that it is one image in every run and epoch; the seed gives the order. Signs are drawn one by one: a
    reader cannot guess them from each other. Sets of another ``number`` are other lines. What is held out goes by the
    transcript. Without ``clean`` there is no target at all.
    """

    def __init__(
        self,
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
    ) -> None:
        if count < 2 or number < 0:
            raise DataError(f"{name}: count={count} and set={number}; it needs 2 lines or more, of a set from 0 up.")
        if height < 12 or width < 2 * height:
            raise DataError(
                f"{name}: lines of {height} x {width} pixels hold no text; height needs to be 12 or more, and width "
                f"twice the height. Set height=24 and width=128."
            )
        self.name, self.seed, self.degradation = name, seed, degradation
        self.clean, self.number, self.count, self.size = clean, number, count, (height, width)
        self.columns = (*(("target",) if clean else ()), "text", *degradation.names)
        self._fonts = tuple(map(str, font_files()))
        self._texts = [self._text(index) for index in range(count)]
        self._train, self._held_out = split_by_hash(self._texts, held_out_fraction, name)
        self._epochs = Epochs(len(self._train), seed)
        identity = {"fingerprint": self.fingerprint(), "seed": seed, "held_out_lines": len(self._held_out)}
        self._cursor = Cursor(name, identity)

    @property
    def epoch_size(self) -> int:
        """Draws in which each line that is trained on comes once."""
        return len(self._train)

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts of the stream."""
        first = self._cursor.position
        self._cursor.position += n
        return [self._prompt(self._train[self._epochs.at(draw)], draw) for draw in range(first, first + n)]

    def held_out(self, n: int) -> list[Prompt]:
        """At most n evaluation prompts, the same ones in the same order in every run."""
        return [self._prompt(index, place) for place, index in enumerate(self._held_out[:n])]

    def fingerprint(self) -> str:
        """SHA-256 of all transcripts, and of how images are made of them."""
        what = [self._texts, str(self.degradation), self.clean, self.number, *self.size]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        return self._cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._cursor.load_state_dict(state)

    def _text(self, index: int) -> str:
        """Words of random signs, cut where the line is full: the last sign ends before the margin."""
        generator = generator_at("line", self.number, index)
        font, size = self._font(generator)
        room = self.size[1] - 2 * MARGIN
        text = ""
        while True:
            length = int(torch.randint(3, LONGEST + 1, (), generator=generator))
            word = "".join(SIGNS[n] for n in torch.randint(len(SIGNS), (length,), generator=generator).tolist())
            longer = f"{text} {word}".strip()
            if _font(font, size).getlength(longer) > room:
                break
            text = longer
        while not text:  # a first word that is too long
            word = word[:-1]
            text = word if _font(font, size).getlength(word) <= room else ""
        return text

    def _font(self, generator: torch.Generator) -> tuple[str, int]:
        """One of the fonts, of 0.58 to 0.7 of the height."""
        font = self._fonts[int(torch.randint(len(self._fonts), (), generator=generator))]
        low, high = round(0.58 * self.size[0]), round(0.7 * self.size[0])
        return font, int(torch.randint(low, high + 1, (), generator=generator))

    def _image(self, index: int) -> Float[Tensor, "1 H W"]:
        """The clean line: ink of 0 to 0.3 on paper of 0.8 to 1."""
        font, size = self._font(generator_at("line", self.number, index))  # the first numbers of ``_text``
        generator = generator_at("place", self.number, index)
        x, y, ink, paper = torch.rand(4, generator=generator).tolist()
        height, width = self.size
        text, chosen = self._texts[index], _font(font, size)
        canvas = import_extra("PIL.Image", "images", "lines of text").new("L", (width, height), 0)
        left = MARGIN + x * (width - 2 * MARGIN - chosen.getlength(text))
        draw = import_extra("PIL.ImageDraw", "images", "lines of text").Draw(canvas)
        draw.text((round(left), height / 2 + round(2 * y - 1)), text, fill=255, font=chosen, anchor="lm")
        cover = torch.from_numpy(np.array(canvas)).float() / 255
        ink, paper = 0.3 * ink, 0.8 + 0.2 * paper
        return as_saved(paper + (ink - paper) * cover)[None]

    def _prompt(self, index: int, draw: int) -> Prompt:
        clean = self._image(index)
        spoiled, strengths = self.degradation(clean, generator_at("spoil", self.number, index))
        meta = {"text": self._texts[index]} | strengths
        return Prompt(f"{self.number}-{index}", spoiled, clean if self.clean else None, meta, draw)


def font_files() -> list[Path]:
    """The fonts in the installed package, which is not imported."""
    try:
        spec = importlib.util.find_spec(PACKAGE)
    except (ImportError, ValueError):
        spec = None
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    files = [Path(folder) / FOLDER / name for folder in folders for name in FONTS]
    if missing := [path.name for path in files if not path.is_file()] or ([] if files else list(FONTS)):
        raise GruppoError(
            f"lines of text are drawn with fonts that the package {PACKAGE} carries, and {missing[0]} is not there; "
            f"run: pip install {PACKAGE}"
        )
    return files


@cache
def _font(file: str, size: int) -> Any:
    """Laid out by Pillow itself: the same pixels whatever else is installed."""
    fonts = import_extra("PIL.ImageFont", "images", "lines of text")
    return fonts.truetype(file, size, layout_engine=fonts.Layout.BASIC)


# --- by name ----------------------------------------------------------------------------------------------------------

WHOLE = {"count": "count", "set": "number", "height": "height", "width": "width"}
ANSWERS = {"yes": True, "true": True, "no": False, "false": False}


def open_lines(data: str, *, seed: int, held_out_fraction: float = 0.1) -> TextLines | None:
    """What ``lines:blur=0.5-2,noise=10-40,count=4000,clean=no`` names; None for other data."""
    kind, _, rest = data.partition(":")
    if kind != "lines":
        return None
    steps: list[str] = []
    options: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in rest.split(","))):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name in WHOLE and re.fullmatch(r"\d+", value):
            options[WHOLE[name]] = int(value)
        elif name == "clean" and value.lower() in ANSWERS:
            options["clean"] = ANSWERS[value.lower()]
        elif name in WHOLE or name == "clean":
            raise DataError(f"data={data!r}: {name}={value!r} is not understood; write {FORM}.")
        else:
            steps.append(part)
    if not steps:
        raise DataError(f"data={data!r} says nothing of how lines are spoiled; write {FORM}.")
    degradation = Degradation.parse(",".join(steps))
    return TextLines(degradation, seed=seed, held_out_fraction=held_out_fraction, name=data, **options)
