"""A small class-conditional UNet: 0.3 million weights at its usual sizes, a picture of 28 x 28 in a millisecond."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import interpolate, pixel_shuffle, pixel_unshuffle, silu

from gruppo.types import GruppoError

GROUPS = 8
"""Of channels that are normalised together. Nothing looks at other rows."""


class UNet(nn.Module):
    """Two resolutions below that of the picture, whose 2 x 2 squares are its channels; ``middle`` has the features.

    ``time_scale`` times a time is about 0 to 1000: 1000 for a flow, 1 for a diffusion of 1000 times.
    """

    def __init__(
        self,
        shape: Sequence[int] = (1, 28, 28),
        classes: int = 10,
        *,
        width: int = 32,
        time_scale: float = 1000.0,
    ) -> None:
        super().__init__()
        channels, height, pixels = shape
        if height % 2 or pixels % 2:
            raise GruppoError(
                f"a picture of {height} x {pixels} has no 2 x 2 squares; both sides need to be even. Crop or pad it."
            )
        if width % GROUPS:
            raise GruppoError(f"width={width} is no multiple of {GROUPS}. Use 32.")
        self.sizes = {"shape": list(shape), "classes": classes, "width": width, "time_scale": time_scale}
        wide, said = 2 * width, 2 * width
        self.width, self.time_scale = width, time_scale
        self.labels = nn.Embedding(classes + 1, said)  # the last one: no class
        self.times = nn.Sequential(nn.Linear(width, said), nn.SiLU(), nn.Linear(said, said))
        self.enter = nn.Conv2d(4 * channels, width, 3, padding=1)
        self.fine = Block(width, width, said)
        self.down = nn.Conv2d(width, wide, 3, stride=2, padding=1)
        self.coarse = Block(wide, wide, said)
        self.middle = Block(wide, wide, said)
        self.up = nn.Conv2d(wide, width, 3, padding=1)
        self.merge = Block(2 * width, width, said)
        last = nn.Conv2d(width, 4 * channels, 3, padding=1)
        for parameter in last.parameters():
            nn.init.zeros_(parameter)
        self.leave = nn.Sequential(nn.GroupNorm(GROUPS, width), nn.SiLU(), last)

    def forward(self, x: Float[Tensor, "N C H W"], times: Float[Tensor, "N"], labels: Int[Tensor, "N"]) -> Tensor:
        told = silu(self.times(waves(times * self.time_scale, self.width)) + self.labels(labels))
        fine = self.fine(self.enter(pixel_unshuffle(x, 2)), told)  # [N, width, H/2, W/2]
        coarse = self.middle(self.coarse(self.down(fine), told), told)  # [N, 2 width, H/4, W/4]
        grown = self.up(interpolate(coarse, size=fine.shape[-2:]))
        return pixel_shuffle(self.leave(self.merge(torch.cat([grown, fine], dim=1), told)), 2)


class Block(nn.Module):
    """Two convolutions beside what goes in; between them, what is known of time and class scales and shifts."""

    def __init__(self, inside: int, outside: int, said: int) -> None:
        super().__init__()
        self.norm, self.first = nn.GroupNorm(GROUPS, inside), nn.Conv2d(inside, outside, 3, padding=1)
        self.told = nn.Linear(said, 2 * outside)
        self.again, self.second = nn.GroupNorm(GROUPS, outside), nn.Conv2d(outside, outside, 3, padding=1)
        self.past = nn.Identity() if inside == outside else nn.Conv2d(inside, outside, 1)

    def forward(self, x: Float[Tensor, "N C h w"], told: Float[Tensor, "N S"]) -> Tensor:
        scale, shift = self.told(told)[..., None, None].chunk(2, dim=1)
        hidden = self.again(self.first(silu(self.norm(x)))) * (1 + scale) + shift
        return self.past(x) + self.second(silu(hidden))


def waves(times: Float[Tensor, "N"], count: int) -> Float[Tensor, "N count"]:
    """cos and sin of times at count / 2 frequencies, from 1 down to 1 / 10000."""
    half = count // 2
    frequencies = (-math.log(10000) * torch.arange(half, device=times.device, dtype=times.dtype) / half).exp()
    angles = times[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1)
