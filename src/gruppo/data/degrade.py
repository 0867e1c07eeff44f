"""Degradations of images on the fly: noise, blur, downscaling, low light, JPEG, with addressed random strengths."""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping, Sequence
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


@dataclass(frozen=True)
class DegradationKind:
    """One kind of degradation."""

    unit: str
    low: float
    high: float
    usual: str
    is_whole: bool = False
    """Strengths are integers."""
    is_expected: bool = False
    """Neither random nor without a gradient: part of ``Degradation.expected``."""


KINDS: Mapping[str, DegradationKind] = {
    "noise": DegradationKind("levels of 255, standard deviation", 0, 255, "25"),
    "blur": DegradationKind("pixels, standard deviation", 0, 20, "1.5", is_expected=True),
    "downscale": DegradationKind("times smaller a side", 1, 16, "2", is_whole=True, is_expected=True),
    "dark": DegradationKind("share of the light", 0.01, 1, "0.3", is_expected=True),
    "jpeg": DegradationKind("quality", 1, 100, "30", is_whole=True),
}


def _apply(name: str, image: Images, strength: float, generator: torch.Generator | None = None) -> Images:
    """One image [1, C, H, W] degraded at a strength between ``low`` and ``high`` of its kind."""
    if name == "noise":
        return image + strength / 255 * torch.randn(image.shape, generator=generator)
    if name == "blur":
        return gaussian_blur(image, strength)
    if name == "dark":
        return image * strength
    if name == "downscale":  # the mean of each square, resized to the original size
        (height, width), side = image.shape[-2:], int(strength)
        # padded to whole squares, and cut again: the size stays the same
        padded = pad(image, (0, -width % side, 0, -height % side), mode="replicate")
        resized = interpolate(avg_pool2d(padded, side), size=padded.shape[-2:], mode="bicubic", align_corners=False)
        return resized[..., :height, :width]
    pillow = import_extra("PIL.Image", "images", "degrading images to JPEG")
    levels, file = to_uint8(image[0]).permute(1, 2, 0).numpy(), io.BytesIO()  # [H, W, C]
    picture = pillow.fromarray(levels[..., 0] if levels.shape[-1] == 1 else levels)  # gray, or RGB
    picture.save(file, "JPEG", quality=int(strength))
    return torch.from_numpy(np.array(pillow.open(file)).reshape(levels.shape)).permute(2, 0, 1)[None].float() / 255


@dataclass(frozen=True)
class Degradation:
    """Steps applied in the order in which they are written: ``blur=0.5-2,noise=10-50,jpeg=40``.

    A range draws the strength for each image. The result is what a file of 8 bits would hold, in [0, 1].
    """

    steps: Mapping[str, tuple[float, float]]
    """By kind, in their order: lowest and highest strength."""

    @classmethod
    def parse(cls, text: str) -> Degradation:
        """``kind=strength`` or ``kind=low-high``, separated by commas."""
        steps, known = dict[str, tuple[float, float]](), ", ".join(KINDS)
        for part in filter(None, map(str.strip, text.split(","))):
            name, equals, strength = (piece.strip() for piece in part.partition("="))
            where = f"the degradation {text!r} has"
            if name not in KINDS:
                raise DataError(f"{where} a step {name!r}{nearest(name, KINDS)}. Available: {known}.")
            if name in steps:
                raise DataError(f"{where} {name} twice; write it once.")
            kind = KINDS[name]
            first, dash, last = strength.partition("-")
            try:
                low, high = float(first), float(last if dash else first)
            except ValueError:
                low = high = float("nan")  # fails the range check below
            is_integer = not kind.is_whole or (low.is_integer() and high.is_integer())
            if not equals or not kind.low <= low <= high <= kind.high or not is_integer:
                number = f"{'an integer' if kind.is_whole else 'a number'} from {kind.low:g} to {kind.high:g}"
                raise DataError(f"""{where} {part!r}; {name} is {number} ({kind.unit}), or a range low-high. Write
                    {name}={kind.usual}.""")
            steps[name] = low, high
        if not steps:
            raise DataError(f"the degradation {text!r} has no step; write one such as noise=25, of {known}.")
        return cls(steps)

    def __str__(self) -> str:
        spans = self.steps.items()
        return ",".join(f"{name}={low:g}" + (f"-{high:g}" if high != low else "") for name, (low, high) in spans)

    def __call__(
        self, image: Float[Tensor, "C H W"], generator: torch.Generator
    ) -> tuple[Float[Tensor, "C H W"], dict[str, float]]:
        """The degraded image, and the strength of each step by its name."""
        strengths: dict[str, float] = {}
        for name, (low, high) in self.steps.items():
            # drawn also where low equals high: a range in place of a number keeps the noise of later steps
            uniform = float(torch.rand((), generator=generator, dtype=torch.float64))
            is_whole = KINDS[name].is_whole  # then + 1, so that the highest integer is as likely as the others
            strengths[name] = float(int(low + uniform * (high - low + 1))) if is_whole else low + uniform * (high - low)
            image = _apply(name, image[None], strengths[name], generator)[0]
        return quantize(image), strengths

    def expected(self, images: Images, strengths: Sequence[Mapping[str, float]]) -> Images:
        """Each image under its own strengths, without steps that are random (noise) or have no gradient (JPEG).

        With a gradient, also without rounding: D of the consistency |D(f(x)) - x|.
        """
        degraded = []
        for image, strength in zip(images, strengths, strict=True):
            x = image[None]
            for name in self.steps:
                x = _apply(name, x, strength[name]) if KINDS[name].is_expected else x
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
                options[name] = {"true": True, "yes": True, "false": False, "no": False}[value.lower()]
            else:
                steps.append(part)
        except (KeyError, ValueError):
            raise DataError(f"data={data!r}: cannot read {name}={value!r}; write {form}.") from None
    return Degradation.parse(",".join(steps)) if steps else None, options
