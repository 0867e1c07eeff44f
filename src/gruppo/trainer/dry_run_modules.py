"""What a run with a module of one's own needs of memory: measured, for no config says its sizes."""

from __future__ import annotations

import torch

from gruppo.config.checks import group_sizes
from gruppo.modalities.text.policy import BATCH_ROWS, TextPolicy
from gruppo.trainer import growth
from gruppo.trainer.run import Run


def working_memory(run: Run, width: int, tokens: int, longest: int) -> dict[str, float]:
    """Bytes of a forward and backward over T tokens, of a chunk of logits in float32 (raw, tempered, gradient), and of
    the logits of B whole rows of L tokens, which each new token reads again.

    Attention scores are among what is measured, as far as a backward pass keeps them.
    """
    rollout, size = run.config.rollout, max(group_sizes(run.config))
    length, vocabulary = longest + rollout.max_new_tokens, run.policy.feature_width()
    rows = max(min(BATCH_ROWS, rollout.prompts * size), growth.cap_of(rollout, size))
    return {
        "activations, measured": max(tokens // length, 1) * kept_bytes(run.policy, length),
        "logits": 3 * 4 * min(run.policy.chunk, tokens) * vocabulary,
        "logits while sampling": width * rows * length * vocabulary,
    }


def kept_bytes(policy: TextPolicy, length: int) -> int:
    """Bytes that a forward of one row keeps for its backward, weights not counted; each piece of memory once."""
    own = {parameter.untyped_storage().data_ptr() for parameter in policy.compute_module.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = policy.backbone.features(torch.zeros(1, length, dtype=torch.long, device=policy.device))
    del logits  # what it kept lived until here, so that no address was counted for two
    return sum(kept.values())
