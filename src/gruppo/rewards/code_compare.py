"""Equality of a program's output with the expected one: plain data, and printed text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

RELATIVE, ABSOLUTE = 1e-6, 1e-9
"""Tolerances of floats."""
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4})?")
_LONGEST_NUMBER = 400


@dataclass(frozen=True)
class Approx:
    """An expected value with its own tolerances, as ``pytest.approx``: |got - value| <= max(rel
    |value|, abs).

    Without ``rel``, 1e-6, or 0 where ``abs`` is set; without ``abs``, 1e-12. Applies to each item
    of a container.
    """

    value: Any
    rel: float | None = None
    abs: float | None = None

    def is_close(self, got: Any, value: Any) -> bool:
        if isinstance(got, complex) or isinstance(value, complex) or got == value:
            return bool(got == value)
        rel = self.rel if self.rel is not None else 0.0 if self.abs is not None else 1e-6
        absolute = 1e-12 if self.abs is None else self.abs
        return not math.isinf(value) and abs(got - value) <= max(rel * abs(value), absolute)


def is_close(got: complex, expected: complex) -> bool:
    """Whether a number is the expected one, within the tolerances if that is a float; infinities
    and NaN equal only themselves. An expected int is exact: 1e9 is not 1000000007.
    """
    if isinstance(expected, int):
        return got == expected
    try:
        if isinstance(got, complex) or isinstance(expected, complex):
            got, expected = complex(got), complex(expected)
            return is_close(got.real, expected.real) and is_close(got.imag, expected.imag)
        is_nan = got != got and expected != expected
        return is_nan or math.isclose(got, expected, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    except OverflowError:  # an int beyond all floats
        return False


def equal(
    got: Any, expected: Any, *, is_json: bool = False, close: Callable[[Any, Any], bool] = is_close
) -> bool:
    """Python's ``==`` over plain data, with a tolerance where the expected number is a float, and
    NaN equal to NaN.

    So 3 is 3.0 and True is 1; a list is no tuple, a set no list, "3" not 3. Floats inside sets, and
    keys, are compared exactly. ``is_json``: the expected value came from JSON, which has no tuples:
    a tuple equals the list of its items.
    """
    for a, b in ((got, expected), (expected, got)):
        if isinstance(a, Approx):
            return equal(b, a.value, close=a.is_close)
    pairs: Iterable[tuple[Any, Any]]
    if isinstance(got, (list, tuple)) and isinstance(expected, (list, tuple)):
        is_alike = len(got) == len(expected) and (
            is_json or isinstance(got, list) == isinstance(expected, list)
        )
        pairs = zip(got, expected, strict=False)
    elif isinstance(got, dict) and isinstance(expected, dict):
        is_alike = len(got) == len(expected) and all(key in got for key in expected)
        pairs = ((got[key], item) for key, item in expected.items())
    else:
        are_numbers = all(isinstance(each, (int, float, complex)) for each in (got, expected))
        return close(got, expected) if are_numbers else bool(got == expected)
    return is_alike and all(equal(a, b, is_json=is_json, close=close) for a, b in pairs)


def equal_text(got: str, expected: str) -> bool:
    """Equality of the words of each line; spaces around words, and blank lines at both ends, do not
    count.

    A word that is a number with a point or an exponent is a float. If it is expected, its tolerance
    applies.
    """
    lines, expected_lines = (
        [line.split() for line in text.strip().splitlines()] for text in (got, expected)
    )
    if list(map(len, lines)) != list(map(len, expected_lines)):
        return False
    words = (
        pair for rows in zip(lines, expected_lines, strict=True) for pair in zip(*rows, strict=True)
    )
    for pair in (pair for pair in words if pair[0] != pair[1]):
        if max(map(len, pair)) > _LONGEST_NUMBER or not all(map(_NUMBER.fullmatch, pair)):
            return False
        numbers = [int(word) if word.lstrip("+-").isdigit() else float(word) for word in pair]
        if all(isinstance(number, int) for number in numbers) or not is_close(
            *numbers
        ):  # whole numbers are exact
            return False
    return True
