"""Sums and differences of two whole numbers, without end."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch

from gruppo.data.cursor import Cursor
from gruppo.data.errors import check_fraction
from gruppo.data.split import hash_unit, is_held_out
from gruppo.seeds import generator_at
from gruppo.types import DataError, GruppoError, Prompt

ENUMERABLE = 100_000


class Arithmetic:
    """Problems such as "What is 7 - 12?", both numbers between ``low`` and ``high``, ends included.

    The problem of a draw depends on the seed and the draw alone. ``answer_prefix``: the prompt ends with the
    assistant's words ``7 - 12 =``, which the policy continues. A problem is held out by its text (``7 - 12``),
    with or without the prefix, a sum together with its mirror image. ``allow_negative=False`` asks for no difference
    below 0. ``system``: the system message; without one, chat templates may write a longer one of their own before
    every problem. Column ``size``, |a| + |b|, is a problem's difficulty for a curriculum.
    """

    name = "arithmetic"
    columns = ("target", "a", "b", "operation", "size")

    def __init__(
        self,
        low: int = 0,
        high: int = 20,
        operations: str = "+-",
        *,
        seed: int,
        held_out_fraction: float = 0.1,
        answer_prefix: bool = True,
        allow_negative: bool = True,
        system: str = "",
    ) -> None:
        check_fraction(held_out_fraction)
        if low > high:
            raise GruppoError(f"arithmetic got low={low} above high={high}; swap them.")
        if not operations or not set(operations) <= set("+-") or len(set(operations)) < len(operations):
            raise GruppoError(f"arithmetic got operations={operations!r}; it knows '+', '-' and '+-'.")
        self.low, self.high, self.operations = low, high, operations
        self.seed, self.held_out_fraction, self.answer_prefix = seed, held_out_fraction, answer_prefix
        self.allow_negative, self.system = allow_negative, system
        self._size = len(operations) * (high - low + 1) ** 2
        if self._size <= ENUMERABLE and not any(map(self._may_draw, range(self._size))):
            raise DataError(
                f"all {len(self._candidates())} problems of arithmetic:{low}:{high} are held out, which leaves none to "
                "learn from; widen the range or lower --prompts.held-out-fraction."
            )
        identity = {"fingerprint": self.fingerprint(), "seed": seed, "held_out_fraction": held_out_fraction}
        self._cursor = Cursor(self.name, identity)

    def take(self, n: int) -> list[Prompt]:
        """The next n problems of the stream."""
        first = self._cursor.position
        self._cursor.position += n
        return [self._prompt(self._drawn(draw), draw) for draw in range(first, first + n)]

    def held_out(self, n: int) -> list[Prompt]:
        """At most n evaluation problems, all different, the same ones in the same order in every run."""
        return [self._prompt(index, place) for place, index in enumerate(self._held_out[:n])]

    def fingerprint(self) -> str:
        """SHA-256 of what defines the problems."""
        what = (self.low, self.high, self.operations, self.answer_prefix, self.allow_negative, self.system)
        text = " ".join(["arithmetic 1", *map(str, what)])
        return hashlib.sha256(text.encode()).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        return self._cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._cursor.load_state_dict(state)

    def _drawn(self, draw: int) -> int:
        generator = generator_at(self.seed, "arithmetic", draw)
        while True:
            index = int(torch.randint(self._size, (), generator=generator))
            if self._may_draw(index):
                return index

    @cached_property
    def _held_out(self) -> list[int]:
        kept = [index for index in self._candidates() if self._is_held_out(index)]
        return sorted(kept, key=lambda index: hash_unit(self._text(index)))

    def _candidates(self) -> list[int]:
        """Every problem, or a fixed sample of them where there are too many to list."""
        if self._size <= ENUMERABLE:
            return list(filter(self._is_offered, range(self._size)))
        generator = generator_at("arithmetic", "held_out")
        sample = torch.randint(self._size, (ENUMERABLE,), generator=generator).unique().tolist()
        return list(filter(self._is_offered, sample))

    def _may_draw(self, index: int) -> bool:
        return self._is_offered(index) and not self._is_held_out(index)

    def _is_offered(self, index: int) -> bool:
        a, b, operation = self._problem(index)
        return self.allow_negative or operation == "+" or a >= b

    def _is_held_out(self, index: int) -> bool:
        """By the problem's text; a sum goes with its mirror image, lest 7 + 12 be asked of who has seen 12 + 7."""
        a, b, operation = self._problem(index)
        text = f"{min(a, b)} + {max(a, b)}" if operation == "+" else f"{a} - {b}"
        return is_held_out(text, self.held_out_fraction)

    def _problem(self, index: int) -> tuple[int, int, str]:
        span = self.high - self.low + 1
        rest, b = divmod(index, span)
        operation, a = divmod(rest, span)
        return self.low + a, self.low + b, self.operations[operation]

    def _text(self, index: int) -> str:
        a, b, operation = self._problem(index)
        return f"{a} {operation} {b}"

    def _prompt(self, index: int, draw: int) -> Prompt:
        a, b, operation = self._problem(index)
        text = self._text(index)
        messages = [{"role": "system", "content": self.system}, {"role": "user", "content": f"What is {text}?"}]
        if self.answer_prefix:
            messages.append({"role": "assistant", "content": f"{text} ="})
        answer = a + b if operation == "+" else a - b
        meta = {"a": a, "b": b, "operation": operation, "size": abs(a) + abs(b)}
        return Prompt(text, messages, str(answer), meta, draw)
