"""Critics of language models: a value head on the policy's trunk, or a separate network."""

from __future__ import annotations

import copy
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gruppo.modalities.common.lora import has_adapter
from gruppo.modalities.text.policy import TextPolicy
from gruppo.protocols import check_values
from gruppo.types import GruppoError, MicroBatch, Rollouts


class ValueHead(nn.Module):
    """V(s_t) = w . f_t + b of the features f_t that also predict action t.

    Initialised to zero, so that the first advantages are the returns. It computes in its own dtype whatever that of the
    features: bfloat16 keeps 8 bits, so that a return of 100 would be rounded to multiples of 0.5.
    """

    def __init__(self, width: int, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width, dtype=dtype))  # nn.Linear would use the global generator
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, features: Float[Tensor, "N F"]) -> Float[Tensor, "N"]:
        width = self.weight.shape[1]
        if features.shape[-1] != width:
            raise GruppoError(
                f"the value head reads {width} features and got {features.shape[-1]}; head and trunk must be of one "
                "model. Make a new head with ValueHead(policy.feature_width())."
            )
        return nn.functional.linear(features.to(self.weight.dtype), self.weight, self.bias)[:, 0]


class SharedCritic:
    """A value head on the policy's trunk, which receives its gradients.

    It reads the logits of a model that cannot be split into trunk and head.
    """

    is_shared = True

    def __init__(self, policy: Any) -> None:
        self.module: nn.Module = _head_for(policy)
        policy.value_head = self.module
        self._policy = policy

    def checkpoint_weights(self) -> dict[str, Tensor]:
        return module_weights(self.module)

    def zero_grad(self) -> None:
        """Nothing: the policy holds the only copy."""

    def bytes_per_unit(self) -> int:
        return 0

    def memory_estimate(self, dtype_bytes: int) -> dict[str, float]:
        return {"critic, float32": 4.0 * sum(p.numel() for p in self.module.parameters() if p.requires_grad)}

    def values(self, rollouts: Rollouts, micro_batch: MicroBatch) -> Float[Tensor, "b t"]:
        return check_values(self._policy.values(rollouts, micro_batch), micro_batch)


class SeparateCritic:
    """A separate trunk with a value head, in the policy's compute dtype.

    The trunk is a copy of the policy's (of a policy with an adapter, a copy of the adapter on the shared base), or that
    of another model with the same tokens. The language head is left out: it would only be summed over ranks and saved.
    """

    is_shared = False

    def __init__(self, policy: TextPolicy, model: TextPolicy | None = None) -> None:
        if model is None or model is policy:
            # the base below an adapter never changes, so that both can share it
            base = {id(p): p for p in policy.trunk().parameters() if not p.requires_grad}
            model, trunk = policy, copy.deepcopy(policy.trunk(), base)
        else:
            check_same_tokens(policy, model)
            trunk = model.trunk()
        backbone = model.backbone.on(trunk)
        self._network = TextPolicy(trunk, backbone, model.chat, compute_dtype=policy.compute_dtype)
        self._network.value_head = head = _head_for(self._network)
        self.module: nn.Module = nn.ModuleDict({"trunk": trunk, "head": head})

    def checkpoint_weights(self) -> dict[str, Tensor]:
        return module_weights(self.module)

    def zero_grad(self) -> None:
        self._network.compute_module.zero_grad(set_to_none=True)

    def bytes_per_unit(self) -> int:
        return self._network.bytes_per_unit()

    def memory_estimate(self, dtype_bytes: int) -> dict[str, float]:
        numbers = sum(p.numel() for p in self.module.parameters() if p.requires_grad)
        copied = 0 if self.compute_copy is None else sum(p.numel() for p in self.compute_copy.parameters())
        return {"critic, float32": 4.0 * numbers} | ({"critic's copy": float(dtype_bytes * copied)} if copied else {})

    @property
    def trunk(self) -> nn.Module:
        """The master weights without the head."""
        return self._network.module

    @property
    def compute_copy(self) -> nn.Module | None:
        """The copy of the trunk in the compute dtype, if that is another."""
        return None if self._network.copy is None else self._network.copy.module

    def values(self, rollouts: Rollouts, micro_batch: MicroBatch) -> Float[Tensor, "b t"]:
        return check_values(self._network.values(rollouts, micro_batch), micro_batch)


def _head_for(policy: Any) -> ValueHead:
    # the dtype of the master weights; those of an adapter are float32 on a base that may be less
    dtype = torch.promote_types(next(policy.module.parameters()).dtype, torch.float32)
    return ValueHead(policy.feature_width(), dtype=dtype).to(policy.device)


def module_weights(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; of a module with adapters, what is trained alone."""
    parameters = dict(module.named_parameters())
    if has_adapter(module):
        return {name: p.detach().contiguous() for name, p in parameters.items() if p.requires_grad}
    saved = module.state_dict().keys()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in saved}
    return {name: tensor.detach().contiguous() for name, tensor in (parameters | buffers).items()}


@torch.no_grad()
def check_same_tokens(policy: TextPolicy, model: TextPolicy) -> None:
    """Refuse a critic that would read the policy's token ids as other tokens."""
    ours, theirs = policy.chat.vocabulary, model.chat.vocabulary
    ids = torch.zeros(1, 1, dtype=torch.long, device=policy.device)
    sizes = [p.backbone.head(p.backbone.features(ids.to(p.device))).shape[-1] for p in (policy, model)]
    problem = ""
    if policy.chat is model.chat:
        pass
    elif ours is None or theirs is None:
        problem = "a tokenizer without a vocabulary cannot be compared with the critic's"
    elif ours != theirs:
        odd = sorted(ours.items() ^ theirs.items())
        token = odd[0][0]
        problem = (
            f"the critic's tokenizer differs: {token!r} is {theirs.get(token, 'no token')} in it and "
            f"{ours.get(token, 'no token')} in the policy's, one of {len(odd)} differences"
        )
    if not problem and sizes[0] != sizes[1]:
        problem = f"the critic's model knows {sizes[1]} token ids and the policy's {sizes[0]}"
    if problem:
        raise GruppoError(
            f"{problem}; a critic needs the policy's own tokens. Give a model of the same family as --critic.model, or "
            "none, for a copy of the policy."
        )
