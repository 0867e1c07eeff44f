"""A config to JSON and back, and the names of presets."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from gruppo.config.schema import Config
from gruppo.core.objective import PRESETS, Objective
from gruppo.types import GruppoError


def to_dict(config: Config) -> dict[str, Any]:
    return dataclasses.asdict(config)


def plain(value: Any) -> Any:
    """A value as ``to_dict`` gives it: settings as dicts, paths as texts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def from_dict(data: Mapping[str, Any]) -> Config:
    """A config from JSON. An unknown or ill-typed entry is refused with the nearest name."""
    return _build(Config, data, "")


def load(path: Path) -> Config:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise GruppoError(f"{path} does not exist; a run's config.json is needed.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise GruppoError(f"{path} cannot be read as JSON ({error}); a run's config.json is needed.") from None
    if not isinstance(data, dict):
        raise GruppoError(f"{path} holds a {type(data).__name__}; a run's config.json is needed.")
    return from_dict(data)


def _build(kind: Any, data: Mapping[str, Any], where: str) -> Any:
    known = {f.name for f in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    values = {}
    for name, value in data.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {where}{near[0]}?" if near else f" Known: {', '.join(sorted(known))}."
            raise GruppoError(f"the config has an unknown entry {where}{name}.{hint}")
        values[name] = _convert(hints[name], value, f"{where}{name}")
    return kind(**values)


def _convert(hint: Any, value: Any, where: str) -> Any:
    if hint is Objective and isinstance(value, str):
        return preset(value)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise GruppoError(f"config entry {where} is {value!r}; it needs an object of settings.")
        return _build(hint, value, f"{where}.")
    if (inner := _settings_in(hint)) is not None:
        if not isinstance(value, list | tuple):
            raise GruppoError(f"config entry {where} is {value!r}; it needs a list of settings.")
        return tuple(_convert(inner, item, f"{where}.{n}") for n, item in enumerate(value))
    if not _fits(hint, value):
        raise GruppoError(f"config entry {where} is {value!r}; it needs {words(hint)}.")
    return _cast(hint, value)


def _settings_in(hint: Any) -> Any:
    """The dataclass that a tuple of any length holds; None of another type."""
    inner = typing.get_args(hint)
    is_list = typing.get_origin(hint) is tuple and inner[-1] is Ellipsis
    return inner[0] if is_list and dataclasses.is_dataclass(inner[0]) else None


def preset(name: str) -> Objective:
    """A named objective."""
    found = PRESETS.get(name.lower().replace("-", "_"))
    if found is None:
        near = difflib.get_close_matches(name.lower(), PRESETS, 1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise GruppoError(f"objective {name or '(nothing)'} is no preset. {hint}Presets: {', '.join(PRESETS)}.")
    return found


def names_critic(objective: Any) -> bool:
    """Whether an objective, a preset's name or the fields of one ask a critic for values."""
    fields = plain(preset(objective) if isinstance(objective, str) else objective)
    return isinstance(fields, Mapping) and fields.get("baseline") == "critic"


def _fits(hint: Any, value: Any) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in inner
    if origin in (typing.Union, types.UnionType):
        return any(_fits(h, value) for h in inner)
    if origin is tuple:
        return isinstance(value, list | tuple) and _has_length(inner, value) and all(_fits(inner[0], v) for v in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _has_length(inner: tuple[Any, ...], value: Any) -> bool:
    return inner[-1] is Ellipsis or len(inner) == len(value)


def _cast(hint: Any, value: Any) -> Any:
    """What JSON has as a list or a whole number, as the field's type."""
    inner = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return _cast(next(h for h in inner if _fits(h, value)), value)
    if isinstance(value, list | tuple):
        return tuple(_cast(inner[0], v) for v in value)
    return float(value) if hint is float else value


_WORDS = {float: "a number", int: "a whole number", str: "a text", bool: "true or false", type(None): "nothing"}


def words(hint: Any) -> str:
    """A type as people say it."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, inner))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(words, inner))
    if origin is tuple:
        kind = _WORDS[inner[0]].split(" ", 1)[1]
        return f"a list of {kind}s" if inner[-1] is Ellipsis else f"a list of {len(inner)} {kind}s"
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))
