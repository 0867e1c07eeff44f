"""Arithmetic and memory traffic that a step needs, by hand: pure functions of a model's shape and
the rows' lengths.

A product of [m, k] by [k, n] is 2 m k n operations. Counted is what any implementation must do
once: a group's prompt once, no token after which nothing is predicted, no recomputation, no
padding; of the rest (norms, softmax, draws) nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A decoder with a gated MLP, and its head."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @classmethod
    def of(cls, config: Any) -> Shape:
        """From a Hugging Face configuration."""
        return cls(
            config.hidden_size,
            config.intermediate_size,
            config.num_hidden_layers,
            config.num_attention_heads,
            config.num_key_value_heads,
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            config.vocab_size,
        )

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of a layer's products with weights."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q": (self.hidden, queries),
            "k": (self.hidden, keys),
            "v": (self.hidden, keys),
            "o": (queries, self.hidden),
            "gate": (self.hidden, self.intermediate),
            "up": (self.hidden, self.intermediate),
            "down": (self.intermediate, self.hidden),
        }

    @property
    def trunk_weights(self) -> int:
        """That every token is multiplied with: those of the layers."""
        return self.layers * sum(inputs * outputs for inputs, outputs in self.linears.values())

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocabulary

    @property
    def kv_numbers(self) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Work:
    """Operations of a forward, by where they are done."""

    trunk: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        return self.trunk + self.attention + self.head

    def times(self, factor: float) -> Work:
        return Work(factor * self.trunk, factor * self.attention, factor * self.head)


KINDS = ("forward", "dgrad", "wgrad")
"""A product with weights, and the gradients of its input and of the weights."""
Group = tuple[int, Sequence[int]]
"""Tokens of a prompt, and of each of its completions."""


def forward(shape: Shape, groups: Sequence[Group]) -> Work:
    """Of all groups, their completions' tokens scored.

    trunk tokens: P + sum(R - 1);  scored tokens: sum(R);
    attention: 4 H D for each pair of a token and one that it sees, itself included.
    """
    tokens = sum(prompt + sum(rows) - len(rows) for prompt, rows in groups)
    scored = sum(sum(rows) for _, rows in groups)
    return Work(
        trunk=2.0 * shape.trunk_weights * tokens,
        attention=4.0
        * shape.layers
        * shape.heads
        * shape.head_dim
        * sum(_pairs(*group) for group in groups),
        head=2.0 * shape.head_weights * scored,
    )


def _pairs(prompt: int, rows: Sequence[int]) -> int:
    """Pairs of a token and one that it sees."""
    return _triangle(prompt) + sum((row - 1) * prompt + _triangle(row - 1) for row in rows)


def _triangle(n: int) -> int:
    return n * (n + 1) // 2


def update(shape: Shape, groups: Sequence[Group]) -> Work:
    """Forward and backward: gradients of inputs and of weights cost a forward each."""
    return forward(shape, groups).times(3)


def prefill(shape: Shape, prompts: Sequence[int]) -> Work:
    """Of each prompt once, and the logits of its last token."""
    return forward(shape, [(prompt, [1]) for prompt in prompts])


def decode(shape: Shape, groups: Sequence[Group]) -> Work:
    """Of all tokens after the first of each row, which prefilling gives."""
    whole, start = forward(shape, groups), prefill(shape, [prompt for prompt, _ in groups])
    firsts = sum(len(rows) for _, rows in groups) - len(
        groups
    )  # a prompt's logits serve all of its rows
    return Work(
        whole.trunk - start.trunk,
        whole.attention - start.attention,
        whole.head - start.head - 2.0 * shape.head_weights * firsts,
    )


def decode_bytes(shape: Shape, groups: Sequence[Group], *, bytes_each: int) -> float:
    """Read while decoding: all weights at each step, a prompt's keys and values once a group, each
    row's own."""
    steps = max((row for _, rows in groups for row in rows), default=1) - 1
    read = float(steps * (shape.trunk_weights + shape.head_weights))
    for prompt, rows in groups:
        read += shape.kv_numbers * (
            prompt * (max(rows) - 1) + sum(_triangle(row - 1) for row in rows)
        )
    return read * bytes_each


ADAM_BYTES = 4 * 7
"""Of one parameter: weight, gradient and two moments read, all but the gradient written, in
float32."""


def ideal_rate(work: Mapping[str, float], rates: Mapping[str, float]) -> float:
    """Operations a second of work in several parts, each at a rate of its own: their harmonic mean
    by work."""
    return sum(work.values()) / sum(amount / rates[name] for name, amount in work.items())


def products(shape: Shape, groups: Sequence[Group]) -> dict[str, float]:
    """Operations of an update's products with weights, by name and kind: ``up dgrad``, ``head
    forward``."""
    work = forward(shape, groups)
    tokens = work.trunk / (2.0 * shape.trunk_weights)
    found = {}
    for kind in KINDS:
        for name, (inputs, outputs) in shape.linears.items():
            found[f"{name} {kind}"] = 2.0 * shape.layers * tokens * inputs * outputs
        found[f"head {kind}"] = work.head
    return found
