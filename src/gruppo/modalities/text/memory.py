"""Memory of language models: activations per token."""

from __future__ import annotations

from typing import Any

import torch

from gruppo.core.linear_head import tile_bytes

TOKENS_ON_CPU, TOKENS = 640, 16384
"""Budgets where memory is not short. A CPU's products are nearly as fast at 600 rows as at more; a
GPU's are not."""


def activations(
    config: Any,
    tokens: int,
    dtype: torch.dtype,
    *,
    is_padded: bool = False,
    is_recomputed: bool = False,
) -> int:
    """Bytes of T tokens: T layers (6 H + 2 K + 2 F) numbers of our layers, T layers (16 H + 4 F) of
    the model's own, which padded rows run.

    H numbers of a feature, K of a key, F of the feed-forward; ours are inputs, norms, q, k, v, the
    output of attention, gate and up. Counted for the Llama layout, whose own norms and rotations
    keep float32; it has 0.4 and 0.95 MB per token at 135M weights in bfloat16. Where the backward
    pass computes layers again, the numbers of one layer and H of each. 0 if the config lacks the
    sizes, as those of recurrent models.
    """
    try:
        model = config.get_text_config()
        feed_forward = getattr(model, "intermediate_size", None) or 4 * model.hidden_size
        numbers = 6 * model.hidden_size + 2 * key_numbers(model) + 2 * feed_forward
        if is_padded:
            numbers = 16 * model.hidden_size + 4 * feed_forward
        layers = model.num_hidden_layers
        of_all = numbers + layers * model.hidden_size if is_recomputed else layers * numbers
        return dtype.itemsize * tokens * of_all
    except (AttributeError, TypeError):
        return 0


def key_numbers(model: Any) -> int:
    """Numbers in the keys of one token in one layer; values have as many."""
    heads = model.num_attention_heads
    size_of_head = getattr(model, "head_dim", None) or model.hidden_size // heads
    return size_of_head * (getattr(model, "num_key_value_heads", None) or heads)


def working_memory(
    policy: Any, config: Any, longest: int, budget: int, rows: int
) -> dict[str, float]:
    """Bytes of one forward and backward over T tokens, and of the cache of B rows of L tokens,
    prompt included.

    Cache 2 B L layers K width, K numbers of a key. That of conversations has the longest replies,
    and counts twice: rows that have ended their turn are kept beside those that are decoded.
    Attention scores are not counted. A plain module has no sizes in a config, and reads whole rows
    again for each new token: nothing is estimated of it.
    """
    if policy.backbone.is_plain:
        return {}
    width = policy.compute_dtype.itemsize
    cached = longest + config.rollout.max_new_tokens
    if config.environment.names:
        cached += (config.environment.turns - 1) * config.environment.max_reply_tokens
        cached = 2 * min(cached, policy.context or cached)
    is_truncated = config.rollout.top_k > 0 or config.rollout.top_p < 1
    model = policy.module.config.get_text_config()
    # a chunk in float32: raw, tempered, gradient
    logits = 3 * 4 * min(policy.chunk, budget) * model.vocab_size
    if isinstance(policy.backbone.head, torch.nn.Linear) and not is_truncated:
        logits = tile_bytes(budget, model.vocab_size, width, policy.device)
    cache = width * 2 * rows * cached * model.num_hidden_layers * key_numbers(model)
    return {
        "activations": policy.bytes_per_unit() * budget,
        "logits": logits,
        "cache while sampling": cache,
    }
