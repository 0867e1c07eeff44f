"""Whether what a program said is what was expected: of plain data, and of printed text."""

from __future__ import annotations

import math
import re
from typing import Any

RELATIVE, ABSOLUTE = 1e-6, 1e-9
"""Tolerances of floats."""
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4})?")
_LONGEST_NUMBER = 400


def same(got: Any, want: Any, *, is_json: bool = False) -> bool:
    """Python's ``==`` over plain data, with a tolerance where one of two numbers is a float, and NaN equal to NaN.

    So 3 is 3.0 and True is 1; a list is no tuple, a set no list, "3" not 3. Floats inside sets, and keys, are compared
    exactly. ``is_json``: what is wanted came from JSON, which has no tuples: a tuple is the list with its items.
    """
    if isinstance(got, (list, tuple)) and isinstance(want, (list, tuple)):
        is_kind = isinstance(got, list) == isinstance(want, list) or is_json
        return (
            is_kind
            and len(got) == len(want)
            and all(same(a, b, is_json=is_json) for a, b in zip(got, want, strict=True))
        )
    if isinstance(got, dict) and isinstance(want, dict):
        return len(got) == len(want) and all(k in got and same(got[k], want[k], is_json=is_json) for k in want)
    if isinstance(got, (float, complex)) or isinstance(want, (float, complex)):
        return _is_number(got) and _is_number(want) and _is_close(got, want)
    return bool(got == want)


def same_text(got: str, want: str) -> bool:
    """The same words in the same lines; spaces between and after words, and blank lines at both ends, do not count.

    Words that are numbers, at least one of them with a point or an exponent, may differ by the tolerance of floats.
    """
    ours, theirs = ([line.split() for line in text.strip().splitlines()] for text in (got, want))
    return len(ours) == len(theirs) and all(
        len(a) == len(b) and all(_same_word(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(ours, theirs, strict=True)
    )


def _same_word(got: str, want: str) -> bool:
    if got == want:
        return True
    if max(len(got), len(want)) > _LONGEST_NUMBER or not (_NUMBER.fullmatch(got) and _NUMBER.fullmatch(want)):
        return False
    return not _are_whole(got, want) and _is_close(float(got), float(want))


def _are_whole(*words: str) -> bool:
    return all(word.lstrip("+-").isdigit() for word in words)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, complex))


def _is_close(a: complex, b: complex) -> bool:
    """Of infinities and NaN, the same ones."""
    try:
        if isinstance(a, complex) or isinstance(b, complex):
            a, b = complex(a), complex(b)
            return _is_close(a.real, b.real) and _is_close(a.imag, b.imag)
        if a == b or (a != a and b != b):
            return True
        return math.isclose(a, b, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    except OverflowError:  # an int beyond all floats
        return False
