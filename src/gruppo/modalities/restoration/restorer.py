"""A network and its action in one module: what is trained, copied for references and saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gruppo.modalities.restoration.heads import Action, Meant
from gruppo.types import GruppoError

Picture = Float[Tensor, "N C H W"]
PROBE = 64
"""Pixels a side of the picture that a new network is tried with."""


class Restorer(nn.Module):
    """``network`` and ``action`` with their weights. What the network returns needs the size of what went in.

    The network computes in its own dtype.
    """

    def __init__(self, network: nn.Module, action: Any) -> None:
        super().__init__()
        self.network, self.action = network, action

    @property
    def acts(self) -> Action:
        return self.action

    def trunk(self, x: Picture, *conditions: Tensor) -> Picture:
        dtype = next((p.dtype for p in self.network.parameters()), torch.float32)
        y = self.network(x.to(dtype), *(one.to(dtype) for one in conditions))
        if not isinstance(y, Tensor) or y.shape != x.shape:
            got = f"{list(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
            raise GruppoError(
                f"the network {type(self.network).__name__} made {got} of pictures {list(x.shape)}; it needs to keep "
                "channels and size. Pad inside of it, or put an upscaling before it."
            )
        return y

    def forward(self, x: Picture) -> Meant:
        return self.acts.meant(self.trunk, x)

    def shown(self, x: Picture, base: Picture | None, drawn: Tensor) -> Picture:
        return self.acts.shown(self.trunk, x, base, drawn)

    def plain(self, x: Picture) -> Picture:
        """The network's picture without any action."""
        return self.acts.plain(self.trunk, x)

    def told(self, x: Picture, values: Float[Tensor, "N K"]) -> Picture:
        """The network's picture, told these values of its controls."""
        action: Any = self.action
        return action.told(self.trunk, x, values)

    def output(self, x: Picture, meant: Meant | None = None) -> Picture:
        """The deterministic picture: that of the mean."""
        meant = self(x) if meant is None else meant
        return self.shown(x, meant.base, meant.mean)

    @torch.no_grad()
    def probe(self, channels: int) -> None:
        """Refuse a network that cannot restore such pictures, before anything is drawn."""
        parameter = next(self.parameters())
        x = torch.full((1, channels, PROBE, PROBE), 0.5, device=parameter.device)
        try:
            y = self.output(x)
        except GruppoError:
            raise
        except Exception as problem:
            reason = " ".join(str(problem).split()) or type(problem).__name__
            raise GruppoError(
                f"the network {type(self.network).__name__} cannot restore pictures {list(x.shape)}: {reason:.300}. It "
                f"needs to take {_signature(self.acts, channels)} and to return the same size. Set channels, or "
                "another network."
            ) from problem
        if not bool(y.isfinite().all()):
            raise GruppoError(
                f"the network {type(self.network).__name__} made numbers of a grey picture that are not finite; its "
                "weights are not usable. Load others."
            )


def _signature(action: Action, channels: int) -> str:
    pictures = f"[N, {channels}, H, W]"
    return f"{pictures} and conditions [N, {action.conditions}]" if action.conditions else pictures


def refusal(picture: Any, channels: int, what: str) -> str | None:
    """Why something is no picture to read, with what to do; or None. ``what``: "input" or "target"."""
    if picture is None:
        return f"has no {what}; it needs a picture [{channels}, H, W] in [0, 1]. Give it one."
    if not isinstance(picture, Tensor) or picture.ndim != 3 or not picture.is_floating_point():
        got = f"{list(picture.shape)} of {picture.dtype}" if isinstance(picture, Tensor) else type(picture).__name__
        return f"has an {what} that is {got}; it needs floats [{channels}, H, W]. Convert it.".replace("an t", "a t")
    if len(picture) != channels:
        return f"has {what} of {len(picture)} channels, and the network is for {channels}. Set channels, or convert it."
    low, high = (float(bound) for bound in torch.aminmax(picture))
    if not (low >= 0 and high <= 1):  # of NaN too
        return f"has {what} with numbers from {low:g} to {high:g}; they need to be from 0 to 1. Divide by its largest."
    return None


def one_size(pictures: Sequence[Tensor]) -> Float[Tensor, "N C H W"]:
    """All in one tensor; refused where they are of several sizes."""
    if len({tuple(picture.shape) for picture in pictures}) > 1:
        sizes = sorted({tuple(picture.shape[1:]) for picture in pictures})
        shown = ", ".join(f"{height} x {width}" for height, width in sizes[:3])
        raise GruppoError(
            f"pictures of {len(sizes)} sizes ({shown}) cannot be restored together; they need one. Crop them, as the "
            "option crop=64 of the data does."
        )
    return torch.stack([picture.float() for picture in pictures])
