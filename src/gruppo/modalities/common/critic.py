"""Critics of language models: a value head on the policy's trunk, or a separate network."""

from __future__ import annotations

import copy

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gruppo.modalities.text import TextPolicy
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

    def __init__(self, policy: TextPolicy) -> None:
        self.module: nn.Module = _head_for(policy)
        policy.value_head = self.module
        self._policy = policy

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


def _head_for(policy: TextPolicy) -> ValueHead:
    # the dtype of the master weights; those of an adapter are float32 on a base that may be less
    dtype = torch.promote_types(next(policy.module.parameters()).dtype, torch.float32)
    return ValueHead(policy.feature_width(), dtype=dtype).to(policy.device)


def check_values(values: Tensor, micro_batch: MicroBatch) -> Float[Tensor, "b t"]:
    """Return the values if their shape is right; [b, 1] or [b] would be broadcast silently."""
    required = (len(micro_batch.rows), micro_batch.cols.stop - (micro_batch.cols.start or 0))
    if tuple(values.shape) != required:
        raise GruppoError(
            f"the critic returned values of shape {list(values.shape)} for a micro-batch of {list(required)} (rows, "
            "actions); it needs one value before each action. Return [b, t] from Critic.values."
        )
    return values


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
