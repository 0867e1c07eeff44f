"""Language models of one's own for ``--model own_models.py:NAME``: right ones, and wrong ones of
each kind."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from tests.fakes import END, ByteTokenizer, TinyGPT, llama
from torch import nn

from gruppo.modalities.text import TextPolicy, from_module

FILE = str(Path(__file__).resolve())
USER, ASSISTANT = 1, 2


def own(name: str) -> str:
    return f"{FILE}:{name}"


def render(messages: Any) -> list[int]:
    ids: list[int] = []
    for message in messages:
        ids += [USER if message["role"] == "user" else ASSISTANT, *message["content"].encode()]
    return [*ids, ASSISTANT]


def wrapped(module: nn.Module, **changes: Any) -> TextPolicy:
    return from_module(
        module, ByteTokenizer(), **({"eos_ids": [END], "context": 64, "render": render} | changes)
    )


# --- right ones -----------------------------------------------------------------------------------


def model() -> TextPolicy:
    return wrapped(TinyGPT())


told: list[Any] = []
"""What the next one was called with, time after time."""


def told_where(folder: Path | None = None) -> TextPolicy:
    told.append(folder)
    return wrapped(TinyGPT())


class TiedGPT(TinyGPT):
    """Its head reads with the embedding's numbers, and has no others."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, END + 1, bias=False)
        self.head.weight = self.tokens.weight


def tied() -> TextPolicy:
    return wrapped(TiedGPT())


def in_bfloat16() -> TextPolicy:
    return wrapped(TinyGPT(), compute="bfloat16")


def of_hugging_face() -> TextPolicy:
    return llama()


# --- wrong ones -----------------------------------------------------------------------------------

number = 3


def bare() -> nn.Module:
    return TinyGPT()


def wants_more(width: int, depth: int = 2) -> TextPolicy:
    return wrapped(TinyGPT(width=width))


def raises() -> TextPolicy:
    raise ValueError("no such checkpoint\nsecond line")


def ends() -> TextPolicy:
    sys.exit("I end here")


def has_no_decode() -> TextPolicy:
    return from_module(TinyGPT(), object(), eos_ids=[END])


def render_raises() -> TextPolicy:
    return wrapped(
        TinyGPT(), render=lambda messages: [len(message.content) for message in messages]
    )


class NarrowHead(TinyGPT):
    """In torch, an error of shapes, after the length that it is tried with."""

    def forward(self, ids: torch.Tensor) -> Any:
        return super().forward(ids) @ torch.ones(1, 1) if ids.shape[1] > 6 else super().forward(ids)


def forward_raises() -> TextPolicy:
    return wrapped(NarrowHead())


class GivesLoss(TinyGPT):
    def forward(self, ids: torch.Tensor) -> Any:
        return super().forward(ids), None


def gives_loss() -> TextPolicy:
    return wrapped(GivesLoss())


class LooksAhead(TinyGPT):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = super().forward(ids)
        return logits + logits.mean(dim=1, keepdim=True)


def looks_ahead() -> TextPolicy:
    return wrapped(LooksAhead())


class LastOnly(TinyGPT):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids)[:, -1]


def last_only() -> TextPolicy:
    return wrapped(LastOnly())


def takes_few() -> TextPolicy:
    return wrapped(TinyGPT(context=2))


def not_finite() -> TextPolicy:
    module = TinyGPT()
    nn.init.constant_(module.head.bias, float("nan"))
    return wrapped(module)


def other_on_each_rank() -> TextPolicy:
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    return model()
