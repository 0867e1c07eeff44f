"""Consistency terms: pairs of images that should be equal, compared without a clean target.

Each returns the two images [b, C, H, W] of each row, whose pixel loss is the term.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gruppo.core.images import apply_symmetry, undo_symmetry
from gruppo.seeds import generator_at
from gruppo.types import GruppoError, Likelihood, Prompt, Rollouts

Images = Float[Tensor, "N C H W"]
Degrade = Callable[[Images, Sequence[Prompt]], Images]
"""D, differentiable: from images, and the prompts whose strengths it reads, to degraded images."""
Consistency = Callable[[Any, Rollouts, Likelihood, Likelihood], tuple[Images, Images]]
"""From (policy, rollouts, likelihood, ref) to the images to compare."""


def to_reference(
    policy: Any, rollouts: Rollouts, likelihood: Likelihood, ref: Likelihood
) -> tuple[Images, Images]:
    """f(x) and f_ref(x), of a frozen reference or a moving average of the policy."""
    assert likelihood.output is not None and ref.output is not None
    return likelihood.output, ref.output.detach().to(likelihood.output)


def equivariance(
    policy: Any, rollouts: Rollouts, likelihood: Likelihood, ref: Likelihood
) -> tuple[Images, Images]:
    """T^-1 f(T x) and f(x) for a random flip or quarter turn T of each prompt, by its draw.

    The gradient goes through both sides (Chen et al. 2021, arXiv 2103.14756). Non-square images are
    only mirrored or turned by 180 degrees.
    """
    x = rollouts.shared["degraded"]  # [P, C, H, W]
    # index 1 to 7 of ``apply_symmetry``; a quarter turn changes the size of an oblong image
    fitting = (1, 2, 3, 4, 5, 6, 7) if x.shape[-1] == x.shape[-2] else (2, 4, 6)
    choices = []
    for prompt in rollouts.prompts:
        generator = generator_at(0, "equivariance", prompt.draw)
        choices.append(fitting[int(torch.randint(len(fitting), (), generator=generator))])
    turned = torch.stack(list(map(apply_symmetry, x, choices))).to(policy.device)
    kind = policy.supervises if "demonstration" in rollouts.per_row else "output"
    restored = policy.output_of(turned, kind)
    restored = torch.stack(list(map(undo_symmetry, restored, choices)))
    assert likelihood.output is not None
    return restored[rollouts.group_ids.to(policy.device)], likelihood.output


def to_degraded(degrade: Degrade) -> Consistency:
    """Return a term of D(f(x)) and x: the restored image, degraded again, and the input. D adds no
    noise.

    So the optimum is not 0: with noise of std sigma in x, it is an L1 of about 0.8 sigma.
    """

    def compare(
        policy: Any, rollouts: Rollouts, likelihood: Likelihood, ref: Likelihood
    ) -> tuple[Images, Images]:
        prompts = [rollouts.prompts[n] for n in rollouts.group_ids.tolist()]
        assert likelihood.output is not None
        degraded = degrade(likelihood.output, prompts)
        x = rollouts.shared["degraded"][rollouts.group_ids].to(degraded)  # [b, C, H, W]
        if degraded.shape != x.shape:
            raise GruppoError(f"""degraded again, {list(x.shape)} became {list(degraded.shape)}.
                Give a degradation that keeps the size.""")
        return degraded, x

    return compare
