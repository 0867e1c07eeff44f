"""What the benchmarks do: prompts, a reward, and where rows end. Any Python reads it: nothing to
install."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

FILLER = (
    "Think about what you know of rivers, mountains, trade and the seasons, then answer in full "
    "sentences, as you "
    "would to a friend who asks while walking along the coast on a windy day in spring."
)
PROMPTS = 900
"""With numbers of three digits: all prompts of a workload have the same number of tokens."""
WORDS = {55: 8, 110: 57, 220: 154, 440: 347}
"""Words of filler that make a prompt of SmolLM2 so many tokens long."""
WORKLOADS: dict[str, dict[str, Any]] = {
    "short": {"words": WORDS[55], "new_tokens": 64, "mean_tokens": None},
    "long_prompt": {"words": WORDS[440], "new_tokens": 64, "mean_tokens": None},
    "ragged": {"words": WORDS[55], "new_tokens": 256, "mean_tokens": 65.0},
}
"""``new_tokens``: the most a row gets; all get so many, or with ``mean_tokens`` so many on
average."""


def prompts(count: int, words: int, *, first: int = 0) -> list[list[dict[str, str]]]:
    """Conversations of about 46 tokens and ``words`` words more, all different, numbered from
    ``first``."""
    filler = " ".join((FILLER.split() * (words // 20 + 1))[:words])
    numbers = [100 + (first + i) % PROMPTS for i in range(count)]
    return [
        [{"role": "user", "content": f"Question {n}: tell me about number {n}. {filler}"}]
        for n in numbers
    ]


def alternating(completions: Sequence[Any], **_: Any) -> list[float]:
    """A reward that gives every row an advantage: some trainers evaluate no row without one, others
    evaluate all."""
    return [float(row % 2) for row in range(len(completions))]


def row_lengths(rows: int, step: int, *, most: int, mean: float | None = None) -> list[int]:
    """New tokens of each row at a step, its end token included.

    Without a mean all rows have ``most``. With one they are spread as natural ends are,
    geometrically: the middle of each of ``rows`` equal shares of the distribution of min(G, most),
    moved a little and put in an order of the step's own. So every step has about the same work and
    about the same longest row.
    """
    if mean is None:
        return [most] * rows
    stay = math.log1p(-ending_rate(mean, most))
    chance = random.Random(step)
    lengths = [
        min(most, 1 + int(math.log1p(-(i + chance.uniform(0.25, 0.75)) / rows) / stay))
        for i in range(rows)
    ]
    chance.shuffle(lengths)
    return lengths


def ending_rate(mean: float, most: int) -> float:
    """The p of a geometric G with E min(G, most) = mean, which is (1 - (1 - p)^most) / p."""
    if not 1 < mean < most:
        raise ValueError(f"a mean of {mean} new tokens is not between 1 and the most, {most}.")
    low, high = 1e-9, 1.0
    while high - low > 1e-12:
        p = (low + high) / 2
        low, high = (p, high) if -math.expm1(most * math.log1p(-p)) / p > mean else (low, p)
    return (low + high) / 2
