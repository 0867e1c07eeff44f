"""Whether an image shows the text that was asked for, as an optical character reader reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from gruppo.loading import import_extra
from gruppo.rewards.images import NAN, ImageReward, is_picture, named, to_pillow

Read = Callable[[np.ndarray], str]
"""From an image [H, W, 3] of bytes to the text in it."""


def ocr_match(read: Read | None = None, *, line: bool = False) -> ImageReward:
    """max(0, 1 - edits / characters) between what is read and the column ``text``, without spaces and case.

    0 to 1, as in Flow-GRPO (arXiv 2505.05470); further words beside the text cost edits. A row without a text is not
    scored. ``read`` is rapidocr (extra ``ocr``) unless given. ``line``: every image is one line of text, and finding
    it, which takes most of the time, is left out. Ugly letters earn as much as fine ones.
    """
    reader = read or rapidocr(line=line)

    def reward(images: Sequence[Tensor], text: Sequence[Any], **_: Any) -> list[float | None]:
        return [_score(reader, image, wanted) for image, wanted in zip(images, text, strict=True)]

    return named(reward, "ocr_match", is_waited_for=True)


def _score(read: Read, image: Tensor, text: Any) -> float | None:
    wanted = "".join(str(text).split()).casefold() if text is not None else ""
    if not wanted:
        return None
    if not is_picture(image):
        return NAN
    found = "".join(read(np.asarray(to_pillow(image).convert("RGB"))).split()).casefold()
    return max(0.0, 1 - edits(found, wanted) / len(wanted))


def edits(a: str, b: str) -> int:
    """Insertions, deletions and replacements that lead from one text to the other (Levenshtein)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        above, row = row, [i]
        for j, y in enumerate(b, start=1):
            row.append(min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (x != y)))
    return row[-1]


def rapidocr(*, line: bool) -> Read:
    """The reader of the package rapidocr, whose networks are in its wheel."""
    package = import_extra("rapidocr", "ocr", "ocr_match")
    import_extra("onnxruntime", "ocr", "ocr_match")
    engine = package.RapidOCR(params={"Global.log_level": "critical"})
    parts = {"use_det": False, "use_cls": False, "use_rec": True} if line else {}

    def read(image: np.ndarray) -> str:
        return " ".join(engine(image, **parts).txts or ())

    return read
