"""What ``explain`` estimates."""

from __future__ import annotations

import pytest
import torch
from tests import tiny
from transformers import LlamaConfig

from gruppo.core.linear_head import tile_bytes
from gruppo.training.build import Parts, build
from gruppo.training.explain import logits_memory, working_memory
from gruppo.training.memory import activations


def test_working_memory_by_hand(tmp_path):
    """The tiny model: 2 layers, H 16, F 32, 2 heads of 8, 1 key head, V 51; 4 x 3 rows; prompts of at most L tokens."""
    run, _ = build(tiny.config(tmp_path, optim__token_budget=100), Parts())
    longest = max(len(run.policy.chat.encode(prompt.inputs)) for prompt in run.source.take(24)) + 8
    assert working_memory(run, 4) == {
        "activations": 4 * 100 * 2 * (6 * 16 + 2 * 8 + 2 * 32),
        "logits": logits_memory(run, 100, 4),
        "cache while sampling": 4 * 2 * 12 * longest * 2 * 8,
    }


def test_logits_take_a_chunk_three_times_or_tiles_under_a_linear_head(tmp_path):
    """Of 100 rows two tiles hold all logits in float32, and the gradient's columns as many again."""
    run, _ = build(tiny.config(tmp_path, rollout__top_k=5), Parts())
    vocabulary = len(run.policy.chat.tokenizer)
    assert logits_memory(run, 100, 2) == 3 * 4 * 100 * vocabulary
    assert logits_memory(run, 5000, 2) == 3 * 4 * run.policy.chunk * vocabulary
    cpu = torch.device("cpu")
    assert tile_bytes(100, vocabulary, 2, cpu) == (2 * 4 + 2) * 100 * vocabulary
    assert tile_bytes(1000, 10000, 2, cpu) == 2 * 4 * 256 * 4096 + 2 * 1000 * 4096


def test_what_a_token_keeps_of_a_smollm2_in_bfloat16_is_near_what_autograd_was_seen_to_keep():
    """0.40 MB in our own layers, 0.95 MB in the model's; counted with saved_tensors_hooks over 307 tokens."""
    smollm2 = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
    )
    assert activations(smollm2, 1, 2, "stream") == pytest.approx(0.401e6, rel=0.05)
    assert activations(smollm2, 1, 2, "packed") == pytest.approx(0.949e6, rel=0.05)
