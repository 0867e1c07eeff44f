"""Images in [0, 1]: 8-bit rounding, Pillow, PSNR and SSIM, pixel losses, filters, symmetries."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn.functional import conv2d, l1_loss, mse_loss, pad

from gruppo.loading import import_extra

PixelLoss = Literal["charbonnier", "l1", "mse"]
LUMA = (0.299, 0.587, 0.114)
"""ITU-R BT.601, as JPEG and Pillow convert to grey."""
SSIM_RADIUS, SSIM_STD = 5, 1.5
SSIM_C1, SSIM_C2 = 0.01**2, 0.03**2
MAX_PSNR_DB = 100.0
"""Of equal images, whose PSNR is infinite, where a mean or a reward needs a number."""
CHARBONNIER_EPS = 1e-3
"""In units of the image's range: below it the loss is quadratic. Lai et al. 2018 (arXiv
1710.01992)."""
BAND_STDS = (1.0, 2.0)
"""Standard deviations, in pixels, of the blurs that separate fine from mid detail, and mid detail
from the rest."""


# --- 8 bits ---------------------------------------------------------------------------------------


def quantize(images: Float[Tensor, "... H W"]) -> Float[Tensor, "... H W"]:
    """Images as read back from an 8-bit file: clamped to [0, 1] and rounded to 1/255, float32. NaN
    stays NaN.

    The one place of rounding, so that rewards read what files show.
    """
    return (images.float().clamp(0, 1) * 255).round() / 255


def to_uint8(images: Float[Tensor, "... H W"]) -> UInt8[Tensor, "... H W"]:
    """Levels 0 to 255 that a file is written from. NaN has none: check for it first."""
    return (quantize(images) * 255).round().to(torch.uint8)


def to_pillow(image: Float[Tensor, "C H W"]) -> Any:
    """Convert an image of one or three channels to PIL, quantized to 8 bits."""
    pillow = import_extra("PIL.Image", "images", "turning a tensor into an image file")
    if image.ndim != 3 or image.shape[0] not in (1, 3):
        raise ValueError(f"an image of shape {tuple(image.shape)}; it needs [1, H, W] or [3, H, W]")
    levels = to_uint8(image.detach().cpu()).permute(1, 2, 0).numpy()  # [H, W, C]
    return pillow.fromarray(levels[..., 0] if len(image) == 1 else levels)


def from_pillow(image: Any) -> Float[Tensor, "C H W"]:
    """Convert a gray or RGB image of PIL to float32 in [0, 1]."""
    levels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return levels.reshape(image.height, image.width, -1).permute(2, 0, 1).contiguous() / 255


# --- fidelity -------------------------------------------------------------------------------------


def psnr(x: Float[Tensor, "B C H W"], y: Float[Tensor, "B C H W"]) -> Float[Tensor, "B"]:
    """-10 log10(mean squared error), in dB, of images in [0, 1]; inf for equal images. float64."""
    return -10 * (x.double() - y.double()).square().mean(dim=(1, 2, 3)).log10()


def ssim(x: Float[Tensor, "B C H W"], y: Float[Tensor, "B C H W"]) -> Float[Tensor, "B"]:
    """(2 mx my + C1)(2 cov + C2) / ((mx^2 + my^2 + C1)(vx + vy + C2)), averaged over pixels; images
    in [0, 1]. float64.

    Moments under an 11 x 11 Gaussian of standard deviation 1.5; population covariances; each
    channel by itself; without the border of 5 pixels. Wang et al. 2004, as scikit-image with
    gaussian_weights=True and use_sample_covariance=False. Images need at least 11 pixels per side.
    """
    if min(x.shape[-2:]) <= 2 * SSIM_RADIUS:
        raise ValueError(
            f"SSIM of images of {tuple(x.shape[-2:])} pixels; it needs at least 11 a side."
        )
    x, y = x.double(), y.double()
    flat = torch.stack([x, y, x * x, y * y, x * y]).flatten(0, 2)[:, None]  # [5 B C, 1, H, W]
    moments = _gaussian_filter(flat, SSIM_STD, SSIM_RADIUS)[:, 0]
    mx, my, xx, yy, xy = moments.unflatten(0, (5, *x.shape[:2]))  # [B, C, H-10, W-10]
    luminance = (2 * mx * my + SSIM_C1) / (mx * mx + my * my + SSIM_C1)
    covariance = 2 * (xy - mx * my) + SSIM_C2
    variance = xx - mx * mx + yy - my * my + SSIM_C2
    return (luminance * covariance / variance).mean(dim=(1, 2, 3))


# --- pixel losses: unreduced, for supervised and consistency terms --------------------------------


def charbonnier(x: Float[Tensor, "..."], y: Float[Tensor, "..."]) -> Tensor:
    """sqrt((x - y)^2 + eps^2): |x - y| with a gradient everywhere. eps, not 0, for equal images."""
    return ((x - y).square() + CHARBONNIER_EPS**2).sqrt()


PIXEL_LOSSES: Mapping[PixelLoss, Callable[[Tensor, Tensor], Tensor]] = {
    "charbonnier": charbonnier,
    "l1": partial(l1_loss, reduction="none"),
    "mse": partial(mse_loss, reduction="none"),  # its mean is 10^(-PSNR / 10)
}


# --- filters --------------------------------------------------------------------------------------


def gaussian_blur(images: Float[Tensor, "B C H W"], std: float) -> Float[Tensor, "B C H W"]:
    """Gaussian blur of this standard deviation in pixels, cut at 3 std, with replicated edges. 0
    changes nothing."""
    if std == 0:
        return images
    r = math.ceil(3 * std)  # beyond 3 std lies 0.3% of the mass
    flat = pad(images.flatten(0, 1)[:, None], [r] * 4, mode="replicate")  # [B C, 1, H+2r, W+2r]
    return _gaussian_filter(flat, std, r).reshape(images.shape)


def _gaussian_filter(
    padded: Float[Tensor, "N 1 H+2r W+2r"], std: float, r: int
) -> Float[Tensor, "N 1 H W"]:
    """Separable Gaussian filter, sampled at pixel centers and normalized to sum 1."""
    steps = torch.arange(-r, r + 1, dtype=padded.dtype, device=padded.device)
    kernel = (-(steps**2) / (2 * std**2)).exp()
    kernel = (kernel / kernel.sum())[None, None]  # [1, 1, 2r+1]
    return conv2d(conv2d(padded, kernel[..., None]), kernel[:, :, None])


def detail_bands(images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B K C H W"]:
    """Fine and mid detail. K = 2 for one channel; K = 4 for three, where each is split into luma
    and chroma.

    fine = y - blur(y, 1), mid = blur(y, 1) - blur(y, 2). Luma is repeated in all three channels;
    chroma is the rest.
    """
    first, second = (gaussian_blur(images, std) for std in BAND_STDS)
    details = torch.stack([images - first, first - second], dim=1)  # [B, 2, C, H, W]
    if images.shape[1] == 1:
        return details
    weights = torch.tensor(LUMA, dtype=images.dtype, device=images.device).reshape(3, 1, 1)
    luma = (details * weights).sum(dim=2, keepdim=True).expand_as(details)
    return torch.cat([luma, details - luma], dim=1)


# --- the eight symmetries of the square -----------------------------------------------------------


def apply_symmetry(image: Float[Tensor, "... H W"], index: int) -> Float[Tensor, "... H W"]:
    """Symmetry 0 (none) to 7: mirrored left to right from 4 on, then ``index % 4`` quarter
    turns."""
    return (image.flip(-1) if index >= 4 else image).rot90(index % 4, dims=(-2, -1))


def undo_symmetry(image: Float[Tensor, "... H W"], index: int) -> Float[Tensor, "... H W"]:
    """The image before ``apply_symmetry``."""
    image = image.rot90(-(index % 4), dims=(-2, -1))
    return image.flip(-1) if index >= 4 else image


def mean_luma(images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B"]:
    """Mean luma of one or three channels, float64."""
    if images.shape[1] == 1:
        return images.double().mean(dim=(1, 2, 3))
    return images.double().mean(dim=(2, 3)) @ images.new_tensor(LUMA, dtype=torch.float64)
