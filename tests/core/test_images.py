"""What a file holds, PSNR and SSIM against hand and scikit-image, aligned crops."""

from __future__ import annotations

import math

import pytest
import torch

from gruppo.core.images import (
    PIXEL_LOSSES,
    charbonnier,
    detail_bands,
    gaussian_blur,
    mean_luma,
    psnr,
    quantize,
    ssim,
    to_uint8,
)

F64 = torch.float64


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def ramp(height: int, width: int) -> torch.Tensor:
    """[1, 1, H, W], each row 0, 1/W, 2/W, ..."""
    return (torch.arange(width, dtype=F64) / width).expand(1, 1, height, width)


# --- what a file holds ----------------------------------------------------------------------------


@pytest.mark.silent_bug(38)
def test_a_saved_image_has_the_nearest_of_256_levels_and_nothing_outside_0_to_1():
    image = torch.tensor([[-0.3, 0.0, 0.4 / 255, 0.6 / 255, 100.49 / 255, 254.6 / 255, 1.0, 7.0]])
    assert to_uint8(image).tolist() == [[0, 0, 0, 1, 100, 255, 255, 255]]
    assert (quantize(image) * 255).round().tolist() == to_uint8(image).tolist()


@pytest.mark.silent_bug(38)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, F64])
def test_saving_what_was_saved_changes_nothing_and_moves_a_pixel_by_half_a_level_at_most(dtype):
    image = noise(3, 16, 16).to(dtype)
    saved = quantize(image)
    assert quantize(saved).equal(saved) and saved.dtype == torch.float32
    assert to_uint8(saved).equal(to_uint8(image))
    assert (saved - image.float()).abs().max() <= 0.5 / 255 + 1e-7
    levels = torch.arange(256)
    assert to_uint8(levels / 255).equal(levels.to(torch.uint8))


# --- fidelity -------------------------------------------------------------------------------------


@pytest.mark.silent_bug(39)
def test_psnr_of_equal_images_is_infinite_and_of_a_shifted_ramp_20_log10_of_its_width():
    x = ramp(8, 32)
    shifted = torch.cat([x[..., 1:], torch.ones(1, 1, 8, 1)], dim=-1)  # a step of 1/32 everywhere
    assert psnr(x, x).tolist() == [math.inf]
    assert psnr(x, shifted).item() == pytest.approx(20 * math.log10(32), rel=1e-12)


def test_psnr_is_of_the_error_of_all_channels_of_each_image():
    x = torch.zeros(2, 3, 4, 4, dtype=F64)
    y = torch.zeros_like(x)
    y[0, 0] = 0.3  # mean squared error .03 over three channels
    y[1] = 0.1
    assert psnr(x, y).tolist() == pytest.approx([-10 * math.log10(0.03), 20.0], rel=1e-12)


def test_ssim_of_equal_images_is_one_and_of_two_greys_that_of_their_means():
    x = noise(2, 3, 16, 16)
    assert ssim(x, x).tolist() == pytest.approx([1, 1], rel=1e-12)
    grey = torch.ones(1, 1, 12, 12, dtype=F64)
    assert ssim(0.5 * grey, 0.2 * grey).item() == pytest.approx(
        (0.2 + 1e-4) / (0.29 + 1e-4), rel=1e-9
    )


def test_psnr_and_ssim_are_scikit_images():
    metrics = pytest.importorskip("skimage.metrics")
    x = noise(2, 3, 20, 31)
    y = (x + 0.2 * noise(2, 3, 20, 31, seed=1)).clamp(0, 1)
    options = {
        "gaussian_weights": True,
        "sigma": 1.5,
        "use_sample_covariance": False,
        "data_range": 1.0,
    }
    for row in range(2):
        a, b = x[row].numpy(), y[row].numpy()
        theirs = metrics.structural_similarity(a, b, channel_axis=0, **options)
        assert ssim(x, y)[row].item() == pytest.approx(theirs, abs=1e-12)
        assert psnr(x, y)[row].item() == pytest.approx(
            metrics.peak_signal_noise_ratio(a, b, data_range=1.0), rel=1e-12
        )


