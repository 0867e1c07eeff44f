"""The text policy: ids in and out, ends, positions, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.fakes import (
    END,
    ByteTokenizer,
    Says,
    bpe_tokenizer,
    causal_lm,
    gpt2,
    llama,
    plain,
    prompts,
    qwen2,
    requests,
)

from gruppo.modalities.text import from_module, from_transformers
from gruppo.types import DataError, GruppoError, Prompt, Request, Rollouts, Sampling

GREEDY = Sampling(temperature=0.0, max_actions=6)


def saying(*scripts, tokenizer=None, eos_ids=(END,), **options):
    """A policy that continues a prompt by the script of its first token; prompts are "@..." and
    "A..."."""
    return from_module(Says(*scripts), tokenizer or ByteTokenizer(), eos_ids=eos_ids, **options)


def whole(policy, rollouts):
    (micro_batch,) = policy.micro_batches(rollouts, rollouts.mask, 10**9)
    return micro_batch


# --- tokens ---------------------------------------------------------------------------------------


@pytest.mark.silent_bug(10)
def test_sampled_ids_are_kept_where_their_text_encodes_to_other_ids():
    tokenizer = bpe_tokenizer()
    a, b, at = (tokenizer.convert_tokens_to_ids(text) for text in "ab@")
    assert tokenizer.encode(tokenizer.decode([a, b])) != [a, b]
    script = [at, a, b, a, tokenizer.eos_token_id]
    module = Says(script, vocabulary=len(tokenizer))
    policy = from_module(module, tokenizer, eos_ids=[tokenizer.eos_token_id])
    rollouts = policy.sample(requests(2, of=prompts("@")), Sampling(max_actions=6), seed=0)
    assert rollouts.actions[rollouts.mask].tolist() == script[1:] * 2
    assert rollouts.completions == ("aba", "aba")
    logprobs = policy.likelihood(rollouts, whole(policy, rollouts)).logprobs
    assert logprobs.abs().max() < 1e-6, "evaluated as sampled: any other ids cost 50 nats"


@pytest.mark.silent_bug(14)
def test_mask_and_log_probs_come_from_lengths_where_padding_is_the_end_token():
    policy = llama()
    assert policy.chat.tokenizer.pad_token_id in policy.chat.eos_ids
    policy = saying([64, 65, END, 66, 67], [65, 66, 67, 68, 69, 70, 71])
    rollouts = policy.sample(requests(1, 1, of=prompts("@", "A")), Sampling(max_actions=6), seed=0)
    assert rollouts.lengths.tolist() == [2, 6]
    assert rollouts.mask.tolist() == [[True, True] + [False] * 4, [True] * 6]
    assert rollouts.completions == ("A", "BCDEFG")


@pytest.mark.silent_bug(15)
def test_every_end_token_of_the_generation_config_and_the_tokenizer_ends_a_completion():
    module, tokenizer = causal_lm("Llama"), bpe_tokenizer()
    a, end = tokenizer.convert_tokens_to_ids("a"), tokenizer.eos_token_id
    module.generation_config.eos_token_id = [a, end]
    assert from_transformers(module, tokenizer, compute="float32").chat.eos_ids == (a, end)
    module.generation_config.eos_token_id = None
    assert from_transformers(module, tokenizer, compute="float32").chat.eos_ids == (end,)


@pytest.mark.silent_bug(15)
@pytest.mark.parametrize(
    ("script", "stop", "finish", "output", "length"),
    [
        ("@one## two", ("##",), "stop", "one", 5),
        ("@one two three", ("##",), "length", "one tw", 6),
        ("@one#", ("##",), "length", "one#@@", 6),
        ("@abcdef", ("f",), "stop", "abcde", 6),
    ],
)
def test_a_stop_text_ends_the_row_and_is_cut_from_the_output_alone(
    script, stop, finish, output, length
):
    policy = saying(list(script.encode()) + [64] * 9)
    rollouts = policy.sample(requests(1, of=prompts("@")), replace(GREEDY, stop=stop), seed=0)
    assert (rollouts.finish, rollouts.completions, rollouts.lengths.tolist()) == (
        (finish,),
        (output,),
        [length],
    )


@pytest.mark.silent_bug(15)
def test_a_stop_text_may_be_a_special_token():
    tokenizer = bpe_tokenizer()
    at, a, user = (tokenizer.convert_tokens_to_ids(text) for text in ("@", "a", "<|user|>"))
    module = Says([at, a, a, user, a, a, a, a], vocabulary=len(tokenizer))
    policy = from_transformers_chat(module, tokenizer)
    rollouts = policy.sample(
        requests(1, of=prompts("@")), replace(GREEDY, stop=("<|user|>",)), seed=0
    )
    assert (
        rollouts.finish == ("stop",)
        and rollouts.lengths.tolist() == [3]
        and rollouts.completions == ("aa",)
    )


def from_transformers_chat(module, tokenizer):
    from gruppo.modalities.text.chat import Chat

    policy = from_module(module, tokenizer, eos_ids=[tokenizer.eos_token_id])
    policy.chat = Chat(tokenizer, [tokenizer.eos_token_id])
    return policy


def test_an_id_beyond_the_tokenizer_is_an_action_like_any_other():
    """Models pad their vocabulary: an id without text may be drawn."""
    policy = llama(vocab_size=320)
    rollouts = policy.sample(requests(8), Sampling(max_actions=8), seed=0)
    assert (rollouts.actions >= len(policy.chat.tokenizer)).any() and all(
        isinstance(o, str) for o in rollouts.completions
    )


# --- positions ------------------------------------------------------------------------------------


@pytest.mark.silent_bug(16)
def test_a_plain_model_that_says_its_position_is_read_at_the_right_one():
    policy = saying(range(64, 124))
    rollouts = policy.sample(
        requests(1, 1, of=prompts("@", "@12345")), Sampling(max_actions=4), seed=0
    )
    assert rollouts.actions.tolist() == [[65, 66, 67, 68], [70, 71, 72, 73]]
    assert policy.likelihood(rollouts, whole(policy, rollouts)).logprobs.abs().max() < 1e-6


@pytest.mark.silent_bug(16)
def test_a_cached_model_that_says_its_position_is_read_at_the_right_one():
    """GPT-2 whose blocks do nothing and whose position embeddings are one-hot: it says where it
    is."""
    policy = says_position()
    assert policy.backbone.caches and policy.backbone.is_padded
    requested = requests(2, 1, 2, of=prompts("@", "@123456789", "@123"))
    rollouts = policy.sample(requested, Sampling(max_actions=4), seed=0)
    first = [len(ids) for ids in rollouts.shared["prompt_ids"]]
    assert len(set(first)) == 3
    expected = [[first[g] + t for t in range(4)] for g in rollouts.group_ids.tolist()]
    assert rollouts.actions.tolist() == expected
    assert policy.likelihood(rollouts, whole(policy, rollouts)).logprobs.abs().max() < 1e-6


def says_position():
    module = causal_lm(
        "GPT2", max_position_embeddings=32, tie_word_embeddings=False, vocab_size=320
    )
    with torch.no_grad():
        for block in module.transformer.h:
            block.attn.c_proj.weight.zero_(), block.mlp.c_proj.weight.zero_()
        module.transformer.wte.weight.zero_()
        module.transformer.wpe.weight.copy_(torch.eye(32))
        module.lm_head.weight.zero_()[1:32] = 20 * torch.eye(32)[:31]  # at position p: token p + 1
    return from_transformers(module, bpe_tokenizer(), compute="float32")


def test_a_row_of_logits_that_are_not_finite_is_an_error_and_its_neighbours_are_as_alone():
    policy, requested = qwen2(), prompts("a", "1", "b")
    healthy = policy.sample(requests(2, 2, 2, of=requested), Sampling(max_actions=5), seed=0)
    (poison,) = policy.chat.encode("1")
    with torch.no_grad():
        policy.module.model.embed_tokens.weight[poison] = torch.nan
    rollouts = policy.sample(requests(2, 2, 2, of=requested), Sampling(max_actions=5), seed=0)
    assert rollouts.finish[2:4] == ("error", "error") and not rollouts.mask[2:4].any()
    unharmed = torch.tensor([0, 1, 4, 5])
    assert "error" not in [rollouts.finish[row] for row in unharmed]
    assert torch.equal(rollouts.actions[unharmed], healthy.actions[unharmed])
    assert rollouts.sampler_logprobs.isfinite().all()
    micro_batches = policy.micro_batches(rollouts, rollouts.mask, 10**9)
    assert (
        sorted(row for micro_batch in micro_batches for row in micro_batch.rows.tolist())
        == unharmed.tolist()
    )


# --- groups, errors, refusals ---------------------------------------------------------------------


def test_a_model_of_nan_gives_errors_and_no_crash_for_any_way_of_decoding():
    for make in (plain, llama, gpt2):
        policy = make()
        with torch.no_grad():
            for parameter in policy.module.parameters():
                parameter.fill_(torch.nan)
        for temperature in (0.0, 1.0):
            rollouts = policy.sample(
                requests(2, 1), Sampling(temperature=temperature, max_actions=3), seed=0
            )
            assert set(rollouts.finish) == {"error"} and rollouts.lengths.tolist() == [0, 0, 0]


def test_a_prompt_that_the_context_cannot_hold_is_refused_in_numbers():
    policy = plain()
    prompt = Prompt("long", "x" * 60)
    assert policy.check_prompt(prompt, Sampling(max_actions=4)) is None
    with pytest.raises(
        GruppoError, match=r"'long' has 60 tokens, and 5 new ones make 65.*context holds 64"
    ):
        policy.sample([Request(prompt, 2)], Sampling(max_actions=5), seed=0)


def test_prompts_to_the_edge_of_the_context_are_sampled_and_evaluated():
    policy = gpt2(max_position_embeddings=32)
    rollouts = policy.sample(requests(4, of=prompts("x" * 20)), Sampling(max_actions=12), seed=0)
    logprobs = policy.likelihood(
        rollouts, whole(policy, rollouts)
    ).logprobs  # packed: 68 tokens in a row of context 32
    torch.testing.assert_close(logprobs, rollouts.sampler_logprobs, rtol=0, atol=5e-6)


def test_greedy_rollouts_have_no_density_to_learn_from():
    policy = plain()
    rollouts = policy.sample(requests(2), GREEDY, seed=0)
    with pytest.raises(GruppoError, match="temperature 0"):
        policy.likelihood(rollouts, whole(policy, rollouts))


def test_samples_of_a_prompt_that_began_differently_are_refused_rather_than_joined():
    """As where an environment's reset does not follow its seed: a group is read with one prompt."""
    policy = plain()
    first, second = (
        policy.sample(requests(2, of=prompts(text)), GREEDY, seed=0) for text in ("@", "A")
    )
    second = replace(second, prompts=first.prompts)
    with pytest.raises(DataError, match="have different prompts"):
        Rollouts.cat([first, second])


def test_two_prompts_with_one_id_and_draw_are_refused_rather_than_merged():
    policy = plain()
    namesakes = [Request(Prompt("x", "what?"), 1), Request(Prompt("x", "other"), 1)]
    with pytest.raises(GruppoError, match="'x' and the draw 0"):
        policy.sample(namesakes, GREEDY, seed=0)


@pytest.mark.parametrize("stop", ["###", ("",), ("a", "")])
def test_stop_texts_that_would_end_every_rollout_at_once_are_refused(stop):
    with pytest.raises(GruppoError, match="stop="):
        Sampling(stop=stop)


def test_completions_have_the_form_of_their_prompts():
    policy = plain()
    rollouts = policy.sample(requests(1, 1, 1), Sampling(max_actions=2), seed=0)
    assert [type(output) for output in rollouts.completions] == [str, str, list]
    assert rollouts.completions[2][0]["role"] == "assistant"
