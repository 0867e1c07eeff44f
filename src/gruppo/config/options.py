"""Options of a tree of dataclasses: dotted names, types, ranges and help."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import math
import typing
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, ValidationInfo
from pydantic_core import core_schema

from gruppo.config.sections import section_name
from gruppo.core.schedules import parse_schedule

T = TypeVar("T")


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

    def contains(self, value: float) -> bool:
        return math.isfinite(value) and self.ge <= value <= self.le and self.gt < value < self.lt

    def __str__(self) -> str:
        bounds = {"at least": self.ge, "above": self.gt, "at most": self.le, "below": self.lt}
        words = [f"{word} {bound:g}" for word, bound in bounds.items() if math.isfinite(bound)]
        return " and ".join(words) or "finite"

    def check(self, value: Any, info: ValidationInfo) -> Any:
        """Refuse a value outside; called by pydantic."""
        numbers = value
        if not isinstance(value, tuple):
            name = info.field_name or ""
            numbers = () if value is None else parse_schedule(value, name).values
        if not all(map(self.contains, numbers)):
            raise ValueError(f"is out of range; it needs to be {self}")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        schema = core_schema.no_info_before_validator_function(_read_number, handler(source))
        return core_schema.with_info_after_validator_function(self.check, schema)


def _read_none(value: Any) -> Any:
    """``none`` is None: neither TOML nor the shell has a null."""
    return None if value in ("none", "None", ["none"], ["None"]) else value


def _read_number(value: Any) -> Any:
    """A number is text in the shell; other text is a schedule."""
    value = _read_none(value)
    if isinstance(value, list):
        return tuple(map(_read_number, value))
    for kind in (int, float) if isinstance(value, str) else ():
        with suppress(ValueError):
            return kind(value)
    return value


Positive = Annotated[int, Range(ge=1)]
Count = Annotated[int, Range(ge=0)]
NonNegative = Annotated[float, Range(ge=0)]
Fraction = Annotated[float, Range(ge=0, le=1)]


NoneOr = Annotated[T | None, BeforeValidator(_read_none)]


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

    @property
    def summary(self) -> str:
        """The first line of the help."""
        return self.help.partition("\n\n")[0]

    @property
    def kinds(self) -> dict[Any, tuple[Any, ...]]:
        """Arguments of its generic types, by type: ``{Literal: ("none", "fsdp")}``."""
        hints = (self.hint, *typing.get_args(self.hint))
        return {typing.get_origin(hint): typing.get_args(hint) for hint in hints}

    @property
    def choices(self) -> list[str]:
        """Values of a Literal."""
        return list(map(str, self.kinds.get(typing.Literal, ())))

    @property
    def is_list(self) -> bool:
        return tuple in self.kinds


@cache
def fields_of(kind: Any) -> dict[str, tuple[Any, str]]:
    """Type and docstring of each field of a dataclass."""
    docs = dict[str, str]()
    # Python keeps no docstrings of fields: they are read from the source.
    body = ast.parse(inspect.getsource(kind)).body[0].body  # type: ignore[attr-defined]
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            docs[ast.unparse(field.target)] = inspect.cleandoc(ast.literal_eval(below.value))
    hints = typing.get_type_hints(kind)
    return {
        field.name: (hints[field.name], docs.get(field.name, ""))
        for field in dataclasses.fields(kind)
    }


def options(section: Any, prefix: str = "") -> dict[str, Option]:
    """All leaves below a dataclass instance, by dotted name, single ones first; those of each stage
    as ``stages.0.lr``."""
    leaves = dict[str, Option]()
    nested = dict[str, Option]()
    default = type(section)()
    for name, (hint, doc) in fields_of(type(section)).items():  # type: ignore[arg-type]
        value = getattr(section, name)
        path = prefix + name
        if dataclasses.is_dataclass(value):
            nested |= options(value, f"{section_name(value) if name == 'modality' else path}.")
        elif any(map(dataclasses.is_dataclass, typing.get_args(hint))):
            for index, item in enumerate(value):
                nested |= options(item, f"{path}.{index}.")
        elif name != "modality":
            leaves[path] = Option(path, hint, value, getattr(default, name), doc)
    return leaves | nested


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
    close += [leaves[other] for other in difflib.get_close_matches(leaf, leaves, 1)]
    return close[0] if close else None
