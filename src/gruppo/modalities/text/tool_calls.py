"""Tool calls in what a model wrote: the formats of the model families in use, read into
messages."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Read = Callable[[str, int], tuple[Any, int]]
"""Reads a value from a position of a text, and returns it with the position behind it; ValueError
if it cannot."""


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


# without NaN and Infinity, which Python reads and JSON does not have
_JSON = json.JSONDecoder(parse_constant=_refuse_constant)


def read_json(text: str, at: int) -> tuple[Any, int]:
    try:
        return _JSON.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"it is not JSON: {error.msg} at {text[error.pos : error.pos + 20]!r}"
        ) from None
    except RecursionError:
        raise ValueError("it is not JSON: it is nested too deeply") from None


def read_tags(pattern: str, end: str) -> Read:
    """Arguments as tags with the groups "key" and "value", up to the pattern ``end``."""
    tag, close = re.compile(pattern, re.DOTALL), re.compile(end)

    def read(text: str, at: int) -> tuple[Any, int]:
        if (found := close.search(text, at)) is None:
            raise ValueError("it is not closed")
        body = text[at : found.start()]
        if rest := tag.sub("", body).strip():
            raise ValueError(f"{rest[:40]!r} is no argument")
        return {match["key"].strip(): match["value"] for match in tag.finditer(body)}, found.start()

    return read


def read_gemma(text: str, at: int) -> tuple[Any, int]:
    """JSON with bare keys, and <|"|> around texts."""
    end = text.find("<tool_call|>", at)
    parts = text[at : len(text) if end < 0 else end].split('<|"|>')
    # texts are every second part; keys get their quotes in the others alone
    parts[::2] = [
        re.sub(r"(?<=[{,])\s*([^\s\"{}\[\],:]+)\s*:", r'"\1":', part) for part in parts[::2]
    ]
    parts[1::2] = map(json.dumps, parts[1::2])
    return read_json("".join(parts), 0)[0], len(text) if end < 0 else end


class _JsonNames(ast.NodeTransformer):
    """Constants of JSON within Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        names = {"true": True, "false": False, "null": None}
        return ast.Constant(names[node.id]) if node.id in names else node


def read_python(text: str, at: int) -> tuple[Any, int]:
    """A list of Python calls with literals as keyword arguments, such as [add(a=1, b=2)]."""
    end = text.find("<|tool_call_end|>", at)
    end = len(text) if end < 0 else end
    body = text[at:end].strip()
    try:
        try:
            tree = ast.parse(body, mode="eval")
        except SyntaxError:  # LFM2's template puts texts in quotes as they are, line ends included
            tree = ast.parse(body.replace("\n", "\\n"), mode="eval")
        calls = _JsonNames().visit(tree).body.elts
        given = [
            {word.arg: ast.literal_eval(word.value) for word in call.keywords} for call in calls
        ]
        names = [ast.unparse(call.func) for call in calls]
        if any(call.args for call in calls) or any(None in arguments for arguments in given):
            raise ValueError("each argument needs its name")
    except (SyntaxError, AttributeError, MemoryError, RecursionError) as error:
        raise ValueError(f"it is no list of Python calls ({error})") from None
    return [
        {"name": name, "arguments": arguments} for name, arguments in zip(names, given, strict=True)
    ], end


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes its calls."""

    mark: str
    """Begins every call; where it is left in the text, a call was begun that cannot be read."""
    begin: str
    """Pattern before the value; its group "name" is the name of the tool, where it stands there."""
    read: Read = read_json
    end: str = ""
    """Pattern behind the value, which may be missing."""
    scaffold: str = ""
    """Pattern of what the family writes around plain text."""
    values_are_text: bool = False
    """Whether the arguments' types come from the tool's schema alone."""


