"""A stand-in for nanochat with the shapes and assertions of its tokenizer, module, checkpoints and
GSM8K task."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.fakes import TinyGPT
from torch import Tensor
from torch.nn import functional as F

NAMES = ("<|bos|>", "<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>")
BOS, USER, USER_END, ASSISTANT, ASSISTANT_END = range(256, 261)


class Tokenizer:
    """Bytes and special tokens, with the methods of nanochat's RustBPETokenizer."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(NAMES[i - 256] if i >= 256 else chr(i) for i in ids)

    def encode_special(self, text: str) -> int:
        return 256 + NAMES.index(text)

    def get_bos_token_id(self) -> int:
        return BOS

    def render_conversation(self, conversation: dict[str, Any]) -> tuple[list[int], list[int]]:
        messages = copy.deepcopy(conversation)["messages"]
        if messages[0]["role"] == "system":
            assert messages[1]["role"] == "user", (
                "System message must be followed by a user message"
            )
            messages[1]["content"] = f"{messages[0]['content']}\n\n{messages[1]['content']}"
            messages = messages[1:]
        assert len(messages) >= 1
        ids = [BOS]
        for i, message in enumerate(messages):
            assert message["role"] == ("user", "assistant")[i % 2], (
                f"Message {i} is from {message['role']}"
            )
            is_user = message["role"] == "user"
            assert not is_user or isinstance(message["content"], str), (
                "User messages are simply expected to be strings"
            )
            ids += [USER if is_user else ASSISTANT, *self.encode(message["content"])]
            ids += [USER_END if is_user else ASSISTANT_END]
        return ids, [0] * len(ids)

    def render_for_completion(self, conversation: dict[str, Any]) -> list[int]:
        conversation = copy.deepcopy(conversation)
        messages = conversation["messages"]
        assert messages[-1]["role"] == "assistant", "Last message must be from the Assistant"
        messages.pop()
        return [*self.render_conversation(conversation)[0], ASSISTANT]


class Config:
    sequence_len = 64


class GPT(TinyGPT):
    """Called and refusing as nanochat's GPT: no single tokens without a cache of keys and
    values."""

    def __init__(self) -> None:
        super().__init__(vocabulary=261)
        self.config = Config()
        self.register_buffer(
            "cos", torch.zeros(1, 10 * Config.sequence_len, 1, 8), persistent=False
        )

    def forward(
        self, idx: Tensor, targets: Any = None, kv_cache: Any = None, loss_reduction: str = "mean"
    ) -> Tensor:
        T = idx.size(1)
        assert self.cos.size(1) >= T, (
            f"Sequence length grew beyond the rotary embeddings cache: {T}"
        )
        assert idx.device == self.cos.device, "Rotary embeddings and idx are on different devices"
        assert T > 1, "Training forward pass should have T > 1"
        logits = super().forward(idx).float()
        if targets is None:
            return logits
        return F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction=loss_reduction
        )


class GSM8K:
    """Three questions, each with its answer in parts. Right is half of all answers."""

    def __init__(self, subset: str, split: str) -> None:
        assert subset in ("main", "socratic") and split in ("train", "test")

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> dict[str, Any]:
        parts = [{"type": "python", "text": "2+3"}, {"type": "text", "text": "#### 5"}]
        question = {"role": "user", "content": f"What is question {i}?"}
        return {"messages": [question, {"role": "assistant", "content": parts}]}

    def reward(self, conversation: dict[str, Any], assistant_response: str) -> float:
        assert isinstance(assistant_response, str)
        assert conversation["messages"][-1]["content"][-1]["text"] == "#### 5"
        return float(sum(map(ord, assistant_response)) % 2)


def load_model(
    source: str, device: torch.device, phase: str
) -> tuple[GPT, Tokenizer, dict[str, Any]]:
    assert source in ("base", "sft", "rl") and phase in ("train", "eval")
    return GPT().to(device), Tokenizer(), {}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``import nanochat`` and ``import tasks`` find the stand-in."""
    for name, members in (
        ("nanochat", {}),
        ("nanochat.checkpoint_manager", {"load_model": load_model}),
        ("tasks", {}),
        ("tasks.gsm8k", {"GSM8K": GSM8K}),
    ):
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
