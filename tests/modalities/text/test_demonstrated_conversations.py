"""A demonstration of several turns has the tokens of a sampled conversation, and learns from the
policy's alone."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tests.environments.scripted import multiply
from tests.fakes import causal_lm, llama
from tests.modalities.text.families import TOOLS, family_tokenizer

from gruppo.environments import Environment, converse
from gruppo.modalities.text import from_transformers
from gruppo.modalities.text.chat import Chat
from gruppo.modalities.text.chat_template import read_template
from gruppo.modalities.text.demonstrations import demonstrate
from gruppo.types import Generated, Prompt, Request, Sampling

USER = {"role": "user", "content": "What is 12 * 34?"}
RESULT = {"role": "tool", "name": "multiply", "content": "408"}
END = "<|im_end|>"


def says(content: str = "", **arguments: int) -> dict:
    call = {"type": "function", "function": {"name": "multiply", "arguments": arguments}}
    return {"role": "assistant", "content": content} | ({"tool_calls": [call]} if arguments else {})


SHOWN = [says(a=12, b=34), RESULT, says("It is 408.")]


def chat() -> Chat:
    tokenizer = family_tokenizer(read_template("examples/chatml_tools.jinja"), [END], bos=None)
    made = Chat(tokenizer, [tokenizer.eos_token_id])
    made.set_tools(TOOLS)
    return made


@pytest.mark.parametrize(
    "shown",
    [
        SHOWN,
        [says("First.", a=1, b=2), RESULT, says(a=3, b=4), RESULT, says("408")],
        [says("Which?"), {"role": "user", "content": "12 and 34"}, *SHOWN],
        [says(a=12, b=34)],
    ],
)
def test_a_demonstrated_conversation_has_the_tokens_of_the_whole(shown):
    of = chat()
    ids, mask, completion = demonstrate(of, [USER], shown, TOOLS)
    whole = of.tokenizer.apply_chat_template([USER, *shown], tools=TOOLS, return_dict=False)
    assert [*of.encode([USER], TOOLS), *ids] == list(whole)[
        : whole[::-1].index(of.eos_ids[0]) * -1 or None
    ]
    assert completion == shown
    written = of.text_with_specials(
        [token for token, own in zip(ids, mask, strict=True) if own]
    ).split(END)
    assert (
        len(written) == sum(message["role"] == "assistant" for message in shown) + 1
        and not written[-1]
    )
    for text, message in zip(written, [m for m in shown if m["role"] == "assistant"], strict=False):
        assert of.answer(of.encode_text(text), text, [USER], TOOLS) == message


def policy() -> tuple[Any, Environment]:
    tokenizer = chat().tokenizer
    made = from_transformers(
        causal_lm("Llama", vocab_size=len(tokenizer), tie_word_embeddings=True), tokenizer
    )
    environment = Environment(tools=[multiply], turns=3, timeout_s=None)
    made.context = 1024
    made.prepare_conversations(environment.tools)
    return made, environment


def test_a_demonstrated_conversation_is_what_was_sampled_turn_by_turn():
    of, environment = policy()
    script = [
        '<tool_call>{"name": "multiply", "arguments": {"a": 12, "b": 34}}</tool_call>',
        "It is 408.",
    ]

    def generate(batch: Any, sampling: Any, seed: int) -> Generated:
        ids = torch.tensor([of.chat.encode_text(script.pop(0) + END)])
        return Generated(ids, torch.zeros(ids.shape), torch.tensor([ids.shape[1]]), ("stop",))

    def sample(requests, sampling, *, seed):
        return of.sample(requests, sampling, seed=seed, generate=generate)

    def go_on(rollouts, replies, sampling, **options):
        return of.continue_rollouts(rollouts, replies, sampling, generate=generate, **options)

    prompt = Prompt("p", [USER], SHOWN)
    sampled = converse(
        sample, go_on, environment, [Request(prompt, 1)], Sampling(max_actions=200), seed=0
    )
    shown = of.demonstrations([prompt, Prompt("q", [USER], "408", draw=1)], seed=0)
    assert sampled.completions[0] == shown.completions[0] == SHOWN
    length = int(sampled.lengths[0])
    assert int(shown.lengths[0]) == length and torch.equal(
        shown.actions[0, :length], sampled.actions[0, :length]
    )
    assert (
        torch.equal(shown.mask[0, :length], sampled.mask[0, :length])
        and not shown.mask[0, :length].all()
    )
    assert torch.equal(shown.shared["prompt_ids"][0], sampled.shared["prompt_ids"][0])
    assert int(shown.mask[1].sum()) == int(shown.lengths[1]) == 4


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (SHOWN[:2], "is no answer; it needs .* several that begin and end with the assistant's"),
        ([RESULT, says("408")], "is no answer"),
        ([says("4"), says("08")], "is no answer"),
        (
            [says(a=12, b=34), RESULT, says(" ")],
            "a message of the assistant in the target is empty",
        ),
        ([says(a=12, b=34) | {"content": 3}, RESULT, says("408")], "is no answer"),
        (
            [{**says(), "tool_calls": [{"function": {"name": "multiply", "arguments": "12"}}]}],
            "cannot be read",
        ),
    ],
)
def test_what_cannot_be_demonstrated_is_refused_with_the_reason(target, why):
    problem = policy()[0].check_demonstration(Prompt("p", [USER], target))
    assert problem is not None and re.search(f"^prompt 'p': .*{why}", problem)


def test_a_text_cannot_be_followed_by_messages():
    assert "Give messages there" in llama().check_demonstration(Prompt("p", "a", SHOWN))
