"""Configs as dicts and as files: TOML, YAML and JSON, and the names of objective presets."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gruppo.config.options import convert, describe_type, fields_of, nested_type
from gruppo.config.schema import Config, CriticConfig
from gruppo.config.sections import section_name, sections
from gruppo.core.objective import PRESETS, Objective
from gruppo.types import GruppoError

SUFFIXES = (".toml", ".yaml", ".yml", ".json")


class EntryError(GruppoError):
    """An entry that is unknown or has a value of the wrong type."""

    def __init__(self, entry: str, message: str) -> None:
        super().__init__(message)
        self.entry = entry
        """Dotted."""


# --- dicts ------------------------------------------------------------------------------------------------------------


def to_dict(config: Config) -> dict[str, Any]:
    """Nested settings; the options of the modality under its name."""
    data = dataclasses.asdict(config)
    section = data.pop("modality")
    return data if section is None else data | {section_name(config.modality): section}


def from_dict(data: Mapping[str, Any]) -> Config:
    """A config from nested settings. An unknown or ill-typed entry is refused with the nearest name."""
    return _build(Config, data, "")


def change(config: Config, changes: Mapping[str, Any]) -> Config:
    """A config with new values by dotted name: ``{"rollout.group_size": 4, "objective": "ppo"}``.

    A section can be changed together with its entries. An objective without a critic resets the config's critic;
    a critic among the changes stays, and is refused later.
    """
    data = to_dict(config)
    if "objective" in changes:
        objective = plain(
            preset(changes["objective"]) if isinstance(changes["objective"], str) else changes["objective"]
        )
        if not (isinstance(objective, Mapping) and objective.get("baseline") == "critic"):
            data["critic"] = plain(CriticConfig())
    for name, value in sorted(changes.items(), key=lambda item: item[0].count(".")):  # sections before their entries
        *path, leaf = name.split(".")
        if path == ["objective"] and isinstance(data["objective"], str):
            data["objective"] = plain(preset(data["objective"]))
        section: Any = data
        for part in path:
            if isinstance(section, list | tuple):
                section = section[int(part)]
            else:
                section = section.setdefault(part, {}) if isinstance(section, dict) else None
        if not isinstance(section, dict):
            raise GruppoError(f"{name}: {path[-1]} is a value, not a section of the config. Set {path[-1]} itself.")
        if name == "modality" and value is not None:
            leaf = section_name(value)
        section[leaf] = plain(value)
    return from_dict(data)


def plain(value: Any) -> Any:
    """A value as ``to_dict`` gives it: sections as dicts, paths as strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def preset(name: str) -> Objective:
    """The objective of a preset's name."""
    objective = PRESETS.get(name.lower().replace("-", "_"))
    if objective is None:
        near = difflib.get_close_matches(name.lower(), PRESETS, 1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise GruppoError(f"objective {name or '(nothing)'} is no preset. {hint}Presets: {', '.join(PRESETS)}.")
    return objective


def _build(kind: Any, data: Mapping[str, Any], prefix: str) -> Any:
    fields, values = fields_of(kind), dict[str, Any]()
    for name, value in data.items():
        entry = f"{prefix}{name}"
        if kind is Config and name in sections():
            if "modality" in values:
                other = section_name(values["modality"])
                raise EntryError(entry, f"the config has sections of two modalities, {other} and {name}. Keep one.")
            if not isinstance(value, Mapping):
                raise EntryError(entry, f"config entry {entry} is {value!r}; it needs a section of settings.")
            values["modality"] = _build(sections()[name], value, f"{entry}.")
            continue
        if kind is Config and name == "modality":
            if value is not None and type(value) not in sections().values():
                raise EntryError(
                    entry,
                    f"config entry modality is {value!r}; it needs null. The options of a modality "
                    f"have a section of their own: {', '.join(sections())}.",
                )
            values.setdefault("modality", value)
            continue
        if name not in fields:
            known = [*fields, *(sections() if kind is Config else ())]
            near = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {prefix}{near[0]}?" if near else f" Known: {', '.join(sorted(known))}."
            raise EntryError(entry, f"the config has an unknown entry {entry}.{hint}")
        hint = fields[name][0]
        if hint is Objective and isinstance(value, str):
            values[name] = preset(value)
        elif dataclasses.is_dataclass(hint):
            if not isinstance(value, Mapping):
                raise EntryError(entry, f"config entry {entry} is {value!r}; it needs a section of settings.")
            values[name] = _build(hint, value, f"{entry}.")
        elif (inner := nested_type(hint)) is not None:
            if not (isinstance(value, list | tuple) and all(isinstance(item, Mapping) for item in value)):
                raise EntryError(entry, f"config entry {entry} is {value!r}; it needs a list of sections.")
            values[name] = tuple(_build(inner, item, f"{entry}.{n}.") for n, item in enumerate(value))
        else:
            try:
                values[name] = convert(hint, value)
            except ValueError:
                message = f"config entry {entry} is {value!r}; it needs {describe_type(hint)}."
                raise EntryError(entry, message) from None
    return kind(**values)


# --- files ------------------------------------------------------------------------------------------------------------


def load(path: Path) -> Config:
    """The config of a .toml, .yaml or .json file; an error names the line where it can be found."""
    try:
        text = path.read_text(encoding="utf-8")
        data = _parse(text, path.suffix)
    except FileNotFoundError:
        raise GruppoError(f"{path} does not exist; a config file (TOML, YAML or JSON) is needed.") from None
    except (OSError, ValueError) as error:
        kind = path.suffix[1:].upper()
        raise GruppoError(
            f"{path} cannot be read as {kind} ({error}); a config file is needed, such as a run's config.json."
        ) from None
    if not isinstance(data, dict):
        raise GruppoError(
            f"{path} holds a {type(data).__name__}; a config file is needed, such as a run's config.json."
        )
    try:
        return from_dict(data)
    except EntryError as error:
        line = _line_of(text, error.entry)
        raise GruppoError(f"{path}{f', line {line}' if line else ''}: {error}") from None


def _parse(text: str, suffix: str) -> Any:
    if suffix == ".toml":
        return tomllib.loads(text)
    if suffix not in (".yaml", ".yml"):
        return json.loads(text)
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML 1.1 reads 1e-6 as a string; numbers need a dot there."""

    number = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _line_of(text: str, entry: str) -> int | None:
    """The line of a dotted entry: the first with its key that follows the line of its section."""
    lines, at, section = text.splitlines(), 0, ""
    for key in entry.split("."):
        pattern, skip = rf"""[\s\[{{\-"']*{re.escape(key)}["']?\s*[=:\]]""", 0
        if key.isdigit():  # the n-th [[stages]] of TOML, counted from the first, which has been found
            pattern, skip = rf"\s*\[\[{section}\]\]", int(key)
        found = [n for n in range(at, len(lines)) if re.match(pattern, lines[n])]
        if len(found) <= skip:
            return None
        at, section = found[skip], key
    return at + 1


def to_toml(config: Config) -> str:
    """The config as TOML that ``load`` reads back, with the help of each option as a comment."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(Config)}
    is_section = {name: dataclasses.is_dataclass(value) or name == "modality" for name, value in fields.items()}
    lines = _toml_fields({name: value for name, value in fields.items() if not is_section[name]}, Config)
    for name, value in fields.items():
        if is_section[name] and value is not None and not (name == "stage" and config.stages):
            lines += ["", *_toml_section(f"[{section_name(value) if name == 'modality' else name}]", value)]
    for stage in config.stages:
        lines += ["", *_toml_section("[[stages]]", stage)]
    return "\n".join(lines) + "\n"


def _toml_section(header: str, section: Any) -> list[str]:
    summary = (type(section).__doc__ or "").strip().splitlines()[0]
    values = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    return [f"# {summary}", header, *_toml_fields(values, type(section))]


def _toml_fields(values: Mapping[str, Any], kind: type) -> list[str]:
    lines = []
    for name, value in values.items():
        hint, _, doc = fields_of(kind)[name]
        if nested_type(hint) is None:
            lines += [f"# {line}" for line in doc.partition("\n\n")[0].splitlines()]
            lines.append(f"{name} = {_toml_value(value)}")
    return lines


def _toml_value(value: Any) -> str:
    if value is None or isinstance(value, str):  # TOML has no null
        return json.dumps("none" if value is None else value, ensure_ascii=False)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    return str(value).lower() if isinstance(value, bool) else repr(value)
