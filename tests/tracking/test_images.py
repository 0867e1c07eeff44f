"""A sheet shows the pixels that were rewarded, each image apart from the others, and words that
fit."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from gruppo.core.images import to_uint8
from gruppo.tracking import images
from gruppo.tracking.images import MAX_SIDE, is_image, make_sheet, to_pil


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


def test_png_bytes_and_pillow_images_are_drawn_like_tensors():
    flat("red", 30, 20).save(file := io.BytesIO(), "PNG")
    for image, size in (
        (file.getvalue(), (30, 20)),
        (flat("red", 30, 20), (30, 20)),
    ):
        assert (
            is_image(image)
            and to_pil(image).size == size
            and to_pil(image).getpixel((5, 5)) == (255, 0, 0)
        )
    assert not is_image(b"text") and not is_image(object())


def test_each_image_is_whole_in_its_box_and_no_two_overlap():
    sizes = [(112, 112), (56, 128), (256, 64), (1, 1), (112, 112), (30, 40)]
    colors = ["red", "green", "blue", "black", "yellow", "cyan"]
    pictures = [flat(color, *size) for color, size in zip(colors, sizes, strict=True)]
    sheet, boxes = make_sheet(pictures, columns=4)
    for picture, box in zip(pictures, boxes, strict=True):
        assert sheet.crop(box).tobytes() == picture.tobytes()
    covered = np.zeros(sheet.size[::-1], dtype=int)
    for left, top, right, bottom in boxes:
        covered[top:bottom, left:right] += 1
    assert covered.max() == 1 and covered.sum() == sum(width * height for width, height in sizes)
