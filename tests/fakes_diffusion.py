"""Tiny denoisers for tests: every kind of path and prediction, guided, branched, windowed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gruppo.modalities.diffusion import (
    ClassLabels,
    DenoiserPolicy,
    DiffusionSampling,
    DiffusionSchedule,
    FlowSchedule,
)
from gruppo.types import MicroBatch, Prompt, Request, Rollouts

SHAPE = (2, 4, 4)
CLASSES = 3


class TinyDenoiser(nn.Module):
    """Two convolutions, with what is known of time and class between them."""

    def __init__(
        self, *, dropout: float = 0.0, channels: int = SHAPE[0], norm: bool = False
    ) -> None:
        super().__init__()
        self.conv_in, self.conv_out = (
            nn.Conv2d(channels, 6, 3, padding=1),
            nn.Conv2d(6, channels, 3, padding=1),
        )
        self.labels, self.times = nn.Embedding(CLASSES + 1, 6), nn.Linear(1, 6)
        self.norm = nn.BatchNorm2d(6) if norm else nn.Identity()
        self.middle, self.dropout = nn.Tanh(), nn.Dropout(dropout)

    def forward(self, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        shift = self.labels(labels) + self.times(times[:, None] / (1 + times[:, None] / 100))
        return self.conv_out(
            self.dropout(self.middle(self.norm(self.conv_in(x)) + shift[..., None, None]))
        )


@dataclass(frozen=True)
class Fake:
    """A policy, and how it is sampled from."""

    policy: DenoiserPolicy
    sampling: DiffusionSampling


def denoiser(
    *, seed: int = 0, module: dict[str, Any] | None = None, dropped: float = 0.0, **changes: Any
) -> Any:
    torch.manual_seed(seed)
    net = TinyDenoiser(**(module or {}))
    return DenoiserPolicy(
        net, SHAPE, condition=ClassLabels(CLASSES, dropped=dropped), middle="middle", **changes
    )


def ddpm_schedule(betas: str = "linear", **options: Any) -> DiffusionSchedule:
    """Of a scheduler of diffusers."""
    from diffusers import DDIMScheduler

    options["timestep_spacing"] = "trailing"
    return DiffusionSchedule(DDIMScheduler(beta_schedule=betas, **options))


def ancestral(**changes: Any) -> Fake:
    return Fake(denoiser(**changes), DiffusionSampling(max_actions=5))


def flow_sde(**changes: Any) -> Fake:
    """A velocity, and a part of the steps."""
    sampling = DiffusionSampling(max_actions=6, transition="flow_sde", train_from=1, train_to=4)
    return Fake(denoiser(predicts="velocity", schedule=FlowSchedule(3.0), **changes), sampling)


def cps(**changes: Any) -> Fake:
    """Guided, and a group's own half of the steps."""
    sampling = DiffusionSampling(
        max_actions=5, transition="cps", guidance=2.5, noise="shared", train_fraction=0.5
    )
    return Fake(denoiser(dropped=0.1, **changes), sampling)


def ddim(**changes: Any) -> Fake:
    """Noise predicted on a diffusion's path."""
    sampling = DiffusionSampling(max_actions=5, transition="ddim", eta=0.8)
    return Fake(denoiser(predicts="noise", schedule=ddpm_schedule(), **changes), sampling)


def ddpm(**changes: Any) -> Fake:
    """v predicted on a diffusion's path that begins at noise alone; groups that part at one
    step."""
    sampling = DiffusionSampling(max_actions=6, transition="ddim", noise="branched")
    schedule = ddpm_schedule("squaredcos_cap_v2")
    return Fake(denoiser(predicts="v", schedule=schedule, **changes), sampling)


FAKES: list[Callable[..., Fake]] = [ancestral, flow_sde, cps, ddim, ddpm]


def prompts(*classes: int) -> list[Prompt]:
    """With draws of their own."""
    return [Prompt(f"p{n}", label, draw=n + 10) for n, label in enumerate(classes or (0, 1, 2))]


def requests(*sizes: int, of: Sequence[Prompt] | None = None) -> list[Request]:
    return [Request(prompt, size) for prompt, size in zip(of or prompts(), sizes, strict=False)]


def sampled(fake: Fake, *sizes: int, seed: int = 3) -> Rollouts:
    return fake.policy.sample(requests(*(sizes or (4, 2, 3))), fake.sampling, seed=seed)


def whole(rollouts: Rollouts, *rows: int) -> MicroBatch:
    """One piece of these rows, of all of them without any."""
    return MicroBatch(torch.tensor(rows or range(len(rollouts))), slice(0, rollouts.mask.shape[1]))


def doubled(fake: Fake) -> Fake:
    """In float64 throughout."""
    fake.policy.module.double()
    return fake