_JSON_VALUE = r"(?=[\[{])"
_CHANNEL = r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)?"
FORMATS: dict[str, ToolFormat] = {
    "Qwen3-Coder, Qwen3.5, Nemotron 3": ToolFormat(
        "<tool_call>",
        r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        read_tags(
            r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>",
            r"</function>|</tool_call>|\Z",
        ),
        r"(?:</function>)?\s*(?:</tool_call>)?",
        values_are_text=True,
    ),
    "GLM 4.5 and later": ToolFormat(
        "<tool_call>",
        r"<tool_call>\s*(?P<name>[^\s<{\[]+)\s*",
        read_tags(
            r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
            r"</tool_call>|<tool_call>|\Z",
        ),
        r"</tool_call>",
        values_are_text=True,
    ),
    "Hermes, Qwen2.5, Qwen3, SmolLM3, Granite 4": ToolFormat(
        "<tool_call>", rf"<tool_call>\s*{_JSON_VALUE}", end=r"\s*</tool_call>"
    ),
    "MiniMax, DeepSeek V3.2, Muse": ToolFormat(
        "invoke name=",
        r"""(?:<(?:minimax:tool_call|atem:function_calls|｜DSML｜function_calls)>\s*)?"""
        r"""<(?:atem:|｜DSML｜)?invoke name="(?P<name>[^"]+)">""",
        read_tags(
            r"""<(?:atem:|｜DSML｜)?parameter name="(?P<key>[^"]+)"[^>]*>"""
            r"""(?P<value>.*?)</(?:atem:|｜DSML｜)?parameter>""",
            r"</(?:atem:|｜DSML｜)?invoke>|\Z",
        ),
        r"</(?:atem:|｜DSML｜)?invoke>\s*(?:</(?:minimax:tool_call|atem:function_calls|｜DSML｜function_calls)>)?",
        scaffold=r"(?:<\|start\|>assistant)?\s{0,9}\bto=\S+?<\|message\|>|<\|eom\|>",
        values_are_text=True,
    ),
    "gpt-oss": ToolFormat(
        "to=functions.",
        rf"{_CHANNEL}\s{{0,9}}to=functions\.(?P<name>[\w.-]+){_CHANNEL}\s*(?:<\|constrain\|>)?\w*\s*<\|message\|>",
        end=r"<\|call\|>",
        scaffold=rf"{_CHANNEL}<\|message\|>|<\|end\|>",
    ),
    "Mistral": ToolFormat("[TOOL_CALLS]", rf"\[TOOL_CALLS\]\s*{_JSON_VALUE}"),
    "Mistral from 2025 on": ToolFormat(
        "[TOOL_CALLS]", r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>\w+))?\[ARGS\]"
    ),
    "DeepSeek": ToolFormat(
        "<｜tool▁call▁begin｜>",
        r"(?:<｜tool▁calls▁begin｜>)?\s{0,9}<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?"
        r"(?P<name>[^\n<]+)(?:<｜tool▁sep｜>|\n```json\n)",
        end=r"\s*(?:```)?\s*<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
    ),
    "Kimi": ToolFormat(
        "<|tool_call_begin|>",
        r"(?:<\|tool_calls_section_begin\|>)?\s{0,9}<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+):\d+)"
        r"\s*<\|tool_call_argument_begin\|>\s*",
        end=r"\s*<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?",
    ),
    "Command": ToolFormat(
        "<|START_ACTION|>",
        rf"<\|START_ACTION\|>\s*{_JSON_VALUE}",
        end=r"\s*<\|END_ACTION\|>",
        scaffold=r"<\|(?:START|END)_RESPONSE\|>",
    ),
    "Granite 3, Phi 4": ToolFormat(
        "<|tool_call|>", rf"<\|tool_call\|>\s*{_JSON_VALUE}", end=r"\s*<\|/tool_call\|>"
    ),
    "Nemotron Nano 2": ToolFormat(
        "<TOOLCALL>", rf"<TOOLCALL>\s*{_JSON_VALUE}", end=r"\s*</TOOLCALL>"
    ),
    "LFM2": ToolFormat(
        "<|tool_call_start|>",
        r"<\|tool_call_start\|>\s*(?=\[)",
        read_python,
        r"\s*<\|tool_call_end\|>",
    ),
    "Gemma 4": ToolFormat(
        "<|tool_call>",
        r"<\|tool_call>call:(?P<name>[\w.-]+)\s*(?=\{)",
        read_gemma,
        r"<tool_call\|>",
    ),
    # last: any JSON object with a name, wherever a template writes it
    "Llama 3": ToolFormat(
        "<|python_tag|>", r"(?:<\|python_tag\|>|;)?\s{0,9}(?=\{\s*\"(?:type|name|function)\"\s*:)"
    ),
}
"""Formats by the families that use them. A template has the first that reads back what it
writes."""

