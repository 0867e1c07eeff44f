"""Chat templates: read from files, probed for tools and for turns that they write differently
later."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gruppo.integrity import read_file
from gruppo.modalities.text.tool_calls import FORMATS, REASONING, ToolFormat, name_of, read_calls
from gruppo.types import DataError, GruppoError

if TYPE_CHECKING:
    from gruppo.modalities.text.chat import Chat

log = logging.getLogger("gruppo")

BUNDLED_TEMPLATES = {"chatml-tools": "chatml_tools.jinja"}
"""Templates of gruppo, by the name that ``prompts.chat_template`` takes."""
MAX_TEMPLATE_BYTES = 1 << 20
SET_BY_GRUPPO = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "messages",
    "tokenize",
    "tools",
)

_QUESTION, _RESULT, _ARGUMENT, _THOUGHT = (
    "probe question",
    "probe result",
    "probe argument",
    "probe thought",
)
_TEXT, _NUMBER = (
    {"type": "string", "description": "A text."},
    {"type": "integer", "description": "A number."},
)
_PARAMETERS = {
    "type": "object",
    "properties": {"text": _TEXT, "number": _NUMBER},
    "required": ["text", "number"],
}
_SCHEMA = {"name": "probe_tool", "description": "A probe.", "parameters": _PARAMETERS}
_PROBE_TOOL = {"type": "function", "function": _SCHEMA}
_CALLED = {"name": "probe_tool", "arguments": {"text": _ARGUMENT, "number": 7}}
_PROBE_CALL = {"type": "function", "id": "000000001", "function": _CALLED}
_USER, _TOOL = (
    {"role": "user", "content": _QUESTION},
    {"role": "tool", "name": "probe_tool", "content": _RESULT},
)
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]}


def read_template(name: str) -> str:
    """The text of a chat template: a file, or one of gruppo's."""
    path = (
        Path(__file__).parent / BUNDLED_TEMPLATES[name]
        if name in BUNDLED_TEMPLATES
        else Path(name).expanduser()
    )
    try:
        return read_file(path, MAX_TEMPLATE_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        why = (
            "it is not UTF-8"
            if isinstance(error, UnicodeDecodeError)
            else getattr(error, "strerror", None) or error
        )
        raise GruppoError(
            f"the chat template {name} cannot be read ({why})",
            option="prompts.chat_template",
            advice=f"to a Jinja file, or to {', '.join(BUNDLED_TEMPLATES)}",
        ) from None


def prepared(
    messages: Sequence[Mapping[str, Any]], *, arguments_as_text: bool
) -> list[dict[str, Any]]:
    """Messages whose tool calls have the form and the ids that templates read, and whose results
    have those ids.

    Results stand in the order of their calls. Ids have nine digits: Mistral's templates take no
    others.
    """
    result, waiting, count = list[dict[str, Any]](), list[str](), 0
    for message in map(dict, messages):
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                count, function = count + 1, dict(call.get("function", call))
                value = function.get("arguments") or {}
                try:
                    value = json.loads(value) if isinstance(value, str) else value
                except ValueError:
                    raise DataError(
                        f"the arguments {value!r:.80} of a tool call are not JSON. Correct them."
                    ) from None
                function["arguments"] = (
                    json.dumps(value, ensure_ascii=False) if arguments_as_text else value
                )
                own = (
                    {name: item for name, item in call.items() if item is not None}
                    if "function" in call
                    else {}
                )
                calls.append(
                    {"type": "function", "id": f"{count:09d}", **own, "function": function}
                )
            message["tool_calls"], waiting = calls, [call["id"] for call in calls]
        elif message["role"] == "tool" and waiting:
            message.setdefault("tool_call_id", waiting.pop(0))
        result.append(message)
    return result


def tool_support(chat: Chat) -> ToolFormat | None:
    """The format of the calls that the chat's template writes; None where its tokenizer's response
    template reads them.

    GruppoError where the template ignores tools, or writes calls that nothing reads.
    """
    advice = f"""Set --prompts.chat-template to a Jinja file with tools, or, for models with the tokens <|im_start|> and
        <|im_end|>, to {" or ".join(BUNDLED_TEMPLATES)}."""
    if not chat.can_chat or chat.is_plain:
        raise GruppoError(
            f"the tools of the environment need a chat template, and this model has none. {advice}"
        )
    try:
        begun = chat.rendered([_USER], chat.tools)
        answered = chat.rendered([_USER, _CALLING, _TOOL], chat.tools, is_answered=True)
    except Exception as error:  # a template may fail in any way
        raise GruppoError(
            f"the model's chat template cannot write tool calls ({error}). {advice}"
        ) from None
    if missing := [text for text in ("probe_tool", _ARGUMENT, _RESULT) if text not in answered]:
        what = "results" if missing == [_RESULT] else "calls"
        raise GruppoError(
            f"the model's chat template ignores tools: it leaves their {what} out. {advice}"
        )
    if unseen := [name for name in map(name_of, chat.tools) if name not in begun]:
        text = "the model's chat template does not write the schemas of tools (such as %s)"
        log.warning(f"{text}: the model knows only what the prompts say of them.", unseen[0])
    try:
        turn = chat.rendered([_USER, _CALLING], chat.tools, is_answered=True).rpartition(_QUESTION)[
            2
        ]
    except DataError:  # a call without its result
        turn = answered.rpartition(_QUESTION)[2].partition(_RESULT)[0]
    if getattr(chat.tokenizer, "response_template", None) is not None:
        message = chat.parsed(turn, "", [_PROBE_TOOL])
        if [call["function"] for call in message.get("tool_calls", [])] == [_CALLED]:
            return None
    # the first format that reads back what the template wrote: several families begin their calls
    # alike
    for form in FORMATS.values():
        try:
            if [call["function"] for call in read_calls(turn, form, [_PROBE_TOOL])[1]] == [_CALLED]:
                return form
        except ValueError:
            continue
    raise GruppoError(
        f"""the model's chat template writes tool calls in a form that is not known here:
                    {turn.strip()!r:.160}""",
        advice="""Give its tokenizer a response_template (transformers), or another template with
                    $prompts.chat_template""",
    )


def rewritten(chat: Chat) -> str:
    """What the template writes differently of turns that were sampled, once more messages follow;
    "" if nothing.

    Sampled tokens stay as they are: the conversation that is trained on differs from one that is
    rendered as a whole.
    """
    if chat.is_plain:
        return ""
    begun, found = chat.rendered([_USER], chat.tools), list[str]()
    turn: dict[str, Any] = {"role": "assistant", "content": "probe answer"}
    # templates read reasoning under one of these two names
    if not any(
        closing in chat.generation_prompt() for closing in REASONING.values()
    ):  # else it does not think
        turn |= {"reasoning_content": _THOUGHT, "thinking": _THOUGHT}
    rounds = {"a user message": (turn, _USER)} | (
        {"a tool's result": (turn | _CALLING, _TOOL)} if chat.tools else {}
    )
    for follows, (turn, reply) in rounds.items():
        try:
            alone = chat.rendered([_USER, turn], chat.tools, is_answered=True)
            once, twice = (
                chat.rendered([_USER, *[turn, reply] * count], chat.tools) for count in (1, 2)
            )
        except (
            Exception
        ):  # a template without such turns; where a conversation needs them, it is refused
            continue
        if _THOUGHT in alone and twice.count(_THOUGHT) < 2:
            found.append(f"leaves out the reasoning of earlier turns once {follows} follows")
        elif not once.startswith(begun) or twice != once + once[len(begun) :]:
            found.append(f"writes earlier turns in another way once {follows} follows")
    return " and ".join(found)


def strings(value: Any) -> Iterator[str]:
    """All texts in nested lists and dicts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from strings(item)
