"""Configs as dicts and as TOML and JSON files, and the names of objective presets."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from pydantic import TypeAdapter, ValidationError

from gruppo.config.options import fields_of, nearest, options
from gruppo.config.schema import Config
from gruppo.config.sections import section_name, sections
from gruppo.core.objective import PRESETS, Objective
from gruppo.integrity import levels, parse_json, read_file
from gruppo.loading import did_you_mean
from gruppo.types import GruppoError

T = TypeVar("T")
MAX_BYTES = 1 << 20
"""Of a config file; those of gruppo have a few KB."""
MAX_DOTS = 256
"""In a line up to its "=". TOML's reader takes minutes for a key of many parts."""
BRANCHES = re.compile(r"int$|float$|str$|[\w-]+\[.*\]$")
"""Parts of pydantic's locations that are no entries: the branch of a union."""
AUTOMATIC = ("correction", "none")
SUFFIXES = (".toml", ".json")


class UnknownEntry(GruppoError):
    """An entry that the config does not have."""


# --- dicts ----------------------------------------------------------------------------------------


def to_dict(config: Config) -> dict[str, Any]:
    """Nested settings; the options of the modality under its name."""
    data = asdict(config)
    section = data.pop("modality")
    return data if section is None else data | {section_name(config.modality): section}


def from_dict(data: Mapping[str, Any], *, is_text: bool = False) -> Config:
    """Build a config from nested settings. An unknown or invalid entry is refused with its name.

    ``is_text``: values may be strings from the shell. With vLLM servers, an objective that does not
    say otherwise corrects for their arithmetic.
    """
    data = {**data}
    for name in ("engine", "environment"):
        if isinstance(data.get(name), str):
            data[name] = {"kind": data[name]}
    objective, engine = data.get("objective", {}), data.get("engine", {})
    if isinstance(objective, str):
        objective = preset_dict(objective)
    if isinstance(objective, Mapping) and isinstance(engine, Mapping):
        data["objective"] = {"correction": default_correction(engine), **objective}
    named = [name for name in data if name in sections()]
    if len(named) > 1:
        raise GruppoError(f"the config has sections of two modalities, {' and '.join(named)}")
    modality: Any = None
    for name in named:
        modality = build(sections()[name], data.pop(name), prefix=f"{name}.", is_text=is_text)
    return replace(build(Config, data, is_text=is_text), modality=modality)


def default_correction(engine: Mapping[str, Any]) -> str:
    return "truncate" if engine.get("kind") == "vllm" else "none"


def preset_dict(objective: Objective | str) -> dict[str, Any]:
    """An objective as a dict, in which a correction of "none" leaves the choice to the engine."""
    fields = asdict(preset(objective) if isinstance(objective, str) else objective)
    return {name: value for name, value in fields.items() if (name, value) != AUTOMATIC}


def build(kind: type[T], data: Any, *, prefix: str = "", is_text: bool = False) -> T:
    """Build a dataclass from nested settings; ``prefix`` is its dotted name, with a dot."""
    try:
        # As JSON, in which lists are tuples and whole numbers floats, but no text is a number.
        text = json.dumps(data, default=_plain)
        return _adapter(cast(Any, kind)).validate_json(text, strict=not is_text)
    except ValidationError as error:
        raise _invalid(kind, prefix, error, str if is_text else repr) from None


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) else os.fspath(value)  # type: ignore[arg-type]


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    _forbid_unknown(kind)
    return TypeAdapter(kind)


def _forbid_unknown(kind: Any) -> None:
    for hint, _ in fields_of(kind).values():
        for nested in filter(is_dataclass, (hint, *get_args(hint))):
            _forbid_unknown(nested)
    kind.__pydantic_config__ = {"extra": "forbid"}


def _invalid(
    kind: Any, prefix: str, error: ValidationError, spell: Callable[[Any], str]
) -> GruppoError:
    """The first problem, with the dotted name of its entry."""
    first = error.errors()[0]
    # Names of fields and indices of stages; not the branch of a union, nor the place in a list.
    path = [part for part in map(str, first["loc"]) if not BRANCHES.match(part)]
    while path[1:] and path[-1].isdecimal():
        path.pop()
    # repr, since the names are a stranger's, and a terminal obeys control characters
    entry = repr((prefix + ".".join(path)).strip("."))[1:-1]
    if first["type"] == "unexpected_keyword_argument":
        near = nearest(entry, [*options(kind(), prefix), *fields_of(kind), *sections()])
        hint = f" Did you mean {near}?" if near else f" Known: {', '.join(fields_of(kind))}."
        return UnknownEntry(f"the config has an unknown entry {entry}.{hint}", option=entry)
    problem = first["msg"].partition(", unable")[0].replace("Input should be", "needs to be")
    problem = problem.replace("Field required", "needs more values").removeprefix("Value error, ")
    return GruppoError(f"{entry}={spell(first['input']):.80} {problem}", option=entry)