REASONING = {
    "<think>": "</think>",
    "<|channel>thought\n": "<channel|>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel|>analysis<|message|>": "<|end|>",
    "to=self<|message|>": "<|eom|>",
    "<seed:think>": "</seed:think>",
}
"""What opens and closes the reasoning before an answer."""


def split_reasoning(text: str, begun: str) -> tuple[str, str]:
    """Reasoning and the rest of a turn; ``begun`` is the beginning that the template has written of
    it."""
    for opening, closing in REASONING.items():
        at = begun.rfind(opening)
        if (at < 0 or closing in begun[at:]) and not text.lstrip().startswith(opening):
            continue
        reasoning, _, rest = text.partition(closing)
        return reasoning.lstrip().removeprefix(opening).strip(), rest
    return "", text


def read_calls(
    text: str, form: ToolFormat, tools: Sequence[Mapping[str, Any]]
) -> tuple[str, list[dict[str, Any]]]:
    """What a text says beside its calls, and the calls; ValueError says why one that was begun
    cannot be read."""
    begin, end, at = re.compile(form.begin), re.compile(form.end), 0
    parts, calls = list[str](), list[dict[str, Any]]()
    while (found := begin.search(text, at)) is not None:
        parts.append(text[at : found.start()])
        named = found.groupdict()
        value, at = form.read(text, found.end())
        if named.get("name"):
            value = {"name": named["name"].strip(), "arguments": value, "id": named.get("id")}
        values = value if isinstance(value, list) else [value]
        calls += [call_of(one, tools if form.values_are_text else ()) for one in values]
        if (closing := end.match(text, at)) is not None:
            at = closing.end()
    parts.append(text[at:])
    rest = "".join(parts)
    if form.mark in rest:
        raise ValueError(
            f"a call begins with {form.mark} and goes on in another way than this model's calls"
        )
    rest = re.sub(form.scaffold, "", rest) if form.scaffold else rest
    return (rest.strip() if calls else rest), calls


def call_of(value: Any, tools: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """A call in the form of messages. Arguments that are texts of tags get the types of their
    tool's schema."""
    function = value.get("function", value) if isinstance(value, Mapping) else value
    if isinstance(function, str):
        function = {**value, "name": function}
    if not isinstance(function, Mapping):
        raise ValueError(
            f"it is a {type(value).__name__}; it needs an object with a name and arguments"
        )
    name = function.get("name", function.get("tool_name"))
    arguments = function.get("arguments", function.get("parameters"))
    if not isinstance(name, str) or not name:
        raise ValueError("it has no name of a tool")
    if isinstance(arguments, str) and arguments.strip():  # some models write the object as a text
        arguments, _ = read_json(arguments.strip(), 0)
    arguments = arguments or {}
    if not isinstance(arguments, Mapping):
        raise ValueError(
            f"its arguments are a {type(arguments).__name__}; they need to be an object"
        )
    schema: Any = next((tool.get("function", tool) for tool in tools if name_of(tool) == name), {})
    schemas = schema.get("parameters", {}).get("properties", {})
    arguments = {
        key: _typed(item, schemas[key]) if key in schemas else item
        for key, item in arguments.items()
    }
    # half a surrogate pair, or a value that JSON does not have, would fail where rows are written
    try:
        json.dumps([name, arguments], ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"its arguments cannot be written as JSON: {error}") from None
    call_id = value.get("id") or value.get("tool_call_id")
    call = {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}
    return call | ({"id": call_id} if isinstance(call_id, str) else {})


def name_of(tool: Mapping[str, Any]) -> str:
    return str(tool.get("function", tool).get("name"))


def _typed(text: Any, schema: Mapping[str, Any]) -> Any:
    """A text as what the schema says it is; itself where it may be a text, or is nothing else."""
    types = json.dumps([schema.get("type"), schema.get("anyOf"), schema.get("oneOf")])
    if not isinstance(text, str) or '"string"' in types or types == "[null, null, null]":
        return text
    for read in (json.loads, ast.literal_eval):  # False and None where a template writes Python's
        try:
            return read(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return text
