"""Degradations: each against its definition, drawn by its generator, and refused in one line."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch

from gruppo.core.images import gaussian_blur, quantize
from gruppo.data.restoration import Degradation
from gruppo.types import DataError

Image = pytest.importorskip("PIL.Image")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def picture(channels: int = 3, height: int = 24, width: int = 20) -> torch.Tensor:
    ramp = torch.linspace(0.2, 0.8, height * width).reshape(1, height, width)
    return quantize(ramp + 0.15 * torch.rand(channels, height, width, generator=generator(9)))


def spoiled(text: str, image: torch.Tensor | None = None, seed: int = 0):
    return Degradation.parse(text)(picture() if image is None else image, generator(seed))


def test_noise_has_its_standard_deviation_in_levels():
    flat = torch.full((1, 200, 200), 0.5)
    image, strengths = spoiled("noise=25", flat)
    assert strengths == {"noise": 25.0}
    assert float((image - flat).std()) * 255 == pytest.approx(25, rel=0.02)
    assert abs(float((image - flat).mean())) * 255 < 0.5


@pytest.mark.silent_bug(38)
def test_what_comes_out_is_as_a_file_would_hold_it():
    image, _ = spoiled("noise=120")
    assert image.min() == 0 and image.max() == 1 and torch.equal(image, quantize(image))


def test_blur_low_light_and_downscaling_by_their_definitions():
    x = picture()
    assert torch.equal(spoiled("blur=1.5")[0], quantize(gaussian_blur(x[None], 1.5)[0]))
    assert torch.equal(spoiled("dark=0.25")[0], quantize(x * 0.25))
    coarse, strengths = spoiled("downscale=4", x[:, :23, :18])
    assert coarse.shape == (3, 23, 18) and strengths == {"downscale": 4.0}
    flat = torch.full((3, 9, 7), 0.4)
    assert torch.equal(spoiled("downscale=3", flat)[0], quantize(flat))
    small = x.reshape(3, 6, 4, 5, 4).mean(dim=(2, 4))[None]
    back = torch.nn.functional.interpolate(
        small, size=(24, 20), mode="bicubic", align_corners=False
    )[0]
    torch.testing.assert_close(
        spoiled("downscale=4", x)[0], quantize(back), rtol=0, atol=1 / 255 + 1e-6
    )


@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_is_what_pillow_writes_and_reads(channels):
    x = picture(channels)
    levels = (x * 255).round().byte().permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(levels[..., 0] if channels == 1 else levels).save(file, "JPEG", quality=30)
    back = (
        torch.from_numpy(np.array(Image.open(file))).reshape(24, 20, channels).permute(2, 0, 1)
        / 255
    )
    image, strengths = spoiled("jpeg=30", x)
    assert torch.equal(image, back) and strengths == {"jpeg": 30.0} and not torch.equal(image, x)


def test_steps_are_taken_in_the_order_in_which_they_are_written():
    flat = torch.full((1, 64, 64), 0.5)
    first, last = (
        float((spoiled(text, flat)[0] - 0.5).std())
        for text in ("noise=25,blur=2", "blur=2,noise=25")
    )
    assert first < 0.3 * last


@pytest.mark.silent_bug(26)
def test_strengths_lie_in_their_range_and_hang_on_the_generator_alone():
    degradation = Degradation.parse("blur=0.5-2, noise=10-50, jpeg=30-32")
    sampled = [degradation(picture(), generator(seed))[1] for seed in range(60)]
    blurs, noises, qualities = (
        np.array([one[name] for one in sampled]) for name in ("blur", "noise", "jpeg")
    )
    assert 0.5 <= blurs.min() < 0.6 and 1.9 < blurs.max() <= 2
    assert 10 <= noises.min() < 12 and 48 < noises.max() <= 50
    assert set(qualities) == {30.0, 31.0, 32.0}
    a, b = (degradation(picture(), generator(7)) for _ in range(2))
    assert torch.equal(a[0], b[0]) and a[1] == b[1]
    assert str(degradation) == "blur=0.5-2,noise=10-50,jpeg=30-32" and degradation.names == (
        "blur",
        "noise",
        "jpeg",
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no step; write one such as noise=25"),
        ("nois=3", "a step 'nois'; .* Did you mean noise"),
        ("noise", "has noise=; it needs numbers from 0 to 255"),
        ("noise=a", "has noise=a; it needs numbers from 0 to 255"),
        ("noise=300", "from 0 to 255"),
        ("blur=3-1", "or a range low-high"),
        ("jpeg=30.5", "it needs whole numbers from 1 to 100"),
        ("downscale=0", "from 1 to 16"),
        ("noise=5,noise=6", "has noise twice"),
    ],
)
def test_a_degradation_that_there_is_not_is_refused_in_one_line(text, why):
    with pytest.raises(DataError, match=why) as caught:
        Degradation.parse(text)
    assert "\n" not in str(caught.value)
