"""A chat model of a few thousand weights in a folder, data, rewards and a config: whole runs take
about a second."""

from __future__ import annotations

import atexit
import gc
import json
import random
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gruppo.api import change
from gruppo.config.schema import Config

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 +-=?.:<>|"
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONTEXT = 128
REWARDS = str(Path(__file__).resolve())
FOLDERS: set[str] = set()
"""Of the models that ``model`` wrote, which no test changes."""


@cache
def model(seed: int = 0) -> str:
    """The folder of a two-layer Llama and its tokenizer, made once a session."""
    folder = Path(tempfile.mkdtemp(prefix="gruppo-tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    written = write_model(folder / "tiny", seed)
    FOLDERS.add(written)
    gc.collect()
    gc.freeze()  # as in conftest.py: transformers is imported by now
    return written


def write_model(folder: Path, seed: int = 0, context: int = CONTEXT, width: int = 16) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = character_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=context,
        initializer_range=0.15,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def character_tokenizer() -> Any:
    """A token is a character; what it does not know is <unk>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<unk>", "<user>", "<assistant>", "<system>"]
    vocabulary = {micro_batch: n for n, micro_batch in enumerate([*special, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def rows(count: int = 24) -> list[dict[str, Any]]:
    """Sums as conversations, their answers, and a column of their own."""
    return [
        {
            "prompt": [{"role": "user", "content": f"{n} + {n % 7} = ?"}],
            "answer": str(n + n % 7),
            "number": n,
        }
        for n in range(count)
    ]


def write_rows(path: Path, given: Sequence[Any] | None = None) -> str:
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in (rows() if given is None else given)),
        encoding="utf-8",
    )
    return str(path)


def config(folder: Path, **changes: Any) -> Config:
    """A run in ``folder`` of four prompts and three samples a step. ``changes`` as in
    ``gruppo.train``."""
    data = folder / "data.jsonl"
    if not data.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_rows(data)
    defaults = {
        "model": model(),
        "data": str(data),
        "reward": [reward("digits")],
        "steps": 6,
        "name": "run",
        "runs_dir": str(folder / "runs"),
        "compute": "float32",
        # a process that imports this file, and torch with it, takes 3 s of CPU time
        "scoring__isolate": False,
        "show_samples_every": 2,
        "rollout__prompts": 4,
        "rollout__group_size": 3,
        "rollout__max_new_tokens": 8,
        "optim__lr": 1e-2,
        "prompts__held_out_fraction": 0.3,
        "evaluation__prompts": 4,
        "evaluation__every": 3,
        "saving__every": 2,
        "saving__keep": 1,
    }
    return change(Config(), defaults | changes)


# --- rewards, named as file.py:function -----------------------------------------------------------


def reward(name: str) -> str:
    return f"{REWARDS}:{name}"


def said(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def digits(completions: Sequence[Any], **_: Any) -> list[float]:
    """The share of digits."""
    return [
        sum(c.isdigit() for c in said(completion)) / max(len(said(completion)), 1)
        for completion in completions
    ]


def noisy(completions: Sequence[Any], **_: Any) -> list[float]:
    """Draws from Python's global generator: a resumed run must draw the same."""
    return [value + random.random() for value in digits(completions)]


def prints(completions: Sequence[Any], **_: Any) -> list[float]:
    print("a line", flush=True)
    return digits(completions)


def raises(completions: Sequence[Any], **_: Any) -> list[float]:
    raise ValueError("boom")


def too_many(completions: Sequence[Any], **_: Any) -> list[float]:
    return [1.0] * (len(completions) + 1)


def nothing(completions: Sequence[Any], **_: Any) -> list[None]:
    """Scores no row."""
    return [None for _ in completions]


not_a_function = 3.0


def asks_for_colour(completions: Sequence[Any], colour: Sequence[str]) -> list[float]:
    return [1.0 for _ in completions]
