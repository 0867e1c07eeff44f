"""Calls of tools in what models write: every family's form, and what is no call."""

from __future__ import annotations

import pytest
from tests.modalities.text.families import TOOLS

from gruppo.modalities.text.tool_calls import FORMATS, read_calls, split_reasoning

(
    HERMES,
    XML,
    GLM,
    INVOKE,
    HARMONY,
    MISTRAL,
    MISTRAL_2025,
    DEEPSEEK,
    KIMI,
    COMMAND,
    GRANITE,
    NEMOTRON,
    LFM,
    GEMMA,
    LLAMA,
) = (
    FORMATS[next(name for name in FORMATS if name.startswith(begin))]
    for begin in (
        *(
            "Hermes",
            "Qwen3-Coder",
            "GLM",
            "MiniMax",
            "gpt-oss",
            "Mistral",
            "Mistral from",
            "DeepSeek",
            "Kimi",
            "Command",
        ),
        *("Granite", "Nemotron", "LFM2", "Gemma", "Llama"),
    )
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
        '<|channel|>commentary to=functions.multiply <|constrain|>json<|message|>{"a": 12, "b": 34}',
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
    "lfm2": (LFM, "<|tool_call_start|>[multiply(a=12, b=34)]<|tool_call_end|>"),
    "gemma 4": (GEMMA, "<|tool_call>call:multiply{a:12,b:34}<tool_call|>"),
    "llama 3": (LLAMA, '{"name": "multiply", "parameters": {"a": 12, "b": 34}}'),
    "llama 3, with a tag": (
        LLAMA,
        '<|python_tag|>{"type": "function", "name": "multiply", "parameters": {"a": 12, "b": 34}}',
    ),
}


def functions(text, form):
    content, calls = read_calls(text, form, TOOLS)
    return content, [call["function"] for call in calls]


@pytest.mark.parametrize("form, text", WRITTEN.values(), ids=WRITTEN)
def test_a_call_is_read_and_the_text_around_it_kept(form, text):
    call = {"name": "multiply", "arguments": {"a": 12, "b": 34}}
    assert functions(text, form) == ("", [call])
    assert functions(f"I multiply.\n{text}", form) == ("I multiply.", [call])
    assert functions("I cannot multiply {12, 34}.", form) == ("I cannot multiply {12, 34}.", [])


def test_two_calls_are_read_in_their_order():
    two = ONE.replace("12", "5")
    for form, text in (
        (HERMES, f"<tool_call>{ONE}</tool_call>\n<tool_call>{two}</tool_call>"),
        (MISTRAL, f"[TOOL_CALLS] [{ONE}, {two}]"),
        (LLAMA, f"{ONE}; {two}"),
        (LFM, "<|tool_call_start|>[multiply(a=12, b=34), multiply(a=5, b=34)]<|tool_call_end|>"),
    ):
        assert [function["arguments"]["a"] for function in functions(text, form)[1]] == [12, 5]


AWKWARD = 'a "b" \\ </tool_call> {x: [1,\n2]} <|"|'
"""Ends of calls, quotes, brackets and line ends within a text."""


def test_texts_with_the_ends_of_calls_in_them_are_whole_where_a_format_allows_it():
    import json

    arguments = json.dumps({"text": AWKWARD})
    assert functions(
        f'<tool_call>{{"name": "note", "arguments": {arguments}}}</tool_call>', HERMES
    )[1][0]["arguments"] == {"text": AWKWARD}
    gemma = f'<|tool_call>call:note{{text:<|"|>{AWKWARD}<|"|>}}<tool_call|>'
    assert functions(gemma, GEMMA)[1][0]["arguments"] == {"text": AWKWARD}
    xml = (
        "<tool_call>\n<function=note>\n<parameter=text>\n  "
        "12\n\n</parameter>\n</function>\n</tool_call>"
    )
    assert functions(xml, XML)[1][0]["arguments"] == {
        "text": "  12\n"
    }  # a text of its schema, not a number


def test_values_of_tags_have_the_types_of_the_schema():
    text = "<tool_call>multiply\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
    for written, value in (
        ("7", 7),
        ("-2.5", -2.5),
        ("True", True),
        ("null", None),
        ("[1]", [1]),
        ("seven", "seven"),
    ):
        assert functions(text.format(written), GLM)[1][0]["arguments"] == {"a": value}
    assert functions(text.replace("multiply", "unknown").format("7"), GLM)[1][0]["arguments"] == {
        "a": "7"
    }


@pytest.mark.parametrize(
    "form, text, why",
    [
        (HERMES, '<tool_call>{"name": "multiply", "arguments": {"a": 12, </tool_call>', "not JSON"),
        (HERMES, "<tool_call>multiply(12, 34)</tool_call>", "goes on in another way"),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>', "no name"),
        (HERMES, '<tool_call>{"name": "multiply", "arguments": [12]}</tool_call>', "are a list"),
        (
            HERMES,
            '<tool_call>{"name": "multiply", "arguments": {"a": NaN}}</tool_call>',
            "NaN is not JSON",
        ),
        (
            HERMES,
            r'<tool_call>{"name": "note", "arguments": {"text": "\ud800"}}</tool_call>',
            "cannot be written",
        ),
        (HERMES, "<tool_call>" + "[" * 100_000, "recursion|not JSON"),
        (
            HERMES,
            '<tool_call>{"name": "multiply", "arguments": {"a": ' + "9" * 5000 + "}}",
            "digits",
        ),
        (
            XML,
            "<tool_call><function=multiply><parameter=a>12</function></tool_call>",
            "is no argument",
        ),
        (LFM, "<|tool_call_start|>[multiply(12, 34)]<|tool_call_end|>", "needs its name"),
        (LFM, "<|tool_call_start|>[multiply(a=open('x'))]<|tool_call_end|>", "malformed"),
        (LLAMA, '{"name": "multiply", "parameters": {"a": 12', "not JSON"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(form, text, why):
    with pytest.raises(ValueError, match=why):
        read_calls(text, form, TOOLS)


def test_reasoning_is_what_the_turn_begins_with_and_its_calls_are_not_made():
    call = f"<tool_call>{ONE}</tool_call>"
    assert split_reasoning(f"<think>\n{call}?\n</think>\n\nNo.", "") == (f"{call}?", "\n\nNo.")
    assert split_reasoning(f"{call}?\n</think>{call}", "<|im_start|>assistant\n<think>\n") == (
        f"{call}?",
        call,
    )
    assert split_reasoning(f"never closed {call}", "<think>\n") == (f"never closed {call}", "")
    assert split_reasoning(call, "<think>\n\n</think>\n\n") == ("", call)
    assert split_reasoning("Is <think> a tag?", "") == ("", "Is <think> a tag?")
