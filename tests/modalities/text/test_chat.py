"""Prompts to ids and ids to text: by the template, without losing or adding a token."""

from __future__ import annotations

import pytest
from tests.fakes import CHAT_TEMPLATE, END, ByteTokenizer, bpe_tokenizer, render

from gruppo.modalities.text.chat import Chat
from gruppo.types import DataError

USER = {"role": "user", "content": "abc"}


@pytest.fixture
def tokenizer():
    return bpe_tokenizer()


@pytest.fixture
def chat(tokenizer):
    return Chat(tokenizer, [tokenizer.eos_token_id])


def test_a_conversation_is_written_by_the_template_up_to_where_the_assistant_speaks(chat):
    assert chat.can_chat
    assert chat.text_with_specials(chat.encode([USER])) == "<|user|>abc<|end|><|assistant|>"


def test_a_conversation_that_ends_with_the_assistant_is_continued_without_an_end(chat):
    begun = [USER, {"role": "assistant", "content": "1 + "}]
    assert chat.text_with_specials(chat.encode(begun)).rstrip() == "<|user|>abc<|end|><|assistant|>1 +"


def test_a_plain_string_is_encoded_as_it_is(chat, tokenizer):
    assert chat.encode("abc12") == [tokenizer.convert_tokens_to_ids("abc"), tokenizer.convert_tokens_to_ids("12")]


def test_text_leaves_out_special_tokens_and_every_end_token(tokenizer):
    abc, end, user = tokenizer.convert_tokens_to_ids(["abc", "<|end|>", "<|user|>"])
    chat = Chat(tokenizer, [end, tokenizer.convert_tokens_to_ids("!")])  # "!" ends too, and is not special
    assert chat.text([abc, user, abc, end]) == "abcabc"
    assert chat.text([abc, tokenizer.convert_tokens_to_ids("!")]) == "abc"
    assert chat.text_with_specials([abc, end]) == "abc<|end|>"


def test_a_conversation_for_a_tokenizer_without_a_template_is_refused(tokenizer):
    tokenizer.chat_template = None
    chat = Chat(tokenizer, [0])
    assert not chat.can_chat
    with pytest.raises(DataError, match="no chat template"):
        chat.encode([USER])


NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
"""As in Gemma's template."""
SYSTEM = {"role": "system", "content": ""}


def test_an_empty_system_message_is_left_out_where_the_template_refuses_it_and_written_elsewhere(chat, tokenizer):
    assert chat.text_with_specials(chat.encode([SYSTEM, USER])).startswith("<|system|><|end|><|user|>")
    tokenizer.chat_template = NO_SYSTEM + CHAT_TEMPLATE
    strict = Chat(tokenizer, [0])
    assert strict.encode([SYSTEM, USER]) == strict.encode([USER])


def test_what_a_template_refuses_is_a_data_error_with_its_message(tokenizer):
    tokenizer.chat_template = NO_SYSTEM + CHAT_TEMPLATE
    chat = Chat(tokenizer, [0])
    with pytest.raises(DataError, match=r"conversation of system, user: System role not supported\. Change"):
        chat.encode([SYSTEM | {"content": "Be brief."}, USER])


def test_a_prompt_without_tokens_is_refused(chat):
    for one in (chat, Chat(ByteTokenizer(), [END], is_plain=True, render=render)):
        with pytest.raises(DataError, match="no tokens"):
            one.encode("")


def test_a_plain_tokenizer_renders_conversations_by_its_own_function():
    chat = Chat(ByteTokenizer(), [END], is_plain=True, render=render)
    assert chat.can_chat and bytes(chat.encode([USER])) == b"u:abc;"
    assert chat.text([104, 105, END]) == "hi" and chat.text_with_specials([104, END]) == "h<end>"
    with pytest.raises(DataError, match="render="):
        Chat(ByteTokenizer(), [END], is_plain=True).encode([USER])
