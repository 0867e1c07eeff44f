"""Plain data as one line of text: what a program may hand out, read by its base type, whatever it says of itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

DEEPEST = 100
"""Levels of nesting; what is deeper is not plain."""


class NotPlain(Exception):
    """A value that is no plain data."""


def encode(value: Any) -> str:
    """One line of ASCII of None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset and dict, nested.

    An instance of a subclass (Counter, a named tuple, an enumeration of ints) is read as its base, by the base's own
    methods: an ``__eq__`` or ``__repr__`` of its own is never called. Anything else raises NotPlain.
    """
    return json.dumps(_tagged(value, 0))


def decode(line: str) -> Any:
    """The value of such a line; NotPlain for any other text."""
    try:
        return _value(json.loads(line))
    except NotPlain:
        raise
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError, MemoryError) as error:
        raise NotPlain(f"it is no plain data ({type(error).__name__})") from None


def _tagged(value: Any, depth: int) -> Any:
    if value is None or value is True or value is False:
        return value
    for base, tag, read in _BASES:
        if type(value) is base or issubclass(type(value), base):
            if depth == DEEPEST:
                raise NotPlain(f"it is nested deeper than {DEEPEST} levels")
            return read(value) if tag is None else [tag, read(value, depth + 1)]
    raise NotPlain(f"it is a {type(value).__name__}, which is no plain data")


def _items(base: type) -> Callable[[Any, int], list[Any]]:
    return lambda value, depth: [_tagged(item, depth) for item in base.__iter__(value)]  # type: ignore[attr-defined]


def _float(value: Any, _: int) -> str:
    return float.hex(value)


def _complex(value: Any, _: int) -> list[str]:
    plain = complex.__add__(value, 0j)
    return [plain.real.hex(), plain.imag.hex()]


def _pairs(value: Any, depth: int) -> list[list[Any]]:
    return [[_tagged(key, depth), _tagged(item, depth)] for key, item in dict.items(value)]


_BASES: list[tuple[type, str | None, Callable[..., Any]]] = [
    (str, None, lambda value: str.__str__(value)),
    (int, "i", lambda value, _: int.__format__(value, "x")),  # no limit of digits, and linear in them
    (float, "f", _float),
    (list, "l", _items(list)),
    (tuple, "t", _items(tuple)),
    (dict, "d", _pairs),
    (set, "s", _items(set)),
    (frozenset, "z", _items(frozenset)),
    (bytes, "b", lambda value, _: bytes.hex(value)),
    (complex, "c", _complex),
]


def _value(tagged: Any) -> Any:
    if tagged is None or isinstance(tagged, (bool, str)):
        return tagged
    if not isinstance(tagged, list) or len(tagged) != 2 or tagged[0] not in _READERS:
        raise NotPlain("it is no plain data")
    return _READERS[tagged[0]](tagged[1])


_READERS: dict[Any, Callable[[Any], Any]] = {
    "i": lambda text: int(text, 16),
    "f": float.fromhex,
    "l": lambda items: [_value(item) for item in items],
    "t": lambda items: tuple(_value(item) for item in items),
    "d": lambda pairs: {_value(key): _value(item) for key, item in pairs},
    "s": lambda items: {_value(item) for item in items},
    "z": lambda items: frozenset(_value(item) for item in items),
    "b": bytes.fromhex,
    "c": lambda parts: complex(float.fromhex(parts[0]), float.fromhex(parts[1])),
}
