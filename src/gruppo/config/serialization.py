"""Configs as dicts and as files: TOML, YAML and JSON, and the names of objective presets."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from gruppo.config.options import convert, describe_type, fields_of, nested_type
from gruppo.config.schema import Config, CriticConfig, EngineConfig, EnvironmentConfig, Stage
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
NO_CORRECTION = ("correction", "none")
REMOVED = {
    "rollout.refill_by": "the sum of all rewards decides",
    "rollout.max_group_size": "a group grows up to twice group_size",
    "optim.state_place": "AdamW's state stays on the device; distributed.offload_params moves it "
    "with the shards",
    "optim.terms_every": "gradients of single terms are not measured",
    "back_off.lr_factor": "it is 0.5",
    "engine.max_inflight": "it is 512",
    "engine.transfer": "weights are published as a folder",
    "saving.completions_gb": "it is 10",
    "saving.ledger_gb": "it is 2",
    "distributed.backend": "the variable GRUPPO_DIST_BACKEND sets it",
    "objective.running_decay": "it is 0.99",
    "objective.tau_pos": "it is 1",
    "objective.tau_neg": "it is 1.05",
}
"""Options of earlier versions, and what holds in their place."""
SUFFIXES = (".toml", ".yaml", ".yml", ".json")


class EntryError(GruppoError):
    """An entry, named by ``option``, that is unknown or has a value of the wrong type."""


class UnknownEntry(EntryError):
    """An entry that the config does not have."""


# --- dicts ----------------------------------------------------------------------------------------


def to_dict(config: Config) -> dict[str, Any]:
    """Nested settings; the options of the modality under its name."""
    data = dataclasses.asdict(config)
    section = data.pop("modality")
    return data if section is None else data | {section_name(config.modality): section}


def from_dict(data: Mapping[str, Any]) -> Config:
    """A config from nested settings. An unknown or ill-typed entry is refused with the nearest
    name.

    With vLLM servers, an objective that does not say otherwise corrects for their arithmetic.
    """
    engine, objective = data.get("engine"), data.get("objective", {})
    if (engine.get("kind") if isinstance(engine, Mapping) else engine) == "vllm":
        if isinstance(objective, str):
            # A preset says nothing about servers: its correction "none" is a default, and no
            # choice.
            objective = {
                k: v
                for k, v in dataclasses.asdict(preset(objective)).items()
                if (k, v) != NO_CORRECTION
            }
        if isinstance(objective, Mapping):
            data = {**data, "objective": {"correction": "truncate", **objective}}
    return build(Config, data)


def change(config: Config, changes: Mapping[str, Any]) -> Config:
    """A config with new values by dotted name: ``{"rollout.group_size": 4, "objective": "ppo"}``.

    A section can be changed together with its entries. An objective without a critic resets the
    config's critic; a critic among the changes stays, and is refused later.
    """
    # By way of a dict, so that values are checked and converted as those of a file are.
    data = to_dict(config)
    for name, value in sorted(
        changes.items(), key=lambda item: item[0].count(".")
    ):  # sections before their entries
        *path, leaf = name.split(".")
        value, section = _plain(value), data
        for part in path:
            if isinstance(section, list | tuple):
                if part not in map(str, range(len(section))):
                    has = f"it has {len(section)}, counted from 0" if section else "it has none"
                    raise GruppoError(
                        f"{name}: the list has no entry {part}; {has}. Set the whole list.",
                        option=name,
                    )
                section = section[int(part)]
            else:
                section = section.setdefault(part, {}) if isinstance(section, dict) else None
        if not isinstance(section, dict):
            raise GruppoError(
                f"{name}: {path[-1]} is a value, not a section of the config. Set {path[-1]} "
                f"itself.",
                option=name,
            )
        if name == "objective":
            value = _plain(preset(value)) if isinstance(value, str) else value
            if "critic" not in changes and not (
                isinstance(value, Mapping) and value.get("baseline") == "critic"
            ):
                data["critic"] = _plain(CriticConfig())
        elif name in ("engine", "environment") and isinstance(value, str):
            value = {**data[name], "kind": value}
        elif name == "modality" and changes[name] is not None:
            leaf = section_name(changes[name])
        section[leaf] = value
    kind = data["engine"].get("kind") if isinstance(data["engine"], Mapping) else None
    # ``from_dict`` then adds the correction that servers need.
    is_chosen = (
        kind == "vllm" and kind != config.engine.kind
    )  # not where an engine of its own was set before
    if (
        is_chosen
        and "objective.correction" not in changes
        and config.objective.correction == "none"
    ):
        data["objective"] = {k: v for k, v in data["objective"].items() if (k, v) != NO_CORRECTION}
    return from_dict(data)


def _plain(value: Any) -> Any:
    """A value as ``to_dict`` gives it: sections as dicts, paths as strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def preset(name: str) -> Objective:
    """The objective of a preset's name."""
    # In the shell also as dr-grpo.
    objective = PRESETS.get(name.lower().replace("-", "_"))
    if objective is None:
        hint = f"{did_you_mean(name.lower(), PRESETS)} Presets: {', '.join(PRESETS)}."
        raise GruppoError(f"objective {name or '(nothing)'} is no preset.{hint}")
    return objective


