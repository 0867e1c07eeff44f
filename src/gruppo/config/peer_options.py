"""Options under the names of TRL, verl, ddpo-pytorch and the source documents; the table is
``peer_options.toml``."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gruppo.config.options import as_text, nearest, options
from gruppo.config.schema import Config
from gruppo.config.sections import sections
from gruppo.errors import as_flag
from gruppo.types import GruppoError

SYSTEMS = ("trl", "verl", "ddpo", "sources")
"""``sources`` are the documents of docs/dev/sources.md."""


@dataclass(frozen=True)
class PeerOption:
    """One option of another system (``theirs``: its names there, separated by commas) and ours."""

    part: str
    """Where it is set there."""
    theirs: str
    ours: str
    """Dotted options, separated by spaces; empty if nothing here is the same."""
    near: str
    """The nearest option if none is the same."""
    remark: str

    @property
    def keys(self) -> set[str]:
        """Names to look it up by: each end of its path in the other system's tree, after any
        dot."""
        paths = [f"{self.part}.{name}".split(".") for name in self.theirs.split(", ")]
        return {normalized(".".join(path[at:])) for path in paths for at in range(len(path))}

    def describe(self, config: Config) -> str:
        """Our options with their values, or that there is none and the nearest."""
        typed = " ".join(_typed(config, name) for name in (self.ours or self.near).split())
        if self.ours:
            return typed
        return f"no counterpart; nearest {typed}" if typed else "no counterpart"


@cache
def peer_options(system: str) -> tuple[PeerOption, ...]:
    """All known options of a system, in the order of its parts."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    found = []
    for part, entries in table[system].items():
        for theirs, entry in entries.items():
            names, _, remark = entry.partition(" | ")
            ours, _, near = names.strip().partition("~")  # ~our.option is the nearest
            found.append(PeerOption(part, theirs, ours, near, remark))
    return tuple(found)


def lookup(system: str, name: str) -> tuple[PeerOption, ...]:
    """The options that a name may mean: the whole name, or its end after any dot."""
    return tuple(option for option in peer_options(system) if normalized(name) in option.keys)


def suggestion(name: str, known: Collection[str], spell: Callable[[str], str]) -> str:
    """The option that an unknown name probably meant, as a sentence and a space; empty if there is
    none.

    ``known``: dotted options; ``spell`` writes one as the user types it, in the shell or in Python.
    """
    near = nearest(name, known)
    # The last part of one of our options beats another system's name: --lr is --optim.lr.
    is_same_leaf = near is not None and near.rpartition(".")[2] == name.rpartition(".")[2]
    sentence = "" if is_same_leaf else hint(name, spell)
    return f"{sentence} " if sentence else f"Did you mean {spell(near)}? " if near else ""


def hint(name: str, spell: Callable[[str], str] = as_flag) -> str:
    """What another system's option is called here, as a sentence for an error; empty if no system
    has it."""
    for system in SYSTEMS:
        for option in lookup(system, name):
            if ours := " ".join(map(spell, (option.ours or option.near).split())):
                how = "is" if option.ours else "has no counterpart; the nearest is"
                return f"{normalized(name)} of {system} {how} {ours}."
    return ""


def explain_names(config: Config, request: str) -> list[str]:
    """Lines for ``--names SYSTEM`` (all its options, by part) or ``--names SYSTEM:NAME`` (that
    one)."""
    system = find_system(request)
    _, colon, name = request.partition(":")
    found = lookup(system, name) if colon else peer_options(system)
    if not found:
        keys = [key for option in peer_options(system) for key in option.keys]
        raise GruppoError(
            f"--names {request}: {system} has no option of this name that is known here."
            f"{_guess(normalized(name), keys)}"
        )
    lines = list[str]()
    for option in found:
        if option.part not in lines:
            lines.append(option.part)
        remark = f"   ({option.remark})" if option.remark else ""
        lines.append(f"  {option.theirs:<40}  {option.describe(config)}{remark}")
    return lines


def find_system(request: str) -> str:
    """The system of ``SYSTEM`` or ``SYSTEM:NAME``."""
    name = request.partition(":")[0].strip().lower()
    if name in SYSTEMS:
        return name
    problem = f"--names {name}: unknown system; it needs one of {', '.join(SYSTEMS)}."
    raise GruppoError(problem + _guess(name.partition("-")[0], SYSTEMS))  # such as ddpo-pytorch


def _guess(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    guess = f"Did you mean {near[0]}?" if near else hint(name)
    return f" {guess}".rstrip()


def normalized(name: str) -> str:
    """A name as it is compared: lower case, with underscores, without leading dashes."""
    return name.strip().lstrip("-").replace("-", "_").lower()


def _typed(config: Config, name: str) -> str:
    """An option and its value as typed in the shell, for each stage if there are several."""
    section, _, leaf = name.partition(".")
    found = options(config)
    if section in sections():
        found = options(config.section(sections()[section]), f"{section}.")
    names = [name]
    if section == "stage" and config.stages:
        names = [f"stages.{n}.{leaf}" for n in range(len(config.stages))]
    values = [as_text(found[name].value) if name in found else "" for name in names]
    return " ".join(
        f"{as_flag(n)} {value}".rstrip() for n, value in zip(names, values, strict=True)
    )
