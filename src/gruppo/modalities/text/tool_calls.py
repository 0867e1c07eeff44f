"""Tool calls in what a model wrote, read by response templates of transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

REASONING = {
    "<think>": "</think>",
    "<|channel>thought\n": "<channel|>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel|>analysis<|message|>": "<|end|>",
    "to=self<|message|>": "<|eom|>",
    "<seed:think>": "</seed:think>",
}
"""Opening and closing marks of the reasoning before an answer."""
SCAFFOLD = re.compile(
    r"<\|start\|>assistant|<\|channel\|>\w+(?=<\|message\|>)|\bto=\S+?(?=<\|message\|>)"
)
"""Names of recipients and channels, which are part of no message (gpt-oss, Muse)."""


class ToolFormat(NamedTuple):
    """How a family of models writes a tool call."""

    mark: str
    """Found in each call; left over in a text, it is a call that could not be read."""
    begin: str
    """With the group "name", the arguments follow, else an object or a list with the names."""
    end: str
    tags: str = ""
    """Pattern of an argument with the groups "key" and "value"; "" for JSON."""
    json_options: Mapping[str, Any] = {}

    @property
    def response_template(self) -> dict[str, Any]:
        calls: dict[str, Any] = {
            "open_pattern": self.begin,
            "close_pattern": rf"\s*(?:{self.end}|\Z)",
            "repeats": True,
            "content": "xml-inline" if self.tags else "json",
            "content_args": {"tag_pattern": self.tags} if self.tags else self.json_options,
        }
        if "<name>" in self.begin:
            function = {"name": "{name}", "arguments": "{content}"}
            calls["transform"] = {"type": "function", "function": function}
            if "<id>" in self.begin:
                calls["transform"]["id"] = "{id}"
        opening, closing = (
            "|".join(map(re.escape, marks)) for marks in zip(*REASONING.items(), strict=True)
        )
        reasoning = {"open_pattern": rf"\A\s*(?:{opening})", "close_pattern": rf"(?:{closing})\s*"}
        content = {"repeats": True, "join": "", "content_args": {"strip": False}}
        fields = {"reasoning_content": reasoning, "tool_calls": calls, "content": content}
        return {"start_anchor_pattern": r"\A", "fields": fields}


FORMATS = {
    "Qwen3-Coder, Qwen3.5, Nemotron 3": ToolFormat(
        "<tool_call>",
        r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        r"</function>\s*</tool_call>|</function>|</tool_call>",
        r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>",
    ),
    "GLM 4.5 and later": ToolFormat(
        "<tool_call>",
        r"<tool_call>\s*(?P<name>[^\s<{\[]+)\s*(?=<)",
        "</tool_call>",
        r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
    ),
    "Hermes, Qwen2.5, Qwen3, SmolLM3, Granite 4": ToolFormat(
        "<tool_call>", "<tool_call>", "</tool_call>"
    ),
    "MiniMax, DeepSeek V3.2, Muse": ToolFormat(
        "invoke name=",
        r'(?:<[^<>\s]*(?:tool_call|function_calls)>\s*)?<[^<>\s]*invoke name="(?P<name>[^"]+)">',
        r"</[^<>\s]*invoke>(?:\s*</[^<>\s]*(?:tool_call|function_calls)>)?",
        r'<[^<>\s]*parameter name="(?P<key>[^"]+)"[^>]*>(?P<value>.*?)</[^<>\s]*parameter>',
    ),
    "gpt-oss": ToolFormat(
        "to=functions.",
        r"(?:<\|channel\|>\w+\s*)?to=functions\.(?P<name>[\w.-]+)[^{]*?<\|message\|>",
        r"<\|call\|>",
    ),
    "Mistral": ToolFormat("[TOOL_CALLS]", r"\[TOOL_CALLS\]\s*(?=[\[{])", r"(?=\[TOOL_CALLS\])"),
    "Mistral from 2025 on": ToolFormat(
        "[TOOL_CALLS]",
        r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)(?:\[CALL_ID\])?(?P<id>\w*)\[ARGS\]",
        r"(?=\[TOOL_CALLS\])",
    ),
    "DeepSeek": ToolFormat(
        "<｜tool▁call▁begin｜>",
        r"(?:<｜tool▁calls▁begin｜>)?\s{0,9}<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?"
        r"(?P<name>[^\n<]+)(?:<｜tool▁sep｜>|\n```json\n)",
        r"(?:```\s*)?<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
    ),
    "Kimi": ToolFormat(
        "<|tool_call_begin|>",
        r"(?:<\|tool_calls_section_begin\|>)?\s{0,9}<\|tool_call_begin\|>\s*"
        r"(?P<id>(?:functions\.)?(?P<name>[\w.-]+):\d+)\s*<\|tool_call_argument_begin\|>",
        r"<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?",
    ),
    "Command": ToolFormat("<|START_ACTION|>", r"<\|START_ACTION\|>", r"<\|END_ACTION\|>"),
    "Granite 3, Phi 4": ToolFormat("<|tool_call|>", r"<\|tool_call\|>", r"<\|/tool_call\|>"),
    "Nemotron Nano 2": ToolFormat("<TOOLCALL>", "<TOOLCALL>", "</TOOLCALL>"),
    "Gemma 4": ToolFormat(
        "<|tool_call>",
        r"<\|tool_call>call:(?P<name>[\w.-]+)",
        r"<tool_call\|>",
        json_options={"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
    ),
    # last: any JSON object with a name, wherever a template writes it
    "Llama 3": ToolFormat(
        "<|python_tag|>",
        r'(?:<\|python_tag\|>)?\s{0,9}(?=\{\s{0,9}"(?:type|name|function)"\s*:)',
        r";\s*(?=\{)",
    ),
}
"""Formats by the families that use them. A template has the first that reads back what it
writes."""


def read_message(text: str, form: ToolFormat, tools: list[Any]) -> dict[str, Any]:
    """Content, and if present reasoning and calls, of a text; ValueError if a call is malformed."""
    from transformers.utils.chat_parsing import parse_response

    found = parse_response(text, form.response_template, prefix="", tools=tools)
    content = SCAFFOLD.sub("", found.get("content", ""))
    if form.mark in content:
        raise ValueError(f"{form.mark} begins a call that goes on in another way than this model's")
    if form.tags:  # the parser skips what is no tag, and the call would lack arguments
        reasoning = found.get("reasoning_content") or ""
        answer = text[text.find(reasoning) + len(reasoning) :]
        for call in re.finditer(rf"(?s)(?:{form.begin})(?P<body>.*?)(?:{form.end}|\Z)", answer):
            if rest := re.sub(form.tags, "", call["body"], flags=re.DOTALL).strip():
                raise ValueError(f"{rest[:40]!r} is no argument")
    return {**found, "content": content}


def calls_of(values: Any) -> list[dict[str, Any]]:
    """Parsed calls, which may be lists of calls, in the form of messages."""
    flat = [
        call for value in values or () for call in (value if isinstance(value, list) else [value])
    ]
    return [call_of(value) for value in flat]


def call_of(value: Any) -> dict[str, Any]:
    """A parsed call in the form of messages; ValueError if it lacks a name or has odd arguments."""
    function = value.get("function", value) if isinstance(value, Mapping) else {}
    if isinstance(function, str):  # Llama 3: the name beside the parameters
        function = {**value, "name": function}
    name = function.get("name", function.get("tool_name"))
    arguments = function.get("arguments", function.get("parameters")) or {}
    if isinstance(arguments, str):  # some models write the object as a string
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, Mapping):
        raise ValueError(f"a call needs a name and an object of arguments, not {value!r:.80}")
    # half a surrogate pair, NaN or a deep nest would fail where rows are written
    json.dumps([name, arguments], ensure_ascii=False, allow_nan=False).encode()
    call = {"type": "function", "function": {"name": name.strip(), "arguments": dict(arguments)}}
    call_id = value.get("id") or value.get("tool_call_id")
    return call | ({"id": call_id} if isinstance(call_id, str) and call_id else {})
