"""Demonstrations: the tokens that the policy would have to sample to answer with a given target."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gruppo.modalities.text.chat import Chat
from gruppo.types import GruppoError


def target_text(target: Any) -> str:
    """Text of a target: a text, a number, an assistant's message or a list of one; "" if it is missing."""
    messages = [target] if isinstance(target, Mapping) else target
    if isinstance(messages, list | tuple):
        contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
        is_answer = len(contents) == len(messages) == 1 and messages[0].get("role", "assistant") == "assistant"
        if not is_answer or not isinstance(contents[0], str):
            raise GruppoError(
                f"the target {target!r:.80} is no answer; it needs a text, or one message of the assistant with a text."
            )
        return contents[0]
    is_missing = target is None or (isinstance(target, float) and math.isnan(target))
    return "" if is_missing else str(target)


def answer_ids(chat: Chat, inputs: Any, text: str) -> list[int]:
    """Tokens of ``text`` behind the prompt's own, with the end token that the policy would close them with.

    They are those of prompt and answer encoded together, if these begin with the prompt's tokens and the rest decodes
    to the text: a chat template may trim it or leave out reasoning. Otherwise the text is encoded by itself.
    """
    prompt, whole = chat.encode(inputs), chat.encode_answered(inputs, text)
    if whole[: len(prompt)] == prompt:
        ids = whole[len(prompt) :]
        ids = next((ids[: n + 1] for n, token in enumerate(ids) if token in chat.eos_ids), ids)
        is_closed = bool(ids) and ids[-1] in chat.eos_ids
        content = ids[:-1] if is_closed else ids
        if content and chat.text_with_specials(content).strip() == text.strip():
            return ids if is_closed else [*ids, *chat.closing]
    ids = chat.encode_text(text)
    if set(ids) & set(chat.eos_ids):
        raise GruppoError(f"the target {text!r:.80} holds an end token, at which the answer would end. Remove it.")
    return [*ids, *chat.closing]
