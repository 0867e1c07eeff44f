"""What a restoration policy samples: pixels, a coarse residual, gains of detail, or the network's
own controls.

Each action is a normal N(m(x), s^2) over a grid of K numbers per cell, and a way to render an image
from a sample.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, avg_pool2d, interpolate, silu

from gruppo.core.images import detail_bands
from gruppo.loading import did_you_mean, split_options, typed_options
from gruppo.types import GruppoError

Images = Float[Tensor, "N C H W"]
Grid = Float[Tensor, "N K h w"]
NetworkCall = Callable[..., Images]
"""The network: from images, and the conditions [N, K] that some actions set, to images."""
DETAIL_SCALE = 10.0
"""Detail is a tenth of an image's range or less; scaled by this, a head sees it as well as the
image."""


class NoiseScale(nn.Module):
    """Standard deviations std e^w of K numbers, w learned or 0. Weight decay pulls a learned one
    back to std."""

    def __init__(self, std: float, count: int, *, learned: bool) -> None:
        super().__init__()
        if std <= 0:
            raise GruppoError(f"std={std:g} of an action; it needs to be above 0. Set 0.1.")
        self.learned = learned
        self.register_buffer("first", torch.full((count,), std))
        self.log_ratio = nn.Parameter(torch.zeros(count), requires_grad=learned)

    def forward(self) -> Float[Tensor, "K"]:
        """Standard deviations in float64."""
        return self.get_buffer("first").double() * self.log_ratio.double().exp()


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

    - ``forward(network, x)``: the mean of the action, and the network's image if the action changes
      it, or None if the action decides what the network reads.
    - ``render(network, x, base, action)``: the image of a sample, before clamping; ``base`` is that
      image or None.
    """

    kind: ClassVar[str]
    conditions = 0
    """Numbers per image that the network reads besides it."""
    grid: int | None = None
    """Cells per side; None if the action has the size of the image."""
    render: Any

    def __init__(
        self, channels: int, count: int, std: float, learned: bool, **options: Any
    ) -> None:
        super().__init__()
        self.channels = channels
        self.count = count
        self.scale = NoiseScale(std, count, learned=learned)
        self.settings = {"kind": self.kind, "channels": channels, "std": std, "learned": learned}
        self.settings |= options
        """Arguments of the constructor, as JSON."""


class PixelNoise(Action):
    """N(f(x), s^2) at each pixel: the action is the image. ``std`` is in units of the range 0 to 1.

    White noise of 0.01 costs 0.41 dB at 30 dB in every sample, while the samples of a group differ
    by 0.011 dB: few rewards can be learned from this action.
    """

    kind = "pixels"

    def __init__(self, channels: int = 3, *, std: float = 0.01, learned: bool = False) -> None:
        super().__init__(channels, channels, std, learned)

    def forward(self, network: NetworkCall, x: Images) -> tuple[Grid, Images | None]:
        base = network(x)
        return base, base

    def render(self, network: NetworkCall, x: Images, base: Images | None, action: Grid) -> Images:
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
        learned: bool = False,
        detached: bool = True,
    ) -> None:
        if grid < 1 or (self.bands and channels not in self.bands):
            raise GruppoError(f"""grid={grid} of {channels} channels: it needs 1 cell a side or
                more, and bands of detail need 1 channel (gray) or 3 (color).""")
        count, std = self.bands.get(channels, channels), std or self.default_std
        super().__init__(channels, count, std, learned, grid=grid, detached=detached)
        self.grid = grid
        self.detached = detached
        self.head = MeanHead(channels * (1 + self.bands.get(channels, 1)), count, grid)

    def forward(self, network: NetworkCall, x: Images) -> tuple[Grid, Images | None]:
        base = network(x)
        seen = base.detach() if self.detached else base
        features = [x.to(base), seen]
        if self.bands:
            features = [seen, detail_bands(seen).flatten(1, 2) * DETAIL_SCALE]
        return self.head(torch.cat(features, dim=1)), base

    def render(self, network: NetworkCall, x: Images, base: Images | None, action: Grid) -> Images:
        assert base is not None
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


# --- the network's own conditions -----------------------------------------------------------------

MIX = "mix"


@dataclass(frozen=True)
class Control:
    """One condition of the network, or ``mix``: y = mix f(x) + (1 - mix) x."""

    name: str
    low: float
    high: float
    start: float
    """Its value without an action."""

    def __post_init__(self) -> None:
        if not self.low < self.high or not self.low <= self.start <= self.high:
            raise GruppoError(f"""the control {self.name!r} starts at {self.start:g} and has the
                range {self.low:g} to {self.high:g}; low needs to be below high, and the start
                between them.""")


