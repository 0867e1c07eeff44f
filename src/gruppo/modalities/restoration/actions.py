"""What a restoration policy samples: pixels, a coarse residual or gains of detail.

Each action is a normal N(m(x), s^2) over a grid of K numbers per cell, and a way to render an image
from a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, interpolate, silu

from gruppo.core.images import detail_bands
from gruppo.loading import did_you_mean, split_options, typed_options
from gruppo.types import GruppoError

Images = Float[Tensor, "N C H W"]
Grid = Float[Tensor, "N K h w"]
NetworkCall = Callable[[Images], Images]
"""The network: from images to images."""
DETAIL_SCALE = 10.0
"""Detail is a tenth of an image's range or less; scaled by this, a head sees it as well as the
image."""


class MeanHead(nn.Module):
    """From images to K numbers per cell of a grid, initially 0. It averages detail over each
    cell."""

    def __init__(self, channels: int, count: int, grid: int, width: int = 24) -> None:
        super().__init__()
        self.grid = grid
        self.conv_in = nn.Conv2d(channels, width, 3, padding=1)
        self.down = nn.Conv2d(width, width, 3, padding=1, stride=2)
        self.mid = nn.Conv2d(width, width, 1)
        self.conv_out = nn.Conv2d(width, count, 1)
        for parameter in self.conv_out.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Images) -> Grid:
        x = x.to(self.conv_in.weight.dtype)
        hidden = silu(self.down(silu(self.conv_in(x))))  # [N, width, H/2, W/2]
        return self.conv_out(silu(self.mid(adaptive_avg_pool2d(hidden, self.grid))))


class Action(nn.Module):
    """Base class. Subclasses define two functions of the network:

    - ``forward(network, x)``: the mean of the action, and the network's image f(x).
    - ``render(base, action)``: the image of a sample, before clamping; ``base`` is f(x).
    """

    kind: ClassVar[str]
    grid: int | None = None
    """Cells per side; None if the action has the size of the image."""
    render: Any
    std: Tensor
    """Of each number, [K, 1, 1]."""

    def __init__(self, channels: int, count: int, std: float, **options: Any) -> None:
        super().__init__()
        self.channels = channels
        self.count = count
        if std <= 0:
            raise GruppoError(f"std={std:g} of an action; it needs to be above 0. Set 0.1.")
        self.register_buffer("std", torch.full((count, 1, 1), std), persistent=False)
        self.settings = {"kind": self.kind, "channels": channels, "std": std, **options}
        """Arguments of the constructor, as JSON."""


class PixelNoise(Action):
    """N(f(x), s^2) at each pixel: the action is the image. ``std`` is in units of the range 0 to 1.

    White noise of 0.01 costs 0.41 dB at 30 dB in every sample, while the samples of a group differ
    by 0.011 dB: few rewards can be learned from this action.
    """

    kind = "pixels"

    def __init__(self, channels: int = 3, *, std: float = 0.01) -> None:
        super().__init__(channels, channels, std)

    def forward(self, network: NetworkCall, x: Images) -> tuple[Grid, Images]:
        base = network(x)
        return base, base

    def render(self, base: Images, action: Grid) -> Images:
        return action


class GridAction(Action):
    """An action on a grid x grid of cells that changes the network's image f(x), bilinear between
    the centers of the cells.

    The mean reads f(x) and is initially 0. A policy gradient reaches f only through the mean;
    ``detached`` stops that.
    """

    default_std: ClassVar[float]
    bands: ClassVar[Mapping[int, int]] = {}
    """Bands of detail by number of channels; empty for an action that is added to the image."""

    def __init__(
        self,
        channels: int = 3,
        *,
        grid: int = 8,
        std: float | None = None,
        detached: bool = True,
    ) -> None:
        if grid < 1 or (self.bands and channels not in self.bands):
            raise GruppoError(f"""grid={grid} of {channels} channels: it needs 1 cell a side or
                more, and bands of detail need 1 channel (gray) or 3 (color).""")
        count, std = self.bands.get(channels, channels), std or self.default_std
        super().__init__(channels, count, std, grid=grid, detached=detached)
        self.grid = grid
        self.detached = detached
        self.head = MeanHead(channels * (1 + self.bands.get(channels, 1)), count, grid)

    def forward(self, network: NetworkCall, x: Images) -> tuple[Grid, Images]:
        base = network(x)
        seen = base.detach() if self.detached else base
        features = [x.to(base), seen]
        if self.bands:
            features = [seen, detail_bands(seen).flatten(1, 2) * DETAIL_SCALE]
        return self.head(torch.cat(features, dim=1)), base

    def render(self, base: Images, action: Grid) -> Images:
        numbers = interpolate(action.to(base), base.shape[-2:], mode="bilinear")  # [N, K, H, W]
        if self.bands:
            numbers = (numbers[:, :, None] * detail_bands(base)).sum(dim=1)
        return base + numbers


class LowResolution(GridAction):
    """A coarse residual of C numbers per cell: z ~ N(m(x, f(x)), s^2), y = f(x) + Up(z)."""

    kind, default_std = "low_resolution", 0.02


class BandGains(GridAction):
    """Gains of bands of detail: y = f(x) + sum_k Up(g_k) band_k(f(x)), g ~ N(m(f(x)), s^2).

    Bands are fine and medium detail, each as luma and as chroma (one channel: two bands); a gain of
    -1 removes a band, 0 keeps it. Four numbers per cell instead of thousands of pixels: a sample is
    visible in the image, and costs 0.03 dB at a std of 0.15. The mean needs 10 to 50 times the
    learning rate of a trained network.
    """

    kind, default_std = "band_gains", 0.15
    bands: ClassVar[Mapping[int, int]] = {1: 2, 3: 4}


# --- by name --------------------------------------------------------------------------------------

ACTIONS: dict[str, Callable[..., Action]] = {
    one.kind: one for one in (PixelNoise, LowResolution, BandGains)
}
EXAMPLES = "pixels:std=0.01, low_resolution:grid=8 or band_gains:grid=8,std=0.15"


def open_action(text: str, channels: int = 3) -> Action:
    """Build the action of ``band_gains:grid=8,std=0.15``."""
    kind, _, rest = text.partition(":")
    if kind not in ACTIONS:
        hint = did_you_mean(kind, ACTIONS)
        raise GruppoError(f"there is no action {kind!r}; write {EXAMPLES}.{hint}")
    typed = typed_options(ACTIONS[kind], split_options(rest), EXAMPLES)
    return ACTIONS[kind](channels=channels, **typed)
