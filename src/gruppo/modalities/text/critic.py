"""A critic of language models with a network of its own."""

from __future__ import annotations

import copy

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gruppo.modalities.common.critic import module_weights, value_head_for
from gruppo.modalities.text.policy import TextPolicy
from gruppo.protocols import check_values
from gruppo.types import GruppoError, MicroBatch, Rollouts


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
        self._network.value_head = head = value_head_for(self._network)
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
