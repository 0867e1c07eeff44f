"""A tiny model that has learned a few calls of tools by heart, as an instruction model of a family
with tools would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils import get_json_schema

CHATML = "{% if enable_thinking is defined %}{% endif %}"  # as Qwen3's reads it
CHATML += (Path(__file__).parents[2] / "examples/chatml_tools.jinja").read_text(encoding="utf-8")


def tokenizer_of(texts: Sequence[str]) -> Any:
    """A token is a word, a sign or a space of these texts."""
    import re

    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<unk>", "<|im_start|>", "<|im_end|>"]
    words = sorted({word for text in texts for word in re.findall(r"\w+|\W", text)} - {*special})
    vocabulary = {word: n for n, word in enumerate([*special, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|\W"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(special)
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
        **names,
    )


def agent(
    conversations: Sequence[Sequence[Mapping[str, Any]]], tools: Sequence[Any]
) -> tuple[Any, Any]:
    """A two-layer model that goes on in these conversations as they do, and its tokenizer.

    ``tools``: the functions of each conversation.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    schemas = [[get_json_schema(tool) for tool in own] for own in tools]
    texts = [
        tokenizer_of([]).apply_chat_template(list(messages), tools=own, tokenize=False)
        for messages, own in zip(conversations, schemas, strict=True)
    ]
    tokenizer = tokenizer_of([*texts, "error: ValueError Game over no XGY"])
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    is_answer = torch.zeros(ids.shape, dtype=torch.bool)
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    speaker = tokenizer("assistant")["input_ids"][0]
    for row, own in zip(is_answer, ids.tolist(), strict=True):
        for place in range(len(own) - 1):
            if (own[place], own[place + 1]) == (start, speaker):
                row[place + 3 : own.index(end, place) + 1] = True  # behind the newline
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=1024,
        eos_token_id=end,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    labels = torch.where(is_answer, ids, -100)
    for _ in range(150):
        loss = model(ids, labels=labels).loss
        if loss < 0.05:  # what is written is then the most likely
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model.lm_head.weight.mul_(5.0)  # and what is sampled, with few exceptions
    return model.eval(), tokenizer


def calls(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }


def said(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}
