"""What predicts the return before each action: a head on the policy's trunk, or a network of its own."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gruppo.modalities.text import TextPolicy
from gruppo.types import GruppoError, MicroBatch, Rollouts


class ValueHead(nn.Module):
    """V(s_t) = w . f_t + b of the features f_t that also predict action t.

    Zero at first, so that the first advantages are the returns. It computes in its own dtype, whatever the features'
    is: bfloat16 keeps 8 bits, and a return of 100 would be known to 0.5.
    """

    def __init__(self, width: int, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width, dtype=dtype))  # nn.Linear would draw from the generator
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, features: Float[Tensor, "N F"]) -> Float[Tensor, "N"]:
        width = self.weight.shape[1]
        if features.shape[-1] != width:
            raise GruppoError(
                f"the value head reads {width} numbers and the features have {features.shape[-1]}; both need to be of "
                "one model. Make a new head with ValueHead(policy.feature_width())."
            )
        return nn.functional.linear(features.to(self.weight.dtype), self.weight, self.bias)[:, 0]


class SharedCritic:
    """A new value head on the policy's trunk, which its gradients reach.

    The features of a model that cannot be split into trunk and head are its logits; the head then reads those.
    """

    is_shared = True

    def __init__(self, policy: TextPolicy) -> None:
        self.module: nn.Module = _head_for(policy)
        policy.value_head = self.module
        self._policy = policy

    def values(self, rollouts: Rollouts, micro_batch: MicroBatch) -> Float[Tensor, "b t"]:
        return check_values(self._policy.values(rollouts, micro_batch), micro_batch)


class SeparateCritic:
    """A trunk of its own with a value head, in the arithmetic of the policy.

    A copy of the policy's trunk as it is now (of its adapter, where it has one: the base is shared), or the trunk of
    another model that reads the same tokens. The language
    head is left behind: there is nothing of it to train, to sum over ranks or to save.
    """

    is_shared = False

    def __init__(self, policy: TextPolicy, model: TextPolicy | None = None) -> None:
        if model is None or model is policy:
            # the base below an adapter never changes: both stand on the same
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
        """Its master weights without the head."""
        return self._network.module

    @property
    def compute_copy(self) -> nn.Module | None:
        """The trunk in another dtype, where the arithmetic has one."""
        return None if self._network.copy is None else self._network.copy.module

    def values(self, rollouts: Rollouts, micro_batch: MicroBatch) -> Float[Tensor, "b t"]:
        return check_values(self._network.values(rollouts, micro_batch), micro_batch)


def _head_for(policy: TextPolicy) -> ValueHead:
    """In the dtype of the master weights; those of an adapter are float32 though its base may be less."""
    dtype = torch.promote_types(next(policy.module.parameters()).dtype, torch.float32)
    return ValueHead(policy.feature_width(), dtype=dtype).to(policy.device)


def check_values(values: Tensor, micro_batch: MicroBatch) -> Float[Tensor, "b t"]:
    """The values, if there is one of each action of the piece. [b, 1] or [b] would be broadcast without a word."""
    needed = (len(micro_batch.rows), micro_batch.cols.stop - (micro_batch.cols.start or 0))
    if tuple(values.shape) != needed:
        raise GruppoError(
            f"the critic gave values of shape {list(values.shape)} for a piece of {list(needed)} (rows, actions); it "
            "needs one number before each action. Return [b, t] from Critic.values."
        )
    return values


def check_same_tokens(policy: TextPolicy, model: TextPolicy) -> None:
    """Refuse a critic that would read the policy's ids as other words."""
    what = _difference(policy.chat.vocabulary, model.chat.vocabulary) if policy.chat is not model.chat else ""
    sizes = _vocabulary_size(policy), _vocabulary_size(model)
    if not what and sizes[0] != sizes[1]:
        what = f"the critic's model knows {sizes[1]} token ids and the policy's {sizes[0]}"
    if what:
        raise GruppoError(
            f"{what}; a critic needs the policy's own tokens. Give a model of the same family as --critic.model, or "
            "none, for a copy of the policy."
        )


def _difference(own: Mapping[str, int] | None, other: Mapping[str, int] | None) -> str:
    if own is None or other is None:
        return "a tokenizer without a vocabulary cannot be compared with the critic's"
    if own == other:
        return ""
    odd = sorted(own.items() ^ other.items())
    where = f"{odd[0][0]!r} is {other.get(odd[0][0], 'no token')} in it and {own.get(odd[0][0], 'no token')} in"
    return f"the critic's tokenizer is another: {where} the policy's, one of {len(odd)} differences"


@torch.no_grad()
def _vocabulary_size(policy: TextPolicy) -> int:
    ids = torch.zeros(1, 1, dtype=torch.long, device=policy.device)
    return policy.backbone.head(policy.backbone.features(ids)).shape[-1]
