"""Tokenizers for the chat templates of model families: bytes, a few merges, and special tokens of
the template."""

from __future__ import annotations

import re
from pathlib import Path

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiply two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "A number."},
                    "b": {"type": "integer", "description": "A number."},
                },
                "required": ["a", "b"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "note",
            "description": "Write a text down.",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string", "description": "What to write."}},
                "required": ["text"],
            },
        },
    },
]
SPECIAL = re.compile(
    r"<\|[^<>|\s'\"]+\|>|<\|[a-z_]+>|<[a-z_]+\|>|<｜[^<>]+?｜>|"
    r"\[/?(?:INST|TOOL_CALLS|TOOL_RESULTS|AVAILABLE_TOOLS|ARGS)\]"
    r"|</?(?:s|bos|eos|sop|start_of_turn|end_of_turn)>|\[gMASK\]|\[e~\[|\]~!?b[\[\]]"
)
PLAIN = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
"""Added tokens that are not special, as in Qwen's tokenizers."""


WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Where the tokenizers of Llama 3 and Qwen cut a text before they merge."""


def family_tokenizer(template: str, ends: list[str], bos: str | None = None):
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        ("Ċ", "Ċ"),
        (">", "Ċ"),
        ("}", "Ċ"),
        ("e", "r"),
        ("u", "s"),
        ("us", "er"),
        ("Ġ", "t"),
        ("i", "n"),
    ]
    vocabulary = {token: n for n, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    found = dict.fromkeys([*SPECIAL.findall(template), *ends, *([bos] if bos else [])])
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in found])
    tokenizer.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in PLAIN if text in template]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=ends[0],
        bos_token=bos,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def trl_templates() -> Path:
    import trl

    return Path(trl.__file__).parent / "chat_templates"
