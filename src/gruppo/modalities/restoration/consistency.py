"""Consistency terms: losses of the deterministic image that need no clean target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gruppo.core.images import PIXEL_LOSSES, PixelLoss, apply_symmetry, undo_symmetry
from gruppo.seeds import generator_at
from gruppo.types import GruppoError, Likelihood, Prompt, Rollouts

Images = Float[Tensor, "N C H W"]
Degradation = Callable[[Images, Sequence[Prompt]], Images]
"""D, differentiable: from images, and the prompts whose strengths it reads, to degraded images."""
Consistency = Callable[[Any, Rollouts, Likelihood, Likelihood], Images]
"""From (policy, rollouts, likelihood, ref) to a loss of each pixel of each row."""


@dataclass(frozen=True)
class ToReference:
    """rho(f(x), f_ref(x)), for a frozen reference or a moving average of the policy."""

    loss: PixelLoss = "charbonnier"

    def __call__(
        self, policy: Any, rollouts: Rollouts, likelihood: Likelihood, ref: Likelihood
    ) -> Images:
        assert ref.output is not None  # requested where Modality.consistency_reads_reference
        return PIXEL_LOSSES[self.loss](likelihood.output, ref.output.detach().to(likelihood.output))


@dataclass(frozen=True)
class Equivariance:
    """rho(f(T x), T f(x)) for a random flip or quarter turn T of each prompt, by its draw.

    The gradient goes through both sides (Chen et al. 2021, arXiv 2103.14756). Non-square images are
    only mirrored or turned by 180 degrees.
    """

    loss: PixelLoss = "charbonnier"
    seed: int = 0

    def __call__(
        self, policy: Any, rollouts: Rollouts, likelihood: Likelihood, ref: Likelihood
    ) -> Images:
        x = rollouts.shared["degraded"]  # [P, C, H, W]
        is_square = x.shape[-1] == x.shape[-2]
        choices = [self.choice(prompt, is_square=is_square) for prompt in rollouts.prompts]
        rows = [choices[group] for group in rollouts.group_ids.tolist()]
        inputs = torch.stack(list(map(apply_symmetry, x, choices))).to(policy.device)
        kind = policy.supervises if "demonstration" in rollouts.per_row else "output"
        group_ids = rollouts.group_ids.to(policy.device)
        restored = policy.output_of(inputs, kind, rollouts.prompts)[group_ids]
        flipped = torch.stack(list(map(apply_symmetry, likelihood.output, rows)))
        losses = PIXEL_LOSSES[self.loss](restored, flipped)
        # a patch has the loss of its own pixels
        return torch.stack(list(map(undo_symmetry, losses, rows)))

    def choice(self, prompt: Prompt, *, is_square: bool) -> int:
        """Index 1 to 7 of ``core.images.apply_symmetry``; 2, 4 or 6 if a quarter turn would change
        the size."""
        generator = generator_at(self.seed, "equivariance", prompt.draw)
        fitting = (1, 2, 3, 4, 5, 6, 7) if is_square else (2, 4, 6)
        return fitting[int(torch.randint(len(fitting), (), generator=generator))]


@dataclass(frozen=True)
class ToDegraded:
    """rho(D(f(x)), x): the restored image, degraded again, matches the input. D adds no noise.

    So the optimum is not 0: with noise of std sigma in x, it is an L1 of about 0.8 sigma.
    """

    degrade: Degradation
    loss: PixelLoss = "charbonnier"

    def __call__(
        self, policy: Any, rollouts: Rollouts, likelihood: Likelihood, ref: Likelihood
    ) -> Images:
        prompts = [rollouts.prompts[n] for n in rollouts.group_ids.tolist()]
        degraded = self.degrade(likelihood.output, prompts)
        x = rollouts.shared["degraded"][rollouts.group_ids].to(degraded)  # [b, C, H, W]
        if degraded.shape != x.shape:
            raise GruppoError(f"""degraded again, {list(x.shape)} became {list(degraded.shape)}.
                Give a degradation that keeps the size.""")
        return PIXEL_LOSSES[self.loss](degraded, x)


CONSISTENCIES: dict[str, Callable[..., Consistency]] = {
    "reference": ToReference,
    "equivariance": Equivariance,
}
"""By name; ``ToDegraded`` needs a degradation."""
