"""Options under the names of TRL, verl, ddpo-pytorch and the source documents; the table is
``peer_options.toml``."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from gruppo.config.options import as_text, nearest
from gruppo.config.schema import Config, Stage
from gruppo.config.sections import sections
from gruppo.config.stages import highest
from gruppo.errors import as_flag
from gruppo.types import GruppoError

SYSTEMS = ("trl", "verl", "ddpo", "sources")
"""``sources`` are the documents of docs/dev/sources.md."""
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
WIDEST = 50
"""Characters of a name that still shares a line with its option."""


@dataclass(frozen=True)
class PeerOption:
    """One option of another system (``theirs``: its names there, separated by commas) and ours."""

    part: str
    """Where it is set there."""
    theirs: str
    ours: str
    """Dotted options, separated by spaces; empty where nothing here is the same."""
    near: str
    """The nearest option where none is the same."""
    remark: str
    rule: str
    """How the value to write there follows from the config: of ``FORMULAS`` or of ``[rules]``."""

    @property
    def keys(self) -> set[str]:
        """Names to look it up by: each end of its path in the other system's tree, after any
        dot."""
        # An entry names alternatives, "a, b", or the factors of one number, "a x b".
        paths = [f"{self.part}.{name}".split(".") for name in re.split(r", | x ", self.theirs)]
        return {normalized(".".join(path[at:])) for path in paths for at in range(len(path))}

    def describe(self, config: Config) -> str:
        """Our options with their values, or that there is none and the nearest."""
        ours = " ".join(_typed(config, name) for name in self.ours.split())
        return ours or "no counterpart" + (
            f"; nearest {_typed(config, self.near)}" if self.near else ""
        )

    def line(self, config: Config, width: int = 0) -> str:
        """Their name, our options, and in parentheses what to write there and the remark."""
        ours = self.describe(config)
        value = FORMULAS[self.rule](config) if self.rule in FORMULAS else None
        if rules := TABLE["rules"].get(self.rule):
            held = (
                candidate
                for candidate, needed in rules
                if all(
                    attrgetter(path)(config if "." in path else config.objective) == needed[path]
                    for path in needed
                )
            )
            value = next(held, "no counterpart")
        is_shown = value is not None and not ours.endswith(f" {as_text(value)}")
        remark = "; ".join(
            filter(None, [f"there {as_text(value)}" if is_shown else "", self.remark])
        )
        return f"{self.theirs:<{width}}  {ours}" + (f"   ({remark})" if remark else "")


FORMULAS: dict[str, Callable[[Config], Any]] = {
    # A bound in nats is converted to one of the ratio; None where the value is the same as here.
    "clip_high_of_ratio": lambda c: (
        math.expm1(c.objective.clip_high) if c.objective.clip_unit == "nats" else None
    ),
    "clip_low_of_ratio": lambda c: (
        -math.expm1(-c.objective.clip_low) if c.objective.clip_unit == "nats" else None
    ),
    # TRL's epsilon_high of CISPO is the cap itself, not its distance from 1.
    "trl_clip_high": lambda c: (
        1 + (FORMULAS["clip_high_of_ratio"](c) or c.objective.clip_high)
        if c.objective.surrogate == "cispo"
        else FORMULAS["clip_high_of_ratio"](c)
    ),
    "trl_delta": lambda c: None if c.objective.dual_clip else "None",
    "trl_correction_mode": lambda c: (
        None
        if c.objective.correction == "none"
        else f"{c.objective.correction_level}_{c.objective.correction}"
    ),
    "rows": lambda c: c.rollout.prompts * c.rollout.group_size,
    "updates": lambda c: c.steps * c.updates_per_batch,
    "minibatch_prompts": lambda c: c.rollout.prompts // c.optim.minibatches,
    "has_kl": lambda c: highest(c, "kl_coef") > 0,
    "kl_in_reward": lambda c: highest(c, "kl_coef") > 0 and c.objective.kl_in == "reward",
    "kl_in_loss": lambda c: highest(c, "kl_coef") > 0 and c.objective.kl_in == "loss",
    # Squared errors are halved here and not there.
    "whole_value_coef": lambda c: (
        c.stage.value_coef / 2
        if isinstance(c.stage.value_coef, int | float) and not c.stages
        else None
    ),
}


@cache
def peer_options(system: str) -> tuple[PeerOption, ...]:
    """All known options of a system, in the order of its parts."""
    found = []
    for part, entries in TABLE[system].items():
        for theirs, entry in entries.items():
            text, remark, rule = [*([entry] if isinstance(entry, str) else entry), "", ""][:3]
            ours, _, near = text.partition("~")  # ~our.option is the nearest
            found.append(PeerOption(part, theirs, ours, near, remark, rule))
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
            if options := " ".join(map(spell, (option.ours or option.near).split())):
                how = "is" if option.ours else "has no counterpart; the nearest is"
                return f"{normalized(name)} of {system} {how} {options}."
    return ""


def explain_names(config: Config, request: str) -> list[str]:
    """Lines for ``--names SYSTEM`` (all its options, by part) or ``--names SYSTEM:NAME`` (that
    one)."""
    system, (_, colon, name) = find_system(request), request.partition(":")
    found = lookup(system, name) if colon else peer_options(system)
    if not found:
        keys = {key: option for option in reversed(peer_options(system)) for key in option.keys}
        message = (
            f"--names {system}:{name}: {system} has no option of this name that is known here."
        )
        if near := difflib.get_close_matches(normalized(name), keys, 1):
            ours = " ".join(map(as_flag, keys[near[0]].ours.split())) or "nothing"
            message += f" The nearest is {near[0]}, here {ours}."
        if others := [other for other in SYSTEMS if other != system and lookup(other, name)]:
            message += f" {others[0]} has it: --names {others[0]}:{normalized(name)}."
        raise GruppoError(f"{message} --names {system} lists all.")
    lines = []
    for part in dict.fromkeys(option.part for option in found):
        of_part = [option for option in found if option.part == part]
        # Two columns; after a name wider than WIDEST, our option follows on the next line.
        width = max(
            (len(option.theirs) for option in of_part if len(option.theirs) <= WIDEST), default=0
        )
        lines.append(part)
        for option in of_part:
            line = option.line(config, width)
            is_wide = len(option.theirs) > WIDEST
            lines += [f"  {option.theirs}"] * is_wide
            lines.append(
                "  " + (" " * width + line.removeprefix(option.theirs) if is_wide else line)
            )
    return lines


def find_system(request: str) -> str:
    """The system of ``SYSTEM`` or ``SYSTEM:NAME``; an unknown one is refused with the nearest."""
    text = request.partition(":")[0].strip()
    name = text.lower()
    if name in SYSTEMS:
        return name
    # Also a longer name, such as ddpo-pytorch.
    near = [
        *difflib.get_close_matches(name, SYSTEMS, 1),
        *(system for system in SYSTEMS if system in name),
    ]
    if near:
        raise GruppoError(f"--names {text}: unknown system. Did you mean {near[0]}?")
    having = [system for system in SYSTEMS if lookup(system, name)]
    where = (
        f" It is an option of {' and '.join(having)}: --names {having[0]}:{text}." if having else ""
    )
    raise GruppoError(
        f"--names {text}: unknown system; it needs one of {', '.join(SYSTEMS)}.{where}"
    )


def normalized(name: str) -> str:
    """A name as it is compared: lower case, with underscores, without leading dashes."""
    return name.strip().lstrip("-").replace("-", "_").lower()


def _typed(config: Config, name: str) -> str:
    """An option and its value, as typed in the shell; of several stages, those with the largest
    value."""
    section, _, leaf = name.partition(".")
    if section == "stage" and config.stages:  # a coefficient of 0 elsewhere would mislead
        peaks = [
            max(stage.schedules[leaf].values) if leaf in stage.schedules else 0.0
            for stage in config.stages
        ]
        index = peaks.index(max(peaks))
        name, value = f"stages.{index}.{leaf}", getattr(config.stages[index], leaf)
    elif section in sections():
        value = getattr(config.section(sections()[section]), leaf)
    else:
        value = attrgetter(name)(config)
    if isinstance(value, tuple) and any(isinstance(item, Stage) for item in value):
        value = ",".join(
            f"{stage.name}:{stage.steps}" if stage.steps else stage.name for stage in value
        )
    return f"{as_flag(name)} {as_text(value)}".rstrip()
