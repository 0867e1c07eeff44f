"""One setting of another system, beside what is typed here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

from gruppo.config.schema import Config, Stage
from gruppo.core.schedules import parse

OF_STAGES = {field.name for field in fields(Stage)}


@dataclass(frozen=True)
class Named:
    """One setting of another system."""

    theirs: str
    """One name, or several with commas between them."""
    ours: str = ""
    """The field of ``Config``, or several with spaces between them; what is typed in the shell follows from it. Empty
    where nothing here is the same."""
    note: str = ""
    """Where the two do not mean the same."""
    there: Callable[[Config], Any] | None = None
    """What is written there for ours, where that is another word or number."""
    near: str = ""
    """The field of ``Config`` that comes nearest, where nothing is the same."""
    part: str = ""
    """Where in the other system it is set."""

    def line(self, config: Config, width: int) -> str:
        notes = [self._there(config), self.note]
        said = "; ".join(note for note in notes if note)
        return f"{self.theirs:<{width}}  {self.here(config)}" + (f"   ({said})" if said else "")

    def here(self, config: Config) -> str:
        """Option and value of each field, or that there is none and what comes nearest."""
        if self.ours:
            return " ".join(self._typed(config, name) for name in self.ours.split())
        return "nothing here" + (f"; nearest {self._typed(config, self.near)}" if self.near else "")

    @property
    def words(self) -> set[str]:
        """The names by which it is looked up: each end of its path in the other system's tree, after any dot."""
        paths = [f"{self.part}.{name}".split(".") for name in re.split(r", | x ", self.theirs)]
        return {key(".".join(path[at:])) for path in paths for at in range(len(path))}

    def _there(self, config: Config) -> str:
        """What is written there, where it is not what is printed beside it anyway."""
        if self.there is None or (said := self.there(config)) is None:
            return ""
        return "" if self.here(config).endswith(f" {typed(said)}") else f"there {typed(said)}"

    def _typed(self, config: Config, name: str) -> str:
        group, _, leaf = name.partition(".")
        if group == "stage" and leaf in OF_STAGES and config.stages:
            index = _highest(config, leaf)
            group, name = "stages", f"stages.{index}.{leaf}"
            value = getattr(config.stages[index], leaf)
        else:
            value = attrgetter(name)(config)
        return f"{option(name)} {typed(value)}".rstrip()


def of_part(part: str, table: Iterable[Named]) -> tuple[Named, ...]:
    """The settings of one part of another system."""
    return tuple(replace(named, part=part) for named in table)


def option(name: str) -> str:
    """A field as it is typed in the shell."""
    return "--" + name.replace("_", "-")


def key(name: str) -> str:
    """A name as it is compared: without dashes before it, in small letters."""
    return name.strip().lstrip("-").replace("-", "_").lower()


def typed(value: Any) -> str:
    """A value as it is typed in the shell."""
    if isinstance(value, Stage):
        return f"{value.name}:{value.steps}" if value.steps else value.name
    if isinstance(value, tuple | list):
        return (",".join if isinstance(next(iter(value), None), Stage) else " ".join)(map(typed, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _highest(config: Config, leaf: str) -> int:
    """The stage in which a coefficient is largest, the first of them."""

    def most(stage: Stage) -> float:
        value = getattr(stage, leaf)
        return max(parse(value, leaf).values) if isinstance(value, str) else float(value or 0)

    return max(range(len(config.stages)), key=lambda index: most(config.stages[index]))
