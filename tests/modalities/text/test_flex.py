"""Compiled layers with FlexAttention, run on the CPU without a code generator, against the plain
layers."""

from __future__ import annotations

import logging

import pytest
import torch
from tests.fakes import STREAMING, llama, requests
from tests.modalities.text.test_backbones import evaluated

from gruppo.core import compiled
from gruppo.core.compiled import Compiled
from gruppo.modalities.text import flex, layouts
from gruppo.modalities.text.decoder import read_decoder, stream_features
from gruppo.modalities.text.flex import BLOCK, block_mask
from gruppo.modalities.text.layouts import stream
from gruppo.types import Sampling


def laid_out(prompts, owners, lengths):
    completions = [torch.arange(length) % 9 for length in lengths]
    prompts = [torch.arange(length) % 9 for length in prompts]
    return stream(prompts, completions, torch.tensor(owners))


@pytest.fixture
def on_cpu(monkeypatch):
    """Run the functions that CUDA compiles on the CPU as they are; torch refuses FlexAttention's
    gradient there."""
    monkeypatch.setattr(compiled, "DEVICES", {"cpu"})
    monkeypatch.setattr(Compiled, "_compiled", property(lambda self: self.function))
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    monkeypatch.setattr(
        flex, "compiled_layer", Compiled(flex._layer, "layers", needs_compiling=True)
    )
    monkeypatch.setattr(flex, "_checked", {})


# --- the mask -------------------------------------------------------------------------------------


def test_blocks_of_the_mask_are_those_of_every_pair_of_tokens(monkeypatch):
    monkeypatch.setattr(layouts, "MULTIPLE", BLOCK)
    tokens = laid_out([300, 5, 257], [0, 0, 1, 2, 0], [200, 130, 9, 400, 1])
    mask = block_mask(tokens.spans, torch.device("cpu"))
    key = torch.arange(len(tokens.ids))
    pairs = mask.mask_mod(None, None, key[:, None], key)
    tiles = pairs.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    some, every = tiles.any(1).any(-1), tiles.all(1).all(-1)
    for count, indices, expected in (
        (mask.kv_num_blocks, mask.kv_indices, some & ~every),
        (mask.full_kv_num_blocks, mask.full_kv_indices, every),
    ):
        listed = [
            sorted(row[:n].tolist())
            for n, row in zip(count[0, 0].tolist(), indices[0, 0], strict=True)
        ]
        assert listed == [row.nonzero()[:, 0].tolist() for row in expected]
    assert every.any() and not some.all(), (
        "a prompt hides what other groups hold, and is seen whole"
    )


# --- the layers -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "dtype"),
    [*((make, torch.float64) for make in STREAMING), (STREAMING[0], torch.float32)],
)
def test_layers_with_flex_attention_and_their_gradients_are_the_plain_ones(make, dtype, on_cpu):
    module = make().compute_module.to(dtype)
    decoder = read_decoder(module)
    owners, completions = torch.tensor([0, 0, 1]), [torch.arange(1, n) for n in (90, 40, 7)]
    prompts = [torch.arange(150) % 9, torch.arange(4)]
    results = []
    for run in (stream_features, flex.features):
        module.zero_grad()
        out = run(decoder, stream(prompts, completions, owners))
        out = out[: len(torch.cat([*prompts, *completions])) - 3]
        (out * torch.sin(torch.arange(out.numel())).view_as(out).to(dtype)).sum().backward()
        results.append([out.detach(), *(p.grad for p in module.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) > 1
    tolerance = 5e-6 if dtype == torch.float64 else 2e-4  # norms of transformers are in float32
    for slow, fast in zip(*results, strict=True):
        assert float((fast - slow).norm() / slow.norm()) < tolerance


def test_a_policy_scores_with_them_and_without_a_gradient_to_the_bit_as_with_one(
    on_cpu, monkeypatch
):
    policy = llama()
    rollouts = policy.sample(requests(5, 2, 3), Sampling(max_actions=9), seed=1)
    calls = []
    monkeypatch.setattr(
        flex.compiled_layer, "function", lambda *args: calls.append(args) or flex._layer(*args)
    )
    (fast, fast_grad) = evaluated(policy, rollouts)
    assert calls
    with torch.no_grad():
        parts = [
            policy.likelihood(rollouts, one)
            for one in policy.micro_batches(rollouts, rollouts.mask, 90)
        ]
    micro_batches = policy.micro_batches(rollouts, rollouts.mask, 90)
    for micro_batch, part in zip(micro_batches, parts, strict=True):
        assert torch.equal(
            micro_batch.of(fast)[rollouts.mask[micro_batch.rows][:, micro_batch.cols]].float(),
            part.logprobs[micro_batch.of(rollouts.mask)],
        )
    monkeypatch.setattr(compiled, "DEVICES", set())
    slow, slow_grad = evaluated(policy, rollouts)
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-4)
    assert float((fast_grad - slow_grad).norm() / slow_grad.norm()) < 1e-4


@pytest.mark.slow
def test_all_layers_and_streams_of_any_length_share_two_graphs(on_cpu, monkeypatch):
    graphs = []
    monkeypatch.undo()
    monkeypatch.setattr(compiled, "DEVICES", {"cpu"})
    monkeypatch.setattr(compiled, "BACKEND", lambda graph, inputs: graphs.append(graph) or graph)
    layer = Compiled(flex._layer, "layers", needs_compiling=True)
    monkeypatch.setattr(flex, "compiled_layer", layer)
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    module = llama(num_hidden_layers=3).compute_module
    for length in (30, 150, 270):
        tokens = laid_out([length, 5], [0, 0, 1], [length, 9, 2])
        flex.features(read_decoder(module), tokens).sum().backward()
    assert 1 <= len(graphs) <= 2


# --- where they cannot be used --------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["raises", "differs", "later"])
def test_layers_that_do_not_compile_or_differ_are_run_the_plain_way_with_one_warning(
    fault, on_cpu, monkeypatch, caplog
):
    policy = llama()
    rollouts = policy.sample(requests(3, 2), Sampling(max_actions=6), seed=1)
    expected = evaluated_plainly(policy, rollouts, monkeypatch)
    calls = []

    def broken(x, *args):
        calls.append(len(x))
        if fault == "raises" or (fault == "later" and len(calls) > 2):
            raise RuntimeError("Failed to find C compiler\nand a long trace")
        return flex._layer(x, *args) * (1.1 if fault == "differs" else 1)

    monkeypatch.setattr(flex.compiled_layer, "function", broken)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            torch.testing.assert_close(evaluated(policy, rollouts), expected, rtol=1e-4, atol=1e-4)
    (warning,) = [
        record.getMessage() for record in caplog.records if "plain path" in record.getMessage()
    ]
    assert "\n" not in warning and ("Failed to find C compiler" in warning) == (fault != "differs")


def test_running_out_of_memory_is_no_failure_of_the_compiler(on_cpu, monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(flex.compiled_layer, "function", full)
    with pytest.raises(torch.OutOfMemoryError):
        flex.is_usable(read_decoder(llama().compute_module))
    assert not flex.compiled_layer.has_failed


def evaluated_plainly(policy, rollouts, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "DEVICES", set())
        return evaluated(policy, rollouts)
