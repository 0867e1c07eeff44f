"""The fast ways give the plain one's numbers, and a model for which they would not is run the plain
way."""

from __future__ import annotations

import logging

import pytest
import torch
from tests.fakes import (
    HUGGING_FACE,
    bpe_tokenizer,
    causal_lm,
    doubled,
    gemma2,
    mistral,
    prompts,
    requests,
)

from gruppo.modalities.text import from_transformers
from gruppo.modalities.text.backbones import CachedDecoding, RereadDecoding, probe
from gruppo.types import Request, Sampling

named = {"ids": lambda make: make.__name__}


def evaluated(policy, rollouts):
    """Log-probs [B, T] and the gradient of their weighted sum."""
    policy.module.zero_grad(set_to_none=True)
    logprobs = torch.zeros(rollouts.mask.shape, dtype=torch.float64)
    for micro_batch in policy.micro_batches(rollouts, rollouts.mask, 90):
        scored = policy.likelihood(rollouts, micro_batch).logprobs.cpu()
        (scored * torch.linspace(-1, 1, scored.shape[1])).sum().backward()
        columns = torch.arange(logprobs.shape[1])[micro_batch.cols]
        logprobs[micro_batch.rows[:, None], columns] = scored.detach().double()
    return logprobs, torch.cat(
        [p.grad.flatten() for p in policy.module.parameters() if p.grad is not None]
    )


def read_as(layout, policy, rollouts):
    assert policy.backbone.runs_layers
    policy.backbone.runs_layers = layout == "stream"
    try:
        return evaluated(policy, rollouts)
    finally:
        policy.backbone.runs_layers = True


@pytest.mark.parametrize("make", HUGGING_FACE, **named)
def test_trunk_and_head_apart_give_the_values_and_gradients_of_the_whole(make):
    policy = doubled(make())
    assert policy.backbone.splits == (make is not gemma2)
    rollouts = policy.sample(requests(3, 2), Sampling(max_actions=9), seed=1)
    apart = evaluated(policy, rollouts)
    policy.backbone.splits = policy.backbone.runs_layers = False
    whole = evaluated(policy, rollouts)
    torch.testing.assert_close(apart[0], whole[0], rtol=0, atol=1e-9)
    torch.testing.assert_close(apart[1], whole[1], rtol=0, atol=3e-7 * float(whole[1].abs().max()))


@pytest.mark.silent_bug(4)
@pytest.mark.parametrize("make", HUGGING_FACE, **named)
def test_cached_decoding_gives_the_logits_of_reading_every_row_again(make):
    """Unequal prompts, longer than the sliding window, rows that leave on the way."""
    policy = make()
    assert policy.backbone.caches
    requested = [
        torch.tensor(policy.chat.encode(text))
        for text in ("a", "a prompt of many tokens", "some of them")
    ]
    owners, generator = torch.tensor([0, 0, 1, 2, 2]), torch.Generator().manual_seed(0)
    with torch.no_grad():
        both = (
            CachedDecoding(policy.backbone, requested, owners),
            RereadDecoding(policy.backbone, requested, owners),
        )
        for step in range(12):
            torch.testing.assert_close(both[0].logits, both[1].logits, rtol=0, atol=2e-5)
            if step in (3, 7):
                for decoding in both:
                    decoding.select(torch.tensor([2, 0, 1] if step == 3 else [1, 2]))
            tokens = torch.randint(200, (len(both[0].logits),), generator=generator)
            for decoding in both:
                decoding.advance(tokens)


def window_of_another_name():
    import transformers

    config = transformers.GPTNeoConfig(
        vocab_size=263,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        window_size=64,
        attention_types=[[["global", "local"], 1]],
    )
    return transformers.GPTNeoForCausalLM(config).eval()


@pytest.mark.parametrize(
    "make",
    [
        lambda: mistral(sliding_window=100).module,
        lambda: gemma2(sliding_window=100).module,
        window_of_another_name,
        lambda: causal_lm("Llama", clip_qkv=1e4),
        lambda: causal_lm(
            "Llama",
            rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        ),
    ],
)
def test_what_sets_in_at_far_positions_or_large_values_is_left_to_the_models_own_forward(make):
    """A few ordinary tokens within a window agree in any case."""
    backbone = probe(make())
    assert backbone.is_padded and not backbone.runs_layers and backbone.caches


def test_soft_capped_logits_are_not_split_even_where_fresh_weights_are_too_small_to_show_the_cap():
    policy = gemma2(initializer_range=0.02, final_logit_softcapping=30.0)
    with torch.no_grad():
        assert policy.module(torch.arange(9)[None]).logits.abs().max() < 3, (
            "the cap of 30 bends them by under 1%"
        )
    assert not policy.backbone.splits


# --- models whose fast ways are wrong -------------------------------------------------------------


def broken(wrong_forward, **changes):
    """A Llama whose forward is wrapped."""
    module = causal_lm("Llama", **changes)
    right = type(module)

    class Broken(right):
        def forward(
            self,
            input_ids=None,
            attention_mask=None,
            position_ids=None,
            past_key_values=None,
            **rest,
        ):
            return wrong_forward(
                super().forward,
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                **rest,
            )

    module.__class__ = Broken
    return module


def forgets_positions(forward, *, position_ids, **rest):
    return forward(position_ids=None if position_ids is None else position_ids * 0, **rest)


def forgets_the_cache(forward, *, past_key_values, **rest):
    return forward(past_key_values=None, **(rest | {"attention_mask": None}))


def forgets_the_mask(forward, *, attention_mask, **rest):
    return forward(attention_mask=None, **rest)


def has_no_cache(forward, *, past_key_values, **rest):
    if past_key_values is not None:
        raise NotImplementedError("this model keeps a state of its own")
    return forward(past_key_values=None, **rest)


@pytest.mark.parametrize(
    "wrong", [forgets_positions, forgets_the_cache, forgets_the_mask, has_no_cache]
)
def test_a_model_whose_cache_is_wrong_is_read_again_at_every_token(wrong, caplog, monkeypatch):
    """Where its layers cannot be run one by one either, which needs no cache of its own."""
    monkeypatch.setattr("gruppo.modalities.text.backbones.read_decoder", lambda module: None)
    with caplog.at_level(logging.WARNING, logger="gruppo"):
        policy = from_transformers(broken(wrong), bpe_tokenizer(), compute="float32")
    assert not policy.backbone.caches and "cache is not exact" in caplog.text
    rollouts = policy.sample(requests(2, 2), Sampling(max_actions=6), seed=0)
    (micro_batch,) = policy.micro_batches(rollouts, rollouts.mask, 10**9)
    torch.testing.assert_close(
        policy.likelihood(rollouts, micro_batch).logprobs,
        rollouts.sampler_logprobs[micro_batch.rows],
        rtol=0,
        atol=5e-6,
    )


def test_the_prompt_is_read_once_for_a_group(monkeypatch):
    policy, seen = mistral(), []
    whole_forward = policy.module.forward
    monkeypatch.setattr(
        policy.module,
        "forward",
        lambda **inputs: (seen.append(inputs["input_ids"].shape), whole_forward(**inputs))[1],
    )
    policy.sample([Request(prompts("abc")[0], 6)], Sampling(max_actions=3), seed=0)
    assert [tuple(shape) for shape in seen] == [(1, 1), (6, 1), (6, 1)]
