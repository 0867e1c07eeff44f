"""Demonstrations: a target becomes the tokens that the policy would write, and those that it would
read between."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from gruppo.modalities.text.chat import Chat, Tools
from gruppo.types import GruppoError

NO_ANSWER = """it needs a string, or one message of the assistant with a text, or several that begin
    and end with the assistant's, with what it reads between them"""


def messages_of(target: Any) -> list[dict[str, Any]]:
    """Messages of a target, which may be a string, a number or one message; none if it is
    missing."""
    if target is None or (isinstance(target, float) and math.isnan(target)):
        return []  # nan: an empty cell of a table
    shown = [target] if isinstance(target, Mapping) else target
    if not isinstance(shown, list | tuple):
        shown = [{"content": str(target)}]
    messages = [{"role": "assistant", **m} for m in shown if isinstance(m, Mapping)]
    for message in messages:
        if message.get("tool_calls"):
            message["content"] = message.get("content") or ""
    roles = [message["role"] for message in messages]
    is_answer = roles[:1] == roles[-1:] == ["assistant"] and len(roles) == len(shown)
    is_answer &= ("assistant", "assistant") not in pairwise(roles)
    if not is_answer or not all(isinstance(m.get("content"), str) for m in messages):
        raise GruppoError(f"the target {target!r:.80} is no answer; {NO_ANSWER}")
    return messages


def answer_ids(chat: Chat, inputs: Any, text: str, tools: Tools = ()) -> list[int]:
    """Tokens of ``text`` behind the prompt's own, with the end token that the policy would close
    them with.

    They are those of prompt and answer encoded together, if these begin with the prompt's tokens
    and the rest decodes to the text: a chat template may trim it or leave out reasoning. Otherwise
    the text is encoded by itself.
    """
    ids = _ids_behind(chat, inputs, text, tools)
    content = [*ids[:-1], *(i for i in ids[-1:] if i not in chat.eos_ids)]
    if content and chat.text_with_specials(content).strip() == text.strip():
        return ids if len(content) < len(ids) else [*ids, *chat.closing]
    ids = chat.encode_text(text)
    if set(ids) & set(chat.eos_ids):
        raise GruppoError(
            f"the target {text!r:.80} holds an end token, at which the answer would end. Remove it."
        )
    return [*ids, *chat.closing]


def _ids_behind(
    chat: Chat, inputs: Any, answer: str | Mapping[str, Any], tools: Tools
) -> list[int]:
    """Tokens of an answer encoded together with its prompt, up to the first end token; none if the
    prompt's tokens change.

    A template may write more behind the end token, such as a line end, which the policy never
    samples.
    """
    prompt, whole = chat.encode(inputs, tools), chat.encode_answered(inputs, answer, tools)
    ids = whole[len(prompt) :] if whole[: len(prompt)] == prompt else []
    ends = [n for n, token in enumerate(ids, start=1) if token in chat.eos_ids]
    return ids[: ends[0]] if ends else ids


def demonstrate(
    chat: Chat, inputs: Any, target: Any, tools: Tools = ()
) -> tuple[list[int], list[bool], Any]:
    """Tokens of a target behind its prompt, which of them the policy writes, and the completion.

    A target of several messages has the tokens of a conversation that was sampled turn by turn.
    """
    messages = messages_of(target)
    is_plain = len(messages) < 2 and not any(m.get("tool_calls") for m in messages)
    if is_plain and not any(message["content"].strip() for message in messages):
        return [], [], messages
    if isinstance(inputs, str):
        if not is_plain:
            raise GruppoError(f"""the target {target!r:.80} is a conversation, and its prompt a
                string. Give messages there.""")
        text = messages[0]["content"]
        ids = answer_ids(chat, inputs, text, tools)
        return ids, [True] * len(ids), text
    ids, mask = list[int](), list[bool]()
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    for place, end in zip(turns, [*turns[1:], len(messages)], strict=True):
        written = turn_ids(chat, [*inputs, *messages[:place]], messages[place], tools)
        read = list[int]()
        if reply := messages[place + 1 : end]:
            is_closed = written[-1] in chat.eos_ids
            read = chat.encode_reply(
                inputs, messages[: place + 1], reply, is_closed=is_closed, tools=tools
            )
        ids += written + read
        mask += [True] * len(written) + [False] * len(read)
    return ids, mask, messages


def turn_ids(
    chat: Chat, inputs: Sequence[Any], message: Mapping[str, Any], tools: Tools
) -> list[int]:
    """Tokens of one turn of the assistant, as it would write and end it; ``inputs``: all messages
    before."""
    if not (calls := message.get("tool_calls")):
        if not message["content"].strip():
            raise GruppoError(
                "a message of the assistant in the target is empty. Give it a text or a call."
            )
        return answer_ids(chat, inputs, message["content"], tools)
    ids = _ids_behind(chat, inputs, message, tools)
    if not ids or ids[-1] not in chat.eos_ids:
        ids = [*ids, *chat.closing]
    read = chat.answer(ids, chat.text(ids), inputs, tools).get("tool_calls", [])
    if [call["function"] for call in read] != [dict(call.get("function", call)) for call in calls]:
        raise GruppoError(f"""the calls {calls!r:.80} of the target, as the chat template writes
            them, cannot be read: {chat.text(ids)!r:.80}. Demonstrate calls of the environment's
            tools, with a dict of arguments.""")
    return ids
