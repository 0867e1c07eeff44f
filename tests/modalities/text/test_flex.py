"""FlexAttention, run on the CPU without a code generator, against attention over blocks."""

from __future__ import annotations

import logging

import pytest
import torch
from tests.fakes import STREAMING, llama, requests
from tests.modalities.text.test_backbones import evaluated

from gruppo.modalities.text import flex
from gruppo.modalities.text.decoder import read_decoder, stream_features
from gruppo.modalities.text.layouts import stream
from gruppo.types import Sampling


@pytest.fixture
def on_cpu(monkeypatch):
    """Run what CUDA compiles on the CPU as it is; torch refuses FlexAttention's gradient there."""
    monkeypatch.setattr(flex, "DEVICES", {"cpu"})
    monkeypatch.setattr(flex, "compiled", lambda: flex._attend)
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    flex.is_usable.cache_clear()
    yield
    flex.is_usable.cache_clear()


def plainly(monkeypatch, run):
    with monkeypatch.context() as patch:
        patch.setattr(flex, "is_usable", lambda *_: False)
        return run()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "dtype"),
    [*((make, torch.float64) for make in STREAMING), (STREAMING[0], torch.float32)],
)
def test_features_and_gradients_are_those_of_attention_over_blocks(
    make, dtype, on_cpu, monkeypatch
):
    module = make().compute_module.to(dtype)
    decoder = read_decoder(module)
    owners, completions = torch.tensor([0, 0, 1]), [torch.arange(1, n) for n in (90, 40, 7)]
    prompts = [torch.arange(150) % 9, torch.arange(4)]
    tokens = stream(prompts, completions, owners)

    def run():
        module.zero_grad()
        out = stream_features(decoder, tokens)[: len(torch.cat([*prompts, *completions])) - 3]
        (out * torch.sin(torch.arange(out.numel())).view_as(out).to(dtype)).sum().backward()
        return [out.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]

    slow, fast = plainly(monkeypatch, run), run()
    assert len(slow) == len(fast) > 1
    tolerance = 5e-6 if dtype == torch.float64 else 2e-4  # norms of transformers are in float32
    for one, other in zip(slow, fast, strict=True):
        assert float((other - one).norm() / one.norm()) < tolerance


@pytest.mark.parametrize("fault", [None, "forward", "backward", "differs", "nan"])
def test_a_policy_scores_with_it_or_without_after_one_warning(fault, on_cpu, monkeypatch, caplog):
    policy, calls = llama(), []
    rollouts = policy.sample(requests(5, 2, 3), Sampling(max_actions=9), seed=1)
    expected = plainly(monkeypatch, lambda: evaluated(policy, rollouts))
    flex.is_usable.cache_clear()

    def attend(q, k, v, mask):
        calls.append(len(q))
        if fault == "forward":
            raise RuntimeError("Failed to find C compiler\nand a long trace")
        out = flex._attend(q, k, v, mask)
        if fault == "backward":
            out.register_hook(lambda grad: 1 / 0)
        return out * {"differs": 1.1, "nan": float("nan")}.get(fault, 1)

    monkeypatch.setattr(flex, "compiled", lambda: attend)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = evaluated(policy, rollouts)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    warnings = [r.getMessage() for r in caplog.records if "FlexAttention" in r.getMessage()]
    assert len(warnings) == (fault is not None) and not any("\n" in line for line in warnings)
    assert (len(calls) == 1) == (fault is not None)


def test_running_out_of_memory_is_no_failure_of_the_compiler(on_cpu, monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(flex, "compiled", lambda: full)
    with pytest.raises(torch.OutOfMemoryError):
        flex.is_usable(torch.device("cpu"), torch.float32, 8)