def build(kind: Any, data: Mapping[str, Any], prefix: str = "") -> Any:
    """A dataclass from nested settings; ``prefix`` is its dotted name in the config, with a dot."""
    hints = {name: hint for name, (hint, _, _) in fields_of(kind).items()}
    if kind is Config:  # the options of a modality stand under its name
        hints |= sections()
        hints["modality"] = type(None)
    values: dict[str, Any] = {}
    for name, value in data.items():
        entry = f"{prefix}{name}"
        if name not in hints and entry in REMOVED:
            problem = f"{entry} is no longer an option: {REMOVED[entry]}. Leave it out."
            raise EntryError(problem, option=entry)
        if name not in hints:
            hint = did_you_mean(name, hints, f" Known: {', '.join(sorted(hints))}.", prefix=prefix)
            raise UnknownEntry(f"the config has an unknown entry {entry}.{hint}", option=entry)
        hint, inner = hints[name], nested_type(hints[name])
        is_list = isinstance(value, list | tuple) and all(
            isinstance(item, Mapping) for item in value
        )
        if hint is Objective and isinstance(value, str):
            values[name] = preset(value)
        elif hint in (EngineConfig, EnvironmentConfig) and isinstance(value, str):
            values[name] = hint(value)
        elif dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
            values[name] = build(hint, value, f"{entry}.")
        elif inner is not None and is_list:
            values[name] = tuple(
                build(inner, item, f"{entry}.{n}.") for n, item in enumerate(value)
            )
        else:
            if name.endswith("_kwargs") and isinstance(
                value, Mapping
            ):  # a dict in Python, a table in TOML
                value = json.dumps(value)
            try:
                values[name] = convert(hint, value)
            except ValueError:
                needed = describe_type(hint)
                if name == "modality":
                    needed = (
                        f"null: a modality's options have a section of their own, "
                        f"{' or '.join(sections())}"
                    )
                raise EntryError(
                    f"{entry} is {value!r:.80}; it needs {needed}.", option=entry
                ) from None
    modalities = [name for name in values if kind is Config and name in sections()]
    if len(modalities) > 1:
        two = " and ".join(modalities[:2])
        raise EntryError(
            f"the config has sections of two modalities, {two}. Keep one.", option=modalities[1]
        )
    for name in modalities:
        values["modality"] = values.pop(name)
    try:
        return kind(**values)
    except GruppoError as error:
        if kind is Stage:
            error.problem = f"{prefix}{error.problem}"
        raise


# --- files ----------------------------------------------------------------------------------------


