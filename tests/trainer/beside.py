"""An engine that samples beside the trainer, from a copy of the policy; named as module:function in
configs."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from gruppo.protocols import Engine
from gruppo.types import Request, Rollouts


class CopyEngine(Engine):
    """Samples from a copy of the weights, one call at a time; a call that waits for ``sync`` uses
    the new weights."""

    concurrency = 2

    def __init__(self, policy: Any, *, slow_s: float = 0.0) -> None:
        self.policy, self.version, self.slow_s = policy.at(copy.deepcopy(policy.module)), 0, slow_s
        self.lock, self.chance = threading.Lock(), random.Random(0)
        self.calls: list[list[Request]] = []

    def generate(self, requests: Sequence[Request], sampling: Any, *, seed: int) -> Rollouts:
        if self.slow_s:
            time.sleep(self.slow_s * self.chance.random())
        with self.lock:
            self.calls.append(list(requests))
            rollouts = self.policy.sample(requests, sampling, seed=seed)
            return replace(rollouts, policy_version=torch.where(rollouts.mask, self.version, 0))

    @torch.no_grad()
    def sync(self, policy: Any, version: int) -> None:
        with self.lock:
            for held, trained in zip(
                self.policy.module.parameters(), policy.module.parameters(), strict=True
            ):
                held.copy_(trained)
            self.policy.refresh(force=True)
            self.version = version

    def close(self) -> None:
        pass


def engine(policy: Any) -> CopyEngine:
    return CopyEngine(policy)


def slow_engine(policy: Any) -> CopyEngine:
    return CopyEngine(policy, slow_s=0.05)
