"""Text in images: the score by hand, and the reader of the extra where it is installed."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch

from gruppo.rewards.images import ocr_accuracy
from gruppo.types import GruppoError

pytest.importorskip("PIL.Image")
GREY = [torch.full((1, 4, 6), 0.5)]


def test_the_reader_gets_the_bytes_of_the_image_in_three_channels():
    seen = []

    def read(image):
        seen.append(image)
        return ""

    image = (torch.arange(24).reshape(1, 4, 6) + 0.3) / 255
    ocr_accuracy(read)(images=[image], text=["x"])
    assert seen[0].dtype == np.uint8 and seen[0].shape == (4, 6, 3)
    assert seen[0][..., 1].tolist() == torch.arange(24).reshape(4, 6).tolist()


def test_a_row_without_a_text_is_not_scored_and_one_with_a_nan_is_not_a_number():
    reward = ocr_accuracy(lambda image: "a")
    assert reward(images=GREY * 3, text=["a", None, " "]) == [1.0, None, None]
    assert math.isnan(reward(images=[torch.full((1, 2, 2), math.nan)], text=["a"])[0])


def test_without_the_package_the_line_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.raises(GruppoError, match=r'ocr_accuracy needs .*pip install .*\[ocr\]"'):
        ocr_accuracy()


@pytest.mark.slow
def test_rapidocr_reads_a_line():
    pytest.importorskip("rapidocr")
    pytest.importorskip("onnxruntime")
    from PIL import Image, ImageDraw, ImageFont

    drawing = Image.new("RGB", (200, 40), "white")
    ImageDraw.Draw(drawing).text((8, 6), "Hello 42", font=ImageFont.load_default(24), fill="black")
    image = torch.from_numpy(np.array(drawing)).permute(2, 0, 1) / 255
    assert ocr_accuracy(ignore_case=True)(
        images=[image, torch.zeros(3, 40, 200)], text=["hello 42"] * 2
    ) == [
        1.0,
        0.0,
    ]


@pytest.mark.parametrize(
    ("read", "score"),
    [
        ("HELLO 42", 1.0),
        ("hello42", 1.0),
        ("hallo 42", 1 - 1 / 7),
        ("hello 42!!", 1 - 2 / 7),
        ("", 0.0),
        ("x" * 90, 0.0),
    ],
)
def test_the_score_is_one_less_the_share_of_edits_without_spaces_and_case(read, score):
    assert ocr_accuracy(lambda image: read, ignore_case=True)(
        images=GREY, text=["Hello 42"]
    ) == pytest.approx([score])
