"""Memory of one GPU by model size, method and number of GPUs, for docs/guides/many-gpus.md.

    python -m benchmarks.memory_table

From the shapes of the Qwen2.5 models (built on the meta device) and the formulas of ``gruppo
plan``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from gruppo.distributed.memory import NF4_BITS, WeightCounts, gathered_bytes, state_bytes

# hidden size, feed-forward, layers, heads, key heads, vocabulary, tied head: config.json of
# Qwen/Qwen2.5-SIZE
SIZES = {
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "3B": (2048, 11008, 36, 16, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "14B": (5120, 13824, 48, 40, 8, 152064, False),
    "32B": (5120, 27648, 64, 40, 8, 152064, False),
    "70B": (8192, 29568, 80, 64, 8, 152064, False),
}
RANK = 16
"""Of adapters on all linear layers of the blocks."""
GPUS = (1, 2, 4, 8, 16, 32, 64)
GB = 1e9


def model(size: str, layers: int | None = None) -> torch.nn.Module:
    """The model without weights; ``layers``: fewer than it has."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    hidden, feed_forward, depth, heads, key_heads, vocabulary, is_tied = SIZES[size]
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers or depth,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        tie_word_embeddings=is_tied,
    )
    with torch.device("meta"):
        return Qwen2ForCausalLM(config)


def linear_layers(module: torch.nn.Module) -> list[torch.nn.Linear]:
    """All but the head: those that get an adapter, and that 4 bits are for."""
    return [
        part
        for name, part in module.named_modules()
        if isinstance(part, torch.nn.Linear) and name != "lm_head"
    ]


def with_adapter(module: torch.nn.Module, counts: WeightCounts) -> WeightCounts:
    """The counts with an adapter of ``RANK``."""
    adapter = sum(RANK * (part.in_features + part.out_features) for part in linear_layers(module))
    return WeightCounts(counts.total + adapter, adapter, counts.largest_block, counts.root)


def gigabytes(
    counts: WeightCounts, gpus: int, base_bytes: float = 0, block_bytes: float = 0
) -> float:
    """Weights, gradients, AdamW and what a step gathers, of one GPU; no activations."""
    parts = state_bytes(counts, shards=gpus, base_bytes=base_bytes)
    parts |= gathered_bytes(counts, shards=gpus, compute_bytes=2, block_bytes=block_bytes)
    if gpus == 1 and counts.trained == counts.total:  # the copy that computes
        parts["copy"] = 2.0 * counts.total
    return sum(parts.values()) / GB


def rows() -> Iterator[str]:
    yield (
        "| model | method | " + " | ".join(f"{gpus} GPU{'s' * (gpus > 1)}" for gpus in GPUS) + " |"
    )
    yield "|---|---|" + "---:|" * len(GPUS)
    for size in SIZES:
        module = model(size)
        full = WeightCounts.of(module)
        lora = with_adapter(module, full)
        linear = sum(part.weight.numel() for part in linear_layers(module))
        four_bits = NF4_BITS / 8 * linear + 2 * (full.total - linear)
        methods = {
            "full": (full, 0, 0),
            "LoRA, bf16 base": (lora, 2 * full.total, 0),
            "LoRA, 4-bit base": (lora, four_bits, 0.5),
        }
        for method, (counts, *sizes) in methods.items():
            numbers = " | ".join(f"{gigabytes(counts, gpus, *sizes):.1f}" for gpus in GPUS)
            yield f"| {size} | {method} | {numbers} |"


if __name__ == "__main__":
    sys.stdout.write("\n".join(rows()) + "\n")
