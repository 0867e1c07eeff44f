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


def target_text(target: Any) -> str:
    """Text of a target: a string, a number, an assistant's message or a list of one; "" if it is
    missing."""
    if target is None or (isinstance(target, float) and math.isnan(target)):
        return ""  # nan: an empty cell of a table
    messages = [target] if isinstance(target, Mapping) else target
    if not isinstance(messages, list | tuple):
        return str(target)
    try:
        (message,) = messages
        content = message["content"]
    except (ValueError, TypeError, KeyError):
        content = None
    if not isinstance(content, str) or message.get("role", "assistant") != "assistant":
        raise GruppoError(f"the target {target!r:.80} is no answer; {NO_ANSWER}")
    return content


def answer_ids(chat: Chat, inputs: Any, text: str, tools: Tools = ()) -> list[int]:
    """Tokens of ``text`` behind the prompt's own, with the end token that the policy would close
    them with.

    They are those of prompt and answer encoded together, if these begin with the prompt's tokens
    and the rest decodes to the text: a chat template may trim it or leave out reasoning. Otherwise
    the text is encoded by itself.
    """
    prompt, whole = chat.encode(inputs, tools), chat.encode_answered(inputs, text, tools)
    if whole[: len(prompt)] == prompt:
        ids = whole[len(prompt) :]
        closed = _to_end(chat, ids)
        content = closed[:-1] or ids
        if content and chat.text_with_specials(content).strip() == text.strip():
            return closed or [*ids, *chat.closing]
    ids = chat.encode_text(text)
    if set(ids) & set(chat.eos_ids):
        raise GruppoError(
            f"the target {text!r:.80} holds an end token, at which the answer would end. Remove it."
        )
    return [*ids, *chat.closing]


def demonstrate(
    chat: Chat, inputs: Any, target: Any, tools: Tools = ()
) -> tuple[list[int], list[bool], Any]:
    """Tokens of a target behind its prompt, which of them the policy writes, and the completion.

    A target of several messages has the tokens of a conversation that was sampled turn by turn.
    """
    given = [target] if isinstance(target, Mapping) else target
    is_messages = isinstance(given, list | tuple) and all(isinstance(m, Mapping) for m in given)
    # a conversation or a call of tools; else a string, or a message with a text
    if not is_messages or (len(given) < 2 and not any(m.get("tool_calls") for m in given)):
        text = target_text(target)
        ids = answer_ids(chat, inputs, text, tools) if text.strip() else []
        completion = text if isinstance(inputs, str) else [{"role": "assistant", "content": text}]
        return ids, [True] * len(ids), completion
    messages = [{**message, "content": message.get("content") or ""} for message in given]
    roles = [message.get("role") for message in messages]
    is_alternating = ("assistant", "assistant") not in pairwise(roles)
    is_alternating &= roles[0] == roles[-1] == "assistant"
    if not is_alternating or not all(isinstance(message["content"], str) for message in messages):
        raise GruppoError(f"the target {target!r:.80} is no answer; {NO_ANSWER}")
    if isinstance(inputs, str):
        raise GruppoError(
            f"the target {target!r:.80} is a conversation, and its prompt a string. Give messages "
            f"there."
        )
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
    prompt, whole = chat.encode(inputs, tools), chat.encode_answered(inputs, message, tools)
    # nothing where the prompt's tokens change behind it: no call is then read below, and the target
    # refused
    ids = whole[len(prompt) :] if whole[: len(prompt)] == prompt else []
    ids = _to_end(chat, ids) or [*ids, *chat.closing]
    read = chat.answer(ids, chat.text(ids), inputs, tools).get("tool_calls", [])
    if [call["function"] for call in read] != [dict(call.get("function", call)) for call in calls]:
        raise GruppoError(f"""the calls {calls!r:.80} of the target, as the chat template writes
            them, cannot be read: {chat.text(ids)!r:.80}. Demonstrate calls of the environment's
            tools, with a dict of arguments.""")
    return ids


def _to_end(chat: Chat, ids: list[int]) -> list[int]:
    """Ids up to the first end token; none if there is no end token.

    A template may write more behind it, such as a line end, which the policy never samples.
    """
    ends = [n for n, token in enumerate(ids) if token in chat.eos_ids]
    return ids[: ends[0] + 1] if ends else []
