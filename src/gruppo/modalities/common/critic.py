"""Critics: a value head on the policy's trunk, or on a network of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gruppo.distributed.sharding import forward
from gruppo.modalities.common.lora import module_weights
from gruppo.protocols import Critic, check_values
from gruppo.types import MicroBatch, Rollouts


class ValueHead(nn.Module):
    """V(s_t) = w . f_t + b of the features f_t that also predict action t.

    Initialized to zero, so that the first advantages are the returns. It computes in its own dtype
    whatever that of the features: bfloat16 keeps 8 bits, so that a return of 100 would be rounded
    to multiples of 0.5.
    """

    def __init__(self, width: int, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        # nn.Linear would use the global generator
        self.weight = nn.Parameter(torch.zeros(1, width, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, features: Float[Tensor, "N F"]) -> Float[Tensor, "N"]:
        return nn.functional.linear(features.to(self.weight.dtype), self.weight, self.bias)[:, 0]


class SharedCritic(Critic):
    """A value head on the policy's trunk, which receives its gradients.

    It reads the logits of a model that cannot be split into trunk and head.
    """

    is_shared = True

    def __init__(self, policy: Any) -> None:
        # the dtype of the master weights; an adapter's are float32 on a base that may be less
        dtype = torch.promote_types(next(policy.module.parameters()).dtype, torch.float32)
        policy.value_head = ValueHead(policy.feature_width(), dtype=dtype).to(policy.device)
        self.module: nn.Module = policy.value_head
        self._policy = policy

    def checkpoint_weights(self) -> dict[str, Tensor]:
        return module_weights(self.module)

    def memory_estimate(self, dtype_bytes: int) -> dict[str, float]:
        trained = sum(p.numel() for p in self.module.parameters() if p.requires_grad)
        return {"critic, float32": 4.0 * trained}

    def values(self, rollouts: Rollouts, micro_batch: MicroBatch) -> Float[Tensor, "b t"]:
        values = forward(self._policy.module, self._policy.values, rollouts, micro_batch)
        return check_values(values, micro_batch)


class NetworkCritic(SharedCritic):
    """A value head on a network of its own: ``network`` is a policy of which only ``trunk`` is
    used."""

    is_shared = False

    def __init__(self, network: Any, trunk: nn.Module) -> None:
        super().__init__(network)
        self.trunk = trunk
        self.module = nn.ModuleDict({"trunk": trunk, "head": network.value_head})

    @property
    def compute_copy(self) -> nn.Module | None:
        """The copy of the trunk in the compute dtype, if there is one."""
        module = self._policy.compute_module
        return None if module is self._policy.module else module

    def memory_estimate(self, dtype_bytes: int) -> dict[str, float]:
        found = super().memory_estimate(dtype_bytes)
        if self.compute_copy is not None:
            numbers = sum(p.numel() for p in self.compute_copy.parameters())
            found["critic's copy"] = float(dtype_bytes * numbers)
        return found

    def shard(self, apply: Callable[..., None]) -> None:
        self._policy.shard(apply)

    def recompute(self) -> None:
        self._policy.recompute()

    def zero_grad(self) -> None:
        self._policy.compute_module.zero_grad(set_to_none=True)

    def bytes_per_unit(self) -> int:
        return self._policy.bytes_per_unit()
