"""What a restoration policy draws: pixels, a coarse residual, or gains of detail; ``controls`` has one more.

Each is a normal N(m(x), s^2) over a grid of K numbers a cell, and a way to show a picture made of what was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gruppo.core.filters import bands, spread_to
from gruppo.modalities.restoration.heads import DETAIL, Grid, Head, Meant, Picture, Scale, Trunk
from gruppo.types import GruppoError


class PixelNoise(nn.Module):
    """N(f(x), s^2) at each pixel: the action is the picture. ``std`` is in units of the range 0 to 1, of each channel.

    White noise of 0.01 costs 0.41 dB at 30 dB in every sample, while the samples of a group differ by 0.011 dB: of few
    rewards is there much to learn so.
    """

    conditions = 0

    def __init__(self, channels: int = 3, *, std: float | Sequence[float] = 0.01, learned: bool = False) -> None:
        super().__init__()
        self.channels, self.scale = channels, Scale(std, channels, learned=learned)

    @property
    def settings(self) -> dict[str, Any]:
        return {"kind": "pixels", "channels": self.channels, **self.scale.settings}

    def shape(self, picture: Sequence[int]) -> tuple[int, int, int]:
        channels, height, width = picture
        return channels, height, width

    def meant(self, trunk: Trunk, x: Picture) -> Meant:
        base = trunk(x)
        return Meant(base, base)

    def forward(self, trunk: Trunk, x: Picture) -> Meant:
        return self.meant(trunk, x)

    def shown(self, trunk: Trunk, x: Picture, base: Picture | None, action: Grid) -> Picture:
        return action

    def plain(self, trunk: Trunk, x: Picture) -> Picture:
        return trunk(x)


class LowResolution(nn.Module):
    """z ~ N(m(x), s^2) on a grid x grid of C numbers, y = f(x) + Up(z).

    m reads x and f(x), and is 0 at first. ``smooth``: Up is bilinear; without it each cell is one flat square, and
    changes nothing outside. A policy gradient reaches f through what m reads of it alone; ``detached`` stops that.
    """

    conditions = 0

    def __init__(
        self,
        channels: int = 3,
        *,
        grid: int = 8,
        std: float | Sequence[float] = 0.02,
        learned: bool = False,
        smooth: bool = True,
        detached: bool = True,
    ) -> None:
        super().__init__()
        self.channels, self.grid, self.smooth, self.detached = channels, grid, smooth, detached
        self.scale, self.head = Scale(std, channels, learned=learned), Head(2 * channels, channels, grid)

    @property
    def settings(self) -> dict[str, Any]:
        own = {"grid": self.grid, "smooth": self.smooth, "detached": self.detached}
        return {"kind": "low_resolution", "channels": self.channels, **own, **self.scale.settings}

    def shape(self, picture: Sequence[int]) -> tuple[int, int, int]:
        return self.channels, self.grid, self.grid

    def meant(self, trunk: Trunk, x: Picture) -> Meant:
        base = trunk(x)
        seen = base.detach() if self.detached else base
        return Meant(self.head(torch.cat([x.to(base), seen], dim=1)), base)

    def forward(self, trunk: Trunk, x: Picture) -> Meant:
        return self.meant(trunk, x)

    def shown(self, trunk: Trunk, x: Picture, base: Picture | None, action: Grid) -> Picture:
        assert base is not None
        return base + spread_to(action.to(base), *base.shape[-2:], smooth=self.smooth)

    def plain(self, trunk: Trunk, x: Picture) -> Picture:
        return trunk(x)


class BandGains(nn.Module):
    """Gains of bands of detail on a coarse grid: y = f(x) + sum_k Up(g_k) band_k(f(x)), g ~ N(m(x), s^2).

    Bands are fine and mid detail, each as luma and as chroma (one channel: two bands); a gain of -1 takes a band away,
    0 leaves it. Four numbers a cell in place of thousands of pixels: what is drawn is seen in the picture, and costs
    0.03 dB at a std of 0.15. m reads f(x) and is 0 at first; it needs 10 to 50 times the rate of a trained network.
    """

    conditions = 0

    def __init__(
        self,
        channels: int = 3,
        *,
        grid: int = 8,
        std: float | Sequence[float] = 0.15,
        learned: bool = False,
        smooth: bool = True,
        detached: bool = True,
    ) -> None:
        super().__init__()
        if channels not in (1, 3):
            raise GruppoError(f"channels={channels}: bands are of 1 channel (grey) or 3 (colour). Set one of them.")
        count = 2 if channels == 1 else 4
        self.channels, self.grid, self.smooth, self.detached = channels, grid, smooth, detached
        self.scale, self.head = Scale(std, count, learned=learned), Head(channels * (1 + count), count, grid)
        self.count = count

    @property
    def settings(self) -> dict[str, Any]:
        own = {"grid": self.grid, "smooth": self.smooth, "detached": self.detached}
        return {"kind": "band_gains", "channels": self.channels, **own, **self.scale.settings}

    def shape(self, picture: Sequence[int]) -> tuple[int, int, int]:
        return self.count, self.grid, self.grid

    def meant(self, trunk: Trunk, x: Picture) -> Meant:
        base = trunk(x)
        seen = base.detach() if self.detached else base
        details = bands(seen).flatten(1, 2) * DETAIL  # [N, K C, H, W]
        return Meant(self.head(torch.cat([seen, details], dim=1)), base)

    def forward(self, trunk: Trunk, x: Picture) -> Meant:
        return self.meant(trunk, x)

    def shown(self, trunk: Trunk, x: Picture, base: Picture | None, action: Grid) -> Picture:
        assert base is not None
        gains = spread_to(action.to(base), *base.shape[-2:], smooth=self.smooth)[:, :, None]  # [N, K, 1, H, W]
        return base + (gains * bands(base)).sum(dim=1)

    def plain(self, trunk: Trunk, x: Picture) -> Picture:
        return trunk(x)
