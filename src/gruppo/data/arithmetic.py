"""Sums and differences of two integers, an endless source."""

from __future__ import annotations

import torch

from gruppo.data.source import IndexedSource, digest_of, hash_unit
from gruppo.seeds import generator_at
from gruppo.types import DataError, GruppoError, Prompt

ENUMERABLE = 100_000
"""Problems that are listed to find the held-out ones; of more, about as many of them."""


def arithmetic(
    low: int = 0,
    high: int = 20,
    *,
    seed: int,
    held_out_fraction: float = 0.1,
    allow_negative: bool = True,
) -> IndexedSource:
    """Problems such as "What is 7 - 12?" with both numbers from ``low`` to ``high``, drawn
    independently.

    The prompt ends with the beginning of the assistant's answer, ``7 - 12 =``, which the policy
    continues; its system message is empty, because some chat templates write a long one where there
    is none. ``allow_negative=False`` leaves out differences below 0. Column ``size`` is |a| + |b|.
    """
    if low > high:
        raise GruppoError(f"arithmetic got low={low}, high={high}; low must not be above high.")
    span = high - low + 1
    count = 2 * span**2

    def problem(index: int) -> tuple[int, str, int]:
        """Both numbers, and the operation between them."""
        rest, b = divmod(index, span)
        operation, a = divmod(rest, span)
        return low + a, "+-"[operation], low + b

    def side(index: int) -> str:
        """train, held_out or none."""
        a, sign, b = problem(index)
        if sign == "-" and a < b and not allow_negative:
            return "none"
        # a sum goes with its mirror image, so that 7 + 12 is not an evaluation of a policy that has
        # seen 12 + 7
        first, second = (a, b) if sign == "-" else sorted((a, b))
        is_held_out = hash_unit(f"{first} {sign} {second}") < held_out_fraction
        return "held_out" if is_held_out else "train"

    def item_at(draw: int) -> int:
        generator = generator_at(seed, "arithmetic", draw)
        while True:  # rejection keeps the distribution over the remaining problems uniform
            index = int(torch.randint(count, (), generator=generator))
            if side(index) == "train":
                return index

    def prompt_at(index: int, draw: int) -> Prompt:
        a, operation, b = problem(index)
        text = f"{a} {operation} {b}"
        messages = [
            {"role": "system", "content": ""},
            {"role": "user", "content": f"What is {text}?"},
            {"role": "assistant", "content": f"{text} ="},
        ]
        meta = {"a": a, "b": b, "operation": operation, "size": abs(a) + abs(b)}
        return Prompt(text, messages, str(a + b if operation == "+" else a - b), meta, draw)

    sides = {index: side(index) for index in range(0, count, count // ENUMERABLE | 1)}
    if "train" not in sides.values():  # item_at() would not end
        raise DataError(
            f"all problems of arithmetic:{low}:{high} are held out, which leaves none to train on",
            advice="Widen the range or lower $prompts.held_out_fraction",
        )
    # ordered by hash, so that the first n are a random sample of the held-out problems
    held_out = sorted(
        (index for index in sides if sides[index] == "held_out"),
        key=lambda index: hash_unit("{} {} {}".format(*problem(index))),
    )
    # "arithmetic 2" is the version of the generator: raise it when the same settings give other
    # problems
    facts = ["arithmetic 2", low, high, "+-", allow_negative, held_out_fraction]
    columns = ("target", "a", "b", "operation", "size")
    return IndexedSource(
        "arithmetic", seed, item_at, held_out, prompt_at, columns, digest_of(facts)
    )
