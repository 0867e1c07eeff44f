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
from gruppo.protocols import Outputs, Policy, shard_policy
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
        self.rule, self.rate, self.every, self.storage = rule, rate, every, storage
        self.numbers = sum(p.numel() for p in policy.module.parameters())
        self.follows_policy = rule == "ema"
        self.shares_module = rule == "adapter_off" or (
            self.follows_policy and has_adapter(policy.module)
        )
        self.is_offloaded = storage != "device" and not self.shares_module
        self._policy = policy
        self._read: Callable[[], dict[str, Tensor]]
        if self.shares_module:
            weights = trained(policy.module)
            self._trained = set(weights)
            self._read = store(weights, "device") if rule == "ema" else dict
            return
        policy.refresh(force=True)
        module = copy.deepcopy(policy.compute_module).requires_grad_(False).eval()
        self._policy = policy.at(module)
        computing = dict(module.named_parameters())
        kept = dict(policy.module.named_parameters()) if rule == "ema" else computing
        if self.is_offloaded or any(
            computing[name].dtype != tensor.dtype for name, tensor in kept.items()
        ):
            self._read = store(kept, storage)
        else:  # one copy serves for both storage and compute
            self._read = computing.copy
        if self.is_offloaded:
            for parameter in module.parameters():
                parameter.data = parameter.data.new_empty(0)

    def memory_estimate(self, dtype_bytes: int) -> dict[str, float]:
        """Return bytes held during updates, with ``dtype_bytes`` per number of what computes."""
        is_elsewhere = self.is_offloaded and self._policy.device.type != "cpu"
        if self.rule == "adapter_off" or is_elsewhere:
            return {}
        if self.shares_module:
            return {
                "reference's adapter": 4
                * sum(tensor.numel() for tensor in self.state_dict().values())
            }
        if self.rule == "frozen":
            return {"reference": dtype_bytes * self.numbers}
        # the weights of the moving average, and a copy of them that computes in another dtype
        copied = {"reference's copy": float(dtype_bytes * self.numbers)} if dtype_bytes != 4 else {}
        return {"reference, float32": 4.0 * self.numbers} | ({} if self.is_offloaded else copied)

    @property
    def module(self) -> nn.Module:
        """The module that computes; its parameters are empty while the weights are offloaded."""
        return self._policy.compute_module

    def shard(self, apply: Callable[..., None]) -> None:
        """Shard the copy over ranks, after the policy; see ``ShardingMixin.shard``."""
        if self.shares_module:
            self._read = (
                store(trained(self._policy.module), "device") if self.follows_policy else dict
            )
            return
        for (
            name,
            weight,
        ) in (
            self._read().items()
        ):  # in the dtype that they are mixed in: FSDP casts to that of compute
            self.module.get_parameter(name).data = weight.detach()
        shard_policy(self._policy, apply)
        shards: dict[str, Tensor] = dict(self.module.named_parameters())
        self._read = shards.copy

    def on_device(self) -> AbstractContextManager[None]:
        """Load offloaded weights for the length of the block; nested calls and other storage cost
        nothing."""
        is_empty = self.is_offloaded and not any(
            parameter.numel() for parameter in self.module.parameters()
        )
        return swapped(self.module, self._read()) if is_empty else nullcontext()

    @contextmanager
    def active(self) -> Iterator[Any]:
        """Yield the policy over the reference's weights."""
        if not self.shares_module:
            with self.on_device():
                yield self._policy
            return
        if self.follows_policy:
            self._policy.refresh()  # not while its weights are swapped
        with (
            swapped(self.module, self._read())
            if self.follows_policy
            else without_adapter(self.module)
        ):
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
        weights = self._read()
        for name, tensor in tensors.items():
            target = weights.pop(name)  # mapped from disk: what is released needs no memory
            if rate == 1:
                target.copy_(tensor)
            elif rate:
                target.mul_(1 - rate).add_(rate * tensor.to(target.device))
        # weights that are stored in another dtype than they compute in are copied to the module
        if not self.is_offloaded and not self.shares_module:
            weights = self._read()
            for name, parameter in self.module.named_parameters():
                parameter.copy_(weights[name])

    def distance(self, policy: Policy) -> float:
        """|policy - reference| / |reference| over the trained weights; NaN if the reference is all
        zeros."""
        weights, difference, norm = self._read(), 0.0, 0.0
        for name, tensor in trained(policy.module).items():
            reference = weights.pop(name)  # mapped from disk: one tensor at a time is in memory
            difference += float(
                whole((tensor.to(reference.device) - reference).square_().sum(dtype=torch.float64))
            )
            norm += float(whole(reference.square().sum(dtype=torch.float64)))
        return (difference / norm) ** 0.5 if norm else float("nan")

    # --- saved state ---

    def frozen_state_dict(self) -> Mapping[str, Tensor]:
        """Return the weights that must never change, by name: all of a frozen copy, or the base
        below an adapter."""
        if self.shares_module:
            return {
                name: p.detach()
                for name, p in self.module.named_parameters()
                if name not in self._trained
            }
        return self._read() if self.rule == "frozen" else {}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights that change: none unless the rule is "ema"; others are rebuilt from
        the first model."""
        return self._read() if self.follows_policy else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        saved, needed = (
            {name: list(t.shape) for name, t in found.items()}
            for found in (state, self.state_dict())
        )
        if odd := sorted(
            name for name in saved.keys() | needed.keys() if saved.get(name) != needed.get(name)
        ):
            raise GruppoError(f"""the saved reference does not fit this run: {len(odd)} tensors
                differ, among them {odd[0]}, which is {saved.get(odd[0], "missing")} in the save,
                and this run needs {needed.get(odd[0], "none")}. Resume with the run's own config
                and model, or start a new run.""")
        self._mix(state, 1.0)


@contextmanager
def swapped(module: nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    """Replace the data of the parameters that ``weights`` names for the length of the block.

    Autograd does not notice (``.data``), so the backward pass of an earlier forward still works
    afterwards.
    """
    parameters = {
        name: parameter for name, parameter in module.named_parameters() if name in weights
    }
    if any(
        map(is_sharded, parameters.values())
    ):  # FSDP gathers from the memory of the shards, not from ``.data``
        shards = {name: local(parameter.detach()) for name, parameter in parameters.items()}
        kept = {name: shard.clone() for name, shard in shards.items()}
        try:
            for name, shard in shards.items():
                shard.copy_(local(weights[name]))
            yield
        finally:
            for name, shard in shards.items():
                shard.copy_(kept[name])
        return
    before = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = weights.pop(name).to(parameter.device, parameter.dtype)
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = before[name]


def store(tensors: Mapping[str, Tensor], storage: Storage) -> Callable[[], dict[str, Tensor]]:
    """Copy the tensors to the storage; return the function that reads them. In-place changes of its
    result persist."""
    device = torch.device("cpu") if storage == "cpu" else None
    return {name: tensor.detach().to(device, copy=True) for name, tensor in tensors.items()}.copy
