"""Encoders: from prompts to conditions of the network, and between images and the states that are denoised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from gruppo.core.images import quantize
from gruppo.types import GruppoError


class ConditionEncoder(Protocol):
    """From a prompt's inputs to the condition that the network reads beside x and t."""

    dropped: float
    """Share of demonstrations trained without their condition; 0 for a network without guidance."""

    def encode(self, inputs: Any) -> Tensor:
        """Condition of one prompt; all have the same shape. Raises GruppoError for inputs that it cannot encode."""
        ...

    def unconditional(self) -> Tensor:
        """The condition that stands for none, of the same shape."""
        ...


class ClassLabels:
    """Class numbers of a class-conditional network, by number or name; the number after the last means no class."""

    def __init__(self, classes: int | Sequence[str], *, dropped: float = 0.0) -> None:
        names = [str(n) for n in range(classes)] if isinstance(classes, int) else list(classes)
        if not names or len(set(names)) < len(names):
            raise GruppoError(f"classes={classes!r:.80} needs at least one name, and no name twice. Change the list.")
        if not 0 <= dropped < 1:
            raise GruppoError(f"dropped={dropped} is out of range; it needs 0 <= dropped < 1. Use 0.1 for guidance.")
        self.names, self.dropped = tuple(names), dropped

    def encode(self, inputs: Any) -> Tensor:
        """Class number as a long scalar []."""
        number = self.names.index(inputs) if isinstance(inputs, str) and inputs in self.names else inputs
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(self.names):
            known = ", ".join(map(repr, self.names[:12])) + (", ..." if len(self.names) > 12 else "")
            raise GruppoError(
                f"{inputs!r:.80} is no class of this network; it knows {known}. Use a name or 0 to "
                f"{len(self.names) - 1}."
            )
        return torch.tensor(number)

    def unconditional(self) -> Tensor:
        return torch.tensor(len(self.names))


@dataclass
class PixelCodec:
    """States are the images themselves, in [-1, 1]. A latent diffusion model overrides both methods."""

    image_shape: tuple[int, ...]
    """[C, H, W]"""

    def encode(self, image: Float[Tensor, "C H W"]) -> Tensor:
        """State of an image in [0, 1]; float32, on the CPU."""
        return (image.float() * 2 - 1).cpu()

    def decode(self, states: Float[Tensor, "B ..."]) -> Float[Tensor, "B C H W"]:
        """Images in [0, 1] as a saved file gives them back, so that a reward sees what a viewer sees."""
        return postprocess(states)


def postprocess(images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
    """From [-1, 1] to [0, 1], rounded to the 8 bits of a file."""
    return quantize((images + 1) / 2)
