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
    chats = (policy.chat, model.chat)
    differing: list[Any] = []
    if policy.chat is not model.chat:
        differing = ["without a vocabulary, which cannot be compared"]
        if not any(chat.is_plain for chat in chats):
            ours, theirs = (chat.tokenizer.get_vocab().items() for chat in chats)
            differing = sorted(ours ^ theirs)
    ids = torch.zeros(1, 2, dtype=torch.long)
    backbones = (policy.backbone, model.backbone)
    sizes = {one.head(one.features(ids.to(policy.device))).shape[-1] for one in backbones}
    if differing or len(sizes) > 1:
        what = f"tokens {differing[:2]}" if differing else f"numbers of token ids {sorted(sizes)}"
        raise GruppoError(
            f"the critic's model and the policy differ: {what}; a critic needs the policy's tokens",
            advice="""Give a model of the same family as $critic.model, or none, for a copy of the
                policy""",
        )
