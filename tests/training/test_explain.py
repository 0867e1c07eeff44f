"""What ``explain`` estimates."""

from __future__ import annotations

from tests import tiny

from gruppo.training.build import Parts, build
from gruppo.training.explain import working_memory


def test_working_memory_by_hand(tmp_path):
    """The tiny model: 2 layers, H 16, F 32, 2 heads of 8, 1 key head, V 51; 4 x 3 rows; prompts of at most L tokens."""
    run, _ = build(tiny.config(tmp_path, optim__token_budget=100), Parts())
    longest = max(len(run.policy.chat.encode(prompt.inputs)) for prompt in run.source.take(24)) + 8
    assert working_memory(run, 4) == {
        "activations": 4 * 100 * 2 * (8 * 16 + 4 * 32),
        "logits, float32": 3 * 4 * 100 * len(run.policy.chat.tokenizer),
        "cache while sampling": 4 * 2 * 12 * longest * 2 * 8,
    }
