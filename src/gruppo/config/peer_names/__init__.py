"""A run's settings under the names that other systems have for them, and the way back."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from gruppo.config.peer_names.ddpo import DDPO, FURTHER
from gruppo.config.peer_names.named import Named, key
from gruppo.config.peer_names.sources import SOURCES
from gruppo.config.peer_names.trl import TRL
from gruppo.config.peer_names.verl import VERL
from gruppo.config.schema import Config
from gruppo.types import GruppoError

NAMES: Mapping[str, tuple[Named, ...]] = {"trl": TRL, "verl": VERL, "ddpo": (*DDPO, *FURTHER), "sources": SOURCES}
"""By the name of the system; ``sources`` are the documents of docs/sources.md."""


def lines(config: Config, system: str) -> list[str]:
    """Their names beside what is typed here; of ddpo-pytorch those that image runs are explained with."""
    return _aligned(config, DDPO if system == "ddpo" else NAMES[system])


def asked(config: Config, text: str) -> list[str]:
    """What ``--names`` prints: SYSTEM, all its names; SYSTEM:NAME, that one alone."""
    _, colon, name = text.partition(":")
    table = NAMES[system_of(text)]
    if colon:
        found = found_in(table, name)
        if not found:
            raise GruppoError(_unknown(system_of(text), name))
        return [line for part in _parts(found) for line in _of_part(config, part, found)]
    return [line for part in _parts(table) for line in _of_part(config, part, table)]


def found_in(table: Iterable[Named], name: str) -> tuple[Named, ...]:
    """The settings that a name means: by its whole, or by what stands behind its last dot."""
    return tuple(named for named in table if key(name) in named.words)


def elsewhere(name: str) -> str:
    """What a name of another system is here, as part of a sentence; empty where no system has it."""
    for system, table in NAMES.items():
        for named in found_in(table, name):
            said = " ".join(f"--{field.replace('_', '-')}" for field in (named.ours or named.near).split())
            if said:
                how = "is" if named.ours else "is nothing here; nearest is"
                return f"{key(name)} of {system} {how} {said}."
    return ""


def system_of(text: str) -> str:
    """The system of SYSTEM or SYSTEM:NAME."""
    given = text.partition(":")[0]
    name = given.strip().lower()
    if name in NAMES:
        return name
    near = difflib.get_close_matches(name, NAMES, 1)
    by_part = [system for system in NAMES if system in name]
    having = [system for system, table in NAMES.items() if found_in(table, name)]
    if near or by_part:
        raise GruppoError(f"--names {given}: unknown system. Did you mean {(near or by_part)[0]}?")
    hint = f" It is a name of {' and '.join(having)}: --names {having[0]}:{given.strip()}." if having else ""
    raise GruppoError(f"--names {given}: unknown system; it needs one of {', '.join(NAMES)}.{hint}")


def _unknown(system: str, name: str) -> str:
    words = {word: named for named in reversed(NAMES[system]) for word in named.words}
    others = [other for other in NAMES if other != system and found_in(NAMES[other], name)]
    near = difflib.get_close_matches(key(name), words, 1)
    said = f"--names {system}:{name}: {system} has no such setting that is known here."
    if near:
        found = words[near[0]]
        ours = " ".join(f"--{field.replace('_', '-')}" for field in found.ours.split())
        said += f" The nearest is {near[0]}, here {ours or 'nothing'}."
    if others:
        said += f" {others[0]} has it: --names {others[0]}:{key(name)}."
    return f"{said} --names {system} lists all."


def _parts(table: Iterable[Named]) -> list[str]:
    return list(dict.fromkeys(named.part for named in table))


def _of_part(config: Config, part: str, table: Iterable[Named]) -> list[str]:
    said = _aligned(config, [named for named in table if named.part == part])
    return [part, *(f"  {line}" for line in said)] if part else said


def _aligned(config: Config, table: Iterable[Named]) -> list[str]:
    """Names of like width; one that is several times as wide has its line begin on the next."""
    table = list(table)
    widths = [len(named.theirs) for named in table if len(named.theirs) <= WIDEST]
    width = max(widths, default=0)
    said = []
    for named in table:
        if len(named.theirs) <= WIDEST:
            said.append(named.line(config, width))
        else:
            said += [named.theirs, " " * width + named.line(config, 0).removeprefix(named.theirs)]
    return said


WIDEST = 50
"""Characters of the names that stand beside their options."""
