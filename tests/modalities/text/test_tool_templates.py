"""Chat templates of model families with tools: rendered as by transformers, in one piece and turn by turn."""

from __future__ import annotations

import pytest
from tests.modalities.text.families import TOOLS, family_tokenizer, trl_templates

from gruppo.modalities.text.chat import Chat
from gruppo.modalities.text.chat_template import rewritten

ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "gemma4 diffusion_gemma": "<turn|> <|tool_response> <eos>",
    "glm4moe": "<|user|> <|observation|> <|endoftext|>",
    "gptoss": "<|return|> <|call|>",
    "llama3": "<|eot_id|>",
    "muse": "<|eot|>",
    "phi3": "<|end|>",
}
"""End tokens of families; the others have <|im_end|>."""


def family_chat(name):
    pytest.importorskip("trl")
    ends = next((ends for names, ends in ENDS.items() if name.startswith(tuple(names.split()))), "<|im_end|>").split()
    template = (trl_templates() / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer = family_tokenizer(template, ends, bos="<bos>")
    return Chat(tokenizer, tokenizer.convert_tokens_to_ids(ends))


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def turn(content="", *calls):
    return {"role": "assistant", "content": content} | ({"tool_calls": list(calls)} if calls else {})


def thoughtful(rounds):
    thought = {"reasoning_content": "To think first.", "thinking": "To think first."}
    return [part if isinstance(part, list) else part | thought for part in rounds]


def result(content, name="multiply"):
    return {"role": "tool", "name": name, "content": content}


USER = {"role": "user", "content": "What is 12 * 34? Write it down."}
CALLS = [turn("", call("multiply", a=12, b=34)), [result("408")], turn("", call("note", text='It is "408".\n'))]
AFTER_TOOLS = [*CALLS, [result("done", "note")], turn("It is 408.")]
AFTER_USER = [turn("Hello."), [{"role": "user", "content": "And 5 * 6?"}], turn("30."), [USER], turn("408.")]


def flat(rounds):
    return [message for part in rounds for message in (part if isinstance(part, list) else [part])]


def incremental(chat, prompt, rounds):
    """Ids of a conversation whose policy writes the tokens of the whole rendering, and that rendering's."""
    messages = [*prompt, *flat(rounds)]
    ids = chat.tokenizer.apply_chat_template(named(messages), tools=TOOLS, return_dict=False)
    written, completion = chat.encode(prompt, TOOLS), []
    for part in rounds:
        if isinstance(part, list):
            written += chat.encode_reply(prompt, completion, part, is_closed=True, tools=TOOLS)
            completion += part
            continue
        assert chat.text_with_specials(written) == chat.text_with_specials(ids[: len(written)])
        assert written == ids[: len(written)]
        end = next((n for n in range(len(written), len(ids)) if ids[n] in chat.eos_ids), len(ids) - 1) + 1
        answer = chat.answer(ids[len(written) : end], "", completion[-1:] or prompt, TOOLS)
        assert "parse_error" not in answer
        assert answer.get("tool_calls", []) == part.get("tool_calls", []) and answer["content"] == part["content"]
        written, completion = ids[:end], [*completion, answer]
    return written, list(ids)


def named(messages):
    """Messages with the ids of calls that some templates ask for, in the order of the calls."""
    found, count = [], 0
    for message in messages:
        if "tool_calls" in message:
            count += 1
            message = message | {"tool_calls": [{**message["tool_calls"][0], "id": f"{count:09d}"}]}
        found.append(message | ({"tool_call_id": f"{count:09d}"} if message["role"] == "tool" else {}))
    return found


WITH_TOOLS = [
    *("deepseekv3", "deepseekv3_training", "diffusion_gemma", "diffusion_gemma_training", "gemma4", "gemma4_v2"),
    *("gemma4_v3", "gemma4_v4", "gemma4_v5", "glm4moe", "glm4moe_training", "gptoss", "gptoss_training", "lfm2_2_5"),
    *("lfm2_2_5_v2", "lfm2_2_5_vl", "lfm2_v2", "lfm2_v2_training", "llama3_1", "llama3_2", "muse_glimmer"),
    *("muse_glimmer_training", "nemotron_3_5_lightning", "nemotron_3_5_lightning_training", "nemotron_3_nano"),
    *("nemotron_3_nano_training", "nemotron_3_super", "nemotron_3_super_training", "nemotron_3_ultra"),
    *("nemotron_3_ultra_training", "qwen2_5", "qwen2_5_training", "qwen3", "qwen3_5_nothink"),
    *("qwen3_5_nothink_training", "qwen3_5_think", "qwen3_5_think_training", "qwen3_6", "qwen3_6_training", "qwen3_8"),
    *("qwen3_8_training", "qwen3_instruct_2507", "qwen3_instruct_2507_training", "qwen3_training", "qwen3_vl"),
    "qwen3_vl_training",
]
"""TRL's templates with tools; the others are listed as refused below."""


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_conversation_by_turns_has_the_ids_of_the_whole_or_the_run_says_why_not(name):
    chat = family_chat(name)
    chat.set_tools(TOOLS)
    notes = rewritten(chat)
    for rounds, follows in ((AFTER_TOOLS, "a tool's result"), (AFTER_USER, "a user message")):
        if follows in notes:
            continue
        thinks = "nothink" not in name
        written, whole = incremental(chat, [USER], thoughtful(rounds) if thinks else rounds)
        assert written == whole[: len(written)] and len(whole) - len(written) <= 2
    prompt = [{"role": "system", "content": "Be brief."}, USER]
    expected = chat.tokenizer.apply_chat_template(prompt, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    assert chat.encode(prompt, TOOLS) == list(expected)
