"""What is typed after a command: recipes and options. A mistake is one line with the nearest name."""

from __future__ import annotations

import dataclasses
import difflib
import io
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

import tyro

from gruppo.config import serialization
from gruppo.config.peer_names import elsewhere
from gruppo.config.schema import Config, CriticConfig, Stage
from gruppo.config.stages import KINDS, planned
from gruppo.core.objective import PRESETS
from gruppo.loading import is_file_name, load_object
from gruppo.recipes import RECIPES
from gruppo.types import GruppoError

NAMES_HELP = " --names trl, verl, ddpo or sources shows the settings under the names that they have there instead."


def config_from(command: str, args: Sequence[str]) -> Config:
    """``RECIPE --overrides`` as a config."""
    if not args or args[0].startswith("-"):
        if args and args[0] in ("-h", "--help"):
            parsed_config(Config(), ["--help"], f"{command} RECIPE")
        raise GruppoError(
            f"no recipe was given. gruppo {command} RECIPE, where RECIPE is {', '.join(RECIPES)}, file.py:function, or "
            "a run's config.json."
        )
    base, rest = with_stages(*with_preset(recipe_config(args[0]), args[1:]))
    return parsed_config(base, rest, f"{command} {args[0]}")


def recipe_config(name: str) -> Config:
    """The config that a built-in name, file.py:function, or a saved config gives."""
    if name in RECIPES:
        return RECIPES[name]()
    if name.endswith(".json") or (Path(name) / "config.json").is_file():
        path = Path(name) if name.endswith(".json") else Path(name) / "config.json"
        return replace(serialization.load(path), name="")
    if ":" not in name and not is_file_name(name):
        near = difflib.get_close_matches(name, RECIPES, 1)
        hint = f"Did you mean {near[0]}?" if near else f"Built in: {', '.join(RECIPES)}; or give file.py:function."
        raise GruppoError(f"unknown recipe {name!r}. {hint}")
    recipe = load_object(name)
    config = recipe() if callable(recipe) else recipe
    if not isinstance(config, Config):
        raise GruppoError(f"{name} gives a {type(config).__name__}; a recipe returns a gruppo.Config.")
    return config


def stem_of(recipe: str) -> str:
    """A recipe as the start of a run's name: a saved config gives its run's, without the time."""
    path = Path(recipe)
    saved = path.parent.name if path.name == "config.json" else path.name if path.is_dir() else ""
    return re.sub(r"-\d{8}-\d{6}(-\d+)?$", "", saved) or path.stem.split(":")[0] or "run"


def with_preset(config: Config, args: Sequence[str]) -> tuple[Config, list[str]]:
    """``--objective NAME`` chooses a preset, which further ``--objective.x`` options change."""
    name, rest = taken(args, "--objective")
    if name is None:
        return config, rest
    objective = serialization.preset(name)
    if config.objective.kl == "exact" and objective.kl_in == "loss":  # of the recipe's model, not of an algorithm
        objective = replace(objective, kl="exact")
    critic = config.critic if objective.has_critic else CriticConfig()  # the recipe's goes with the recipe's objective
    return replace(config, objective=objective, critic=critic), rest


def with_stages(config: Config, args: Sequence[str]) -> tuple[Config, list[str]]:
    """``--stages supervised:50,ramp:30,full`` names the parts of the run; ``--stages.0.lr`` and the like change them.

    ``--stage.x`` options, and those of the recipe's stage, then are of the stages that are made from it.
    """
    text, rest = taken(args, "--stages")
    if text is None:
        return config, rest
    of_stage = [piece.split("=", 1)[0].startswith("--stage.") for piece in rest]
    own = [n for n, is_own in enumerate(of_stage) if is_own]
    values = [n + 1 for n in own if "=" not in rest[n] and n + 1 < len(rest)]
    those = {*own, *values}
    config = parsed_config(config, [rest[n] for n in sorted(those)], "train")
    return planned(text, config), [piece for n, piece in enumerate(rest) if n not in those]


def taken(args: Sequence[str], option: str) -> tuple[str | None, list[str]]:
    """The value of an option, None where it is not given and "" where nothing follows it, and the other arguments."""
    rest = [piece for arg in args for piece in (arg.split("=", 1) if arg.startswith(f"{option}=") else [arg])]
    _check_once(rest, {option: str})
    if option not in rest:
        return None, rest
    at = rest.index(option)
    return rest[at + 1] if at + 1 < len(rest) else "", rest[:at] + rest[at + 2 :]


def parsed_config(default: Config, args: Sequence[str], name: str) -> Config:
    """The default with the options applied."""
    options = {
        "default": default,
        "config": (tyro.conf.FlagConversionOff,),
        "description": "Options of a run; the defaults are the recipe's. --objective NAME chooses a preset: "
        f"{', '.join(PRESETS)}. --stages NAME:STEPS,NAME makes a run of several stages, of {', '.join(KINDS)}, as in "
        "--stages supervised:50,ramp:30,full; --stages.0.lr and the like then change one of them, counted from 0."
        + (NAMES_HELP if name.startswith("explain") else ""),
    }
    types = {"--objective": str, "--stages": str, **_fields(Config, "--")}
    for index in range(len(default.stages)):
        types |= _fields(Stage, f"--stages.{index}.")
    _check_stage_numbers(args, default.stages)
    return _parsed(Config, args, name, types, options)