class Controls(Action):
    """The network's own conditions as the action: c ~ N(m(x), s^2), y = f(x, c).

    Actions are in units of each control's range, from its start: value = start + a (high - low),
    clamped to the range. The network reads the values, without ``mix``; with ``unit`` as shares of
    the range, 0 to 1, from which a network learns better if a range is one of 50 levels and pixels
    are in [0, 1]. m reads x, and is initially 0. Log-probs need no gradient through the network, so
    that it may be one without any.
    """

    kind, grid = "controls", 1

    def __init__(
        self,
        controls: Sequence[Control | Mapping[str, Any]],
        channels: int = 3,
        *,
        std: float = 0.15,
        learned: bool = False,
        unit: bool = False,
    ) -> None:
        # a mapping if read from a file
        parsed = [one if isinstance(one, Control) else Control(**one) for one in controls]
        names = [control.name for control in parsed]
        if not names or len(set(names)) != len(names):
            raise GruppoError(f"the controls are {names}; it needs one at least, and each once.")
        listed = [asdict(control) for control in parsed]
        super().__init__(channels, len(names), std, learned, controls=listed, unit=unit)
        self.controls = parsed
        self.unit = unit
        self.head = MeanHead(2 * channels, len(names), 1)
        spans = torch.tensor([[float(c.low), float(c.high), float(c.start)] for c in parsed])
        self.register_buffer("_spans", spans.T, persistent=False)  # saved in ``settings``
        self._read = [n for n, name in enumerate(names) if name != MIX]
        self._mix = [n for n, name in enumerate(names) if name == MIX]
        self.conditions = len(self._read)

    def forward(self, network: NetworkCall, x: Images) -> tuple[Grid, Images | None]:
        detail = x - avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)
        return self.head(torch.cat([x, detail * DETAIL_SCALE], dim=1)), None

    def values(self, action: Grid) -> Float[Tensor, "N K"]:
        """Value of each control, ``mix`` included, clamped to its range."""
        low, high, start = self.get_buffer("_spans").to(action)
        return (start + action.flatten(1) * (high - low)).clamp(low, high)

    def restored(self, network: NetworkCall, x: Images, values: Float[Tensor, "N K"]) -> Images:
        """Compute the network's image at these values of the controls; ``mix`` is not applied."""
        if not self._read:
            return network(x)
        if self.unit:
            low, high, _ = self.get_buffer("_spans").to(values)
            values = (values - low) / (high - low)
        return network(x, values[:, self._read])

    def true_values(self, columns: Mapping[str, Any]) -> list[float]:
        """Value of each control in a prompt's columns, by name; 1 for ``mix``. Raises GruppoError
        without one in the range."""
        values = []
        for control in self.controls:
            value: Any = control.high if control.name == MIX else columns.get(control.name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not control.low <= value <= control.high:
                raise GruppoError(f"""has {value!r} as {control.name!r}; supervises='told' gives the
                    network that number, from {control.low:g} to {control.high:g}. Use data that
                    have it, such as lines:blur=0.5-2,noise=10-40, or widen the range.""")
            values.append(float(value))
        return values

    def render(self, network: NetworkCall, x: Images, base: Images | None, action: Grid) -> Images:
        values = self.values(action)
        image = self.restored(network, x, values)
        if not self._mix:
            return image
        mix = values[:, self._mix, None, None].to(image)  # [N, 1, 1, 1]
        return mix * image + (1 - mix) * x.to(image)


# --- by name --------------------------------------------------------------------------------------

ACTIONS: dict[str, Callable[..., Action]] = {
    one.kind: one for one in (PixelNoise, LowResolution, BandGains, Controls)
}
EXAMPLES = (
    "pixels:std=0.01, low_resolution:grid=8, band_gains:grid=8,std=0.15 or "
    "controls:noise=0-1@0.5,mix=0-1@1"
)


def open_action(text: str, channels: int = 3) -> Action:
    """Build the action of ``band_gains:grid=8,std=0.15`` or
    ``controls:noise=0-50@25,mix=0-1@1``."""
    kind, _, rest = text.partition(":")
    if kind not in ACTIONS:
        hint = did_you_mean(kind, ACTIONS)
        raise GruppoError(f"there is no action {kind!r}; write {EXAMPLES}.{hint}")
    options = split_options(rest)
    controls = []
    for name in list(options) if kind == "controls" else ():
        if "@" in options[name]:
            controls.append(parse_control(name, options.pop(name)))
    typed = typed_options(ACTIONS[kind], options, EXAMPLES)
    if kind == "controls":
        typed["controls"] = controls
    return ACTIONS[kind](channels=channels, **typed)


def parse_control(name: str, text: str) -> Control:
    """The control of ``noise=0-50@25``: its range and start."""
    numbers = re.fullmatch(r"([\d.]+)-([\d.]+)@([\d.]+)", text)
    if numbers is None:
        raise GruppoError(f"{name}={text} is not of the form low-high@start; write {EXAMPLES}.")
    return Control(name, *map(float, numbers.groups()))
