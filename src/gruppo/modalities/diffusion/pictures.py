"""Pictures in [0, 1], as rewards and files have them, and in [-1, 1], as denoisers do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from gruppo.core.images import as_saved


class Codec(Protocol):
    """Between pictures and the states that are denoised."""

    @property
    def picture_shape(self) -> tuple[int, ...]:
        """[C, H, W]"""
        ...

    def encode(self, picture: Float[Tensor, "C H W"]) -> Tensor:
        """The state of a picture in [0, 1]; float32, on the CPU."""
        ...

    def decode(self, states: Float[Tensor, "B ..."]) -> Float[Tensor, "B C H W"]:
        """Pictures in [0, 1], as they come back from a saved file."""
        ...


@dataclass(frozen=True)
class Pixels:
    """A state is the picture itself, in [-1, 1]."""

    picture_shape: tuple[int, ...]

    def encode(self, picture: Tensor) -> Tensor:
        return latent_of(picture).cpu()

    def decode(self, states: Tensor) -> Tensor:
        return pictures_of(states)


def latent_of(picture: Float[Tensor, "C H W"]) -> Float[Tensor, "C H W"]:
    """x = 2 picture - 1, float32."""
    return picture.float() * 2 - 1


def pictures_of(latents: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
    """(x + 1) / 2 as it comes back from a saved file, so that a reward sees what a viewer will."""
    return as_saved((latents + 1) / 2)


def refusal(target: Any, shape: tuple[int, ...]) -> str | None:
    """Why a target is no picture to learn from, with what to do; or None."""
    if target is None:
        return f"has no picture to learn from: its target is None. Give it one of the shape {list(shape)}, in [0, 1]."
    if not isinstance(target, Tensor) or tuple(target.shape) != shape or not target.is_floating_point():
        got = f"{list(target.shape)} of {target.dtype}" if isinstance(target, Tensor) else type(target).__name__
        return f"has a target that is {got}; it needs floats of the shape {list(shape)}. Convert or resize it."
    low, high = (float(bound) for bound in torch.aminmax(target))
    if not (low >= 0 and high <= 1):  # of NaN too
        return (
            f"has a target with numbers from {low:g} to {high:g}; a picture's are from 0 to 1. Divide by its largest."
        )
    return None
