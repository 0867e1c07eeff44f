"""Plain data as one line of text: what a program may hand out, read by its base type, whatever it says of itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

DEEPEST = 100
"""Levels of nesting below the list of a case's values; what is deeper is not plain."""
_MOST_ALIKE = 1000


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
        return _value(json.loads(line), 0)
    except NotPlain:
        raise
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError, MemoryError) as error:
        raise NotPlain(f"it is no plain data ({type(error).__name__})") from None


def _tagged(value: Any, depth: int) -> Any:
    if value is None or value is True or value is False:
        return value
    for base, tag, read in _BASES:
        if type(value) is base or issubclass(type(value), base):
            if tag in _NESTED and depth > DEEPEST:
                raise NotPlain(_TOO_DEEP)
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


_NESTED = ("l", "t", "d", "s", "z")
_TOO_DEEP = f"it is nested deeper than {DEEPEST} levels"


def _value(tagged: Any, depth: int) -> Any:
    if tagged is None or isinstance(tagged, (bool, str)):
        return tagged
    if not isinstance(tagged, list) or len(tagged) != 2 or tagged[0] not in _READERS:
        raise NotPlain("it is no plain data")
    if tagged[0] in _NESTED and depth > DEEPEST:
        raise NotPlain(_TOO_DEEP)
    return _READERS[tagged[0]](tagged[1], depth + 1)


def _values(items: Any, depth: int) -> list[Any]:
    return [_value(item, depth) for item in items]


def _hashed(items: Any, depth: int) -> list[Any]:
    """Items of a set, or keys; a table of many whose hashes are the same would take hours to fill."""
    values = _values(items, depth)
    if len(values) - len(set(map(hash, values))) > _MOST_ALIKE:
        raise NotPlain(f"it has more than {_MOST_ALIKE} items that hash alike")
    return values


def _dict(pairs: Any, depth: int) -> dict[Any, Any]:
    keys = _hashed([key for key, _ in pairs], depth)
    return dict(zip(keys, _values([item for _, item in pairs], depth), strict=True))


_READERS: dict[Any, Callable[[Any, int], Any]] = {
    "i": lambda text, _: int(text, 16),
    "f": lambda text, _: float.fromhex(text),
    "l": _values,
    "t": lambda items, depth: tuple(_values(items, depth)),
    "d": _dict,
    "s": lambda items, depth: set(_hashed(items, depth)),
    "z": lambda items, depth: frozenset(_hashed(items, depth)),
    "b": lambda text, _: bytes.fromhex(text),
    "c": lambda parts, _: complex(float.fromhex(parts[0]), float.fromhex(parts[1])),
}
