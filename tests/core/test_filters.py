"""Blurs, bands and grids by hand; distances of pixels by their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from gruppo.core.filters import bands, gaussian_blur, shrunk, spread_to
from gruppo.core.images import psnr
from gruppo.core.pixel_losses import PIXEL_LOSSES, charbonnier

F64 = torch.float64


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("std", [0.5, 1.5, 3.0])
def test_a_blur_is_that_of_scikit_image_s_gaussian(std):
    filters = pytest.importorskip("skimage.filters")
    image = noise(1, 1, 20, 17)
    theirs = filters.gaussian(image[0, 0].numpy(), sigma=std, mode="nearest", truncate=math.ceil(3 * std) / std)
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
    found = bands(image)
    assert found.shape == (2, 2 if channels == 1 else 4, channels, 12, 10)
    torch.testing.assert_close(found.sum(dim=1) + gaussian_blur(image, 2.0), image)
    if channels == 3:
        weights = torch.tensor([0.299, 0.587, 0.114], dtype=F64).reshape(3, 1, 1)
        assert (found[:, 2:] * weights).sum(dim=2).abs().max() <= 1e-12
        assert found[:, :2].std(dim=2).max() <= 1e-12, "luma is the same in all channels"


def test_grids_are_spread_smoothly_between_centres_or_as_squares():
    grid = torch.tensor([[[[0.0, 1.0]]]], dtype=F64)
    assert spread_to(grid, 1, 4)[0, 0, 0].tolist() == [0.0, 0.25, 0.75, 1.0]
    assert spread_to(grid, 2, 4, smooth=False)[0, 0].tolist() == [[0, 0, 1, 1]] * 2
    assert shrunk(torch.arange(8.0).reshape(1, 1, 2, 4), 2).tolist() == [[[[2.5, 4.5]]]]


def test_distances_of_pixels_are_their_formulas():
    x, y = noise(2, 3, 4, 4), noise(2, 3, 4, 4, seed=1)
    d = x - y
    assert torch.equal(PIXEL_LOSSES["l1"](x, y), d.abs()) and torch.equal(PIXEL_LOSSES["mse"](x, y), d**2)
    torch.testing.assert_close(PIXEL_LOSSES["charbonnier"](x, y), (d**2 + 1e-6).sqrt())
    torch.testing.assert_close(-10 * PIXEL_LOSSES["mse"](x, y).mean(dim=(1, 2, 3)).log10(), psnr(x, y))
    equal = x.clone().requires_grad_()
    charbonnier(equal, x).sum().backward()
    assert equal.grad.eq(0).all(), "finite where the images are equal"
