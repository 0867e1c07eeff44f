"""Validation of what other training loops pass in."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gruppo.core.objective import Objective
from gruppo.core.weights import loss_total, loss_weights
from gruppo.types import GruppoError, Stat

Terms = tuple[dict[str, Tensor], dict[str, Stat]]
"""Terms of a loss, coefficients included, so that their sum is the loss; and statistics of its actions."""


def batch_weights(loss_mask: Bool[Tensor, "B T"], objective: Objective, max_length: int) -> Float[Tensor, "B T"]:
    """``loss_weights`` with this batch as the whole update."""
    total = loss_total(loss_mask, average=objective.average, max_length=max_length)
    return loss_weights(loss_mask, average=objective.average, total=total)


def check_coefficient(name: str, value: float) -> float:
    if not 0 <= value < math.inf:
        raise GruppoError(
            f"{name}={value} would reward what it should limit; it needs a finite number from 0. Use 0 for none."
        )
    return value


def check_shapes(like: Tensor, mask: Tensor | None = None, **others: Tensor | None) -> None:
    """Refuse shapes that differ from that of ``like``, and masks that are not boolean."""
    for name, other in {"mask": mask, **others}.items():
        if other is not None and other.shape != like.shape:
            raise GruppoError(
                f"{name} is {list(other.shape)} beside {list(like.shape)}; it needs the same shape. Reshape it: "
                "nothing is broadcast here."
            )
    if mask is not None and mask.dtype != torch.bool:
        raise GruppoError(
            f"mask is {mask.dtype}; it needs True and False, True where the policy chose. Use mask.bool()."
        )


def check_finite(loss_mask: Tensor, **inputs: Tensor) -> None:
    """Refuse numbers that are not finite where ``loss_mask`` is True."""
    for name, x in inputs.items():
        bad = int((loss_mask & ~x.isfinite()).sum())
        if bad:
            raise GruppoError(
                f"{name} holds {bad} numbers that are not finite where mask is True. Leave those rows out of the mask; "
                "a failed reward is not a reward of 0."
            )
