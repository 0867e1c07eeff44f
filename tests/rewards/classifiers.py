"""Tiny reward models: true Hugging Face classifiers over two layers, and their folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.fakes import bpe_tokenizer

OTHER_MERGES = (("e", "s"), ("1", "2"), ("x", "t"))
"""Another tokenizer than the policies': an x merges with the t that follows."""


def classifier(
    kind: str, labels: int = 1, *, seed: int = 0, tokenizer: Any = None, **changes: Any
) -> Any:
    """A ``LlamaForSequenceClassification`` or ``LlamaForTokenClassification`` with weights that
    matter."""
    import transformers

    tokenizer = bpe_tokenizer(OTHER_MERGES) if tokenizer is None else tokenizer
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    ends = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    rest = {"initializer_range": 0.5, "num_labels": labels}
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**(sizes | heads | ends | rest | changes))
    return getattr(transformers, f"LlamaFor{kind}")(config).eval()


def folder_of(
    path: Path, kind: str, labels: int = 1, *, chats: bool = True, **changes: Any
) -> Path:
    """The model and its tokenizer as ``save_pretrained`` writes them."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = bpe_tokenizer(OTHER_MERGES)
    tokenizer.chat_template = tokenizer.chat_template if chats else None
    classifier(kind, labels, tokenizer=tokenizer, **changes).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