def change(config: Config, changes: Mapping[str, Any], *, is_text: bool = False) -> Config:
    """Return the config with new values by dotted name: ``{"rollout.group_size": 4, "objective":
    "ppo"}``. A section can be changed together with its entries."""
    # By way of a dict, so that values are checked as those of a file are.
    data = to_dict(config)
    if data["objective"]["correction"] == default_correction(data["engine"]):
        del data["objective"]["correction"]  # the engine may change
    by_depth = sorted(changes.items(), key=lambda item: item[0].count("."))
    for name, value in by_depth:
        *path, leaf = name.split(".")
        if name == "modality" and value is not None:
            leaf = section_name(value)
        if isinstance(value, str) and name in ("engine", "environment"):
            path, leaf = [name], "kind"
        if name == "objective" and isinstance(value, str | Objective):
            value = preset_dict(value)
        section: Any = data
        try:
            for part in path:
                is_dict = isinstance(section, dict)
                section = section.setdefault(part, {}) if is_dict else section[int(part)]
            section[leaf] = asdict(value) if is_dataclass(value) else value  # type: ignore[arg-type]
        except (IndexError, TypeError, ValueError):
            raise UnknownEntry(f"the config has no entry {name}", option=name) from None
    return from_dict(data, is_text=is_text)


def preset(name: str) -> Objective:
    """Return the objective of a preset's name, in the shell also as ``dr-grpo``."""
    objective = PRESETS.get(name.lower().replace("-", "_"))
    if objective is None:
        hint = did_you_mean(name.lower(), PRESETS, f" Presets: {', '.join(PRESETS)}.")
        raise GruppoError(f"objective {name!r} is not a preset.{hint}")
    return objective


# --- files ----------------------------------------------------------------------------------------


def load(path: Path) -> Config:
    """Read the config of a .toml or .json file."""
    needed = "a config file is needed: TOML or JSON, such as a run's config.json."
    return read(path, from_dict, needed)


def read(path: Path, make: Callable[[Mapping[str, Any]], T], needed: str) -> T:
    """Return what ``make`` returns for the settings of a file; its errors are prefixed by the
    path."""
    try:
        data = _parse(read_file(path, MAX_BYTES).decode("utf-8"), path.suffix)
        numbers = (n for level in levels(data) for n in level if isinstance(n, int))
        if any(number.bit_length() > 64 for number in numbers):
            raise ValueError("it has a whole number of more than 64 bits")
    except FileNotFoundError:
        raise GruppoError(f"{path} does not exist; {needed}") from None
    except (OSError, ValueError, RecursionError) as error:
        kind = path.suffix[1:].upper()
        raise GruppoError(f"{path} cannot be read as {kind} ({error}); {needed}") from None
    if not isinstance(data, dict):
        raise GruppoError(f"{path} holds a {type(data).__name__}; {needed}")
    try:
        return make(data)
    except GruppoError as error:
        error.problem = f"{path}: {error.problem}"
        raise error from None


def _parse(text: str, suffix: str) -> Any:
    if suffix == ".toml":
        keys = (part for line in text.splitlines() for part in line.split("="))
        if any(key.count(".") > MAX_DOTS for key in keys):
            raise ValueError(f"a line has more than {MAX_DOTS} dots")
        return tomllib.loads(text)
    return parse_json(text)


def to_toml(config: Config) -> str:
    """Write the config as TOML that ``load`` reads back, with the help of each option as a
    comment."""
    lines = list[str]()
    table = ""
    for name, option in options(config).items():
        section, _, leaf = name.rpartition(".")
        if section == "stage" and config.stages:
            continue
        if section != table:
            header = "[[stages]]" if section.startswith("stages.") else f"[{section}]"
            lines += ["", header]
            table = section
        # JSON's spelling of texts, integers and lists is TOML's too; TOML has no null, and Python's
        # "inf".
        value = "none" if option.value is None else option.value
        is_float = isinstance(value, float)
        written = repr(value) if is_float else json.dumps(value, ensure_ascii=False)
        lines += [*(f"# {line}" for line in option.summary.splitlines()), f"{leaf} = {written}"]
    return "\n".join(lines) + "\n"
