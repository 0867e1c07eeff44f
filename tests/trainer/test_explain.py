"""What ``explain`` estimates."""

from __future__ import annotations

import pytest
import torch
from tests import tiny
from transformers import LlamaConfig

from gruppo.api import explain
from gruppo.build import Parts, build
from gruppo.config.schema import Stage
from gruppo.core.linear_head import KEPT_ON_CPU, tile_bytes
from gruppo.modalities.text.memory import activations, working_memory


def test_working_memory_by_hand(tmp_path):
    """The tiny model: 2 layers, H 16, F 32, 2 heads of 8, 1 key head, V 51; 4 x 3 rows; prompts of
    at most L tokens."""
    run, _ = build(tiny.config(tmp_path, optim__token_budget=100), Parts())
    longest = max(len(run.policy.chat.encode(prompt.inputs)) for prompt in run.source.take(24))
    memory = working_memory(run.policy, run.config, longest, 100, 12)
    assert memory["activations"] == 4 * 100 * 2 * (6 * 16 + 2 * 8 + 2 * 32)
    assert memory["cache while sampling"] == 4 * 2 * 12 * (longest + 8) * 2 * 8
    assert memory["logits"] == tile_bytes(
        100, len(run.policy.chat.tokenizer), 4, torch.device("cpu")
    )


def test_logits_take_a_chunk_three_times_or_tiles_under_a_linear_head(tmp_path):
    """Of 100 rows two tiles hold all logits in float32, the gradient's columns as many again, and
    the kept ones too."""
    run, _ = build(tiny.config(tmp_path, rollout__top_k=5), Parts())
    vocabulary = len(run.policy.chat.tokenizer)
    assert working_memory(run.policy, run.config, 4, 100, 1)["logits"] == 3 * 4 * 100 * vocabulary
    assert (
        working_memory(run.policy, run.config, 4, 5000, 1)["logits"]
        == 3 * 4 * run.policy.chunk * vocabulary
    )
    cpu = torch.device("cpu")
    assert tile_bytes(100, vocabulary, 2, cpu) == (2 * 4 + 2 + 2) * 100 * vocabulary
    assert tile_bytes(10000, 10000, 2, cpu) == 2 * 4 * 256 * 4096 + 2 * 10000 * 4096 + KEPT_ON_CPU


def test_what_a_token_keeps_of_a_smollm2_in_bfloat16_is_near_what_autograd_was_seen_to_keep():
    """0.40 MB in our own layers, 0.95 MB in the model's; counted with saved_tensors_hooks over 307
    tokens."""
    smollm2 = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
    )
    assert activations(smollm2, 1, torch.bfloat16) == pytest.approx(0.401e6, rel=0.05)
    assert activations(smollm2, 1, torch.bfloat16, is_padded=True) == pytest.approx(
        0.949e6, rel=0.05
    )


def explained(tmp_path, **changes) -> str:
    return "\n".join(explain(tiny.config(tmp_path, **changes)))


def test_an_adapter_is_told_with_its_size_and_its_reference(tmp_path):
    """Rank 4 on q_proj of 2 layers, 16 to 16: 2 x 4 x (16 + 16) numbers."""
    text = explained(
        tmp_path, lora__rank=4, lora__alpha=8.0, lora__targets=("q_proj",), stage__kl_coef=0.1
    )
    assert "adapter     256 trained weights on a frozen base of " in text
    assert "reference   the base, with the adapter off\n" in text
    assert "reference   " not in explained(tmp_path, lora__rank=4)


def test_a_reference_that_follows_is_told(tmp_path):
    mixed = {"stage__kl_coef": 0.1, "reference__kind": "mixed", "reference__update_every": 2}
    text = explained(tmp_path, reference__place="cpu", **mixed)
    assert (
        "reference   a copy that follows the policy: 0.6 policy + 0.4 reference after every 2 "
        "steps, on the CPU" in text
    )
    assert "a second adapter that follows the policy: 0.6 policy" in explained(
        tmp_path, lora__rank=4, **mixed
    )
    assert "reference   a copy of the first weights, on the device\n" in explained(
        tmp_path, stage__kl_coef=0.1
    )


def test_demonstrations_are_told_with_the_stages_that_learn_from_them(tmp_path):
    stages = (Stage(name="supervised", steps=2, rl_coef=0.0, sup_coef=1.0), Stage(name="full"))
    text = explained(tmp_path, stages=stages, supervised__batch=8)
    assert "supervised  8 demonstrations per step, in --stages.0\n" in text
    one = explained(tmp_path, stage__sup_coef="linear:1,0")
    assert "demonstrations per step, in --stage\n" in one
