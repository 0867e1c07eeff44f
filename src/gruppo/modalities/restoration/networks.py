"""Small networks that restore images, quick on a CPU. Of any size, without statistics of a batch, identity at first."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad, pixel_shuffle, pixel_unshuffle, relu

from gruppo.types import GruppoError


class DnCNN(nn.Module):
    """x + a stack of 3 x 3 convolutions at full resolution: 39 000 weights at its usual sizes.

    Zhang et al. 2017 (arXiv 1608.03981) with fewer, narrower layers and without batch normalisation, whose moving
    statistics would be another function in training.
    """

    def __init__(self, channels: int = 3, *, width: int = 32, depth: int = 6, conditions: int = 0) -> None:
        super().__init__()
        _check(channels, width, conditions)
        if depth < 2:
            raise GruppoError(f"depth={depth} leaves no layer between the first and the last; use 2 or more.")
        self.sizes = {"channels": channels, "width": width, "depth": depth, "conditions": conditions}
        layers: list[nn.Module] = [nn.Conv2d(channels + conditions, width, 3, padding=1), nn.ReLU()]
        for _ in range(depth - 2):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
        self.body = nn.Sequential(*layers, _silent(nn.Conv2d(width, channels, 3, padding=1)))

    def forward(
        self, x: Float[Tensor, "N C H W"], conditions: Float[Tensor, "N K"] | None = None
    ) -> Float[Tensor, "N C H W"]:
        return x + self.body(_beside(x, conditions, self.sizes["conditions"]))


class UNet(nn.Module):
    """x + a UNet on its 2 x 2 squares, at a half and a quarter of the resolution: 151 000 weights at its usual sizes.

    Plain residual blocks, without norms or gates.
    """

    def __init__(self, channels: int = 3, *, width: int = 26, conditions: int = 0) -> None:
        super().__init__()
        _check(channels, width, conditions)
        self.sizes = {"channels": channels, "width": width, "conditions": conditions}
        wide = 2 * width
        self.enter = nn.Conv2d(4 * (channels + conditions), width, 3, padding=1)
        self.fine = Block(width)
        self.down = nn.Conv2d(width, wide, 2, stride=2)
        self.coarse = nn.Sequential(Block(wide), Block(wide))
        self.up = nn.Conv2d(wide, 4 * width, 1)
        self.merge = nn.Sequential(Block(width), Block(width))
        self.leave = _silent(nn.Conv2d(width, 4 * channels, 3, padding=1))

    def forward(
        self, x: Float[Tensor, "N C H W"], conditions: Float[Tensor, "N K"] | None = None
    ) -> Float[Tensor, "N C H W"]:
        height, width = x.shape[-2:]
        asked = _beside(x, conditions, self.sizes["conditions"])
        asked = pad(asked, (0, -width % 4, 0, -height % 4), mode="replicate")
        fine = self.fine(self.enter(pixel_unshuffle(asked, 2)))  # [N, width, H/2, W/2]
        coarse = self.coarse(self.down(fine))  # [N, 2 width, H/4, W/4]
        said = self.leave(self.merge(fine + pixel_shuffle(self.up(coarse), 2)))
        return x + pixel_shuffle(said, 2)[..., :height, :width]


class Block(nn.Module):
    """x + two convolutions of x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Float[Tensor, "N C h w"]) -> Float[Tensor, "N C h w"]:
        return x + self.second(relu(self.first(x)))


def _silent(layer: nn.Conv2d) -> nn.Conv2d:
    """A layer that says 0 at first."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


def _beside(x: Tensor, conditions: Tensor | None, count: int) -> Float[Tensor, "N C+K H W"]:
    """Each condition as one more channel, the same at every pixel (Zhang et al. 2018, arXiv 1710.04026)."""
    if not count:
        return x
    if conditions is None or conditions.shape != (len(x), count):
        got = "none" if conditions is None else f"{list(conditions.shape)}"
        raise GruppoError(
            f"the network reads {count} conditions of each picture and got {got} for {len(x)} pictures. Give "
            f"[{len(x)}, {count}], or use the action 'controls'."
        )
    maps = conditions.to(x)[:, :, None, None].expand(-1, -1, *x.shape[-2:])
    return torch.cat([x, maps], dim=1)


def _check(channels: int, width: int, conditions: int) -> None:
    numbers: dict[str, tuple[Any, int]] = {
        "channels": (channels, 1),
        "width": (width, 1),
        "conditions": (conditions, 0),
    }
    for name, (value, least) in numbers.items():
        if not isinstance(value, int) or value < least:
            raise GruppoError(f"{name}={value!r} is out of range; it needs a whole number of at least {least}.")


NETWORKS: dict[str, type[DnCNN] | type[UNet]] = {"dncnn": DnCNN, "unet": UNet}
