"""Memory of one rank: weights, gradients and optimizer state, whole or sharded, and what a step
gathers of them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from gruppo.distributed.sharding import blocks_of

NF4_BITS = 4.127
"""Of a weight of a layer in 4 bits, scales included (QLoRA, arXiv 2305.14314: double
quantization)."""


@dataclass(frozen=True)
class WeightCounts:
    """Numbers in the weights of a model, by what decides where they are."""

    total: int
    trained: int
    """With a gradient: all of them, or those of an adapter."""
    largest_block: int
    root: int
    """In no block, such as a tied embedding and the last norm: whole on each rank while a step
    computes."""

    @classmethod
    def of(cls, module: nn.Module) -> WeightCounts:
        counts = [sum(p.numel() for p in block.parameters()) for block in blocks_of(module)]
        parameters = list(module.parameters())
        total = sum(p.numel() for p in parameters)
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        return cls(total, trained, max(counts, default=0), total - sum(counts))


def state_bytes(
    counts: WeightCounts, *, shards: int, base_bytes: float = 0, critic_trained: int = 0
) -> dict[str, float]:
    """Bytes of one rank between steps, of AdamW in float32 over ``shards`` ranks; 1 where each
    holds all.

    ``base_bytes``: of all frozen weights under an adapter; 0 without one. ``critic_trained``:
    numbers of a critic that have a gradient too.
    """
    trained = counts.trained + critic_trained
    parts = {"base": base_bytes} if base_bytes else {}
    own = counts.trained if base_bytes else counts.total
    parts |= {f"{'adapter' if base_bytes else 'weights'}, float32": 4.0 * own}
    parts |= {"gradients, float32": 4.0 * trained, "AdamW state, float32": 8.0 * trained}
    return {name: size / shards for name, size in parts.items()}


def gathered_bytes(
    counts: WeightCounts, *, shards: int, compute_bytes: int, block_bytes: float = 0
) -> dict[str, float]:
    """Bytes that a step of sharded weights gathers: the root, a block that computes, and one that
    is fetched ahead.

    In the backward pass, the gradients of the root and of a block are whole too, until they are
    reduced in float32. Nothing where weights are not sharded. ``block_bytes``: of a number of a
    block in 4 bits, which is not cast.
    """
    if shards == 1:
        return {}
    gradients = (
        0
        if counts.trained < counts.total
        else (compute_bytes + 4) * max(counts.root, counts.largest_block)
    )
    weights = (
        compute_bytes * counts.root + (block_bytes or compute_bytes) * 2 * counts.largest_block
    )
    return {"gathered in a step": float(weights + gradients)}
