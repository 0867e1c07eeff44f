"""Equality of a program's output with the expected one: plain data, and printed text."""

from __future__ import annotations

import cmath
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4})?")
_LONGEST_NUMBER = 400


@dataclass(frozen=True)
class Tolerance:
    """Numbers are close if |a - b| <= max(rel max(|a|, |b|), abs)."""

    rel: float = 1e-6
    abs: float = 1e-9
    of_ints: bool = False
    """Whether an expected int has a tolerance; else it is exact: 1e9 is not 1000000007."""

    def is_close(self, got: complex, expected: complex) -> bool:
        """Infinities and NaN equal only themselves."""
        if isinstance(expected, int) and not self.of_ints:
            return got == expected
        if got != got and expected != expected:
            return True
        try:
            return cmath.isclose(got, expected, rel_tol=self.rel, abs_tol=self.abs)
        except OverflowError:  # an int beyond all floats
            return got == expected


EXACT_INTS = Tolerance()


def equal(
    got: Any, expected: Any, tolerance: Tolerance = EXACT_INTS, *, is_json: bool = False
) -> bool:
    """Python's ``==`` over plain data, with a tolerance where the expected number is a float, and
    NaN equal to NaN.

    So 3 is 3.0 and True is 1; a list is no tuple, a set no list, "3" not 3. Floats inside sets, and
    keys, are compared exactly. ``is_json``: the expected value came from JSON, which has no tuples:
    a tuple equals the list of its items.
    """
    pairs: Iterable[tuple[Any, Any]]
    if isinstance(got, (list, tuple)) and isinstance(expected, (list, tuple)):
        if len(got) != len(expected) or (type(got) is not type(expected) and not is_json):
            return False
        pairs = zip(got, expected, strict=True)
    elif isinstance(got, dict) and isinstance(expected, dict):
        if got.keys() != expected.keys():
            return False
        pairs = ((got[key], item) for key, item in expected.items())
    elif isinstance(got, (int, float, complex)) and isinstance(expected, (int, float, complex)):
        return tolerance.is_close(got, expected)
    else:
        return bool(got == expected)
    return all(equal(a, b, tolerance, is_json=is_json) for a, b in pairs)


def equal_text(got: str, expected: str) -> bool:
    """Equality of the words of each line; spaces around words, and blank lines at both ends, do not
    count. The tolerance of floats applies to an expected number with a point or an exponent.
    """
    lines, expected_lines = (
        [line.split() for line in text.strip().splitlines()] for text in (got, expected)
    )
    if [*map(len, lines)] != [*map(len, expected_lines)]:
        return False
    return all(map(_equal_words, chain(*lines), chain(*expected_lines)))


def _equal_words(got: str, expected: str) -> bool:
    if got == expected:
        return True
    if max(len(got), len(expected)) > _LONGEST_NUMBER:
        return False
    if not _NUMBER.fullmatch(got) or not _NUMBER.fullmatch(expected):
        return False
    numbers = [
        int(word) if word.lstrip("+-").isdigit() else float(word) for word in (got, expected)
    ]
    are_whole = all(isinstance(number, int) for number in numbers)
    return not are_whole and EXACT_INTS.is_close(*numbers)
