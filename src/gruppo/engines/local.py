"""Samples from the policy itself, in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gruppo.distributed.sharding import local
from gruppo.protocols import Engine
from gruppo.types import Request, Rollouts


class LocalEngine(Engine):
    """The policy's own ``sample``. It runs on the weights that the trainer scores with, so they
    cannot be stale."""

    def __init__(self, policy: Any, version: int = 0) -> None:
        # also for a subclass with a sync of its own
        self.policy = policy
        self.version = version
        self.sync(policy, version)

    def generate(self, requests: Sequence[Request], sampling: Any, *, seed: int) -> Rollouts:
        """Rows stamped with the version of the weights that chose them."""
        return self._stamped(self.policy.sample(requests, sampling, seed=seed))

    def continue_rollouts(
        self, rollouts: Rollouts, replies: Mapping[int, Any], sampling: Any, **how: Any
    ) -> Rollouts:
        """Rows that got a reply, written on by the same weights; see
        ``TextPolicy.continue_rollouts``."""
        return self._stamped(self.policy.continue_rollouts(rollouts, replies, sampling, **how))

    def _stamped(self, rollouts: Rollouts) -> Rollouts:
        return replace(rollouts, policy_version=torch.where(rollouts.mask, self.version, 0))

    def sync(self, policy: Any, version: int) -> None:
        """Copy the trained weights to those that are sampled from, and check that they are
        equal."""
        policy.refresh(force=True)
        named = policy.module.named_parameters()
        for (name, master), sampled in zip(named, policy.compute_module.parameters(), strict=True):
            trained = spread_sample(master).to(sampled.dtype)
            held = spread_sample(sampled)
            if not torch.allclose(
                trained, held, rtol=0, atol=0, equal_nan=True
            ):  # a run that diverged has NaN in both
                text = f"is not the trainer's: version {version} did not arrive."
                raise RuntimeError(f"after sync the sampler's {name} {text}")
        self.policy = policy
        self.version = version


def spread_sample(x: Tensor) -> Tensor:
    """Return 256 to 511 numbers at equal distances in ``x``, or this rank's shard of it; all of a
    smaller tensor."""
    flat = local(x.detach()).flatten()
    return flat[:: max(1, len(flat) // 256)]
