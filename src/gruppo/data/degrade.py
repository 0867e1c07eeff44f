"""Degradations of images on the fly: noise, blur, downscaling, low light, JPEG, with addressed random strengths."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate, pad

from gruppo.core.images import gaussian_blur, quantize, to_uint8
from gruppo.data.source import nearest
from gruppo.loading import import_extra
from gruppo.types import DataError

Images = Float[Tensor, "B C H W"]


def _downscale(images: Images, factor: float, _generator: torch.Generator | None = None) -> Images:
    """Mean of each square, resized to the original size by bicubic interpolation."""
    height, width = images.shape[-2:]
    side = int(factor)
    # padded to whole squares, and cut again: the size stays the same
    padded = pad(images, (0, -width % side, 0, -height % side), mode="replicate")
    resized = interpolate(
        avg_pool2d(padded, side), size=padded.shape[-2:], mode="bicubic", align_corners=False
    )
    return resized[..., :height, :width]


def _compress(images: Images, quality: float, _generator: torch.Generator) -> Images:
    """One image through JPEG."""
    pillow = import_extra("PIL.Image", "images", "degrading images to JPEG")
    levels, file = to_uint8(images[0]).permute(1, 2, 0).numpy(), io.BytesIO()
    image = pillow.fromarray(levels[..., 0] if levels.shape[-1] == 1 else levels)  # gray, or RGB
    image.save(file, "JPEG", quality=int(quality))
    return (
        torch.from_numpy(np.array(pillow.open(file)).reshape(levels.shape))
        .permute(2, 0, 1)[None]
        .float()
        / 255
    )


@dataclass(frozen=True)
class DegradationKind:
    """One kind of degradation."""

    apply: Callable[..., Images]
    """Degraded images, from images [B, C, H, W], a strength between ``low`` and ``high``, and a generator."""
    unit: str
    low: float
    high: float
    usual: str
    is_whole: bool = False
    """Strengths are integers."""
    is_expected: bool = False
    """Neither random nor without a gradient: part of ``Degradation.expected``."""


KINDS: Mapping[str, DegradationKind] = {
    "noise": DegradationKind(
        lambda images, levels, generator: (
            images + levels / 255 * torch.randn(images.shape, generator=generator)
        ),
        *("levels of 255, standard deviation", 0, 255, "25"),
    ),
    "blur": DegradationKind(
        lambda x, std, _=None: gaussian_blur(x, std),
        "pixels, standard deviation",
        0,
        20,
        "1.5",
        is_expected=True,
    ),
    "downscale": DegradationKind(
        _downscale, "times smaller a side", 1, 16, "2", is_whole=True, is_expected=True
    ),
    "dark": DegradationKind(
        lambda x, share, _=None: x * share, "share of the light", 0.01, 1, "0.3", is_expected=True
    ),
    "jpeg": DegradationKind(_compress, "quality", 1, 100, "30", is_whole=True),
}


@dataclass(frozen=True)
class Degradation:
    """Steps applied in the order in which they are written: ``blur=0.5-2,noise=10-50,jpeg=40``.

    A range draws the strength for each image. The result is what a file of 8 bits would hold, in [0, 1].
    """

    steps: tuple[tuple[str, float, float], ...]
    """Kind, lowest and highest strength."""

    @classmethod
    def parse(cls, text: str) -> Degradation:
        """``kind=strength`` or ``kind=low-high``, separated by commas."""
        steps, known = dict[str, tuple[str, float, float]](), ", ".join(KINDS)
        for part in filter(None, map(str.strip, text.split(","))):
            name, equals, strength = (piece.strip() for piece in part.partition("="))
            where = f"the degradation {text!r} has"
            if name not in KINDS:
                raise DataError(
                    f"{where} a step {name!r}{nearest(name, KINDS)}. Available: {known}."
                )
            if name in steps:
                raise DataError(f"{where} {name} twice; write it once.")
            kind = KINDS[name]
            first, dash, last = strength.partition("-")
            try:
                low = float(first)
                high = float(last) if dash else low
            except ValueError:
                low = high = float("nan")  # fails the range check below
            is_integer = not kind.is_whole or (low.is_integer() and high.is_integer())
            if not equals or not kind.low <= low <= high <= kind.high or not is_integer:
                number = f"{'an integer' if kind.is_whole else 'a number'} from {kind.low:g} to {kind.high:g}"
                usage = f"{number} ({kind.unit}), or a range low-high. Write {name}={kind.usual}."
                raise DataError(f"{where} {part!r}; {name} is {usage}")
            steps[name] = name, low, high
        if not steps:
            raise DataError(
                f"the degradation {text!r} has no step; write one such as noise=25, of {known}."
            )
        return cls(tuple(steps.values()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _, _ in self.steps)

    def __str__(self) -> str:
        return ",".join(
            f"{name}={low:g}" + (f"-{high:g}" if high != low else "")
            for name, low, high in self.steps
        )

    def __call__(
        self, image: Float[Tensor, "C H W"], generator: torch.Generator
    ) -> tuple[Float[Tensor, "C H W"], dict[str, float]]:
        """The degraded image, and the strength of each step by its name."""
        strengths: dict[str, float] = {}
        for name, low, high in self.steps:
            # drawn also where low equals high: a range in place of a number keeps the noise of later steps
            uniform = float(torch.rand((), generator=generator, dtype=torch.float64))
            is_whole = KINDS[
                name
            ].is_whole  # then + 1, so that the highest integer is as likely as the others
            strength = (
                float(int(low + uniform * (high - low + 1)))
                if is_whole
                else low + uniform * (high - low)
            )
            image = KINDS[name].apply(image[None], strength, generator)[0]
            strengths[name] = strength
        return quantize(image), strengths

    def expected(self, images: Images, strengths: Sequence[Mapping[str, float]]) -> Images:
        """Each image under its own strengths, without steps that are random (noise) or have no gradient (JPEG).

        With a gradient, also without rounding: D of the consistency |D(f(x)) - x|.
        """
        degraded = []
        for image, strength in zip(images, strengths, strict=True):
            x = image[None]
            for name in self.names:
                x = KINDS[name].apply(x, strength[name]) if KINDS[name].is_expected else x
            degraded.append(x)
        return torch.cat(degraded)


def parse_data_options(
    text: str, data: str, integers: Collection[str], flags: Collection[str], form: str
) -> tuple[Degradation | None, dict[str, Any]]:
    """The degradation of ``noise=25,crop=64,flips=no``, None without one, and the other options by name.

    ``form``: the text that errors suggest to write.
    """
    steps, options = [], dict[str, Any]()
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, value = (piece.strip() for piece in part.partition("="))
        try:
            if name in integers:
                options[name] = int(value)
            elif name in flags:
                options[name] = {"true": True, "yes": True, "false": False, "no": False}[
                    value.lower()
                ]
            else:
                steps.append(part)
        except (KeyError, ValueError):
            raise DataError(f"data={data!r}: cannot read {name}={value!r}; write {form}.") from None
    return Degradation.parse(",".join(steps)) if steps else None, options
