"""A sheet shows the pixels that were rewarded, each image apart from the others, and words that fit."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from gruppo.core.images import to_uint8
from gruppo.tracking import images
from gruppo.tracking.images import (
    CAPTION,
    MAX_SIDE,
    Cell,
    SheetRow,
    draw,
    fonts_for,
    is_image,
    load_font,
    to_pil,
    wrap,
)


def flat(color, width=40, height=30):
    return Image.new("RGB", (width, height), color)


@pytest.mark.silent_bug(38)
@pytest.mark.parametrize(
    ("side", "factor"), [(28, 4), (32, 4), (64, 2), (14, 8), (112, 1), (200, 1)]
)
def test_each_pixel_is_a_square_of_its_8_bit_level(side, factor):
    image = torch.rand(1, side, side - 1, generator=torch.Generator().manual_seed(side)) * 1.2 - 0.1
    sampled = np.asarray(to_pil(image))
    levels = to_uint8(image)[0].numpy()
    assert sampled.shape == (side * factor, (side - 1) * factor, 3)
    assert (sampled == np.kron(levels, np.ones((factor, factor), dtype=np.uint8))[..., None]).all()


def test_colors_are_red_green_blue_and_what_lies_outside_is_cut_off():
    image = torch.tensor([1.5, 0.5, -1.0]).reshape(3, 1, 1).expand(3, 2, 2)
    assert np.asarray(to_pil(image)).reshape(-1, 3).tolist() == [[255, 128, 0]] * 112**2


def test_a_pixel_that_is_not_finite_is_seen_and_the_others_are_as_they_were():
    image = torch.zeros(3, 28, 28)
    image[1, 2, 5], image[0, 27, 27] = torch.nan, torch.inf
    sampled = np.asarray(to_pil(image))[::4, ::4]
    assert [tuple(sampled[at]) for at in ((2, 5), (27, 27))] == [images.NOT_FINITE] * 2
    assert (sampled.reshape(-1, 3) == 0).all(axis=1).sum() == 28 * 28 - 2


def test_a_large_image_is_made_smaller_and_keeps_its_proportions():
    assert to_pil(torch.zeros(3, 300, 600)).size == (MAX_SIDE, MAX_SIDE // 2)
    assert to_pil(torch.zeros(1, 1, 2000)).size == (MAX_SIDE, 1)


def test_images_are_floats_of_one_or_three_channels():
    assert is_image(torch.rand(1, 2, 3)) and is_image(torch.rand(3, 1, 1).half())
    odd = [
        torch.rand(4, 8, 8),
        torch.rand(8, 8),
        torch.rand(1, 0, 8),
        torch.zeros(1, 8, 8, dtype=torch.long),
    ]
    assert not any(map(is_image, [*odd, torch.rand(1, 1, 8, 8), "text", None, np.zeros((1, 8, 8))]))


def test_png_bytes_figures_and_pillow_images_are_drawn_like_tensors():
    from matplotlib.figure import Figure

    flat("red", 30, 20).save(file := io.BytesIO(), "PNG")
    figure = Figure(figsize=(2, 1), dpi=100, facecolor="red")
    for image, size in (
        (file.getvalue(), (30, 20)),
        (flat("red", 30, 20), (30, 20)),
        (figure, (200, 100)),
    ):
        assert (
            is_image(image)
            and to_pil(image).size == size
            and to_pil(image).getpixel((5, 5)) == (255, 0, 0)
        )
    assert not is_image(b"text") and not is_image(object())


def test_each_image_is_whole_in_its_box_and_no_two_overlap():
    colors = ["red", "green", "blue", "black", "yellow", "cyan"]
    sizes = [(112, 112), (56, 128), (256, 64), (1, 1), (112, 112), (30, 40)]
    cells = [
        Cell(flat(c, *size), "0.5", "words " * 9) for c, size in zip(colors, sizes, strict=True)
    ]
    lines = [
        SheetRow("a prompt of several words, and more of them", cells[:3]),
        SheetRow("", [None, *cells[3:]]),
    ]
    sheet, boxes = draw(lines, title="T " * 300, heads={0: "before", 2: "after"})
    assert boxes[1][0] is None and [len(line) for line in boxes] == [3, 4]
    placed = [box for line in boxes for box in line if box is not None]
    for cell, box in zip(cells, placed, strict=True):
        assert sheet.crop(box).tobytes() == cell.image.tobytes()
    covered = np.zeros(sheet.size[::-1], dtype=int)
    for left, top, right, bottom in placed:
        covered[top:bottom, left:right] += 1
    assert covered.max() == 1 and covered.sum() == sum(width * height for width, height in sizes)


def test_columns_stand_below_each_other_and_those_with_a_head_apart():
    lines = [
        SheetRow("", [Cell(flat("red")), Cell(flat("red", 90)), Cell(flat("red"))])
        for _ in range(2)
    ]
    plain, headed = (
        draw(lines, title="", heads=heads)[1] for heads in (None, {0: "before", 1: "after"})
    )
    lefts = [[box[0] for box in line] for line in plain]
    assert lefts[0] == lefts[1] == [14, 14 + 56 + 8, 14 + 56 + 8 + 90 + 8]
    assert [box[0] for box in headed[0]] == [lefts[0][0], lefts[0][1] + 16, lefts[0][2] + 16]
    assert headed[0][0][1] > plain[0][0][1]


@pytest.mark.parametrize(
    "text", ["a photo of a red bus on a snowy road at night", "x" * 300, "  two words ", ""]
)
def test_words_are_broken_to_fit_and_what_is_left_out_is_marked(text):
    font = fonts_for([text])[CAPTION]
    for width in (30, 90, 2000):
        lines = wrap(text, font, width, max_lines=3)
        assert all(font.getlength(line) <= width for line in lines) and len(lines) <= 3
        if lines and lines[-1].endswith("..."):
            assert text.strip().replace(" ", "").startswith("".join(lines)[:-3].replace(" ", ""))
        else:
            assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_foreign_letters_are_written_in_a_font_that_has_them_and_never_stop_a_sheet(monkeypatch):
    lacking = {
        name: images.lacks(name, "Ж") for name in ("", *images.FONTS) if load_font(name, CAPTION)
    }
    assert images.lacks("", "\U0010ffff") and not images.lacks("", "e")
    assert fonts_for(["Ж"])[CAPTION] is load_font(min(lacking, key=lacking.__getitem__), CAPTION)
    monkeypatch.setattr(images, "FONTS", ("no such font.ttf",))
    sheet, _ = draw([SheetRow("一只猫 \u202e", [Cell(flat("red"), "猫")])], title="Ж")
    assert sheet.width > 40
