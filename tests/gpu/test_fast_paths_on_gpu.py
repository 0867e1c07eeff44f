"""Each path that CUDA alone takes, against the plain one on the same device: skipped where there is
none."""

from __future__ import annotations

import pytest
import torch
from tests.fakes import doubled, llama, qwen3, requests
from tests.modalities.text.test_backbones import evaluated
from tests.modalities.text.test_static_decoding import OWNERS, PROMPTS
from tests.trainer.test_step import run_in, step, vector

from gruppo.core import compiled, linear_head
from gruppo.modalities.text import flex
from gruppo.modalities.text.backbones import RereadDecoding
from gruppo.modalities.text.decoder import read_decoder
from gruppo.modalities.text.decoding import FusedDecoder
from gruppo.modalities.text.static_decoding import StaticDecoding
from gruppo.trainer import update
from gruppo.types import Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WIDE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


@pytest.mark.parametrize("make", [llama, qwen3])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_compiled_attention_and_head_are_as_near_to_float64_as_the_plain_ones(
    make, compute, monkeypatch
):
    policy = make(compute=compute, **WIDE)
    rollouts = policy.sample(requests(5, 2, 3), Sampling(max_actions=20), seed=1)
    fast, fast_grad = evaluated(policy, rollouts)
    used = (linear_head.compiled_summary, linear_head.compiled_gradient)
    assert not any(each.has_failed for each in used)
    assert flex.is_usable(policy.device, policy.compute_dtype, WIDE["head_dim"])
    monkeypatch.setattr(compiled, "DEVICES", set())
    monkeypatch.setattr(flex, "is_usable", lambda *_: False)
    slow, slow_grad = evaluated(policy, rollouts)
    exact, exact_grad = evaluated(doubled(make(**WIDE)), rollouts)

    def error(found, expected):
        return float((found - expected).norm() / expected.norm())

    # products of float32 may be rounded to TF32
    assert error(fast, exact) < 2 * error(slow, exact) + 1e-3
    assert error(fast_grad, exact_grad) < 2 * error(slow_grad, exact_grad) + 1e-3


@torch.no_grad()
def test_a_recorded_step_decodes_what_rows_that_are_read_again_do(monkeypatch):
    monkeypatch.setattr(StaticDecoding, "columns", 8)
    policy = llama(**WIDE)
    module, owners = policy.compute_module, OWNERS.cuda()
    prompts = [prompt.cuda() for prompt in PROMPTS]
    fused = FusedDecoder(read_decoder(module), module.get_output_embeddings())
    static = StaticDecoding(fused, prompts, owners)
    plain = RereadDecoding(policy.backbone, prompts, owners)
    for t in range(20):
        torch.testing.assert_close(static.logits, plain.logits, rtol=1e-2, atol=1e-2)
        if t in (4, 12):
            kept = torch.arange(len(plain.logits) // 2, device="cuda")
            static.select(kept)
            plain.select(kept)
        tokens = (torch.arange(len(plain.logits), device="cuda") * 5 + t) % 40
        static.advance(tokens)
        plain.advance(tokens)
    assert static.graph is not None and StaticDecoding.can_record


def test_nothing_between_forward_and_optimizer_step_waits_for_the_device(tmp_path, monkeypatch):
    run = run_in(tmp_path, compute="bfloat16")
    step(run)  # compiles, and measures memory
    run.state.step += 1
    backward, take = update.backward, run.optimizer.step

    def watched(*args):
        torch.cuda.set_sync_debug_mode("error")
        return backward(*args)

    def stepped(*args):
        take(*args)
        torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(update, "backward", watched)
    monkeypatch.setattr(run.optimizer, "step", stepped)
    try:
        before = vector(run.policy.module)
        step(run)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not torch.equal(vector(run.policy.module), before)


def test_masters_are_float32(tmp_path):
    run = run_in(tmp_path, compute="bfloat16")
    assert {p.dtype for p in run.parameters} == {torch.float32}
    step(run)
    assert run.state.token_budget > 0
