"""Options of image restoration networks: ``--restoration.*``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from gruppo.config.options import NoneOr, Range


@dataclass(frozen=True)
class RestorationConfig:
    """Action and supervised loss of image restoration networks."""

    action: str = "low_resolution"
    """What a new policy samples: pixels, low_resolution or band_gains.

    With settings: pixels:std=0.01, low_resolution:grid=8, band_gains:grid=8,std=0.15.
    """
    weights: str = ""
    """Initial weights of a new network: a .safetensors file or a policy folder."""
    supervises: NoneOr[Literal["output", "base"]] = None
    """Image that the supervised loss compares with the clean one.

    Default: output, or as saved. output: at the mean action. base: of the network alone.
    """
    loss: NoneOr[Literal["charbonnier", "l1", "mse"]] = None
    """Pixel loss of supervision and consistency. Default: charbonnier, or as saved."""
    consistency: str = "reference"
    """Consistency term: reference, equivariance or file.py:degrade.

    reference: distance to the reference's image. equivariance: under flips and rotations. A
    function of images and prompts: the output, degraded again, matches the input.
    """
    action_lr_factor: Annotated[float, Range(gt=0)] = 1.0
    """Learning rate of the action head, relative to the network's.

    Parameters initialized at 0 need 10 to 50.
    """
