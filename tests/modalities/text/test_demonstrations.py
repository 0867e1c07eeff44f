"""A target becomes the tokens that the policy itself would write and end it with, and its loss is
cross-entropy."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.fakes import HUGGING_FACE, ByteTokenizer, Says, bpe_tokenizer, llama

from gruppo.core.weights import loss_weights
from gruppo.modalities.text import from_module
from gruppo.modalities.text.chat import Chat
from gruppo.modalities.text.demonstrations import answer_ids, messages_of
from gruppo.types import GruppoError, Prompt, Request, Sampling

USER = {"role": "user", "content": "abc"}
END = bpe_tokenizer().eos_token_id


def chat(template: str | None = None) -> Chat:
    tokenizer = bpe_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    return Chat(tokenizer, [END])


def said(of: Chat, inputs: Any, text: str) -> str:
    return of.text_with_specials(answer_ids(of, inputs, text))


def test_an_answer_is_what_stands_behind_the_prompt_in_the_conversation_up_to_its_end():
    ids = answer_ids(chat(), [USER], "12ab")
    assert ids == [*bpe_tokenizer().convert_tokens_to_ids(["12", "ab"]), END]
    assert [*chat().encode([USER]), *ids] == chat().encode_answered([USER], "12ab")


def test_nothing_after_the_first_end_token_belongs_to_the_answer():
    line = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}"
    chatty = chat(line + "{% if add_generation_prompt %}<|assistant|>{% endif %}")
    assert chatty.encode_answered([USER], "12")[-2] == END
    assert said(chatty, [USER], "12") == "12<|end|>"


def test_words_that_the_assistant_has_begun_go_on():
    begun = [USER, {"role": "assistant", "content": "1 +"}]
    assert said(chat(), begun, " 12") == " 12<|end|>"
    assert [*chat().encode(begun), *answer_ids(chat(), begun, " 12")] == chat().encode_answered(
        begun, " 12"
    )


def test_a_text_whose_first_letters_would_join_the_prompts_last_is_written_by_itself():
    """ "a" + "b" is one token, and the policy has been shown "a"."""
    assert chat().encode("a" + "b12") == bpe_tokenizer().convert_tokens_to_ids(["ab", "12"])
    assert answer_ids(chat(), "a", "b12") == [
        *bpe_tokenizer().convert_tokens_to_ids(["b", "12"]),
        END,
    ]


def test_a_template_that_leaves_out_reasoning_does_not_take_it_out_of_the_answer():
    forgetful = chat(
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'].split('</think>')[-1] "
        "}}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    assert said(forgetful, [USER], "1 + 1</think>2") == "1 + 1</think>2<|end|>"


def test_a_template_that_begins_the_answer_for_the_policy_does_not_begin_it_twice():
    thinking = chat(
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>abc{% endif %}"
    )
    assert said(thinking, [USER], "12") == "12<|end|>"


def test_the_end_is_the_tokenizers_own_where_a_model_names_others_first():
    tokenizer = bpe_tokenizer()
    several = Chat(tokenizer, [tokenizer.convert_tokens_to_ids("!"), END])
    assert answer_ids(several, "a", "12")[-1] == END
    without = Chat(tokenizer, [tokenizer.convert_tokens_to_ids("!")])
    assert answer_ids(without, "a", "12")[-1] == tokenizer.convert_tokens_to_ids("!")


def test_a_tokenizer_of_ones_own_writes_text_and_the_end():
    own = Chat(ByteTokenizer(), [256], is_plain=True, render=lambda messages: [1])
    assert answer_ids(own, "a", "bc") == answer_ids(own, [USER], "bc") == [98, 99, 256]


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("12", ["12"]),
        (12, ["12"]),
        (0, ["0"]),
        ({"role": "assistant", "content": "12"}, ["12"]),
        ([{"role": "assistant", "content": "12"}], ["12"]),
        (None, []),
        (math.nan, []),
    ],
)
def test_the_text_of_a_target(target, text):
    assert [message["content"] for message in messages_of(target)] == text


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (None, r"'p' has no target to learn from: it is None"),
        ("  ", r"'p' has no target to learn from: it is '  '"),
        ([USER], r"is no answer; it needs a string, or one message of the assistant"),
        ([{"role": "assistant", "content": "1"}] * 2, r"is no answer"),
        ([{"role": "assistant", "content": None}], r"is no answer"),
        ("12<|end|>ab", r"holds an end token, at which the answer would end"),
        ("x" * 125, r"and its target have 127 tokens; the model's context holds 126"),
    ],
)
def test_what_cannot_be_learned_from_is_refused_with_the_reason(target, why):
    policy = llama()
    policy.context = 126
    with pytest.raises(GruppoError, match=why):
        policy.demonstrations([Prompt("p", "a", target)], seed=0)


def test_a_context_that_is_just_long_enough_is():
    policy = llama()
    policy.context = 126
    assert policy.check_demonstration(Prompt("p", "a", "x" * 124)) is None


@pytest.mark.silent_bug(14)
@pytest.mark.silent_bug(16)
def test_a_demonstration_of_what_the_policy_says_is_what_it_said_and_costs_nothing():
    """The same tokens as were sampled, the end token among them, each read at the position that
    predicts it."""
    scripts = [[*ByteTokenizer().encode(text), 256] for text in ("0a12", "1a345")]
    policy = from_module(Says(*scripts), ByteTokenizer(), eos_ids=[256], context=64)
    prompts = [Prompt(str(n), f"{n}a", draw=n) for n in range(2)]
    sampled = policy.sample(
        [Request(prompt, 1) for prompt in prompts], Sampling(max_actions=8), seed=0
    )
    shown = [
        replace(prompt, target=text)
        for prompt, text in zip(prompts, sampled.completions, strict=True)
    ]
    demos = policy.demonstrations(shown, seed=0)
    assert torch.equal(demos.actions, sampled.actions) and torch.equal(demos.mask, sampled.mask)
    assert demos.finish == sampled.finish and demos.completions == sampled.completions
    (micro_batch,) = policy.micro_batches(demos, demos.mask, 1000)
    loss = policy.supervised_loss(demos, policy.likelihood(demos, micro_batch))
    assert loss.shape == demos.mask.shape and float(loss.detach().max()) < 1e-6


@pytest.mark.parametrize("make", HUGGING_FACE, ids=lambda make: make.__name__)
def test_the_loss_and_its_gradient_are_those_of_transformers_labels(make):
    policy = make()
    prompts = [
        Prompt("p", [USER], "12ab"),
        Prompt("q", "what", "it is abc", draw=1),
        Prompt("r", "a", "b", draw=2),
    ]
    demos = policy.demonstrations(prompts, seed=0)
    (micro_batch,) = policy.micro_batches(demos, demos.mask, 1000)
    weights = loss_weights(demos.mask, average="token", total=demos.mask.sum())
    ours = (
        micro_batch.of(weights)
        * policy.supervised_loss(demos, policy.likelihood(demos, micro_batch))
    ).sum()
    ours.backward()
    trained = [parameter for parameter in policy.module.parameters() if parameter.requires_grad]
    got = [parameter.grad.clone() for parameter in trained]
    policy.module.zero_grad()
    theirs = 0.0
    for row, prompt in enumerate(prompts):
        before, answer = (
            policy.chat.encode(prompt.inputs),
            demos.actions[row, : int(demos.lengths[row])].tolist(),
        )
        ids, labels = torch.tensor([before + answer]), torch.tensor([[-100] * len(before) + answer])
        theirs = theirs + policy.module(input_ids=ids, labels=labels).loss * len(answer)
    theirs = theirs / int(demos.mask.sum())
    theirs.backward()
    torch.testing.assert_close(ours.float(), theirs)
    for mine, parameter in zip(got, trained, strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-4, atol=1e-5)
