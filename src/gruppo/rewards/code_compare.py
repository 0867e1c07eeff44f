"""Equality of a program's output with the expected one: plain data, and printed text."""

from __future__ import annotations

import cmath
import re
from itertools import chain
from typing import Any

Tolerance = tuple[float, float]
"""Relative and absolute: numbers are close if |a - b| <= max(rel max(|a|, |b|), abs)."""
_FLOATS: Tolerance = (1e-6, 1e-9)
_NUMBERS = (int, float, complex)
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4})?")
_LONGEST_NUMBER = 400


def equal(
    got: Any, expected: Any, tolerance: Tolerance | None = None, *, is_json: bool = False
) -> bool:
    """Python's ``==`` over plain data, with a tolerance if the expected number is a float, and NaN
    equal to NaN.

    So 3 is 3.0 and True is 1; a list is not a tuple, and "3" is not 3. Floats inside sets, and
    keys, are compared exactly. ``tolerance``: replaces that of floats, and applies to ints too.
    ``is_json``: the expected value came from JSON, which has no tuples: a tuple equals the list of
    its items.
    """
    if isinstance(got, (list, tuple)) and isinstance(expected, (list, tuple)):
        if len(got) != len(expected) or (type(got) is not type(expected) and not is_json):
            return False
        pairs = list(zip(got, expected, strict=True))
    elif isinstance(got, dict) and isinstance(expected, dict):
        if got.keys() != expected.keys():
            return False
        pairs = [(got[key], item) for key, item in expected.items()]
    elif isinstance(got, _NUMBERS) and isinstance(expected, _NUMBERS):
        return _is_close(got, expected, tolerance)
    else:
        return bool(got == expected)
    return all(equal(a, b, tolerance, is_json=is_json) for a, b in pairs)


def _is_close(got: complex, expected: complex, tolerance: Tolerance | None = None) -> bool:
    """An expected int is exact without a ``tolerance``: 1e9 is not 1000000007."""
    if got == expected or (got != got and expected != expected):
        return True
    if tolerance is None and isinstance(expected, int):
        return False
    rel, absolute = tolerance or _FLOATS
    try:
        return cmath.isclose(got, expected, rel_tol=rel, abs_tol=absolute)
    except OverflowError:  # an int beyond all floats
        return False


def equal_text(got: str, expected: str) -> bool:
    """Equality of the words of each line; spaces around words, and blank lines at both ends, do not
    count. The tolerance of floats applies to an expected number with a point or an exponent.
    """
    lines = [line.split() for line in got.strip().splitlines()]
    expected_lines = [line.split() for line in expected.strip().splitlines()]
    if [*map(len, lines)] != [*map(len, expected_lines)]:
        return False
    return all(map(_equal_words, chain(*lines), chain(*expected_lines)))


def _equal_words(got: str, expected: str) -> bool:
    if got == expected:
        return True
    words = (got, expected)
    if not all(len(word) <= _LONGEST_NUMBER and _NUMBER.fullmatch(word) for word in words):
        return False
    got_is_int, expected_is_int = (word.lstrip("+-").isdigit() for word in words)
    if expected_is_int:
        return not got_is_int and float(got) == int(expected)
    return _is_close(float(got), float(expected))