def load(path: Path) -> Config:
    """The config of a .toml, .yaml or .json file; an error names the line where it can be found."""
    return read(
        path, from_dict, "a config file is needed: TOML, YAML or JSON, such as a run's config.json."
    )


def read(path: Path, make: Callable[[Mapping[str, Any]], T], needed: str) -> T:
    """What ``make`` returns for the settings of a file; the line of an ``EntryError`` is added to
    it."""
    try:
        text = read_file(path, MAX_BYTES).decode("utf-8")
        data = _parse(text, path.suffix)
        if any(
            isinstance(value, int) and value.bit_length() > 64
            for level in levels(data)
            for value in level
        ):
            raise ValueError("it has a whole number of more than 64 bits")
    except FileNotFoundError:
        guess = did_you_mean(
            path.name, [other.name for other in path.parent.glob(f"*{path.suffix}")]
        )
        raise GruppoError(f"{path} does not exist; {needed}{guess}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise GruppoError(
            f"{path} cannot be read as {path.suffix[1:].upper()} ({error}); {needed}"
        ) from None
    if not isinstance(data, dict):
        raise GruppoError(f"{path} holds a {type(data).__name__}; {needed}")
    try:
        return make(data)
    except EntryError as error:
        line = _line_of(text, error.option)
        error.problem = f"{path}{f', line {line}' if line else ''}: {error.problem}"
        raise error from None


def _parse(text: str, suffix: str) -> Any:
    if suffix == ".toml":
        if any(
            part.count(".") > MAX_DOTS for line in text.splitlines() for part in line.split("=")
        ):
            raise ValueError(f"a line has more than {MAX_DOTS} dots")
        return tomllib.loads(text)
    if suffix not in (".yaml", ".yml"):
        return parse_json(text)
    import yaml

    # Safe: a config file of somebody else must not construct Python objects.
    class Loader(yaml.SafeLoader):
        """YAML 1.1 reads 1e-6 as a string; numbers need a dot there."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):  # a few of them stand for billions of entries
                raise ValueError(
                    f"it refers to the anchor *{self.peek_event().anchor:.40}; write its value out"
                )
            return super().compose_node(parent, index)

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
        if (
            key.isdigit()
        ):  # the n-th [[stages]] of TOML, counted from the first, which has been found
            pattern, skip = rf"\s*\[\[{section}\]\]", int(key)
        found = [n for n in range(at, len(lines)) if re.match(pattern, lines[n])]
        if len(found) <= skip:
            return None
        at, section = found[skip], key
    return at + 1


def to_toml(config: Config) -> str:
    """The config as TOML that ``load`` reads back, with the help of each option as a comment."""
    tables: list[tuple[str, Any]] = [("", config)]
    for name in (field.name for field in dataclasses.fields(Config)):
        section = getattr(config, name)
        if dataclasses.is_dataclass(section) and not (name == "stage" and config.stages):
            tables.append((f"[{section_name(section) if name == 'modality' else name}]", section))
    tables += [("[[stages]]", stage) for stage in config.stages]
    lines = []
    for header, section in tables:
        if header:
            lines += ["", f"# {(type(section).__doc__ or '').strip().splitlines()[0]}", header]
        for name, (hint, _, doc) in fields_of(type(section)).items():  # type: ignore[arg-type]
            value = getattr(section, name)
            if (
                name == "modality"
                or dataclasses.is_dataclass(value)
                or nested_type(hint) is not None
            ):
                continue
            # JSON's spelling of texts, integers and lists is TOML's too; TOML has no null, and
            # Python's "inf".
            written = json.dumps("none" if value is None else value, ensure_ascii=False)
            written = repr(value) if isinstance(value, float) else written
            lines += [
                *(f"# {line}" for line in doc.partition("\n\n")[0].splitlines()),
                f"{name} = {written}",
            ]
    return "\n".join(lines) + "\n"
