"""Images in [0, 1]: what a saved file holds of them, PSNR and SSIM with maps, aligned crops, measures of many."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn.functional import avg_pool2d, conv2d

LUMA = (0.299, 0.587, 0.114)
"""ITU-R BT.601, as JPEG and Pillow convert to grey."""
SSIM_RADIUS, SSIM_STD = 5, 1.5
SSIM_C1, SSIM_C2 = 0.01**2, 0.03**2


# --- what a file holds ------------------------------------------------------------------------------------------------


def as_saved(images: Float[Tensor, "... H W"]) -> Float[Tensor, "... H W"]:
    """The images as they come back from a file of 8 bits: clamped to [0, 1], rounded to 1/255. NaN stays NaN.

    The one place of rounding: what a reward reads is what the file shows. float32.
    """
    return (images.float().clamp(0, 1) * 255).round() / 255


def to_bytes(images: Float[Tensor, "... H W"]) -> UInt8[Tensor, "... H W"]:
    """The levels 0 to 255 that a file is written from. NaN has none: look for it before."""
    return (as_saved(images) * 255).round().to(torch.uint8)


# --- fidelity ---------------------------------------------------------------------------------------------------------


def psnr(x: Float[Tensor, "B C H W"], y: Float[Tensor, "B C H W"], *, patch: int = 0) -> Float[Tensor, "B ..."]:
    """-10 log10(mean squared error), in dB, of images in [0, 1]; inf where they are equal. float64.

    [B]; with ``patch`` [B, H / patch, W / patch], each square by itself (what is left over at the end is in none).
    """
    error = (x.double() - y.double()).square()
    return -10 * _pooled(error, patch).log10()


def ssim(x: Float[Tensor, "B C H W"], y: Float[Tensor, "B C H W"], *, patch: int = 0) -> Float[Tensor, "B ..."]:
    """Mean of ``ssim_map``: [B], without the border of 5 pixels whose surroundings are mirrored; or of each square."""
    map_ = ssim_map(x, y)
    r = SSIM_RADIUS
    return _pooled(map_ if patch else map_[..., r:-r, r:-r], patch)


def ssim_map(x: Float[Tensor, "B C H W"], y: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
    """(2 mx my + C1)(2 cov + C2) / ((mx^2 + my^2 + C1)(vx + vy + C2)) at each pixel. float64; images in [0, 1].

    Moments under an 11 x 11 Gaussian of standard deviation 1.5; covariances of the population; each channel by itself;
    mirrored at the border, the edge twice. Wang et al. 2004, as scikit-image with gaussian_weights=True and
    use_sample_covariance=False. Images have at least 11 pixels a side.
    """
    if min(x.shape[-2:]) <= 2 * SSIM_RADIUS:
        raise ValueError(f"SSIM of images of {tuple(x.shape[-2:])} pixels; it needs at least 11 a side.")
    x, y = x.double(), y.double()
    mx, my, xx, yy, xy = _blurred(torch.stack([x, y, x * x, y * y, x * y]))
    vx, vy, cov = xx - mx * mx, yy - my * my, xy - mx * my
    return (2 * mx * my + SSIM_C1) * (2 * cov + SSIM_C2) / ((mx * mx + my * my + SSIM_C1) * (vx + vy + SSIM_C2))


def _pooled(map_: Float[Tensor, "B C H W"], patch: int) -> Float[Tensor, "B ..."]:
    return avg_pool2d(map_, patch).mean(dim=1) if patch else map_.mean(dim=(1, 2, 3))


def _blurred(stack: Float[Tensor, "N B C H W"]) -> Float[Tensor, "N B C H W"]:
    """Under the Gaussian window, rows and columns apart."""
    r = SSIM_RADIUS
    steps = torch.arange(-r, r + 1, dtype=stack.dtype, device=stack.device)
    kernel = (-(steps**2) / (2 * SSIM_STD**2)).exp()
    kernel = (kernel / kernel.sum())[None, None]  # [1, 1, 11]
    flat = stack.flatten(0, 2)[:, None]  # [N B C, 1, H, W]
    flat = flat[..., _mirrored(flat.shape[-2], r), :][..., _mirrored(flat.shape[-1], r)]
    return conv2d(conv2d(flat, kernel[..., None]), kernel[:, :, None]).reshape(stack.shape)


def _mirrored(size: int, r: int) -> Int[Tensor, "size+2r"]:
    """Places of a line continued by r at both ends: b a | a b c ... y z | z y."""
    line = torch.arange(size)
    return torch.cat([line[:r].flip(0), line, line[-r:].flip(0)])


# --- crops and flips that stay aligned --------------------------------------------------------------------------------


def random_crop(images: Sequence[Float[Tensor, "... H W"]], size: int, generator: torch.Generator) -> list[Tensor]:
    """The same random square of each image, ``size`` pixels wide in the smallest of them.

    The others may be larger by a whole factor, as a target is beside its low-resolution input; so is their square.
    """
    height, width = (min(image.shape[side] for image in images) for side in (-2, -1))
    factors = [image.shape[-2] // height for image in images]
    for image, k in zip(images, factors, strict=True):
        if tuple(image.shape[-2:]) != (k * height, k * width):
            raise ValueError(f"{tuple(image.shape[-2:])} is no whole multiple of {(height, width)} pixels.")
    if size > min(height, width):
        raise ValueError(f"a square of {size} pixels does not fit into {(height, width)}.")
    top, left = (int(torch.randint(side - size + 1, (), generator=generator)) for side in (height, width))
    return [
        image[..., k * top : k * (top + size), k * left : k * (left + size)]
        for image, k in zip(images, factors, strict=True)
    ]


def random_flip(images: Sequence[Float[Tensor, "... H W"]], generator: torch.Generator) -> list[Tensor]:
    """The same of the eight flips and quarter turns of each image."""
    return [flip(image, choice) for choice in [int(torch.randint(8, (), generator=generator))] for image in images]


def flip(image: Float[Tensor, "... H W"], choice: int) -> Float[Tensor, "... H W"]:
    """Number 0 (none) to 7: ``choice % 4`` quarter turns, from 4 on mirrored left to right before them."""
    image = image.flip(-1) if choice >= 4 else image
    return image.rot90(choice % 4, dims=(-2, -1))


# --- measures of one and of many --------------------------------------------------------------------------------------


def brightness(images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B"]:
    """Mean luma of one or three channels; of white strokes on black, their ink. float64."""
    if images.shape[1] == 1:
        return images.double().mean(dim=(1, 2, 3))
    return images.double().mean(dim=(2, 3)) @ images.new_tensor(LUMA, dtype=torch.float64)


def diversity(images: Float[Tensor, "B C H W"], labels: Int[Tensor, "B"]) -> Float[Tensor, ""]:
    """Standard deviation of each pixel (ddof 1) over the images of a class; its mean over pixels, then over classes.

    Classes with a single image are left out; NaN where there is no other. float64.
    """
    of_class = [images[labels == label].double() for label in labels.unique()]
    each = [own.std(dim=0).mean() for own in of_class if len(own) > 1]
    return torch.stack(each).mean() if each else torch.tensor(torch.nan, dtype=torch.float64)


def frechet_distance(x: Float[Tensor, "n d"], y: Float[Tensor, "m d"]) -> Float[Tensor, ""]:
    """|mx - my|^2 + tr(Cx + Cy - 2 (Cx Cy)^(1/2)) of two sets of features, covariances with ddof 1. float64.

    Of two normals the squared 2-Wasserstein distance; of Inception's features it is called FID (arXiv 1706.08500).
    Few samples raise it: compare at equal counts.
    """
    x, y = x.double(), y.double()
    cx, cy = torch.cov(x.T).reshape(x.shape[1], -1), torch.cov(y.T).reshape(y.shape[1], -1)
    values, vectors = torch.linalg.eigh(cx)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T  # Cx^(1/2)
    shared = torch.linalg.eigvalsh(root @ cy @ root).clamp(min=0).sqrt().sum()  # tr (Cx Cy)^(1/2)
    return (x.mean(dim=0) - y.mean(dim=0)).square().sum() + cx.trace() + cy.trace() - 2 * shared
