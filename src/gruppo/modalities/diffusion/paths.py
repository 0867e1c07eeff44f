"""Levels of noise: where a sampler's steps go, and what the network is told of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from gruppo.types import GruppoError


class Path(Protocol):
    """From noise to data: x = alpha x0 + sigma e at each time. Times are what the network is told."""

    @property
    def is_flow(self) -> bool: ...

    def times(self, steps: int) -> Float[Tensor, "steps+1"]:
        """Of a sampler, from pure noise to clean data; float64."""
        ...

    def level(self, times: Float[Tensor, "b"]) -> tuple[Float[Tensor, "b"], Float[Tensor, "b"]]:
        """alpha and sigma, float64."""
        ...

    def spread(self, uniforms: Float[Tensor, "b"]) -> Float[Tensor, "b"]:
        """Times to train at, of uniforms in [0, 1)."""
        ...


@dataclass(frozen=True)
class Flow:
    """x = (1 - t) x0 + t e, and the network is told t in (0, 1].

    A sampler's times are even, then shifted to shift t / (1 + (shift - 1) t): above 1, more steps where it is noisy
    (Esser et al. 2024, arXiv 2403.03206, eq. 23).
    """

    shift: float = 1.0
    is_flow = True

    def __post_init__(self) -> None:
        if not 0 < self.shift < math.inf:
            raise GruppoError(f"shift={self.shift} is out of range; it needs to be above 0. Use 1 for even times.")

    def times(self, steps: int) -> Tensor:
        times = self._shifted(torch.linspace(1, 0, steps + 1, dtype=torch.float64))
        times[0] = 1  # to the bit: what is left of alpha by rounding would be divided by
        return times

    def level(self, times: Tensor) -> tuple[Tensor, Tensor]:
        return 1 - times, times

    def spread(self, uniforms: Tensor) -> Tensor:
        return self._shifted(1 - uniforms.double())

    def _shifted(self, t: Tensor) -> Tensor:
        return self.shift * t / (1 + (self.shift - 1) * t)


@dataclass(frozen=True)
class Diffusion:
    """x = sqrt(a) x0 + sqrt(1 - a) e, a the product of 1 - beta up to a time 0 .. length - 1; clean data are at -1.

    ``linear``: betas of Ho et al. 2020 (arXiv 2006.11239). ``scaled_linear``: of Stable Diffusion, linear in sqrt(beta)
    from 0.00085 to 0.012. ``cosine``: Nichol & Dhariwal 2021 (arXiv 2102.09672), eq. 17. The steps of a sampler are
    even and begin at the noisiest time ("trailing", Lin et al. 2023, arXiv 2305.08891).
    """

    betas: Literal["linear", "scaled_linear", "cosine"] = "linear"
    length: int = 1000
    is_flow = False

    def __post_init__(self) -> None:
        if self.betas not in BETAS:
            raise GruppoError(f"betas={self.betas!r} is not one of {', '.join(map(repr, BETAS))}. Use 'linear'.")
        if self.length < 2:
            raise GruppoError(f"length={self.length} is no range of times; it needs at least 2. Use 1000.")

    def times(self, steps: int) -> Tensor:
        if steps > self.length:
            raise GruppoError(
                f"{steps} steps are more than the {self.length} times that the network knows. Set fewer "
                "--diffusion.steps or --diffusion.eval-steps."
            )
        return (self.length * torch.linspace(1, 0, steps + 1, dtype=torch.float64)).round() - 1

    def level(self, times: Tensor) -> tuple[Tensor, Tensor]:
        kept = self._kept[times.long() + 1]
        return kept.sqrt(), (1 - kept).sqrt()

    def spread(self, uniforms: Tensor) -> Tensor:
        return (uniforms.double() * self.length).floor()

    @cached_property
    def _kept(self) -> Float[Tensor, "length+1"]:
        """a of times -1, 0, 1, ..."""
        kept = (1 - BETAS[self.betas](self.length)).cumprod(0)
        return torch.cat([torch.ones(1, dtype=torch.float64), kept])


def _cosine(length: int) -> Float[Tensor, "length"]:
    kept = ((torch.linspace(0, 1, length + 1, dtype=torch.float64) + 0.008) / 1.008 * math.pi / 2).cos().square()
    return (1 - kept[1:] / kept[:-1]).clamp(max=0.999)


BETAS = {
    "linear": lambda length: torch.linspace(1e-4, 0.02, length, dtype=torch.float64),
    "scaled_linear": lambda length: torch.linspace(0.00085**0.5, 0.012**0.5, length, dtype=torch.float64).square(),
    "cosine": _cosine,
}
