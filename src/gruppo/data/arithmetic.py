"""Sums and differences of two integers, an endless source."""

from __future__ import annotations

import hashlib

import torch

from gruppo.data.source import IndexedSource, hash_unit
from gruppo.seeds import generator_at
from gruppo.types import DataError, GruppoError, Prompt

ENUMERABLE = 100_000
"""Problems that are listed to find the held-out ones; of more, a fixed sample of this size is searched."""


def arithmetic(
    low: int = 0,
    high: int = 20,
    operations: str = "+-",
    *,
    seed: int,
    held_out_fraction: float = 0.1,
    answer_prefix: bool = True,
    allow_negative: bool = True,
    system: str = "",
) -> IndexedSource:
    """Problems such as "What is 7 - 12?" with both numbers from ``low`` to ``high``, drawn independently.

    ``answer_prefix``: the prompt ends with the beginning of the assistant's answer, ``7 - 12 =``, which the policy
    continues. ``allow_negative=False`` leaves out differences below 0. ``system`` is the system message; without one,
    some chat templates write a longer one of their own. Column ``size``, |a| + |b|, is a difficulty for a curriculum.
    """
    if low > high:
        raise GruppoError(f"arithmetic got low={low} above high={high}; swap them.")
    if not operations or not set(operations) <= set("+-") or len(set(operations)) < len(operations):
        raise GruppoError(
            f"arithmetic got operations={operations!r}; it supports '+', '-' and '+-'."
        )
    span = high - low + 1
    count = len(operations) * span**2

    def problem(index: int) -> tuple[int, str, int, bool | None]:
        """Both numbers, the operation between them, and whether the problem is held out; None for one left out."""
        rest, b = divmod(index, span)
        operation, a = divmod(rest, span)
        a, b, sign = low + a, low + b, operations[operation]
        if sign == "-" and a < b and not allow_negative:
            return a, sign, b, None
        # a sum goes with its mirror image, so that 7 + 12 is not an evaluation of a policy that has seen 12 + 7
        text = f"{min(a, b)} + {max(a, b)}" if sign == "+" else f"{a} - {b}"
        return a, sign, b, hash_unit(text) < held_out_fraction

    def item_at(draw: int) -> int:
        generator = generator_at(seed, "arithmetic", draw)
        while True:  # rejection keeps the distribution over the remaining problems uniform
            index = int(torch.randint(count, (), generator=generator))
            if problem(index)[-1] is False:
                return index

    def prompt_at(index: int, draw: int) -> Prompt:
        a, operation, b, _ = problem(index)
        text = f"{a} {operation} {b}"
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": f"What is {text}?"},
        ]
        if answer_prefix:
            messages.append({"role": "assistant", "content": f"{text} ="})
        meta = {"a": a, "b": b, "operation": operation, "size": abs(a) + abs(b)}
        return Prompt(text, messages, str(a + b if operation == "+" else a - b), meta, draw)

    indices: list[int] | range = range(count)
    if count > ENUMERABLE:
        generator = generator_at(
            "arithmetic", "held_out"
        )  # without the seed: the same for every run
        indices = torch.randint(count, (ENUMERABLE,), generator=generator).unique().tolist()
    # ordered by hash, so that the first n are a random sample of the held-out problems
    held_out = sorted(
        (i for i in indices if problem(i)[-1]),
        key=lambda i: hash_unit("{} {} {}".format(*problem(i))),
    )
    if count <= ENUMERABLE and not any(
        problem(index)[-1] is False for index in indices
    ):  # item_at() would not end
        text = (
            "which leaves none to train on; widen the range or lower --prompts.held-out-fraction."
        )
        raise DataError(
            f"all {len(held_out)} problems of arithmetic:{low}:{high} are held out, {text}"
        )
    # "arithmetic 1" is the version of the generator: raise it when the same settings give other problems
    settings = (low, high, operations, answer_prefix, allow_negative, system)
    digest = hashlib.sha256(" ".join(["arithmetic 1", *map(str, settings)]).encode()).hexdigest()
    columns, identity = (
        ("target", "a", "b", "operation", "size"),
        {"held_out_fraction": held_out_fraction},
    )
    return IndexedSource(
        "arithmetic", seed, item_at, held_out, prompt_at, columns, digest, identity
    )
