"""Degradations of images on the fly: noise, blur, downscaling, low light, JPEG, with addressed
random strengths."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate, pad

from gruppo.core.images import from_pillow, gaussian_blur, quantize, to_pillow
from gruppo.loading import did_you_mean, import_extra, split_options, typed_options
from gruppo.types import DataError

Image = Float[Tensor, "C H W"]
Images = Float[Tensor, "B C H W"]


def add_noise(images: Images, levels: float, generator: torch.Generator) -> Images:
    """Gaussian noise with a standard deviation in levels of 255."""
    return images + levels / 255 * torch.randn(images.shape, generator=generator)


def downscale(images: Images, factor: float, _: Any) -> Images:
    """Mean of each square, resized to the original size by bicubic interpolation."""
    height, width = images.shape[-2:]
    side = int(factor)
    # padded to whole squares, and cut again: the size stays the same
    padded = pad(images, (0, -width % side, 0, -height % side), mode="replicate")
    small = avg_pool2d(padded, side)
    resized = interpolate(small, size=padded.shape[-2:], mode="bicubic", align_corners=False)
    return resized[..., :height, :width]


def compress(images: Images, quality: float, _: torch.Generator) -> Images:
    """One image through JPEG."""
    pillow = import_extra("PIL.Image", "images", "degrading images to JPEG")
    file = io.BytesIO()
    to_pillow(images[0]).save(file, "JPEG", quality=int(quality))
    return from_pillow(pillow.open(file))[None]


@dataclass(frozen=True)
class DegradationKind:
    """One kind of degradation."""

    apply: Callable[..., Images]
    """Degraded images, from images [B, C, H, W], a strength between ``low`` and ``high``, and a
    generator."""
    low: float
    high: float
    unit: str
    is_whole: bool = False
    """Strengths are integers."""


KINDS: Mapping[str, DegradationKind] = {
    "noise": DegradationKind(add_noise, 0, 255, "levels of 255"),
    "blur": DegradationKind(lambda x, std, _: gaussian_blur(x, std), 0, 20, "pixels"),
    "downscale": DegradationKind(downscale, 1, 16, "times smaller a side", is_whole=True),
    "dark": DegradationKind(lambda x, share, _: x * share, 0.01, 1, "share of the light"),
    "jpeg": DegradationKind(compress, 1, 100, "quality", is_whole=True),
}


@dataclass(frozen=True)
class Degradation:
    """Steps applied in the order in which they are written: ``blur=0.5-2,noise=10-50,jpeg=40``.

    A range draws the strength for each image. The result is what a file of 8 bits would hold, in
    [0, 1].
    """

    steps: tuple[tuple[str, float, float], ...]
    """Kind, lowest and highest strength."""

    @classmethod
    def parse(cls, text: str) -> Degradation:
        """``kind=strength`` or ``kind=low-high``, separated by commas."""
        steps = []
        for name, strength in split_options(text, DataError).items():
            if name not in KINDS:
                raise DataError(f"""the degradation {text!r} has a step {name!r}; there are
                    {", ".join(KINDS)}.{did_you_mean(name, KINDS)}""")
            kind = KINDS[name]
            first, _, last = strength.partition("-")
            try:
                low, high = float(first), float(last or first)
            except ValueError:
                low = high = -1.0
            is_odd = kind.is_whole and (low % 1 or high % 1)
            if not kind.low <= low <= high <= kind.high or is_odd:
                raise DataError(f"""the degradation {text!r} has {name}={strength}; it needs
                    {"whole " if kind.is_whole else ""}numbers from {kind.low:g} to {kind.high:g}
                    ({kind.unit}), one or a range low-high.""")
            steps.append((name, low, high))
        if not steps:
            raise DataError(f"the degradation {text!r} has no step; write one such as noise=25.")
        return cls(tuple(steps))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _, _ in self.steps)

    def __str__(self) -> str:
        return ",".join(
            f"{name}={low:g}" + (f"-{high:g}" if high > low else "")
            for name, low, high in self.steps
        )

    def __call__(self, image: Image, generator: torch.Generator) -> tuple[Image, dict[str, float]]:
        """The degraded image, and the strength of each step by its name."""
        strengths: dict[str, float] = {}
        for name, low, high in self.steps:
            # drawn also where low equals high: a range in place of a number keeps the noise of
            # later steps
            uniform = float(torch.rand((), generator=generator, dtype=torch.float64))
            strengths[name] = low + uniform * (high - low)
            if KINDS[name].is_whole:  # + 1: the highest integer is as likely as the others
                strengths[name] = float(int(low + uniform * (high - low + 1)))
            image = KINDS[name].apply(image[None], strengths[name], generator)[0]
        return quantize(image), strengths


def parse_data_options(
    text: str, function: Callable[..., Any], names: Sequence[str], usage: str
) -> tuple[Degradation | None, dict[str, Any]]:
    """The degradation of ``noise=25,crop=64``, None without one, and the options ``names`` of a
    function.

    ``usage``: what errors suggest to write.
    """
    found = split_options(text, DataError)
    steps = ",".join(f"{name}={found[name]}" for name in found if name not in names)
    options = {name: value for name, value in found.items() if name in names}
    degradation = Degradation.parse(steps) if steps else None
    return degradation, typed_options(function, options, usage, DataError)
