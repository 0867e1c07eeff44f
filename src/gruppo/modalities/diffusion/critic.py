"""A critic of denoising steps with a network of its own; one that shares the policy's is ``SharedCritic``."""

from __future__ import annotations

import copy

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gruppo.modalities.common.critic import ValueHead, module_weights
from gruppo.modalities.diffusion.policy import DenoiserPolicy
from gruppo.protocols import check_values
from gruppo.types import MicroBatch, Rollouts


class DenoiserCritic:
    """V of the state before each step: a copy of the policy's network as it is now, with a value head on its middle.

    What follows the middle gets no gradient, and rests.
    """

    is_shared = False

    def __init__(self, policy: DenoiserPolicy) -> None:
        trunk = copy.deepcopy(policy.module).requires_grad_(True)
        for parameter in trunk.parameters():  # the base below an adapter may be held in less
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
        self._network = policy.at(trunk)
        self._rest_what_follows(list(trunk.parameters()))
        dtype = torch.promote_types(policy.compute_dtype, torch.float32)
        self._network.value_head = head = ValueHead(policy.feature_width(), dtype=dtype).to(policy.device)
        self.module: nn.Module = nn.ModuleDict({"trunk": trunk, "head": head})

    def _rest_what_follows(self, parameters: list[nn.Parameter]) -> None:
        features = self._network.denoiser.network(self._network.denoiser.probe(), features=True)[1]
        for parameter, reached in zip(
            parameters, torch.autograd.grad(features.sum(), parameters, allow_unused=True), strict=True
        ):
            parameter.requires_grad_(reached is not None)

    def checkpoint_weights(self) -> dict[str, Tensor]:
        return module_weights(self.module)

    def zero_grad(self) -> None:
        """Nothing: ``module`` holds the only copy."""

    def bytes_per_unit(self) -> int:
        return 0

    def memory_estimate(self, dtype_bytes: int) -> dict[str, float]:
        return {"critic, float32": 4.0 * sum(p.numel() for p in self.module.parameters() if p.requires_grad)}

    def values(self, rollouts: Rollouts, micro_batch: MicroBatch) -> Float[Tensor, "b t"]:
        return check_values(self._network.values(rollouts, micro_batch), micro_batch)
