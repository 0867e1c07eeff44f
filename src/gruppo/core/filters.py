"""Filters of images: a Gaussian blur, the bands of detail between blurs, averages of squares."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import avg_pool2d, conv2d, interpolate, pad

from gruppo.core.images import LUMA

BAND_STDS = (1.0, 2.0)
"""Of the two blurs, in pixels: fine detail is what the first takes away, mid detail what the second takes more."""


def gaussian_blur(images: Float[Tensor, "B C H W"], std: float) -> Float[Tensor, "B C H W"]:
    """Under a Gaussian of that standard deviation in pixels, cut at 3 std; the edge is continued. 0 changes nothing.

    Its weights are those of the pixels' centres, and add up to 1.
    """
    if std == 0:
        return images
    r = math.ceil(3 * std)
    steps = torch.arange(-r, r + 1, dtype=images.dtype, device=images.device)
    kernel = (-(steps**2) / (2 * std**2)).exp()
    kernel = (kernel / kernel.sum())[None, None]  # [1, 1, 2r+1]
    flat = pad(images.flatten(0, 1)[:, None], (r, r, r, r), mode="replicate")  # [B C, 1, H+2r, W+2r]
    return conv2d(conv2d(flat, kernel[..., None]), kernel[:, :, None]).reshape(images.shape)


def bands(images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B K C H W"]:
    """Fine and mid detail. K = 2 of one channel; of three, each as luma and as what is left, chroma: K = 4.

    fine = y - blur(y, 1), mid = blur(y, 1) - blur(y, 2); their luma stands in all three channels.
    """
    first, second = (gaussian_blur(images, std) for std in BAND_STDS)
    details = torch.stack([images - first, first - second], dim=1)  # [B, 2, C, H, W]
    if images.shape[1] == 1:
        return details
    weights = torch.tensor(LUMA, dtype=images.dtype, device=images.device).reshape(3, 1, 1)
    luma = (details * weights).sum(dim=2, keepdim=True).expand_as(details)
    return torch.cat([luma, details - luma], dim=1)


def spread_to(grid: Float[Tensor, "B K h w"], height: int, width: int, *, smooth: bool = True) -> Tensor:
    """A coarse grid over all pixels: bilinear between the centres of its cells, or each cell its own number."""
    if smooth:
        return interpolate(grid, size=(height, width), mode="bilinear", align_corners=False)
    return interpolate(grid, size=(height, width), mode="nearest")


def shrunk(images: Float[Tensor, "B C H W"], factor: int) -> Float[Tensor, "B C H/f W/f"]:
    """The mean of each square of ``factor`` pixels a side."""
    return avg_pool2d(images, factor)
