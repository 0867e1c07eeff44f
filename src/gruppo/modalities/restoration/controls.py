"""The network's own conditioning as the action: noise level, blur, how much of the given picture is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gruppo.modalities.restoration.heads import DETAIL, Grid, Head, Meant, Picture, Scale, Trunk
from gruppo.types import GruppoError


@dataclass(frozen=True)
class Control:
    """One number that the network is told of a picture, or ``mix``: y = mix f(x) + (1 - mix) x."""

    name: str
    low: float
    high: float
    start: float
    """What it is without any action."""

    def __post_init__(self) -> None:
        if not self.low < self.high or not self.low <= self.start <= self.high:
            raise GruppoError(
                f"the control {self.name!r} starts at {self.start:g} and has the range {self.low:g} to {self.high:g}; "
                "low needs to be below high, and the start between them."
            )


MIX = "mix"


class Controls(nn.Module):
    """The network's own conditioning as the action: c ~ N(m(x), s^2), y = f(x, c).

    Numbers are drawn in units of each control's range, from its start: value = start + a (high - low), kept within the
    range. The network is told them in that range, in their order, without ``mix``; with ``unit`` as shares of the
    range, 0 to 1, which is what a network learns from beside pixels in [0, 1] where a range is one of 50 levels. m
    reads x, and is 0 at first. The network computes no gradient of log-probs, so that it may be one without any.
    """

    def __init__(
        self,
        controls: Sequence[Control | Mapping[str, Any]],
        channels: int = 3,
        *,
        std: float | Sequence[float] = 0.15,
        learned: bool = False,
        unit: bool = False,
    ) -> None:
        super().__init__()
        self.unit = unit
        self.controls = [one if isinstance(one, Control) else Control(**one) for one in controls]
        self.channels = channels
        names = [control.name for control in self.controls]
        if not names or len(set(names)) != len(names):
            raise GruppoError(f"the controls are {names}; there needs to be one at least, and each once.")
        self.scale, self.head = Scale(std, len(names), learned=learned), Head(2 * channels, len(names), 1)
        for name in ("low", "high", "start"):
            numbers = torch.tensor([float(getattr(control, name)) for control in self.controls])
            self.register_buffer(f"_{name}", numbers, persistent=False)
        self._told = [n for n, name in enumerate(names) if name != MIX]
        self._mix = names.index(MIX) if MIX in names else None

    @property
    def settings(self) -> dict[str, Any]:
        controls = [asdict(control) for control in self.controls]
        return {
            "kind": "controls",
            "controls": controls,
            "channels": self.channels,
            "unit": self.unit,
            **self.scale.settings,
        }

    @property
    def conditions(self) -> int:
        return len(self._told)

    def shape(self, picture: Sequence[int]) -> tuple[int, int, int]:
        return len(self.controls), 1, 1

    def meant(self, trunk: Trunk, x: Picture) -> Meant:
        first = x - nn.functional.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)
        return Meant(self.head(torch.cat([x, first * DETAIL], dim=1)), None)

    def forward(self, trunk: Trunk, x: Picture) -> Meant:
        return self.meant(trunk, x)

    def values(self, action: Grid) -> Float[Tensor, "N K"]:
        """Of each control, in its range; ``mix`` among them."""
        low, high, start = (self.get_buffer(f"_{name}").to(action) for name in ("low", "high", "start"))
        return (start + action.flatten(1) * (high - low)).clamp(low, high)

    def told(self, trunk: Trunk, x: Picture, values: Float[Tensor, "N K"]) -> Picture:
        """The network's picture, told these values of each control; ``mix`` has no part in it."""
        if not self._told:
            return trunk(x)
        if self.unit:
            low, high = (self.get_buffer(f"_{name}").to(values) for name in ("low", "high"))
            values = (values - low) / (high - low)
        return trunk(x, values[:, self._told])

    def true_values(self, given: Sequence[Mapping[str, Any]]) -> Float[Tensor, "N K"]:
        """Of each control by its name; a mix of 1. Ask ``refuse_values`` first."""
        return torch.tensor([[1.0 if c.name == MIX else float(own[c.name]) for c in self.controls] for own in given])

    def refuse_values(self, given: Mapping[str, Any]) -> str | None:
        """Why these columns do not say what the network is to be told, or None."""
        for control in (one for one in self.controls if one.name != MIX):
            value = given.get(control.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                got = f"{value!r} as {control.name!r}" if control.name in given else f"no column {control.name!r}"
                return (
                    f"has {got}; supervises='told' tells the network that number. Give data that have it, such as "
                    "lines:blur=0.5-2,noise=10-40, or name the control as the data do."
                )
            if not control.low <= value <= control.high:
                return (
                    f"has {control.name}={value:g}, and the control has the range {control.low:g} to "
                    f"{control.high:g}. Widen the range, or degrade within it."
                )
        return None

    def shown(self, trunk: Trunk, x: Picture, base: Picture | None, action: Grid) -> Picture:
        values = self.values(action)
        picture = self.told(trunk, x, values)
        if self._mix is None:
            return picture
        mix = values[:, self._mix].reshape(-1, 1, 1, 1).to(picture)
        return mix * picture + (1 - mix) * x.to(picture)

    def plain(self, trunk: Trunk, x: Picture) -> Picture:
        return self.shown(trunk, x, None, torch.zeros(len(x), *self.shape(x.shape[1:]), device=x.device))
