"""A small restoration network, fast on a CPU, and ``Restorer``: a network with its action."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad, pixel_shuffle, pixel_unshuffle, relu

from gruppo.modalities.restoration.actions import Action, Grid, Images
from gruppo.types import GruppoError

PROBE_SIDE = 64
"""Pixels per side of the image that a new network is tried with."""


class RestorationUNet(nn.Module):
    """x + a UNet on its 2 x 2 patches, at a half and a quarter of the resolution: 151 000 weights
    by default.

    Plain residual blocks, without norms or gates.
    """

    def __init__(self, channels: int = 3, *, width: int = 26) -> None:
        super().__init__()
        if width < 1:
            raise GruppoError(f"width={width}; it needs 1 or more")
        self.sizes = {"channels": channels, "width": width}
        wide = 2 * width
        self.conv_in = nn.Conv2d(4 * channels, width, 3, padding=1)
        self.fine = PlainResBlock(width)
        self.down = nn.Conv2d(width, wide, 2, stride=2)
        self.coarse = nn.Sequential(PlainResBlock(wide), PlainResBlock(wide))
        self.up = nn.Conv2d(wide, 4 * width, 1)
        self.merge = nn.Sequential(PlainResBlock(width), PlainResBlock(width))
        self.conv_out = nn.Conv2d(width, 4 * channels, 3, padding=1)
        for parameter in self.conv_out.parameters():  # the identity at first
            nn.init.zeros_(parameter)

    def forward(self, x: Images) -> Images:
        height, width = x.shape[-2:]
        sides = (0, -width % 4, 0, -height % 4)  # sides that are halved twice
        inputs = pad(x, sides, mode="replicate")
        fine = self.fine(self.conv_in(pixel_unshuffle(inputs, 2)))  # [N, width, H/2, W/2]
        coarse = self.coarse(self.down(fine))  # [N, 2 width, H/4, W/4]
        residual = self.conv_out(self.merge(fine + pixel_shuffle(self.up(coarse), 2)))
        return x + pixel_shuffle(residual, 2)[..., :height, :width]


class PlainResBlock(nn.Module):
    """x + two convolutions of x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Float[Tensor, "N C h w"]) -> Float[Tensor, "N C h w"]:
        return x + self.second(relu(self.first(x)))


NETWORKS = {"unet": RestorationUNet}


class Restorer(nn.Module):
    """A network and its action: the module that is trained, copied for references and saved.

    The network computes in its own dtype, and needs to keep the size of its input.
    """

    action: Action

    def __init__(self, network: nn.Module, action: Action) -> None:
        super().__init__()
        self.network = network
        self.action = action

    def call_network(self, x: Images) -> Images:
        parameter = next(self.network.parameters(), torch.empty(0))  # a fixed filter has none
        y = self.network(x.to(parameter.dtype))
        if y.shape != x.shape:
            raise GruppoError(f"""the network {type(self.network).__name__} returned
                {list(y.shape)} for images {list(x.shape)}; it needs to keep channels and size. Pad
                inside it, or upscale before it.""")
        return y

    def forward(self, x: Images) -> tuple[Grid, Images]:
        """Mean of the action, and the network's image; see ``Action``."""
        return self.action(self.call_network, x)

    @torch.no_grad()
    def probe(self, channels: int) -> None:
        """Raise GruppoError for a network that cannot restore images with this number of
        channels."""
        x = torch.full((1, channels, PROBE_SIDE, PROBE_SIDE), 0.5, device=self.action.std.device)
        try:
            mean, base = self(x)
            self.action.render(base, mean)
        except GruppoError:
            raise
        except Exception as error:  # a network of the user's: anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise GruppoError(f"""the network {type(self.network).__name__} cannot restore images
                {list(x.shape)}: {reason:.300}. It needs to take [N, {channels}, H, W] and to return
                the same size. Set channels, or another network.""") from error
