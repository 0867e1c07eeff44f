"""What a denoiser is asked for, as the numbers that its network reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from gruppo.types import GruppoError


class Condition(Protocol):
    """From a prompt's inputs to what the network is given beside x and t."""

    dropped: float
    """Share of demonstrations that are learned from without it; 0 where the network has no guidance."""

    def encode(self, inputs: Any) -> Tensor:
        """Of one prompt; the shapes of all are alike. A ``GruppoError`` says what cannot be asked for."""
        ...

    def nothing(self) -> Tensor:
        """What stands in the place of a condition that is left out; of the shape of any other."""
        ...


class ClassLabels:
    """One of several classes, by number or name; the number after the last stands for none of them."""

    def __init__(self, classes: int | Sequence[str], *, dropped: float = 0.0) -> None:
        names = [str(n) for n in range(classes)] if isinstance(classes, int) else list(classes)
        if not names or len(set(names)) < len(names):
            raise GruppoError(f"classes={classes!r:.80} needs one name or more, each another. Mend the list.")
        if not 0 <= dropped < 1:
            raise GruppoError(f"dropped={dropped} is out of range; it needs 0 up to below 1. Use 0.1 for guidance.")
        self.names, self.dropped = tuple(names), dropped

    def encode(self, inputs: Any) -> Tensor:
        """[] long."""
        number = self.names.index(inputs) if isinstance(inputs, str) and inputs in self.names else inputs
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(self.names):
            known = ", ".join(map(repr, self.names[:12])) + (", ..." if len(self.names) > 12 else "")
            raise GruppoError(
                f"{inputs!r:.80} is no class of this network; it knows {known}. Ask for a name or 0 to "
                f"{len(self.names) - 1}."
            )
        return torch.tensor(number)

    def nothing(self) -> Tensor:
        return torch.tensor(len(self.names))
