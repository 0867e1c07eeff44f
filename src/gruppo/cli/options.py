"""What is typed after a command: a recipe and options. A mistake is one line with the nearest
name."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from gruppo.cli import help as help_text
from gruppo.cli.help import HELP_FLAGS, Shortcuts
from gruppo.config import peer_options, serialization
from gruppo.config.options import options
from gruppo.config.schema import Config
from gruppo.config.sections import find_modality, sections
from gruppo.config.stages import planned
from gruppo.errors import as_flag
from gruppo.recipes import RECIPES
from gruppo.recipes.open import check_code, config_file, recipe_config
from gruppo.types import GruppoError

T = TypeVar("T")


def parse_config(command: str, args: Sequence[str], *, trust_run: bool = False) -> Config:
    """The config of ``RECIPE --options``; with ``--help`` its options are printed, and the process
    exits.

    Code that the config of a run names, and no option, is refused unless this user created the run
    or ``trust_run``.
    """
    if args and args[0] in HELP_FLAGS:
        return apply_options(Config(), args, f"{command} RECIPE")
    if not args or args[0].startswith("-"):
        raise GruppoError(f"""no recipe was given. gruppo {command} RECIPE, where RECIPE is
            {", ".join(RECIPES)}, file.py:function, or a config file (TOML, JSON).""")
    recipe, file, usage = recipe_config(args[0]), config_file(args[0]), f"{command} {args[0]}"
    if file is None or command == "config":  # the user's own code, or nothing is imported
        return apply_options(recipe, args[1:], usage)
    config = apply_options(replace(recipe, trust_remote_code=False), args[1:], usage)
    check_code(file, recipe, config, trust_run=trust_run)
    return config


def apply_options(config: Config, args: Sequence[str], command: str) -> Config:
    """The config with the options of a command line.

    ``--objective NAME`` chooses a preset, ``--stages NAME:STEPS,...`` the stages; the other
    options, applied after them, change single values. ``--stage.x`` together with ``--stages``
    changes what the stages are made from.
    """
    words = [_normalized(arg) for arg in args if arg not in HELP_FLAGS]
    for name, kind in sections().items():
        if config.modality is None and any(word.startswith(f"--{name}.") for word in words):
            config = replace(config, modality=kind())
    chosen, words = parse_own(words, Shortcuts(), command)
    if chosen.objective is not None:
        objective = serialization.preset(chosen.objective)
        # A property of the recipe's model.
        if config.objective.kl == "exact" and objective.kl_in == "loss":
            objective = replace(objective, kl="exact")
        config = serialization.change(config, {"objective": objective})
    if chosen.stages is not None:
        config, words = _set(config, words, command, "stage.")
        config = planned(chosen.stages, config)
    config, words = _set(config, words, command)
    if words:
        raise _not_understood(words, command, options(config), config)
    if any(arg in HELP_FLAGS for arg in args):
        # A recipe without a modality gets that of its --model, whose options the help would lack
        # otherwise.
        section = find_modality(config.model).config_section if config.model else None
        if config.modality is None and section is not None:
            config = replace(config, modality=section())
        print(help_text.config_help(config, command, is_complete="--help-all" in args))
        sys.exit(0)
    return config


def _normalized(arg: str) -> str:
    """``--optim.max_grad_norm`` with dashes, and ``--engine`` as in a config file, where
    engine = "vllm" sets the kind."""
    name, equals, value = arg.partition("=")
    if not re.fullmatch(r"--[a-z][\w.-]*", name):
        return arg
    name = re.sub(r"^--(engine|environment)$", r"--\1.kind", name)
    return name.replace("_", "-") + equals + value


def _set(
    config: Config, words: Sequence[str], command: str, prefix: str = ""
) -> tuple[Config, list[str]]:
    """The config with the options that begin with ``prefix``, and the other words."""
    table = {name: one for name, one in options(config).items() if name.startswith(prefix)}
    values, rest = help_text.options_parser(table, command).parse_known_args(words)
    return serialization.change(config, vars(values), is_text=True), rest


def parse_own(args: Sequence[str], own: T, command: str) -> tuple[T, list[str]]:
    """``own``, a dataclass of options besides those of a config, with those among ``args``; and the
    other arguments."""
    values, rest = help_text.options_parser(options(own), command).parse_known_args(args)
    return serialization.build(type(own), vars(values), is_text=True), rest


def parse_command(name: str, command: Callable[..., Any], args: Sequence[str]) -> dict[str, Any]:
    """The keyword arguments for a command's function; with ``--help`` they are described, and the
    process exits. Words after ``--`` are no options; the last list of arguments takes them."""
    parser = help_text.command_parser(name, command)
    at = args.index("--") if "--" in args else len(args)
    if any(arg in HELP_FLAGS for arg in args[:at]):
        print(parser.format_help().rstrip())
        sys.exit(0)
    values, words = parser.parse_known_intermixed_args(args[:at])
    literal = list(args[at + 1 :])
    for field, value in vars(values).items():
        if isinstance(value, list | tuple):
            setattr(values, field, (*value, *literal))
            literal = []
    if words or literal:
        raise _not_understood([*words, *literal], name, inspect.signature(command).parameters)
    return vars(values)


def _not_understood(
    words: Sequence[str], command: str, known: Collection[str], config: Config | None = None
) -> GruppoError:
    """An unknown option, with the option that was probably meant here or in another system."""
    name = words[0].partition("=")[0][2:].replace("-", "_")
    if not words[0].startswith("--"):
        problem = f"not understood: {' '.join(words)}."
    elif config is not None and name.startswith("stages."):
        stages = [f"--stages.{n} {stage.name}" for n, stage in enumerate(config.stages)]
        one = "one stage, --stage.lr and the like; --stages supervised:50,full names several"
        problem = f"unknown option {as_flag(name)}: the run has {', '.join(stages) or one}."
    else:
        hint = peer_options.suggestion(name, known, as_flag)
        problem = f"unknown option {as_flag(name)}. {hint}".rstrip()
    return GruppoError(f"{problem} gruppo {command} --help lists the options.")
