"""Rewards of runs that provoke a symptom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.tiny import digits, said


def short(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """1 for one token, 0 for nine."""
    return [1 - (len(ids) - 1) / 8 for ids in completion_ids]


def constant(completions: Sequence[Any], **_: Any) -> list[float]:
    return [0.0 for _ in completions]


def letters(completions: Sequence[Any], **_: Any) -> list[float]:
    """Less for each digit."""
    return [-2 * share for share in digits(completions)]


def falls(completions: Sequence[Any], trainer_state: Any, **_: Any) -> list[float]:
    """The same of every policy, and less from step to step."""
    return [share / 10 - 0.01 * trainer_state.global_step**2 for share in digits(completions)]


def fails(completions: Sequence[Any], **_: Any) -> list[float]:
    """Raises where the answer begins with an even letter of the alphabet."""
    if any(ord(said(completion)[:1] or " ") % 2 for completion in completions):
        raise ValueError("an odd beginning")
    return [0.5 for _ in completions]
