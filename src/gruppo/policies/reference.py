"""What the KL term is measured against."""

from __future__ import annotations

import copy
from typing import Any

import torch

from gruppo.types import Likelihood, Piece, Policy, Rollouts, Want


class FrozenReference:
    """The policy as it was when this was made: a copy in evaluation mode, without gradients, that never changes.

    It is a copy of the weights that do the arithmetic, so that the KL of an unchanged policy is exactly 0.
    """

    def __init__(self, policy: Any) -> None:
        policy.refresh(force=True)
        self.module = copy.deepcopy(policy.sampler).requires_grad_(False).eval()
        self._policy = policy.at(self.module)

    @torch.no_grad()
    def likelihood(self, rollouts: Rollouts, piece: Piece, *, want: Want = ()) -> Likelihood:
        return self._policy.likelihood(rollouts, piece, want=want)

    def update(self, policy: Policy, step: int) -> None:
        """Nothing: it is frozen."""
