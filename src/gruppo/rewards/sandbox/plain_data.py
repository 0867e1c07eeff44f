"""Serialization of plain data as one line of text, the only output of a program."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

DEEPEST = 100  # levels of nesting below the list of a case's values
_MOST_COLLISIONS = 1000
_NOT_PLAIN, _TOO_DEEP = "it is no plain data", f"it is nested deeper than {DEEPEST} levels"
_ATOMS: dict[type, tuple[str, Callable[[Any], str], Callable[[str], Any]]] = {
    int: (
        "i",
        lambda value: int.__format__(value, "x"),
        lambda text: int(text, 16),
    ),  # without a limit of digits
    float: ("f", float.hex, float.fromhex),
    bytes: ("b", bytes.hex, bytes.fromhex),
}
_NESTED: dict[type, str] = {list: "l", tuple: "t", dict: "d", set: "s", frozenset: "z"}


class NotPlain(Exception):
    """A value that is no plain data."""


def encode(value: Any) -> str:
    """One line of ASCII of None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset
    and dict, nested.

    An instance of a subclass (Counter, a named tuple, an IntEnum) is read as its base class, by
    methods of the base class: its own ``__eq__`` or ``__repr__`` is never called. Anything else
    raises NotPlain.
    """
    return json.dumps(_to_json(value, 0))


@dataclass
class NodeBudget:
    """Values, items and keys that may still be decoded: a short text can have millions, which fill
    the memory."""

    left: int


def decode(line: str, budget: NodeBudget | None = None) -> Any:
    """Inverse of ``encode``; raises NotPlain for any other text, which a program may have
    forged."""
    try:
        return _from_json(json.loads(line), 0, budget or NodeBudget(len(line)))
    except (ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise NotPlain(f"{_NOT_PLAIN} ({type(error).__name__})") from None


def _to_json(value: Any, depth: int) -> Any:
    if value is None or value is True or value is False:
        return value
    kind = type(value)  # not __class__, which a program can override
    if issubclass(kind, str):
        return str.__str__(value)
    if issubclass(kind, complex):
        plain = complex.__add__(value, 0j)
        return ["c", [plain.real.hex(), plain.imag.hex()]]
    base: Any = next((base for base in (*_ATOMS, *_NESTED) if issubclass(kind, base)), None)
    if base is None:
        numpy = sys.modules.get(
            "numpy"
        )  # a number of numpy's is one of Python's in every comparison
        if (
            numpy is not None
            and issubclass(kind, numpy.generic)
            and type(plain := value.item()) is not kind
        ):
            return _to_json(plain, depth)
        raise NotPlain(f"it is a {kind.__name__}, which is no plain data")
    if base in _ATOMS:
        tag, write, _ = _ATOMS[base]
        return [tag, write(value)]
    if depth > DEEPEST:
        raise NotPlain(_TOO_DEEP)
    if base is dict:
        return [
            "d",
            [
                [_to_json(key, depth + 1), _to_json(item, depth + 1)]
                for key, item in dict.items(value)
            ],
        ]
    return [_NESTED[base], [_to_json(item, depth + 1) for item in base.__iter__(value)]]


def _from_json(tagged: Any, depth: int, budget: NodeBudget) -> Any:
    budget.left -= 1
    if budget.left < 0:
        raise NotPlain("it has too many items")
    match tagged:
        case None | bool() | str():
            return tagged
        case ["c", [real, imag]]:
            return complex(float.fromhex(real), float.fromhex(imag))
        case ["i" | "f" | "b" as tag, text]:
            return next(read for name, _, read in _ATOMS.values() if name == tag)(text)
        case ["l" | "t" | "d" | "s" | "z" as tag, list(items)]:
            if depth > DEEPEST:
                raise NotPlain(_TOO_DEEP)
            if tag == "d":
                items, values = [key for key, _ in items], [item for _, item in items]
            keys = [_from_json(item, depth + 1, budget) for item in items]
            if tag in "lt":
                return keys if tag == "l" else tuple(keys)
            # A table of many items whose hashes collide would take hours to fill.
            if len(keys) - len(set(map(hash, keys))) > _MOST_COLLISIONS:
                raise NotPlain(f"it has more than {_MOST_COLLISIONS} items that hash alike")
            if tag == "d":
                return dict(
                    zip(
                        keys,
                        [_from_json(value, depth + 1, budget) for value in values],
                        strict=True,
                    )
                )
            return set(keys) if tag == "s" else frozenset(keys)
    raise NotPlain(_NOT_PLAIN)
