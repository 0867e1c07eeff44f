"""A small class-conditional UNet: 0.3 million weights at its default sizes, a 28 x 28 image in a
millisecond."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import interpolate, pixel_shuffle, pixel_unshuffle, silu

from gruppo.types import GruppoError

GROUPS = 8
"""Channels are normalized in groups. Other rows do not enter, so that a row's output is the same in
any batch."""
TIME_SCALE = 1000.0
"""Frequencies are those of DDPM, whose times span 0 to 1000."""


class DenoisingUNet(nn.Module):
    """Two resolutions below the image's, whose 2 x 2 patches are channels; ``middle`` is the
    bottleneck. Times are those of a flow, 0 to 1."""

    def __init__(
        self, shape: Sequence[int] = (1, 28, 28), classes: int = 10, *, width: int = 32
    ) -> None:
        super().__init__()
        channels, *sides = shape
        if any(side % 2 for side in sides) or width % GROUPS:
            raise GruppoError(
                f"width={width} and images of {sides}: the UNet needs a width that is a multiple "
                f"of {GROUPS}, and images with even sides. Set --diffusion.width 32, or resize "
                "them."
            )
        self.sizes = {"shape": list(shape), "classes": classes, "width": width}
        wide = 2 * width
        self.width = width
        self.label_embedding = nn.Embedding(classes + 1, wide)  # the last one: no class
        self.time_embedding = nn.Sequential(
            nn.Linear(width, wide), nn.SiLU(), nn.Linear(wide, wide)
        )
        self.conv_in = nn.Conv2d(4 * channels, width, 3, padding=1)
        self.fine = ResBlock(width, width, wide)
        self.down = nn.Conv2d(width, wide, 3, stride=2, padding=1)
        self.coarse = ResBlock(wide, wide, wide)
        self.middle = ResBlock(wide, wide, wide)
        self.up = nn.Conv2d(wide, width, 3, padding=1)
        self.merge = ResBlock(wide, width, wide)
        last = nn.Conv2d(width, 4 * channels, 3, padding=1)
        for parameter in last.parameters():  # as in DDPM: a new network predicts 0
            nn.init.zeros_(parameter)
        self.conv_out = nn.Sequential(nn.GroupNorm(GROUPS, width), nn.SiLU(), last)

    def forward(
        self, x: Float[Tensor, "N C H W"], times: Float[Tensor, "N"], labels: Int[Tensor, "N"]
    ) -> Tensor:
        # cos and sin of the times at width / 2 frequencies, from 1 down to 1 / 10000
        half = self.width // 2
        steps = torch.arange(half, device=times.device, dtype=times.dtype)
        frequencies = (-math.log(10000) * steps / half).exp()
        angles = (times * TIME_SCALE)[:, None] * frequencies
        time = self.time_embedding(torch.cat([angles.cos(), angles.sin()], dim=1))
        embedding = silu(time + self.label_embedding(labels))  # [N, S]
        fine = self.fine(self.conv_in(pixel_unshuffle(x, 2)), embedding)  # [N, width, H/2, W/2]
        coarse = self.coarse(self.down(fine), embedding)  # [N, 2 width, H/4, W/4]
        upsampled = self.up(interpolate(self.middle(coarse, embedding), size=fine.shape[-2:]))
        merged = self.merge(torch.cat([upsampled, fine], dim=1), embedding)
        return pixel_shuffle(self.conv_out(merged), 2)


class ResBlock(nn.Module):
    """Residual block of two convolutions; the embedding of time and class scales and shifts between
    them."""

    def __init__(self, in_channels: int, out_channels: int, embedding: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.scale_shift = nn.Linear(embedding, 2 * out_channels)
        self.norm2 = nn.GroupNorm(GROUPS, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.skip: nn.Module = nn.Identity()
        if in_channels != out_channels:
            self.skip = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x: Float[Tensor, "N C h w"], embedding: Float[Tensor, "N S"]) -> Tensor:
        scale, shift = self.scale_shift(embedding)[..., None, None].chunk(2, dim=1)
        hidden = self.norm2(self.conv1(silu(self.norm1(x)))) * (1 + scale) + shift
        return self.skip(x) + self.conv2(silu(hidden))
