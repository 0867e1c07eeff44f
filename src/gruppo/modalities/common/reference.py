"""Reference models of the KL term: a frozen copy, a copy that follows the policy, or the policy
without its adapter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gruppo.distributed.sharding import forward, is_sharded, local, whole
from gruppo.modalities.common.lora import has_adapter, trained, without_adapter
from gruppo.protocols import Outputs, Policy
from gruppo.types import GruppoError, Likelihood, MicroBatch, Rollouts

Rule = Literal["frozen", "ema", "adapter_off"]
Storage = Literal["device", "cpu"]


class ReferenceModel:
    """The policy as it was, or weights that follow it, in evaluation mode and without gradients.

    ``rule``:
      - "frozen": a copy of the policy's compute module that never changes.
      - "ema": reference <- rate policy + (1 - rate) reference, every ``every`` steps; with
        ``every=0`` only
        ``reset_to`` changes it. Gorbatovski et al. 2024 (arXiv 2404.09656), the soft update.
        Weights are stored and mixed in the dtype of the master weights, since bfloat16 would round
        small updates away. Of a policy with an adapter, a second adapter on the same base; the
        product B A of mixed A and B is not the mix of the products.
      - "adapter_off": the policy's base model, without its adapter. Nothing is copied.

    ``storage``: where a copy is kept between uses. The module that computes is the policy's
    own or a deep copy of it, so that the KL of an unchanged policy is exactly 0.
    """

    def __init__(
        self,
        policy: Any,
        *,
        rule: Rule = "frozen",
        rate: float = 0.0,
        every: int = 0,
        storage: Storage = "device",
    ) -> None:
        self.rule = rule
        self.rate = rate
        self.every = every
        self.numbers = sum(p.numel() for p in policy.module.parameters())
        self.follows_policy = rule == "ema"
        self.shares_module = rule == "adapter_off" or (
            self.follows_policy and has_adapter(policy.module)
        )
        self.is_offloaded = storage == "cpu" and not self.shares_module
        self._policy = policy
        self._weights: dict[str, Tensor] = {}
        if self.shares_module:
            self._trained = set(trained(policy.module))
            if self.follows_policy:
                self._weights = store(trained(policy.module))
            return
        policy.refresh(force=True)
        module = copy.deepcopy(policy.compute_module).requires_grad_(False).eval()
        self._policy = policy.at(module)
        computing = dict(module.named_parameters())
        kept = dict(policy.module.named_parameters()) if self.follows_policy else computing
        self._weights = computing  # one copy serves for both storage and compute
        if self.is_offloaded:
            self._weights = store(kept, "cpu")
            for parameter in module.parameters():
                parameter.data = parameter.data.new_empty(0)
        elif any(computing[name].dtype != tensor.dtype for name, tensor in kept.items()):
            self._weights = store(kept)

    def memory_estimate(self, dtype_bytes: int) -> dict[str, float]:
        """Return bytes held during updates, with ``dtype_bytes`` per number of what computes."""
        is_elsewhere = self.is_offloaded and self._policy.device.type != "cpu"
        if self.rule == "adapter_off" or is_elsewhere:
            return {}
        if self.shares_module:
            return {"reference": 4.0 * sum(tensor.numel() for tensor in self._weights.values())}
        size = dtype_bytes
        if self.follows_policy:  # float32, and a copy that computes in another dtype
            size = 4 if dtype_bytes == 4 or self.is_offloaded else 4 + dtype_bytes
        return {"reference": float(size * self.numbers)}

    @property
    def module(self) -> nn.Module:
        """The module that computes; its parameters are empty while the weights are offloaded."""
        return self._policy.compute_module

    def shard(self, apply: Callable[..., None]) -> None:
        """Shard the copy over ranks, after the policy; see ``Policy.shard``."""
        if self.shares_module:
            if self.follows_policy:
                self._weights = store(trained(self._policy.module))
            return
        # in the dtype that they are mixed in: FSDP casts to that of compute
        for name, weight in self._weights.items():
            self.module.get_parameter(name).data = weight.detach()
        self._policy.shard(apply)
        shards: dict[str, Tensor] = dict(self.module.named_parameters())
        self._weights = shards

    def on_device(self) -> AbstractContextManager[None]:
        """Load offloaded weights for the length of the block; nested calls and other storage cost
        nothing."""
        is_empty = not any(parameter.numel() for parameter in self.module.parameters())
        return swapped(self.module, self._weights) if is_empty else nullcontext()

    @contextmanager
    def active(self) -> Iterator[Any]:
        """Yield the policy over the reference's weights."""
        if not self.shares_module:
            with self.on_device():
                yield self._policy
        elif self.follows_policy:
            self._policy.refresh()  # not while its weights are swapped
            with swapped(self.module, self._weights):
                yield self._policy.at(self.module)
        else:
            with without_adapter(self.module):
                yield self._policy.at(self.module)

    @torch.no_grad()
    def likelihood(
        self, rollouts: Rollouts, micro_batch: MicroBatch, *, outputs: Outputs = ()
    ) -> Likelihood:
        with self.active() as policy:
            return forward(policy.module, policy.likelihood, rollouts, micro_batch, outputs=outputs)

    # --- following the policy ---

    def update(self, policy: Policy, step: int) -> None:
        """Mix the policy's weights in, if the rule says so after this step (1, 2, ...)."""
        if self.every and step % self.every == 0:
            self._mix(trained(policy.module), self.rate)

    def reset_to(self, policy: Policy) -> None:
        """Copy the policy's current weights ("ema" only)."""
        self._mix(trained(policy.module), 1.0)

    @torch.no_grad()
    def _mix(self, tensors: Mapping[str, Tensor], rate: float) -> None:
        """reference <- rate tensors + (1 - rate) reference. Rates 0 and 1 keep and copy every bit,
        NaN included."""
        weights = self._weights
        for name, tensor in tensors.items():
            if rate == 1:
                weights[name].copy_(tensor)
            elif rate:
                weights[name].mul_(1 - rate).add_(rate * tensor.to(weights[name].device))
        # weights that are stored in another dtype than they compute in are copied to the module
        if not self.is_offloaded and not self.shares_module:
            for name, parameter in self.module.named_parameters():
                parameter.copy_(weights[name])

    def distance(self, policy: Policy) -> float:
        """|policy - reference| / |reference| over the trained weights; NaN if the reference is all
        zeros."""
        weights, difference, norm = self._weights, 0.0, 0.0
        for name, tensor in trained(policy.module).items():
            reference = weights[name]
            apart = (tensor.to(reference.device) - reference).square_()
            difference += float(whole(apart.sum(dtype=torch.float64)))
            norm += float(whole(reference.square().sum(dtype=torch.float64)))
        return (difference / norm) ** 0.5 if norm else float("nan")

    # --- saved state ---

    def frozen_state_dict(self) -> Mapping[str, Tensor]:
        """Return the weights that must never change, by name: all of a frozen copy, or the base
        below an adapter."""
        if self.rule == "frozen":
            return self._weights
        if not self.shares_module:
            return {}
        parameters = self.module.named_parameters()
        return {name: p.detach() for name, p in parameters if name not in self._trained}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights that change: none unless the rule is "ema"; others are rebuilt from
        the first model."""
        return self._weights if self.follows_policy else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        saved = {name: list(tensor.shape) for name, tensor in state.items()}
        needed = {name: list(tensor.shape) for name, tensor in self.state_dict().items()}
        odd = [n for n in sorted(saved.keys() | needed.keys()) if saved.get(n) != needed.get(n)]
        if odd:
            raise GruppoError(f"""the saved reference does not fit this run: {odd[0]} is
                {saved.get(odd[0], "missing")} in the save, and this run needs
                {needed.get(odd[0], "none")}. Resume with the run's own config and model, or start a
                new run.""")
        self._mix(state, 1.0)


@contextmanager
def swapped(module: nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    """Replace the data of the parameters that ``weights`` names for the length of the block.

    Autograd does not notice (``.data``), so the backward pass of an earlier forward still works
    afterwards.
    """
    parameters = {name: p for name, p in module.named_parameters() if name in weights}
    is_whole = not any(map(is_sharded, parameters.values()))
    before = {
        name: p.data if is_whole else local(p.detach()).clone() for name, p in parameters.items()
    }

    def put(tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in parameters.items():
            if is_whole:
                parameter.data = tensors[name].to(parameter.device, parameter.dtype)
            else:  # FSDP gathers from the memory of the shards, not from ``.data``
                local(parameter.detach()).copy_(local(tensors[name]))

    try:
        put(weights)
        yield
    finally:
        put(before)


def store(tensors: Mapping[str, Tensor], device: str | None = None) -> dict[str, Tensor]:
    """Copy the tensors to a device, their own by default."""
    return {name: tensor.detach().to(device, copy=True) for name, tensor in tensors.items()}
