"""The options of a tree of dataclasses: dotted names, types, ranges and help, and values read from
files or text."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import math
import textwrap
import types
import typing
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

from gruppo.config.sections import section_name
from gruppo.core.schedules import parse_schedule
from gruppo.types import GruppoError


@dataclass(frozen=True)
class Range:
    """The interval of a number, declared on its field: ``Annotated[float, Range(gt=0, le=1)]``.

    It applies to every number of a tuple and every value that a schedule reaches. Values must be
    finite.
    """

    ge: float = -math.inf
    gt: float = -math.inf
    le: float = math.inf
    lt: float = math.inf
    why: str = ""
    """What a value outside means."""

    def contains(self, value: float) -> bool:
        return math.isfinite(value) and self.ge <= value <= self.le and self.gt < value < self.lt

    def __str__(self) -> str:
        bounds = {"at least": self.ge, "above": self.gt, "at most": self.le, "below": self.lt}
        return (
            " and ".join(
                f"{word} {bound:g}" for word, bound in bounds.items() if math.isfinite(bound)
            )
            or "finite"
        )


Positive = Annotated[int, Range(ge=1)]
Count = Annotated[int, Range(ge=0)]
NonNegative = Annotated[float, Range(ge=0)]
Fraction = Annotated[float, Range(ge=0, le=1)]


@dataclass(frozen=True)
class Option:
    """One leaf of the tree."""

    name: str
    """Dotted: ``rollout.group_size``."""
    hint: Any
    value: Any
    default: Any
    """Of its dataclass; ``value`` may be a recipe's."""
    help: str
    range: Range | None


@cache
def fields_of(kind: Any) -> dict[str, tuple[Any, Range | None, str]]:
    """Type, range and docstring of each field of a dataclass."""
    hints, docs = typing.get_type_hints(kind, include_extras=True), dict[str, str]()
    # Python keeps no docstrings of fields: they are read from the source.
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
    for field, below in itertools.pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            docs[ast.unparse(field.target)] = inspect.cleandoc(str(below.value.value))
    found = {}
    for name in (field.name for field in dataclasses.fields(kind)):
        interval = next(iter(getattr(hints[name], "__metadata__", ())), None)
        found[name] = (
            hints[name] if interval is None else hints[name].__origin__,
            interval,
            docs.get(name, ""),
        )
    return found


def options(section: Any, prefix: str = "") -> dict[str, Option]:
    """All leaves below a dataclass instance, by dotted name; those of each stage as
    ``stages.0.lr``."""
    found, default = dict[str, Option](), type(section)()
    for name, (hint, interval, doc) in fields_of(type(section)).items():  # type: ignore[arg-type]
        value, path = getattr(section, name), prefix + name
        if dataclasses.is_dataclass(value):
            found |= options(value, f"{section_name(value) if name == 'modality' else path}.")
        elif nested_type(hint) is not None:
            for index, item in enumerate(value):
                found |= options(item, f"{path}.{index}.")
        elif name != "modality":
            found[path] = Option(path, hint, value, getattr(default, name), doc, interval)
    return found


def nested_type(hint: Any) -> Any:
    """The dataclass that a tuple of any length holds; None for another type."""
    inner = typing.get_args(hint)
    is_list = typing.get_origin(hint) is tuple and inner[-1] is Ellipsis
    return inner[0] if is_list and dataclasses.is_dataclass(inner[0]) else None


def check_ranges(section: Any) -> None:
    """Refuse numbers outside the range that their field declares, with the dotted option and a
    value to set."""
    for name, option in options(section).items():
        value, interval = option.value, option.range
        if interval is None or value is None:
            continue
        # All numbers of a tuple, and all values that a schedule starts with, ends with or changes
        # to.
        for number in value if isinstance(value, tuple) else parse_schedule(value, name).values:
            if not interval.contains(number):
                reached = f" reaches {number:g}, which" if isinstance(value, str) else ""
                why = f" ({interval.why})" if interval.why else ""
                raise GruppoError(
                    f"{name}={value}{reached} is out of range{why}; it needs to be {interval}",
                    option=name,
                    advice="to such a value" if option.default is None else as_text(option.default),
                )


# --- names and text -------------------------------------------------------------------------------


def as_text(value: Any) -> str:
    """A value as typed in the shell."""
    if isinstance(value, tuple | list):
        return " ".join(map(as_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The name that was probably meant: by its last part (``lr`` is ``optim.lr``), or by
    spelling."""
    known = list(known)
    # Backwards, so that of two options with the same last part the first counts.
    leaves = {other.rpartition(".")[2]: other for other in reversed(known)}
    leaf = name.rpartition(".")[2]
    if leaf in leaves:
        return leaves[leaf]
    # The whole name has to be close (0.6 is the default): names of one section resemble each other
    # by their prefix.
    close = difflib.get_close_matches(name, known, 1, cutoff=0.75)
    return (
        close[0]
        if close
        else next((leaves[n] for n in difflib.get_close_matches(leaf, leaves, 1)), None)
    )


_WORDS = {
    float: "a number",
    int: "a whole number",
    str: "a text",
    bool: "true or false",
    type(None): "nothing",
}


def describe_type(hint: Any) -> str:
    """A type in words, for errors."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, inner))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(describe_type, inner))
    if origin is tuple:
        kind = _WORDS.get(inner[0], "a section").split(" ", 1)[1]
        return f"a list of {kind}s" if inner[-1] is Ellipsis else f"a list of {len(inner)} {kind}s"
    return _WORDS.get(hint, "a section of settings")


def is_list(hint: Any) -> bool:
    return any(typing.get_origin(kind) is tuple for kind in (hint, *typing.get_args(hint)))


def convert(hint: Any, value: Any, *, is_text: bool = False) -> Any:
    """A value from a file as the type of its field; ``is_text``: from the shell, where numbers are
    text too.

    ``none`` is None where the type has it, as TOML has no null. Raises ValueError if the value does
    not fit.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is type(None):
        if value is None or value == "none" or (is_text and value in ("None", ["None"], ["none"])):
            return None
    elif origin in (typing.Union, types.UnionType):
        # None first, or "none" would be a text.
        for kind in sorted(inner, key=lambda kind: kind is not type(None)):
            with suppress(ValueError):
                return convert(kind, value, is_text=is_text)
    elif origin is Literal:
        if value in inner and type(value) is type(inner[0]):  # 1 == True
            return value
    elif origin is tuple:
        if isinstance(value, list | tuple) and (inner[-1] is Ellipsis or len(inner) == len(value)):
            return tuple(convert(inner[0], item, is_text=is_text) for item in value)
    elif is_text and isinstance(value, str) and hint is not str:
        if hint is not bool:
            return hint(value)
        if value.lower() in ("true", "false"):
            return value.lower() == "true"
    # A file may write 1 for 1.0; true is an int in Python, and no number here.
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    elif isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise ValueError(f"{value!r} is not {describe_type(hint)}")
