"""Consistency terms: what the deterministic picture is held to beside a clean one. Never to itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from gruppo.core.images import flip
from gruppo.core.pixel_losses import PIXEL_LOSSES, PixelLoss
from gruppo.seeds import generator_at
from gruppo.types import GruppoError, Likelihood, Prompt, Rollouts

Picture = Float[Tensor, "N C H W"]
Degrade = Callable[[Picture, Sequence[Prompt]], Picture]
"""D, with a gradient: of pictures, and of the prompts whose strengths it reads."""


class Consistency(Protocol):
    """Of each pixel of each row."""

    def __call__(self, policy: Any, rollouts: Rollouts, likelihood: Likelihood, ref: Likelihood) -> Picture: ...


@dataclass(frozen=True)
class ToReference:
    """rho(f(x), f_ref(x)): a frozen reference, or one that follows by a moving average."""

    loss: PixelLoss = "charbonnier"

    def __call__(self, policy: Any, rollouts: Rollouts, likelihood: Likelihood, ref: Likelihood) -> Picture:
        if ref.output is None:
            raise GruppoError('consistency to a reference reads its picture, and there is none. Ask want=("output",).')
        return PIXEL_LOSSES[self.loss](likelihood.output, ref.output.detach().to(likelihood.output))


@dataclass(frozen=True)
class Equivariance:
    """rho(f(T x), T f(x)), T one of the flips and quarter turns, drawn for each prompt by its draw.

    A gradient goes through both sides (Chen et al. 2021, arXiv 2103.14756). Pictures that are not square are mirrored
    or turned by a half.
    """

    loss: PixelLoss = "charbonnier"
    seed: int = 0

    def __call__(self, policy: Any, rollouts: Rollouts, likelihood: Likelihood, ref: Likelihood) -> Picture:
        x = rollouts.shared["degraded"]
        is_square = x.shape[-1] == x.shape[-2]
        choices = [self.choice(prompt, is_square=is_square) for prompt in rollouts.prompts]
        turned = torch.stack([flip(image, choice) for image, choice in zip(x, choices, strict=True)])
        is_demonstration = "demonstration" in rollouts.per_row
        asked = turned.to(policy.device)
        of_turned = policy.taught(asked, rollouts.prompts) if is_demonstration else policy.output_of(asked)
        of_turned = of_turned[rollouts.group_ids.to(policy.device)]
        rows = [choices[group] for group in rollouts.group_ids.tolist()]
        turned_of = torch.stack([flip(image, choice) for image, choice in zip(likelihood.output, rows, strict=True)])
        apart = PIXEL_LOSSES[self.loss](of_turned, turned_of)
        return torch.stack([_unflip(pixels, choice) for pixels, choice in zip(apart, rows, strict=True)])

    def choice(self, prompt: Prompt, *, is_square: bool) -> int:
        """Number 1 to 7 of ``core.images.flip``; 2, 4 or 6 where a quarter turn would change the size."""
        generator = generator_at(self.seed, "equivariance", prompt.draw)
        fitting = (1, 2, 3, 4, 5, 6, 7) if is_square else (2, 4, 6)
        return fitting[int(torch.randint(len(fitting), (), generator=generator))]


def _unflip(pixels: Float[Tensor, "C H W"], choice: int) -> Float[Tensor, "C H W"]:
    """Back in place: a patch's loss is that of its own pixels."""
    back = pixels.rot90(-(choice % 4), dims=(-2, -1))
    return back.flip(-1) if choice >= 4 else back


@dataclass(frozen=True)
class ToDegraded:
    """rho(D(f(x)), x): the restored picture, degraded again, is what was given. D knows no noise.

    Noise stays in it: of a restored picture with sigma of noise left out, an L1 of about 0.8 sigma is right, not 0.
    """

    degrade: Degrade
    loss: PixelLoss = "charbonnier"

    def __call__(self, policy: Any, rollouts: Rollouts, likelihood: Likelihood, ref: Likelihood) -> Picture:
        ids = rollouts.group_ids
        prompts = [rollouts.prompts[group] for group in ids.tolist()]
        again = self.degrade(likelihood.output, prompts)
        x = rollouts.shared["degraded"][ids].to(again)
        if again.shape != x.shape:
            raise GruppoError(
                f"degraded again, {list(likelihood.output.shape)} became {list(again.shape)}; the given pictures are "
                f"{list(x.shape)}. Give a degradation that keeps the size."
            )
        return PIXEL_LOSSES[self.loss](again, x)


ConsistencyKind = Literal["reference", "equivariance"]
CONSISTENCIES: dict[str, Callable[..., Consistency]] = {"reference": ToReference, "equivariance": Equivariance}
"""By name; a degradation needs to be given."""
