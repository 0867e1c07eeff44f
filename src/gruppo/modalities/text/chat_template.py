"""Chat templates: read from files, and probed for tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gruppo.integrity import read_file
from gruppo.modalities.text.tool_calls import FORMATS, ToolFormat
from gruppo.types import DataError, GruppoError

if TYPE_CHECKING:
    from gruppo.modalities.text.chat import Chat

MAX_TEMPLATE_BYTES = 1 << 20
RESERVED = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "messages",
    "tokenize",
    "tools",
}

_QUESTION = "probe question"
_RESULT = "probe result"
_ARGUMENT = "probe argument"
_PROPERTIES = {"text": {"type": "string"}, "number": {"type": "integer"}}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES, "required": ["text", "number"]}
_SCHEMA = {"name": "probe_tool", "description": "A probe.", "parameters": _PARAMETERS}
_CALLED = {"name": "probe_tool", "arguments": {"text": _ARGUMENT, "number": 7}}
_PROBE_CALL = {"type": "function", "id": "000000001", "function": _CALLED}
_USER = {"role": "user", "content": _QUESTION}
_TOOL = {"role": "tool", "name": "probe_tool", "content": _RESULT}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]}


def read_template(file: str) -> str:
    """The text of a chat template's file."""
    try:
        return read_file(Path(file).expanduser(), MAX_TEMPLATE_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        raise GruppoError(
            f"the chat template {file} cannot be read ({error})",
            option="prompts.chat_template",
            advice="to a Jinja file",
        ) from None


def template_kwargs(text: str) -> dict[str, Any]:
    """Parse further variables of a chat template, a JSON object."""
    with suppress(ValueError):
        values = json.loads(text or "{}")
        if isinstance(values, dict) and all(map(str.isidentifier, values)):
            if taken := RESERVED & set(values):
                problem = f"prompts.chat_template_kwargs sets {taken.pop()}, which gruppo sets"
                raise GruppoError(problem)
            return values
    raise GruppoError(
        f"prompts.chat_template_kwargs is {text!r:.80}",
        advice="""It needs a JSON object, such as $prompts.chat_template_kwargs '{"enable_thinking":
            false}'""",
    )


def prepared(
    messages: Sequence[Mapping[str, Any]], *, arguments_as_text: bool = False
) -> list[dict[str, Any]]:
    """Messages whose tool calls have the form and the ids that templates read, and whose results
    have those ids.

    Results stand in the order of their calls. Ids have nine digits: Mistral's templates take no
    others.
    """
    result: list[dict[str, Any]] = []
    waiting: list[str] = []
    count = 0
    for message in map(dict, messages):
        if message.get("tool_calls"):
            calls: list[dict[str, Any]] = []
            waiting = []
            for call in message["tool_calls"]:
                count += 1
                function = dict(call.get("function", call))
                function["arguments"] = _arguments(function, arguments_as_text)
                waiting.append(call.get("id") or f"{count:09d}")
                calls.append({"type": "function", "id": waiting[-1], "function": function})
            message["tool_calls"] = calls
        elif message["role"] == "tool" and waiting:
            message.setdefault("tool_call_id", waiting.pop(0))
        result.append(message)
    return result


def _arguments(function: Mapping[str, Any], as_text: bool) -> Any:
    value = function.get("arguments") or {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise DataError(
                f"the arguments {value!r:.80} of a tool call are not JSON. Correct them."
            ) from None
    return json.dumps(value, ensure_ascii=False) if as_text else value


def tool_format(chat: Chat) -> ToolFormat | None:
    """The format of the calls that the chat's template writes; None where its tokenizer's response
    template reads them.

    GruppoError where the template ignores tools, or writes calls that nothing reads.
    """
    advice = """Set $prompts.chat_template to a Jinja file with tools; for models with the tokens
        <|im_start|> and <|im_end|>, there is chatml_tools.jinja in the examples"""
    if not chat.can_chat or chat.is_plain:
        problem = "the tools of the environment need a chat template, and this model has none"
        raise GruppoError(problem, advice=advice)
    try:
        answered = chat.rendered([_USER, _CALLING, _TOOL], chat.tools, is_answered=True)
    except Exception as error:  # a template may fail in any way
        problem = f"the model's chat template cannot write tool calls ({error})"
        raise GruppoError(problem, advice=advice) from None
    missing = [text for text in ("probe_tool", _ARGUMENT, _RESULT) if text not in answered]
    if missing:
        part = "results" if missing == [_RESULT] else "calls"
        problem = f"the model's chat template ignores tools: it leaves their {part} out"
        raise GruppoError(problem, advice=advice)
    whole = answered.partition(_RESULT)[0]
    with suppress(DataError):  # of a call without its result
        whole = chat.rendered([_USER, _CALLING], chat.tools, is_answered=True)
    turn = whole.rpartition(_QUESTION)[2]
    has_own = getattr(chat.tokenizer, "response_template", None) is not None
    # the first format that reads back what the template wrote: several families begin their calls
    # alike
    probe = [{"type": "function", "function": _SCHEMA}]
    for form in (*([None] if has_own else []), *FORMATS.values()):
        message = chat.parsed(turn, "", probe, form)
        if [call["function"] for call in message.get("tool_calls", ())] == [_CALLED]:
            return form
    raise GruppoError(
        f"""the model's chat template writes tool calls in a form that is not known here:
            {turn.strip()!r:.160}""",
        advice="""Give its tokenizer a response_template (transformers), or another template with
            $prompts.chat_template""",
    )


def map_strings(value: Any, function: Callable[[str], Any]) -> Any:
    """A copy of nested lists and dicts with the function of each string in them."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Mapping):
        return {name: map_strings(item, function) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(item, function) for item in value]
    return value
