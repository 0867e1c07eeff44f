"""Options of diffusion models: ``--diffusion.*``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from gruppo.config.options import Count, NonNegative, Range


@dataclass(frozen=True)
class DiffusionConfig:
    """Sampling and architecture options of diffusion models."""

    steps: Annotated[int, Range(ge=2)] = 10
    """Denoising steps per sample; the last one is deterministic and not trained on."""
    transition: str = "ancestral"
    """Sampler: ancestral, ddim, flow_sde, dance_sde or cps.

    Flow models take ancestral, flow_sde, dance_sde or cps.
    """
    eta: Annotated[float | None, Range()] = None
    """Scale of the noise added in a step; default: the sampler's own."""
    guidance: NonNegative = 1.0
    """Scale of classifier-free guidance, in sampling and scoring; 1 disables."""
    noise: Literal["independent", "shared", "branched"] = "independent"
    """Noise shared within a group.

    shared: the initial latent. branched: all noise but that of one random step, the only one
    trained on.
    """
    train_from: Count = 0
    """First denoising step to train on."""
    train_to: Count = 0
    """Denoising step at which training stops (exclusive); 0 for the last one."""
    train_fraction: Annotated[float, Range(gt=0, le=1)] = 1.0
    """Fraction of these steps to train on, sampled per group."""
    eval_steps: Count = 0
    """Denoising steps in evaluation, which follows the ODE; 0 for the training value."""
    shift: Annotated[float, Range(gt=0)] = 1.0
    """Timestep shift of a new network; above 1 gives noisy steps more weight."""
    predicts: Literal["noise", "x0", "v", "velocity"] = "x0"
    """Prediction type of a new network."""
    dropped: Annotated[float, Range(ge=0, lt=1)] = 0.0
    """Probability of training a new network without the class, for guidance."""
    width: Annotated[int, Range(ge=8)] = 32
    """Base channels of a new network."""
    size: Annotated[tuple[int, int] | None, Range()] = None
    """Height and width of a pipeline's images in pixels; default: the model's own."""
    embedded_guidance: NonNegative = 3.5
    """Guidance that FLUX receives as an input; unlike guidance, not classifier-free."""
