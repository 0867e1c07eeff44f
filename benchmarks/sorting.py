"""The task of ``benchmarks.presets``: a small model learns to write five different digits in order,
and to stop.

"41720>" is answered "01247" and an end. The reward is 1 where the whole answer is right and ended,
else 0, so a model that knows the order but not the end earns nothing. A short supervised start,
ended long before the model can do it, stands for the pretraining without which nothing is ever
rewarded.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from gruppo.seeds import seed_at

ALPHABET = "\n0123456789>"
END = 0
DIGITS = 5
CONTEXT = 2 * DIGITS + 4
WARM_STEPS, WARM_ROWS, WARM_LR = 20, 128, 3e-3


class Characters:
    """A token is a character; the line's end is the answer's end."""

    def encode(self, text: str) -> list[int]:
        return [ALPHABET.index(character) for character in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(ALPHABET[i] for i in ids)


class SmallGPT(nn.Module):
    """Two causal layers, 103 thousand weights: ids [B, T] to logits [B, T, V]."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(len(ALPHABET), width), nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.head = nn.Linear(width, len(ALPHABET))

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.tokens(ids) + self.places(torch.arange(length, device=ids.device))
        causal = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
        return self.head(self.layers(x, mask=causal, is_causal=True))


def problems(count: int) -> list[dict[str, Any]]:
    """Different problems, the same ones in every run."""
    draw = random.Random(0)
    found: dict[str, dict[str, Any]] = {}
    while len(found) < count:
        digits = "".join(draw.sample(ALPHABET[1:11], DIGITS))
        found[digits] = {"prompt": f"{digits}>", "answer": "".join(sorted(digits))}
    return list(found.values())


def started(seed: int) -> SmallGPT:
    """The model that every preset of a seed starts from."""
    model = SmallGPT()
    model.load_state_dict(_warm_weights(seed))
    return model


@cache
def _warm_weights(seed: int) -> dict[str, Tensor]:
    """After a few supervised steps on random problems."""
    torch.manual_seed(seed_at(seed, "warm"))
    model = SmallGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_LR)
    for _ in range(WARM_STEPS):
        asked = (
            torch.rand(WARM_ROWS, 10).argsort(dim=1)[:, :DIGITS] + 1
        )  # [rows, digits], digit d is token d + 1
        mark, end = (torch.full((WARM_ROWS, 1), token) for token in (ALPHABET.index(">"), END))
        answer = torch.cat([asked.sort(dim=1).values, end], dim=1)
        logits = model(torch.cat([asked, mark, answer], dim=1))[:, DIGITS:-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), answer.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: weight.detach() for name, weight in model.state_dict().items()}
