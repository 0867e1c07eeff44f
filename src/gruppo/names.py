"""Names with arguments, as in options and config files: ``kind:value,other,name=value``.

    call_by_name(length_target, "50,characters")    # length_target(50, "characters")
    call_by_name(RewardModel, "./model,label=1")    # RewardModel("./model", label=1)

The signature of what is called says which arguments there are, and its annotations how they are
read: int, float, bool, str, Path, Literal, or a Sequence of strings, which takes all values. Other
parameters cannot be written. ValueError says what is wrong with the text.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack, get_args, get_origin, get_type_hints

from gruppo.loading import did_you_mean

_OPTION = re.compile(r",(?=\s*[A-Za-z_]\w*=)")
"""The comma before an option; others belong to the value before it."""
_COMMA = re.compile(r"[,\uff0c\u3001]")
_READABLE = (int, float, bool, str, Path)


def call_by_name(function: Callable[..., Any], text: str) -> Any:
    """Call a function or a class with the arguments in ``text``."""
    hints = parameters_of(function)
    kinds = inspect.signature(function).parameters
    in_order = inspect.Parameter.POSITIONAL_OR_KEYWORD
    places = [name for name in hints if name in kinds and kinds[name].kind is in_order]
    # A lone text, such as a path or a pattern, may hold commas.
    is_text = len(places) == 1 and str in _types(hints[places[0]])
    pieces = [text] if is_text and len(hints) == 1 else _OPTION.split(text.strip())
    name, equals, _ = pieces[0].partition("=")
    arguments = dict[str, Any]()
    if not equals or not (name.strip() in hints or (name.strip().isidentifier() and not is_text)):
        first = pieces.pop(0)
        words = [first] if is_text else _COMMA.split(first)
        arguments = _read_values(words if first.strip() else [], places, hints)
    for name, equals, value in (piece.partition("=") for piece in pieces):
        name = name.strip()
        if not equals or name not in hints:
            has = f" It has {', '.join(hints) or 'none'}"
            raise ValueError(f"there is no option {name!r}.{did_you_mean(name, hints)}{has}")
        arguments[name] = _read(name, value, hints[name])
    for name in required_of(function):
        if name not in arguments:
            raise ValueError(f"it needs {name}")
    return function(**arguments)


def _read_values(words: list[str], places: list[str], hints: dict[str, Any]) -> dict[str, Any]:
    """The arguments without a name."""
    words = [_nonempty(word) for word in words]
    if words and places and get_origin(hints[places[0]]) is Sequence:
        return {places[0]: words}
    if len(words) > len(places):
        raise ValueError(f"it takes at most {len(places)} values without a name=")
    pairs = zip(places, words, strict=False)
    return {name: _read(name, word, hints[name]) for name, word in pairs}


def parameters_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotation of each parameter that can be written."""
    own: Any = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
    hints = get_type_hints(own)
    written = dict[str, Any]()
    for name in inspect.signature(function).parameters:
        if get_origin(hints.get(name)) is Unpack:  # **options: Unpack[SomeTypedDict]
            written |= get_type_hints(get_args(hints[name])[0])
        elif _types(hints.get(name)):
            written[name] = hints[name]
    return written


def required_of(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]


def usage_of(name: str, function: Callable[..., Any]) -> str:
    """How a name and its arguments are written."""
    required = required_of(function)
    options = [f"{option}=VALUE" for option in parameters_of(function) if option not in required]
    words = [*map(str.upper, required), *options]
    return f"{name}:{','.join(words)}" if words else name


def _types(hint: Any) -> list[Any]:
    """Types of the texts that a parameter takes; none if it takes no text."""
    if get_origin(hint) in (Literal, Sequence):
        return [str]
    return [part for part in get_args(hint) or (hint,) if part in _READABLE]


def _nonempty(value: str) -> str:
    if not value.strip():
        raise ValueError("an argument is missing")
    return value.strip()


def _read(name: str, value: str, hint: Any) -> Any:
    """Convert a value to the type of its parameter; a text stays one where it may be a string."""
    if get_origin(hint) is Literal and value not in get_args(hint):
        raise ValueError(f"{name}={value} is not one of {', '.join(map(str, get_args(hint)))}")
    types = _types(hint)
    if str in types:
        return value.replace("\\n", "\n").replace("\\t", "\t")
    try:
        if types[0] is bool:
            return {"true": True, "false": False}[value.strip().lower()]
        return types[0](value.strip())
    except (KeyError, ValueError):
        raise ValueError(f"{name}={value} is no {types[0].__name__}") from None
