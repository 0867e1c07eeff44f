"""A network with its path: from a state to the normal of the next one, for sampling and for scoring alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gruppo.modalities.diffusion.conditions import Condition
from gruppo.modalities.diffusion.network import Asked, Network, alike
from gruppo.modalities.diffusion.paths import Path
from gruppo.modalities.diffusion.pictures import Codec
from gruppo.modalities.diffusion.transitions import Predicts, Step, Transition, split
from gruppo.types import Gaussian, GruppoError

LEAST_ALPHA = 1e-3
"""From which a prediction of noise says enough of the picture: log-ratios stay within 1e-5 nats per dimension."""


@dataclass(frozen=True, eq=False)
class Stepped:
    """What is said of N states."""

    normal: Gaussian
    """Of the next ones: mean [N, *E], std [N]."""
    x0: Float[Tensor, "N ..."]
    features: Float[Tensor, "N F"]


@dataclass(frozen=True, eq=False)
class Denoiser:
    """What a module was trained for."""

    network: Network
    shape: tuple[int, ...]
    predicts: Predicts
    path: Path
    condition: Condition | None
    codec: Codec

    def __post_init__(self) -> None:
        if self.predicts not in get_args(Predicts):
            known = ", ".join(map(repr, get_args(Predicts)))
            raise GruppoError(f"predicts={self.predicts!r} is not one of {known}. Use 'x0'.")
        if self.predicts != "noise":
            return
        alpha = float(self.path.level(self.path.times(1)[:1])[0])
        if alpha < LEAST_ALPHA:
            raise GruppoError(
                f"predicts='noise' on a path that begins at alpha={alpha:.1g}: the picture is what is left of x "
                "without its noise, divided by alpha, and rounding with it. It needs at least "
                f"{LEAST_ALPHA:g}. Train the network to predict 'v', 'velocity' or 'x0', or use Diffusion('linear')."
            )

    @property
    def device(self) -> torch.device:
        return next(self.network.module.parameters()).device

    def on(self, module: nn.Module) -> Denoiser:
        """The same over other weights."""
        return replace(self, network=self.network.on(module))

    def probe(self) -> Asked:
        """One state of no meaning."""
        condition = None if self.condition is None else self.condition.nothing()[None].to(self.device)
        zero = torch.zeros(1, *self.shape, device=self.device)
        return Asked(zero, torch.ones(1, device=self.device), condition, torch.ones(1))

    def steps(self, counts: Int[Tensor, "N"], columns: Int[Tensor, "N"]) -> tuple[Step, Float[Tensor, "N"]]:
        """Step number ``columns`` of a sampler with so many, and the time that the network is told."""
        times = torch.zeros(2, len(columns), dtype=torch.float64)
        for count in counts.unique().tolist():
            of = counts == count
            times[:, of] = self.path.times(count)[torch.stack([columns[of], columns[of] + 1])]
        (alpha, sigma), (next_alpha, next_sigma) = self.path.level(times[0]), self.path.level(times[1])
        levels = (level.to(self.device) for level in (alpha, sigma, next_alpha, next_sigma))
        return Step(*levels), times[0].to(self.device)

    def stepped(
        self, asked: Asked, step: Step, transition: Transition, groups: Int[Tensor, "N"], *, features: bool = False
    ) -> Stepped:
        """``groups``: rows of equal number have the same condition."""
        said, middle = self._said(asked, groups, features=features)
        x0, noise = split(asked.x, said, step, self.predicts)
        return Stepped(transition(asked.x, x0, noise, step), x0, middle)

    def features(self, asked: Asked, groups: Int[Tensor, "N"]) -> Float[Tensor, "N F"]:
        """Of the network's middle, with the condition."""
        return self._said(asked.plain(), groups, features=True)[1]

    def _said(
        self, asked: Asked, groups: Int[Tensor, "N"], *, features: bool
    ) -> tuple[Float[Tensor, "N ..."], Float[Tensor, "N F"]]:
        rows, answer = alike(asked, groups)
        nothing = None if self.condition is None or asked.is_plain else self.condition.nothing().to(self.device)
        said, middle = self.network(asked.take(rows), nothing=nothing, features=features)
        answer = answer.to(said.device)
        return said[answer], middle[answer]

    def encoded(self, inputs: Sequence[object]) -> Tensor | None:
        """Conditions [P, ...] of prompts' inputs."""
        return None if self.condition is None else torch.stack([self.condition.encode(one) for one in inputs])
