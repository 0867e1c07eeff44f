"""Calls of tools in what models write: every family's form, and what is no call."""

from __future__ import annotations

import json

import pytest
from tests.modalities.text.families import TOOLS

from gruppo.modalities.text.tool_calls import FORMATS, calls_of, read_message

HERMES, XML, GLM, INVOKE, HARMONY, MISTRAL, MISTRAL_2025, DEEPSEEK = (
    "Hermes, Qwen2.5, Qwen3, SmolLM3, Granite 4",
    "Qwen3-Coder, Qwen3.5, Nemotron 3",
    "GLM 4.5 and later",
    "MiniMax, DeepSeek V3.2, Muse",
    "gpt-oss",
    "Mistral",
    "Mistral from 2025 on",
    "DeepSeek",
)
KIMI, COMMAND, GRANITE, NEMOTRON, GEMMA, LLAMA = (
    "Kimi",
    "Command",
    "Granite 3, Phi 4",
    "Nemotron Nano 2",
    "Gemma 4",
    "Llama 3",
)
ONE = '{"name": "multiply", "arguments": {"a": 12, "b": 34}}'
WRITTEN = {
    "hermes": (HERMES, f"<tool_call>\n{ONE}\n</tool_call>"),
    "hermes without an end": (HERMES, f"<tool_call>{ONE}"),
    "granite 4, a list": (HERMES, f"<tool_call>[{ONE}]</tool_call>"),
    "arguments as a text": (
        HERMES,
        r'<tool_call>{"name": "multiply", "arguments": "{\"a\": 12, \"b\": 34}"}</tool_call>',
    ),
    "qwen3-coder": (
        XML,
        "<tool_call>\n<function=multiply>\n<parameter=a>\n12\n</parameter>\n<parameter=b>\n34\n</parameter>\n</function>\n"
        "</tool_call>",
    ),
    "glm": (
        GLM,
        "<tool_call>multiply\n<arg_key>a</arg_key>\n<arg_value>12</arg_value>\n<arg_key>b</arg_key>\n"
        "<arg_value>34</arg_value>\n</tool_call>",
    ),
    "minimax": (
        INVOKE,
        '<minimax:tool_call>\n<invoke name="multiply">\n<parameter '
        'name="a">12</parameter>\n<parameter name="b">34'
        "</parameter>\n</invoke>\n</minimax:tool_call>",
    ),
    "deepseek 3.2": (
        INVOKE,
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="multiply">\n<｜DSML｜parameter name="a" '
        'string="false">12'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="b" '
        'string="false">34</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
    ),
    "gpt-oss": (
        HARMONY,
        "<|channel|>commentary to=functions.multiply <|constrain|>json<|message|>"
        '{"a": 12, "b": 34}',
    ),
    "gpt-oss, as its template writes": (
        HARMONY,
        '<|start|>assistant to=functions.multiply<|channel|>commentary json<|message|>{"a": 12, '
        '"b": 34}<|call|>',
    ),
    "mistral": (MISTRAL, f"[TOOL_CALLS] [{ONE}]"),
    "mistral 2025": (MISTRAL_2025, '[TOOL_CALLS]multiply[ARGS]{"a": 12, "b": 34}'),
    "deepseek 3": (
        DEEPSEEK,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>multiply\n```json\n"
        '{"a": 12, "b": 34}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    "deepseek 3.1": (
        DEEPSEEK,
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>multiply<｜tool▁sep｜>{"a": 12, "b": '
        "34}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
    ),
    "kimi": (
        KIMI,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.multiply:0<|tool_call_argument_begin|>"
        '{"a": 12, "b": 34}<|tool_call_end|><|tool_calls_section_end|>',
    ),
    "command": (
        COMMAND,
        '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "multiply", "parameters": {"a": 12, '
        '"b": 34}}\n'
        "]<|END_ACTION|>",
    ),
    "granite 3": (GRANITE, f"<|tool_call|>[{ONE}]"),
    "phi 4": (GRANITE, f"<|tool_call|>{ONE}<|/tool_call|>"),
    "nemotron nano 2": (NEMOTRON, f"<TOOLCALL>[{ONE}]</TOOLCALL>"),
    "gemma 4": (GEMMA, "<|tool_call>call:multiply{a:12,b:34}<tool_call|>"),
    "llama 3": (LLAMA, '{"name": "multiply", "parameters": {"a": 12, "b": 34}}'),
    "llama 3, with a tag": (
        LLAMA,
        '<|python_tag|>{"type": "function", "name": "multiply", "parameters": {"a": 12, "b": 34}}',
    ),
    "llama 3, the name beside": (
        LLAMA,
        '{"type": "function", "function": "multiply", "parameters": {"a": 12, "b": 34}}',
    ),
}


def read(text, form):
    message = read_message(text, FORMATS[form], TOOLS)
    return message, calls_of(message.get("tool_calls"))


def functions(text, form):
    message, calls = read(text, form)
    return message["content"].strip(), [call["function"] for call in calls]


@pytest.mark.parametrize("form, text", WRITTEN.values(), ids=WRITTEN)
def test_a_call_is_read_and_the_text_around_it_kept(form, text):
    call = {"name": "multiply", "arguments": {"a": 12, "b": 34}}
    assert functions(text, form)[1] == [call]
    content, calls = functions(f"I multiply.\n{text}", form)
    assert content.startswith("I multiply.") and calls == [call]
    assert functions("I cannot multiply {12, 34}.", form) == ("I cannot multiply {12, 34}.", [])


def test_two_calls_are_read_in_their_order():
    two = ONE.replace("12", "5")
    for form, text in (
        (HERMES, f"<tool_call>{ONE}</tool_call>\n<tool_call>{two}</tool_call>"),
        (MISTRAL, f"[TOOL_CALLS] [{ONE}, {two}]"),
        (LLAMA, f"{ONE}; {two}"),
        (MISTRAL_2025, '[TOOL_CALLS]multiply[ARGS]{"a": 12}[TOOL_CALLS]multiply[ARGS]{"a": 5}'),
    ):
        assert [function["arguments"]["a"] for function in functions(text, form)[1]] == [12, 5]


def test_ids_of_calls_are_kept():
    assert read(WRITTEN["kimi"][1], KIMI)[1][0]["id"] == "functions.multiply:0"
    assert read('[TOOL_CALLS]multiply[CALL_ID]abc[ARGS]{"a": 1}', MISTRAL_2025)[1][0]["id"] == "abc"


def test_texts_with_quotes_brackets_and_line_ends_are_whole():
    awkward = 'a "b" \\ {x: [1,\n2]} <|"|'
    call = json.dumps({"name": "note", "arguments": {"text": awkward}})
    for form, text in (
        (HERMES, f"<tool_call>{call}</tool_call>"),
        (GEMMA, f'<|tool_call>call:note{{text:<|"|>{awkward}<|"|>}}<tool_call|>'),
    ):
        assert functions(text, form)[1][0]["arguments"] == {"text": awkward}
    xml = (
        "<tool_call>\n<function=note>\n<parameter=text>\n12\n</parameter>\n</function>\n"
        "</tool_call>"
    )
    assert functions(xml, XML)[1][0]["arguments"] == {"text": "12"}  # a string in its schema


def test_values_of_tags_have_the_types_of_the_schema():
    text = "<tool_call>multiply\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
    for written, value in (("7", 7), ("seven", "seven")):
        assert functions(text.format(written), GLM)[1][0]["arguments"] == {"a": value}
    unknown = text.replace("multiply", "unknown").format("7")
    assert functions(unknown, GLM)[1][0]["arguments"] == {"a": "7"}


@pytest.mark.parametrize(
    "form, text, why",
    [
        (HERMES, '<tool_call>{"name": "multiply", "arguments": {"a": 12, </tool_call>', "JSON"),
        (HERMES, "<tool_call>multiply(12, 34)</tool_call>", "JSON"),
        (XML, "<tool_call>multiply(12, 34)</tool_call>", "goes on in another way"),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>', "needs a name"),
        (HERMES, '<tool_call>{"name": "multiply", "arguments": [12]}</tool_call>', "an object"),
        (HERMES, '<tool_call>{"name": "multiply", "arguments": {"a": NaN}}</tool_call>', "JSON"),
        (
            HERMES,
            r'<tool_call>{"name": "note", "arguments": {"text": "\ud800"}}</tool_call>',
            "surrogates",
        ),
        (HERMES, "<tool_call>" + "[" * 100_000, "recursion|JSON"),
        (
            HERMES,
            '<tool_call>{"name": "multiply", "arguments": {"a": ' + "9" * 5000 + "}}",
            "digits",
        ),
        (LLAMA, '{"name": "multiply", "parameters": {"a": 12', "JSON"),
        *(
            (XML, f"<tool_call><function=multiply>{body}</function></tool_call>", "is no argument")
            for body in ("<parameter=a>12", '{"a": 12}', "so <parameter=a>12</parameter>")
        ),
        (GLM, "<tool_call>multiply\n<arg_key>a</arg_key>\n12\n</tool_call>", "is no argument"),
        (INVOKE, '<invoke name="multiply"><parameter name="a">12</invoke>', "is no argument"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(form, text, why):
    with pytest.raises((ValueError, RecursionError), match=why):
        read(text, form)


def test_reasoning_is_what_the_turn_begins_with_and_its_calls_are_not_made():
    call = f"<tool_call>{ONE}</tool_call>"
    message, calls = read(f"<think>\n{call}?\n</think>\n\nNo.", HERMES)
    assert (message["reasoning_content"], message["content"], calls) == (f"{call}?", "No.", [])
    message, calls = read(f"<think>\nnever closed {call}", HERMES)
    assert (message["reasoning_content"], calls) == (f"never closed {call}", [])
    assert len(read(f"<think>\n\n</think>\n\n{call}", HERMES)[1]) == 1
    assert functions("Is <think> a tag?", HERMES) == ("Is <think> a tag?", [])
    broken = "<tool_call><function=multiply>12</function></tool_call>"
    assert read(f"<think>\n{broken}\n</think>\n\nNo.", XML)[1] == []


def test_spaces_before_what_is_no_call_take_no_time_that_grows_with_their_square():
    """A regular expression holds the interpreter, so that no deadline would stop it."""
    text = " " * 200_000 + "x"
    for form in (LLAMA, KIMI, DEEPSEEK):
        assert functions(text, form) == ("x", [])
