"""A critic of language models with a network of its own."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch

from gruppo.modalities.common.critic import NetworkCritic
from gruppo.modalities.text.policy import TextPolicy
from gruppo.types import GruppoError


class SeparateCritic(NetworkCritic):
    """A separate trunk with a value head, in the policy's compute dtype.

    The trunk is a copy of the policy's (of a policy with an adapter, a copy of the adapter on the
    shared base), or that of another model with the same tokens. The language head is left out: it
    would only be summed over ranks and saved.
    """

    def __init__(self, policy: TextPolicy, model: TextPolicy | None = None) -> None:
        if model is None or model is policy:
            # the base below an adapter never changes, so that both can share it
            base = {id(p): p for p in policy.trunk().parameters() if not p.requires_grad}
            model, trunk = policy, copy.deepcopy(policy.trunk(), base)
        else:
            check_same_tokens(policy, model)
            trunk = model.trunk()
        backbone = replace(model.backbone, module=trunk)
        network = TextPolicy(trunk, backbone, model.chat, compute_dtype=policy.compute_dtype)
        super().__init__(network, trunk)


@torch.no_grad()
def check_same_tokens(policy: TextPolicy, model: TextPolicy) -> None:
    """Refuse a critic that would read the policy's token ids as other tokens."""
    vocabularies: list[Any] = [
        None if p.chat.is_plain else p.chat.tokenizer.get_vocab() for p in (policy, model)
    ]
    ours, theirs = vocabularies
    ids = torch.zeros(1, 2, dtype=torch.long, device=policy.device)
    sizes = [
        p.backbone.head(p.backbone.features(ids.to(p.device))).shape[-1] for p in (policy, model)
    ]
    is_same = policy.chat is model.chat
    if not is_same and (ours is None or theirs is None):
        problem = "a tokenizer without a vocabulary cannot be compared with the critic's"
    elif not is_same and ours != theirs:
        odd = sorted(ours.items() ^ theirs.items())
        token = odd[0][0]
        own, other = (vocabulary.get(token, "no token") for vocabulary in (ours, theirs))
        differs = (
            f"the critic's tokenizer differs: {token!r} is {other} in it and {own} in the policy's"
        )
        problem = f"{differs}, one of {len(odd)} differences"
    elif sizes[0] != sizes[1]:
        problem = f"the critic's model knows {sizes[1]} token ids and the policy's {sizes[0]}"
    else:
        return
    raise GruppoError(
        f"{problem}; a critic needs the policy's own tokens",
        advice="Give a model of the same family as $critic.model, or none, for a copy of the policy",
    )
