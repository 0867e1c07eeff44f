"""Distances of two images at each pixel: what supervised and consistency terms are made of. Unreduced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from jaxtyping import Float
from torch import Tensor

PixelLoss = Literal["charbonnier", "l1", "mse"]
CHARBONNIER_EPS = 1e-3
"""In units of the image's range 1: below it the loss is quadratic. Lai et al. 2018 (arXiv 1710.01992)."""


def charbonnier(x: Float[Tensor, "..."], y: Float[Tensor, "..."], *, eps: float = CHARBONNIER_EPS) -> Tensor:
    """sqrt((x - y)^2 + eps^2): |x - y| with a gradient everywhere. Of equal images it is eps, not 0."""
    return ((x - y).square() + eps * eps).sqrt()


def l1(x: Float[Tensor, "..."], y: Float[Tensor, "..."]) -> Tensor:
    """|x - y|"""
    return (x - y).abs()


def mse(x: Float[Tensor, "..."], y: Float[Tensor, "..."]) -> Tensor:
    """(x - y)^2; its mean is 10^(-PSNR / 10)."""
    return (x - y).square()


PIXEL_LOSSES: Mapping[PixelLoss, Callable[[Tensor, Tensor], Tensor]] = {
    "charbonnier": charbonnier,
    "l1": l1,
    "mse": mse,
}
