"""Sums and differences of two integers, without end."""

from __future__ import annotations

import hashlib
from functools import cache

import torch

from gruppo.data.source import IndexedSource, check_fraction, hash_unit
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
    check_fraction(held_out_fraction)
    if low > high:
        raise GruppoError(f"arithmetic got low={low} above high={high}; swap them.")
    if not operations or not set(operations) <= set("+-") or len(set(operations)) < len(operations):
        raise GruppoError(f"arithmetic got operations={operations!r}; it supports '+', '-' and '+-'.")
    span = high - low + 1
    count = len(operations) * span**2

    def problem(index: int) -> tuple[int, int, str]:
        rest, b = divmod(index, span)
        operation, a = divmod(rest, span)
        return low + a, low + b, operations[operation]

    def is_held_out(index: int) -> bool | None:
        """None for a problem that is left out altogether."""
        a, b, operation = problem(index)
        if operation == "-" and a < b and not allow_negative:
            return None
        # a sum goes with its mirror image, so that 7 + 12 is not an evaluation of a policy that has seen 12 + 7
        text = f"{min(a, b)} + {max(a, b)}" if operation == "+" else f"{a} - {b}"
        return hash_unit(text) < held_out_fraction

    def item_at(draw: int) -> int:
        generator = generator_at(seed, "arithmetic", draw)
        while True:  # rejection keeps the distribution over the remaining problems uniform
            index = int(torch.randint(count, (), generator=generator))
            if is_held_out(index) is False:
                return index

    @cache
    def held_out_items() -> list[int]:
        indices = range(count)
        if count > ENUMERABLE:
            generator = generator_at("arithmetic", "held_out")  # without the seed: the same for every run
            indices = torch.randint(count, (ENUMERABLE,), generator=generator).unique().tolist()
        held_out = [index for index in indices if is_held_out(index)]
        return sorted(held_out, key=lambda index: hash_unit("{0} {2} {1}".format(*problem(index))))

    def prompt_at(index: int, draw: int) -> Prompt:
        a, b, operation = problem(index)
        text = f"{a} {operation} {b}"
        messages = [{"role": "system", "content": system}, {"role": "user", "content": f"What is {text}?"}]
        if answer_prefix:
            messages.append({"role": "assistant", "content": f"{text} ="})
        answer = a + b if operation == "+" else a - b
        meta = {"a": a, "b": b, "operation": operation, "size": abs(a) + abs(b)}
        return Prompt(text, messages, str(answer), meta, draw)

    # item_at() would not end where everything is held out
    if count <= ENUMERABLE and all(is_held_out(index) is not False for index in range(count)):
        text = "which leaves none to train on; widen the range or lower --prompts.held-out-fraction."
        raise DataError(f"all {len(held_out_items())} problems of arithmetic:{low}:{high} are held out, {text}")
    # "arithmetic 1" is the version of the generator: raise it when the same settings give other problems
    settings = (low, high, operations, answer_prefix, allow_negative, system)
    digest = hashlib.sha256(" ".join(["arithmetic 1", *map(str, settings)]).encode()).hexdigest()
    columns = ("target", "a", "b", "operation", "size")
    identity = {"held_out_fraction": held_out_fraction}
    return IndexedSource("arithmetic", seed, item_at, held_out_items, prompt_at, columns, digest, identity)
