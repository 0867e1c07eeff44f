"""Whether what a program gave is what was expected: of plain data, and of printed text."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

RELATIVE, ABSOLUTE = 1e-6, 1e-9
"""Tolerances of floats."""
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4})?")
_LONGEST_NUMBER = 400


@dataclass(frozen=True)
class Approx:
    """An expected value with its own tolerances, as ``pytest.approx``: |got - value| <= max(rel |value|, abs).

    Without ``rel``, 1e-6, or nothing where ``abs`` is there; without ``abs``, 1e-12.
    """

    value: Any
    rel: float | None = None
    abs: float | None = None

    def matches(self, got: Any) -> bool:
        """Of a list, tuple or dict, each of its items."""
        value = self.value
        if isinstance(value, (list, tuple)):
            is_alike = isinstance(got, type(value)) and len(got) == len(value)
            return is_alike and all(Approx(v, self.rel, self.abs).matches(g) for v, g in zip(value, got, strict=True))
        if isinstance(value, dict):
            is_alike = isinstance(got, dict) and got.keys() == value.keys()
            return is_alike and all(Approx(v, self.rel, self.abs).matches(got[key]) for key, v in value.items())
        if not isinstance(value, (int, float)) or not isinstance(got, (int, float)) or value == got:
            return bool(value == got)
        rel = self.rel if self.rel is not None else 0.0 if self.abs is not None else 1e-6
        absolute = 1e-12 if self.abs is None else self.abs
        return not math.isinf(value) and abs(got - value) <= max(rel * abs(value), absolute)


def equal(got: Any, expected: Any, *, is_json: bool = False) -> bool:
    """Python's ``==`` over plain data, with a tolerance where one of two numbers is a float, and NaN equal to NaN.

    So 3 is 3.0 and True is 1; a list is no tuple, a set no list, "3" not 3. Floats inside sets, and keys, are compared
    exactly. ``is_json``: what is expected came from JSON, which has no tuples: a tuple is the list with its items.
    """
    for a, b in ((got, expected), (expected, got)):
        if isinstance(a, Approx):
            return a.matches(b)
    if isinstance(got, (list, tuple)) and isinstance(expected, (list, tuple)):
        if len(got) != len(expected) or (isinstance(got, list) != isinstance(expected, list) and not is_json):
            return False
        return all(equal(a, b, is_json=is_json) for a, b in zip(got, expected, strict=True))
    if isinstance(got, dict) and isinstance(expected, dict):
        has_keys = len(got) == len(expected) and all(key in got for key in expected)
        return has_keys and all(equal(got[key], item, is_json=is_json) for key, item in expected.items())
    if isinstance(got, (float, complex)) or isinstance(expected, (float, complex)):
        return all(isinstance(each, (int, float, complex)) for each in (got, expected)) and _is_close(got, expected)
    return bool(got == expected)


def equal_text(got: str, expected: str) -> bool:
    """The same words in the same lines; spaces between and after words, and blank lines at both ends, do not count.

    Words that are numbers, at least one of them with a point or an exponent, may differ by the tolerance of floats.
    """
    lines, expected_lines = ([line.split() for line in text.strip().splitlines()] for text in (got, expected))
    if list(map(len, lines)) != list(map(len, expected_lines)):
        return False
    for words in zip(lines, expected_lines, strict=True):
        for pair in zip(*words, strict=True):
            if pair[0] == pair[1]:
                continue
            if max(map(len, pair)) > _LONGEST_NUMBER or not all(map(_NUMBER.fullmatch, pair)):
                return False
            are_whole = all(word.lstrip("+-").isdigit() for word in pair)
            if are_whole or not _is_close(*map(float, pair)):
                return False
    return True


def _is_close(a: complex, b: complex) -> bool:
    """Infinities and NaN are close to themselves alone."""
    try:
        if isinstance(a, complex) or isinstance(b, complex):
            a, b = complex(a), complex(b)
            return _is_close(a.real, b.real) and _is_close(a.imag, b.imag)
        return a == b or (a != a and b != b) or math.isclose(a, b, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    except OverflowError:  # an int beyond all floats
        return False
