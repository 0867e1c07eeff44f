"""Tiny restoration policies for tests: every action."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gruppo.modalities.restoration import (
    BandGains,
    LowResolution,
    PixelNoise,
    RestorationPolicy,
)
from gruppo.types import MicroBatch, Prompt, Request, Rollouts, Sampling

SIDE = 8
SAMPLING = Sampling(max_actions=1)


class TinyNetwork(nn.Module):
    """x + two convolutions of x."""

    def __init__(self, channels: int = 3, *, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(channels, 5, 3, padding=1)
        self.norm = nn.BatchNorm2d(5) if norm else nn.Identity()
        self.dropout, self.conv_out = nn.Dropout(dropout), nn.Conv2d(5, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.3 * self.conv_out(self.dropout(torch.tanh(self.norm(self.conv_in(x)))))


def policy_of(
    action: Any, *, seed: int = 0, module: dict[str, Any] | None = None, **choices: Any
) -> RestorationPolicy:
    torch.manual_seed(seed)
    network = TinyNetwork(**(module or {}))
    for layer in (layer for layer in action.modules() if isinstance(layer, nn.Conv2d)):
        layer.reset_parameters()  # by this seed, whenever the action was made
    with torch.no_grad():
        for name, parameter in action.named_parameters():
            if name.startswith("head.conv_out"):
                parameter.normal_(std=0.3)  # 0 at first: nothing would be seen of it
    return RestorationPolicy(network, action, **choices)


def pixels(**choices: Any) -> RestorationPolicy:
    return policy_of(PixelNoise(std=0.1), **choices)


def low_resolution(**choices: Any) -> RestorationPolicy:
    return policy_of(LowResolution(grid=2, std=0.1, detached=False), **choices)


def band_gains(**choices: Any) -> RestorationPolicy:
    """Of a network that rests."""
    policy = policy_of(BandGains(grid=4), **choices)
    policy.module.network.requires_grad_(False)
    return policy


POLICIES: list[Callable[..., RestorationPolicy]] = [
    pixels,
    low_resolution,
    band_gains,
]


def picture(n: int, side: int = SIDE) -> Tensor:
    return torch.rand(3, side, side, generator=torch.Generator().manual_seed(n))


def prompts(count: int = 3, **changes: Any) -> list[Prompt]:
    """Each with a clean picture, and a draw of its own."""
    return [
        Prompt(f"p{n}", picture(n), picture(n + 50), draw=n + 10, **changes) for n in range(count)
    ]


def requests(*sizes: int, of: Sequence[Prompt] | None = None) -> list[Request]:
    return [
        Request(prompt, size) for prompt, size in zip(of or prompts(len(sizes)), sizes, strict=True)
    ]


def sampled(policy: RestorationPolicy, *sizes: int, seed: int = 3) -> Rollouts:
    return policy.sample(requests(*(sizes or (4, 2, 3))), SAMPLING, seed=seed)


def whole(rollouts: Rollouts, *rows: int) -> MicroBatch:
    return MicroBatch(torch.tensor(rows or range(len(rollouts))), slice(0, rollouts.mask.shape[1]))


def doubled(policy: RestorationPolicy) -> RestorationPolicy:
    policy.module.double()
    return policy


def disturb(module: nn.Module, by: float = 0.05) -> None:
    with torch.no_grad():
        for n, parameter in enumerate(module.parameters()):
            parameter.add_(
                by * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(n))
            )