def parsed(command: Callable[..., Any], args: Sequence[str], name: str) -> Any:
    """A command's own arguments."""
    hints = {f"--{name.replace('_', '-')}": hint for name, hint in typing.get_type_hints(command).items()}
    switches = {option.replace("--", "--no-", 1): hint for option, hint in hints.items() if hint is bool}
    return _parsed(command, args, name, hints | switches, {})


def _fields(kind: Any, prefix: str) -> dict[str, Any]:
    """Every leaf's option, and its type."""
    found: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(kind).items():
        option = prefix + name.replace("_", "-")
        found |= _fields(hint, f"{option}.") if dataclasses.is_dataclass(hint) else {option: hint}
    return found


def _parsed(target: Any, args: Sequence[str], name: str, types: Mapping[str, Any], options: dict[str, Any]) -> Any:
    _check_names(args, name, types)
    _check_once(args, types)
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return tyro.cli(target, args=list(args), prog=f"gruppo {name}", **options)
    except SystemExit as stop:
        if not stop.code:
            raise  # help was asked for, and shown
        raise GruppoError(_one_line(said.getvalue(), args, name, types)) from None


def _check_stage_numbers(args: Sequence[str], stages: Sequence[Stage]) -> None:
    """Refuse an option of a stage that the run does not have."""
    for arg in args:
        option = arg.split("=", 1)[0]
        match = re.fullmatch(r"--stages\.([^.]+)\.(.+)", option)
        if match is None or match[1] in map(str, range(len(stages))):
            continue
        field = match[2]
        if not stages:
            raise GruppoError(
                f"unknown option {option}: this run has one stage, --stage.{field}. Name several with --stages, as in "
                "--stages supervised:50,full."
            )
        names = [f"{number} {stage.name}".strip() for number, stage in enumerate(stages)]
        there = f"are the stages {' and '.join(names)}" if len(names) > 1 else f"is the stage {names[0]} alone"
        meant = next((n for n, stage in enumerate(stages) if stage.name == match[1]), len(stages) - 1)
        raise GruppoError(f"unknown option {option}: there {there}: --stages.{meant}.{field}.")


def _check_once(args: Sequence[str], types: Mapping[str, Any]) -> None:
    """Refuse an option that is given again: the parser would keep the last one and say nothing."""
    given = [arg.split("=", 1)[0].replace("_", "-") for arg in args if arg.startswith("--")]
    for option in given:
        if (times := given.count(option)) == 1 or option not in types:
            continue
        often = "twice" if times == 2 else f"{times} times"
        form = f"write {option} A B" if _is_list(types[option]) else "leave one of them out"
        raise GruppoError(f"{option} is given {often}; {form}.")


def _is_list(hint: Any) -> bool:
    inner = typing.get_args(hint)
    return typing.get_origin(hint) is tuple or any(typing.get_origin(kind) is tuple for kind in inner)


def _check_names(args: Sequence[str], name: str, types: Mapping[str, Any]) -> None:
    for arg in args:
        option = arg.split("=", 1)[0].replace("_", "-")
        if option.startswith("--") and option not in types and option not in ("--", "--help"):
            near = _nearest(option, types)
            hint = elsewhere(option) if near is None or not _is_leaf_of(near, option) else ""
            hint = f"{hint} " if hint else f"Did you mean {near}? " if near else ""
            raise GruppoError(f"unknown option {option}. {hint}gruppo {name} --help lists them.")


def _nearest(option: str, known: Mapping[str, Any]) -> str | None:
    """By the whole name, else by its last part: ``--lr`` means ``--optim.lr``."""
    leaves = {name.lstrip("-").rpartition(".")[2]: name for name in reversed(list(known))}
    leaf = option.lstrip("-").rpartition(".")[2]
    whole = difflib.get_close_matches(option, known, 1, cutoff=0.75)
    return (
        leaves.get(leaf)
        or next(iter(whole), None)
        or next((leaves[found] for found in difflib.get_close_matches(leaf, leaves, 1)), None)
    )


def _is_leaf_of(near: str, option: str) -> bool:
    return near.rpartition(".")[2].lstrip("-") == option.rpartition(".")[2].lstrip("-")


def _one_line(box: str, args: Sequence[str], name: str, types: Mapping[str, Any]) -> str:
    """What the parser says in a box of several lines, as one."""
    has_frame = "╭" in box  # the title stands in the frame, else on a line with a rule below it
    lines = [line.strip(" │╭╮╰╯|") for line in box.strip().splitlines()]
    rules = [n for n, line in enumerate(lines) if not line.strip("─-")]
    body = lines[1 : rules[0]] if has_frame else lines[rules[0] + 1 : rules[1]] if len(rules) > 1 else lines
    said = " ".join(" ".join(body).split())
    if found := re.search(r"(?:Error parsing |argument '?)(--[\w.-]+)", said):
        option = found[1].rstrip(".:")
        given = _given(args, option)
        needs = serialization.words(types[option]) if option in types else "a value"
        return f"{option} {given or 'has no value'}: it needs {needs}. gruppo {name} --help says more."
    said = said.replace("Unrecognized options:", "not understood:")
    return f"{said or 'the options are not understood'}. gruppo {name} --help lists the options."


def _given(args: Sequence[str], option: str) -> str:
    """The words after an option, up to the next one."""
    words: list[str] = []
    is_inside = False
    for arg in args:
        head, equals, tail = arg.partition("=")
        if arg.startswith("--"):
            is_inside = head.replace("_", "-") == option
            words = ([tail] if equals else []) if is_inside else words
        elif is_inside:
            words.append(arg)
    return " ".join(words)
