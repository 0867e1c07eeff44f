"""What every action is made of: a noise scale, a head that says the mean, and what it is asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, silu

from gruppo.types import GruppoError

Picture = Float[Tensor, "N C H W"]
Grid = Float[Tensor, "N K h w"]
Trunk = Callable[..., Picture]
"""The network: pictures to pictures; with conditions [N, K] beside them where its action sets them."""


@dataclass(frozen=True, eq=False)
class Meant:
    """What is said of N pictures before anything is drawn."""

    mean: Grid
    base: Picture | None
    """The network's picture, where the action changes it; None where the action decides what the network is asked."""


class Action(Protocol):
    """An ``nn.Module`` with the weights of the mean's head and of the noise scale."""

    scale: Scale

    @property
    def settings(self) -> Mapping[str, Any]:
        """What it was built with, as JSON; with ``kind``."""
        ...

    @property
    def conditions(self) -> int:
        """Numbers that the network is told of each picture."""
        ...

    def shape(self, picture: Sequence[int]) -> tuple[int, int, int]:
        """Of one action, [K, h, w], of a picture [C, H, W]."""
        ...

    def meant(self, trunk: Trunk, x: Picture) -> Meant: ...

    def shown(self, trunk: Trunk, x: Picture, base: Picture | None, action: Grid) -> Picture:
        """The picture of an action, before it is clamped."""
        ...

    def plain(self, trunk: Trunk, x: Picture) -> Picture:
        """The picture without any action."""
        ...

    def __call__(self, trunk: Trunk, x: Picture) -> Meant: ...


class Scale(nn.Module):
    """Standard deviations of K numbers: s0 e^w, w learned or 0. Weight decay pulls a learned one back to s0."""

    def __init__(self, std: float | Sequence[float], count: int, *, learned: bool) -> None:
        super().__init__()
        given = [float(std)] * count if isinstance(std, int | float) else [float(one) for one in std]
        if len(given) != count or not all(0 < one < math.inf for one in given):
            raise GruppoError(
                f"std={std} gives no scale to {count} numbers; it needs one above 0, or one for each. Set 0.1."
            )
        self.start, self.learned = given, bool(learned)
        self.register_buffer("first", torch.tensor(given))
        self.log_ratio = nn.Parameter(torch.zeros(count), requires_grad=bool(learned))

    def forward(self) -> Float[Tensor, "K"]:
        """In float64."""
        first: Tensor = self.get_buffer("first")
        return first.double() * self.log_ratio.double().exp()

    @property
    def settings(self) -> dict[str, Any]:
        return {"std": self.start, "learned": self.learned}


class Head(nn.Module):
    """From pictures to K numbers a cell of a grid: 0 at first. It sees a cell's own detail, averaged."""

    def __init__(self, channels: int, count: int, grid: int, width: int = 24) -> None:
        super().__init__()
        if grid < 1:
            raise GruppoError(f"grid={grid} has no cell; set 1 or more.")
        self.grid = grid
        self.look = nn.Conv2d(channels, width, 3, padding=1)
        self.weigh = nn.Conv2d(width, width, 3, padding=1, stride=2)
        self.mix = nn.Conv2d(width, width, 1)
        self.say = nn.Conv2d(width, count, 1)
        for parameter in self.say.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Picture) -> Grid:
        seen = silu(self.weigh(silu(self.look(x.to(self.look.weight.dtype)))))
        return self.say(silu(self.mix(adaptive_avg_pool2d(seen, self.grid))))


DETAIL = 10.0
"""Detail is a tenth of a picture's range and less: so many times larger, a head sees it as well as the picture."""
