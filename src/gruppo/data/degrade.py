"""What spoils an image, on the fly: noise, blur, downscaling, low light, JPEG; its strengths drawn by address."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import interpolate, pad

from gruppo.core.filters import gaussian_blur, shrunk
from gruppo.core.images import as_saved, to_bytes
from gruppo.data.errors import nearest
from gruppo.loading import import_extra
from gruppo.types import DataError

Image = Float[Tensor, "C H W"]


@dataclass(frozen=True)
class Kind:
    """One way to spoil an image."""

    unit: str
    low: float
    high: float
    """Strengths lie between ``low`` and ``high``."""
    usual: str
    spoil: Callable[[Tensor, float, torch.Generator], Tensor]
    """Of an image [C, H, W] and a strength."""
    is_whole: bool = False
    """Strengths are whole numbers."""
    expected: Callable[[Tensor, float], Tensor] | None = None
    """Of images [B, C, H, W], without chance and with a gradient; None: they stay as they are."""


def _noisy(image: Image, levels: float, generator: torch.Generator) -> Image:
    return image + levels / 255 * torch.randn(image.shape, generator=generator)


def _blurred(images: Float[Tensor, "B C H W"], std: float) -> Float[Tensor, "B C H W"]:
    return gaussian_blur(images, std)


def _coarse(images: Float[Tensor, "B C H W"], factor: float) -> Float[Tensor, "B C H W"]:
    """The mean of each square, and back to the old size by bicubic interpolation."""
    height, width = images.shape[-2:]
    side = int(factor)
    whole = pad(images, (0, -width % side, 0, -height % side), mode="replicate")
    back = interpolate(shrunk(whole, side), size=whole.shape[-2:], mode="bicubic", align_corners=False)
    return back[..., :height, :width]


def _dark(images: Float[Tensor, "B C H W"], share: float) -> Float[Tensor, "B C H W"]:
    return images * share


def _jpeg(image: Image, quality: float, generator: torch.Generator) -> Image:
    pillow = import_extra("PIL.Image", "images", "degrading images to JPEG")
    levels, file = to_bytes(image).permute(1, 2, 0).numpy(), io.BytesIO()
    grey = levels.shape[-1] == 1
    pillow.fromarray(levels[..., 0] if grey else levels, "L" if grey else "RGB").save(
        file, "JPEG", quality=int(quality)
    )
    back = np.array(pillow.open(file)).reshape(levels.shape)
    return torch.from_numpy(back).permute(2, 0, 1).float() / 255


def _certain(expected: Callable[[Tensor, float], Tensor]) -> Callable[[Tensor, float, torch.Generator], Tensor]:
    """What takes no chance, of one image."""
    return lambda image, strength, generator: expected(image[None], strength)[0]


KINDS: Mapping[str, Kind] = {
    "noise": Kind("levels of 255, standard deviation", 0, 255, "25", _noisy),
    "blur": Kind("pixels, standard deviation", 0, 20, "1.5", _certain(_blurred), expected=_blurred),
    "downscale": Kind("times smaller a side", 1, 16, "2", _certain(_coarse), is_whole=True, expected=_coarse),
    "dark": Kind("share of the light", 0.01, 1, "0.3", _certain(_dark), expected=_dark),
    "jpeg": Kind("quality", 1, 100, "30", _jpeg, is_whole=True),
}


@dataclass(frozen=True)
class Step:
    kind: str
    low: float
    high: float

    def strength(self, generator: torch.Generator) -> float:
        """Uniform from low to high, both of them among whole numbers."""
        uniform = float(torch.rand((), generator=generator, dtype=torch.float64))
        if KINDS[self.kind].is_whole:
            return float(int(self.low + uniform * (self.high - self.low + 1)))
        return self.low + uniform * (self.high - self.low)


@dataclass(frozen=True)
class Degradation:
    """Steps one after the other, in the order in which they are written: ``blur=0.5-2,noise=10-50,jpeg=40``.

    A range draws each image's own strength. What comes out is as a file of 8 bits would hold it, in [0, 1].
    """

    steps: tuple[Step, ...]

    @classmethod
    def parse(cls, text: str) -> Degradation:
        """``kind=strength`` or ``kind=low-high``, between commas."""
        steps = tuple(_step(part.strip(), text) for part in text.split(",") if part.strip())
        if not steps:
            raise DataError(f"the degradation {text!r} has no step; write one such as noise=25, of {_known()}.")
        names = [step.kind for step in steps]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise DataError(f"the degradation {text!r} has {twice} twice; write it once.")
        return cls(steps)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(step.kind for step in self.steps)

    def __str__(self) -> str:
        return ",".join(f"{s.kind}={s.low:g}" + (f"-{s.high:g}" if s.high != s.low else "") for s in self.steps)

    def __call__(self, image: Image, generator: torch.Generator) -> tuple[Image, dict[str, float]]:
        """The spoiled image, and each step's strength by its name."""
        strengths: dict[str, float] = {}
        for step in self.steps:
            strength = strengths[step.kind] = step.strength(generator)
            image = KINDS[step.kind].spoil(image, strength, generator)
        return as_saved(image), strengths

    def expected(
        self, images: Float[Tensor, "B C H W"], strengths: Sequence[Mapping[str, float]]
    ) -> Float[Tensor, "B C H W"]:
        """Each image under its own strengths without what hangs on chance (noise) or has no gradient (JPEG, rounding).

        With a gradient: D of the consistency |D(f(x)) - x|.
        """
        return torch.cat([self._expected(image[None], own) for image, own in zip(images, strengths, strict=True)])

    def _expected(self, image: Float[Tensor, "1 C H W"], strengths: Mapping[str, float]) -> Float[Tensor, "1 C H W"]:
        for step in self.steps:
            expected = KINDS[step.kind].expected
            image = image if expected is None else expected(image, strengths[step.kind])
        return image


def _step(part: str, text: str) -> Step:
    name, equals, said = part.partition("=")
    name = name.strip()
    if name not in KINDS:
        raise DataError(f"the degradation {text!r} has a step {name!r}{nearest(name, KINDS)}. There are {_known()}.")
    kind = KINDS[name]
    first, dash, last = said.strip().partition("-")
    try:
        low = float(first)
        high = float(last) if dash else low
    except ValueError:
        low = high = float("nan")
    is_whole = not kind.is_whole or (low.is_integer() and high.is_integer())
    if not equals or not kind.low <= low <= high <= kind.high or not is_whole:
        whole = "a whole number" if kind.is_whole else "a number"
        raise DataError(
            f"the degradation {text!r} has {part!r}; {name} is {whole} from {kind.low:g} to {kind.high:g} "
            f"({kind.unit}), or a range low-high. Write {name}={kind.usual}."
        )
    return Step(name, low, high)


def _known() -> str:
    return ", ".join(KINDS)