def test_an_image_smaller_than_the_window_is_refused():
    with pytest.raises(ValueError, match=r"\(10, 16\) pixels; it needs at least 11"):
        ssim(torch.zeros(1, 1, 10, 16), torch.zeros(1, 1, 10, 16))


# --- measures -------------------------------------------------------------------------------------


def test_brightness_is_the_mean_of_grey_and_the_luma_of_colour():
    grey = torch.tensor([0.25, 0.75]).expand(1, 1, 2, 2)
    colours = torch.eye(3)[:, :, None, None].expand(3, 3, 2, 2)  # red, green, blue
    assert mean_luma(grey).tolist() == [0.5]
    assert mean_luma(colours).tolist() == pytest.approx([0.299, 0.587, 0.114])


# --- filters and pixel losses ---------------------------------------------------------------------


@pytest.mark.parametrize("std", [0.5, 1.5, 3.0])
def test_a_blur_is_that_of_scikit_image_s_gaussian(std):
    filters = pytest.importorskip("skimage.filters")
    image = noise(1, 1, 20, 17)
    theirs = filters.gaussian(
        image[0, 0].numpy(), sigma=std, mode="nearest", truncate=math.ceil(3 * std) / std
    )
    assert gaussian_blur(image, std)[0, 0].numpy() == pytest.approx(theirs, abs=1e-6)
    assert gaussian_blur(image, 0) is image


def test_a_blur_keeps_a_flat_image_and_spreads_a_point_as_a_normal():
    flat = torch.full((2, 3, 5, 9), 0.3, dtype=F64)
    torch.testing.assert_close(gaussian_blur(flat, 2.0), flat)
    point = torch.zeros(1, 1, 15, 15, dtype=F64)
    point[..., 7, 7] = 1
    spread = gaussian_blur(point, 1.0)[0, 0]
    assert spread[7, 8] / spread[7, 7] == pytest.approx(math.exp(-0.5))
    assert spread[9, 8] / spread[7, 7] == pytest.approx(math.exp(-2.5))
    assert spread.sum() == pytest.approx(1)


@pytest.mark.parametrize("channels", [1, 3])
def test_bands_and_what_is_left_add_up_to_the_image_and_chroma_has_no_luma(channels):
    image = noise(2, channels, 12, 10)
    found = detail_bands(image)
    assert found.shape == (2, 2 if channels == 1 else 4, channels, 12, 10)
    torch.testing.assert_close(found.sum(dim=1) + gaussian_blur(image, 2.0), image)
    if channels == 3:
        weights = torch.tensor([0.299, 0.587, 0.114], dtype=F64).reshape(3, 1, 1)
        assert (found[:, 2:] * weights).sum(dim=2).abs().max() <= 1e-12
        assert found[:, :2].std(dim=2).max() <= 1e-12, "luma is the same in all channels"


def test_distances_of_pixels_are_their_formulas():
    x, y = noise(2, 3, 4, 4), noise(2, 3, 4, 4, seed=1)
    d = x - y
    assert torch.equal(PIXEL_LOSSES["l1"](x, y), d.abs()) and torch.equal(
        PIXEL_LOSSES["mse"](x, y), d**2
    )
    torch.testing.assert_close(PIXEL_LOSSES["charbonnier"](x, y), (d**2 + 1e-6).sqrt())
    torch.testing.assert_close(
        -10 * PIXEL_LOSSES["mse"](x, y).mean(dim=(1, 2, 3)).log10(), psnr(x, y)
    )
    equal = x.clone().requires_grad_()
    charbonnier(equal, x).sum().backward()
    assert equal.grad.eq(0).all(), "finite where the images are equal"
