"""Serialization of plain data as one line of text, the only output of a program."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import count
from typing import Any

DEEPEST = 100  # levels of nesting below the list of a case's values
_MOST_COLLISIONS = 1000
_NESTED: dict[str, Any] = {"l": list, "t": tuple, "d": dict, "s": set, "z": frozenset}
_NOT_PLAIN, _TOO_DEEP = "it is not plain data", f"it is nested deeper than {DEEPEST} levels"


class NotPlain(Exception):
    """A value that is not plain data."""


def encode(value: Any) -> str:
    """One line of ASCII of None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset
    and dict, nested.

    An instance of a subclass (Counter, a named tuple, an IntEnum) is read as its base class, by
    methods of the base class: its own ``__eq__`` or ``__repr__`` is never called. Anything else
    raises NotPlain.
    """
    return json.dumps(_to_json(value, 0))


def decode(line: str, budget: Iterator[int] | None = None) -> Any:
    """Inverse of ``encode``; raises NotPlain for any other text, which a program may have forged.

    ``budget`` yields a number for each value, item and key that may be decoded: a short text can
    have millions, which fill the memory.
    """
    try:
        return _from_json(json.loads(line), 0, budget or count())
    except (ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise NotPlain(f"{_NOT_PLAIN} ({type(error).__name__})") from None


def _to_json(value: Any, depth: int) -> Any:
    kind = type(value)  # not __class__, which a program can override
    if value is None or value is True or value is False:
        return value
    if issubclass(kind, str):
        return str.__str__(value)
    if issubclass(kind, int):
        return ["i", int.__format__(value, "x")]  # without a limit of digits
    if issubclass(kind, float):
        return ["f", float.hex(value)]
    if issubclass(kind, complex):
        plain = complex.__add__(value, 0j)
        return ["c", [plain.real.hex(), plain.imag.hex()]]
    if issubclass(kind, bytes):
        return ["b", bytes.hex(value)]
    for tag, base in _NESTED.items():
        if issubclass(kind, base):
            if depth > DEEPEST:
                raise NotPlain(_TOO_DEEP)
            parts = dict.items(value) if base is dict else base.__iter__(value)
            return [tag, [_part_to_json(part, depth + 1, base) for part in parts]]
    numpy = sys.modules.get("numpy")  # a number of numpy's is one of Python's in every comparison
    if numpy is not None and issubclass(kind, numpy.generic):
        plain = value.item()
        if type(plain) is not kind:
            return _to_json(plain, depth)
    raise NotPlain(f"it is a {kind.__name__}, which is not plain data")


def _part_to_json(part: Any, depth: int, base: type) -> Any:
    if base is dict:
        return [_to_json(each, depth) for each in part]
    return _to_json(part, depth)


def _from_json(tagged: Any, depth: int, budget: Iterator[int]) -> Any:
    if next(budget, None) is None:
        raise NotPlain("it has too many items")
    match tagged:
        case None | bool() | str():
            return tagged
        case ["i", text]:
            return int(text, 16)
        case ["f", text]:
            return float.fromhex(text)
        case ["c", [real, imag]]:
            return complex(float.fromhex(real), float.fromhex(imag))
        case ["b", text]:
            return bytes.fromhex(text)
        case ["l" | "t" | "d" | "s" | "z" as tag, list(parts)]:
            if depth > DEEPEST:
                raise NotPlain(_TOO_DEEP)
            keys = [key for key, _ in parts] if tag == "d" else parts
            keys = [_from_json(key, depth + 1, budget) for key in keys]
            # A table of many items whose hashes collide would take hours to fill.
            if tag in "dsz" and len(keys) - len(set(map(hash, keys))) > _MOST_COLLISIONS:
                raise NotPlain(f"it has more than {_MOST_COLLISIONS} items with equal hashes")
            if tag != "d":
                return _NESTED[tag](keys)
            values = [_from_json(value, depth + 1, budget) for _, value in parts]
            return dict(zip(keys, values, strict=True))
    raise NotPlain(_NOT_PLAIN)
