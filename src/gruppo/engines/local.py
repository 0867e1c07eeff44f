"""Samples from the policy itself, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from gruppo.types import Request, Rollouts


class LocalEngine:
    """The policy's own ``sample``. The arithmetic runs on the weights the trainer scores with, so they cannot be stale."""

    def __init__(self, policy: Any, version: int = 0) -> None:
        self.policy = policy
        self.version = version
        self.sync(policy, version)

    def generate(self, requests: Sequence[Request], sampling: Any, *, seed: int) -> Rollouts:
        """Rows stamped with the version of the weights that chose them."""
        rollouts = self.policy.sample(requests, sampling, seed=seed)
        return replace(rollouts, policy_version=torch.where(rollouts.mask, self.version, 0))

    def sync(self, policy: Any, version: int) -> None:
        """Bring the sampling weights up to the trained ones, and look that they are."""
        policy.refresh(force=True)
        for (name, master), sampled in zip(
            policy.module.named_parameters(), policy.backbone.module.parameters(), strict=True
        ):
            head = master.detach().flatten()[:256].to(sampled.dtype)
            if not torch.equal(head, sampled.detach().flatten()[:256]):
                raise RuntimeError(
                    f"after sync the sampler's {name} is not the trainer's: version {version} did not arrive."
                )
        self.policy, self.version = policy, version

    def close(self) -> None:
        """Nothing to close."""
