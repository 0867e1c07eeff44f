"""Groups one after another: the layout by hand, attention against the plain way, features against
the model's own."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes import STREAMING, doubled, llama, requests
from tests.modalities.text.test_backbones import read_as

from gruppo.modalities.text import layouts as streams
from gruppo.modalities.text.decoder import _Attention, read_decoder, stream_features
from gruppo.modalities.text.layouts import attention_blocks, stream
from gruppo.types import Sampling

named = {"ids": lambda make: make.__name__}


# --- the layout -----------------------------------------------------------------------------------


def example():
    """Prompt 10 11 with completions 1 2 3 and 4 7, prompt 20 with 5 6."""
    prompts = [torch.tensor([10, 11]), torch.tensor([20])]
    completions = [torch.tensor([1, 2, 3]), torch.tensor([5, 6]), torch.tensor([4, 7])]
    return stream(prompts, completions, torch.tensor([0, 1, 0]))


def test_a_prompt_is_there_once_and_a_completion_without_its_last_token():
    tokens = example()
    assert tokens.ids.tolist() == [10, 11, 1, 2, 4, 20, 5, *[0] * 9], (
        "filled up to a multiple of 16"
    )
    assert tokens.positions.tolist() == [0, 1, 2, 3, 2, 0, 1, *range(9)]


@pytest.mark.silent_bug(16)
def test_an_action_is_predicted_by_the_token_before_it_and_the_first_by_the_prompts_last():
    completion, column = torch.tensor([0, 0, 0, 1, 1, 2, 2]), torch.tensor([0, 1, 2, 0, 1, 0, 1])
    assert example().before(completion, column).tolist() == [1, 2, 3, 5, 6, 1, 4]


@st.composite
def groups(draw):
    prompts = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    owners = draw(st.lists(st.integers(0, len(prompts) - 1), min_size=1, max_size=9))
    return (
        prompts,
        owners,
        draw(st.lists(st.integers(0, 9), min_size=len(owners), max_size=len(owners))),
    )


def laid_out(prompts, owners, lengths):
    completions = [torch.arange(length) for length in lengths]
    return stream([torch.arange(length) for length in prompts], completions, torch.tensor(owners))


def blocks_of(tokens):
    return attention_blocks(tokens, torch.device("cpu"), torch.float64)


def sight(prompts, owners, lengths):
    """[query, key]: what the tokens of a stream may see, text by text, without its padding."""
    texts = []  # (first token, tokens, first token of the prompt, tokens of the prompt)
    end = 0
    for g, prompt in enumerate(prompts):
        shared = (end, prompt)
        texts.append((end, prompt, end, 0))
        end += prompt
        for owner, length in zip(owners, lengths, strict=True):
            if owner == g:
                texts.append((end, max(length - 1, 0), *shared))
                end += max(length - 1, 0)
    visible = torch.zeros(end, end, dtype=torch.bool)
    for start, length, prompt_start, prompt in texts:
        visible[start : start + length, prompt_start : prompt_start + prompt] = True
        visible[start : start + length, start : start + length] = (
            torch.ones(length, length).tril().bool()
        )
    return visible


SIZES = {
    "large blocks": (streams.BLOCK_SCORES, streams.BLOCK_QUERIES, 0),
    "small blocks": (30, 3, 0),
    "whole groups": (streams.BLOCK_SCORES, streams.BLOCK_QUERIES, streams.SMALL_GROUP),
    "some whole groups": (400, 12, 12),
}
"""Scores and columns of a block, and tokens of a group that is one text of a block."""


@pytest.fixture(params=SIZES.values(), ids=SIZES)
def block_sizes(request, monkeypatch):
    scores, queries, small_group = request.param
    monkeypatch.setattr(streams, "BLOCK_SCORES", scores)
    monkeypatch.setattr(streams, "BLOCK_QUERIES", queries)
    monkeypatch.setattr(streams, "SMALL_GROUP", small_group)


# --- attention ------------------------------------------------------------------------------------


def plain_attention(q, k, v, visible):
    shared_by = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(shared_by, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k).masked_fill(~visible, -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v)


@pytest.mark.silent_bug(4)
@settings(max_examples=40, deadline=None)
@given(layout=groups(), heads=st.sampled_from([(4, 4), (6, 2), (3, 1)]))
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_attention_over_blocks_equals_a_masked_softmax_over_everything(sizes, layout, heads):
    with pytest.MonkeyPatch.context() as patch:
        for name, size in zip(("BLOCK_SCORES", "BLOCK_QUERIES", "SMALL_GROUP"), sizes, strict=True):
            patch.setattr(streams, name, size)
        tokens = laid_out(*layout)
        blocks = blocks_of(tokens)
    generator = torch.Generator().manual_seed(0)
    visible = sight(*layout)
    count = len(visible)
    q, k, v, weight = (
        torch.randn(
            len(tokens.ids), n, 8, dtype=torch.float64, generator=generator
        ).requires_grad_()
        for n in (heads[0], heads[1], heads[1], heads[0])
    )
    got = _Attention.apply(q, k, v, blocks)[:count]
    needed = plain_attention(q[:count], k[:count], v[:count], visible)
    weight = weight[:count]
    torch.testing.assert_close(got, needed, rtol=1e-9, atol=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad((got * weight).sum(), (q, k, v)),
        torch.autograd.grad((needed * weight).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


class Elsewhere(torch.nn.Embedding):
    """Refuses what is not on the device it says it is on, as an accelerator would."""

    def forward(self, ids):
        assert ids.device == self.weight.device
        return torch.zeros(*ids.shape, self.embedding_dim, device=ids.device)


def test_tokens_are_brought_to_the_device_of_the_weights():
    decoder = read_decoder(llama().module.to("meta"))
    elsewhere = replace(
        decoder, embed=Elsewhere(5, 32, device="meta"), layers=(), norm=torch.nn.Identity()
    )
    assert stream_features(elsewhere, example()).device.type == "meta"


# --- whole models ---------------------------------------------------------------------------------


@pytest.mark.silent_bug(3)
@pytest.mark.silent_bug(4)
@pytest.mark.parametrize("make", STREAMING, **named)
def test_a_stream_gives_the_values_and_gradients_of_rows_alone(make, block_sizes):
    policy = doubled(make())
    rollouts = policy.sample(requests(5, 2, 3), Sampling(max_actions=9), seed=1)
    got, needed = (read_as(layout, policy, rollouts) for layout in ("stream", "padded"))
    torch.testing.assert_close(got[0], needed[0], rtol=0, atol=1e-9)
    torch.testing.assert_close(got[1], needed[1], rtol=0, atol=3e-7 * float(needed[1].abs().max()))


def test_a_stream_in_bfloat16_is_as_near_to_float32_as_rows_alone_are():
    exact, rounded = llama(), llama(compute="bfloat16")
    rollouts = exact.sample(requests(6, 6, 6), Sampling(max_actions=12), seed=1)
    needed = read_as("padded", exact, rollouts)[0]
    of_stream, of_rows = (
        (read_as(layout, rounded, rollouts)[0] - needed).abs()[rollouts.mask].mean()
        for layout in ("stream", "padded")
    )
    assert 0 < of_stream < 1.5 * of_rows


@pytest.mark.parametrize(
    "part", ["", "self_attn", "mlp", "input_layernorm", "post_attention_layernorm", "mlp.act_fn"]
)
def test_a_model_with_a_hook_in_a_layer_runs_its_own_forward_which_calls_the_hook(part):
    policy = llama()
    assert not policy.backbone.is_padded
    calls = []
    hooked = policy.module.model.layers[0].get_submodule(part)
    handle = hooked.register_forward_hook(lambda *_: calls.append(1))
    rollouts = policy.sample(requests(2), Sampling(max_actions=4), seed=1)
    calls.clear()
    assert policy.backbone.is_padded
    policy.likelihood(rollouts, policy.micro_batches(rollouts, rollouts.mask, 90)[0])
    assert calls
    handle.remove()
    assert not policy.backbone.is_padded
