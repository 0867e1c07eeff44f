"""What is typed after a command: a recipe and options. A mistake is one line with the nearest
name."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from gruppo.cli import help as help_text
from gruppo.config import peer_options, serialization
from gruppo.config.options import (
    Option,
    check_ranges,
    convert,
    describe_type,
    is_list,
    options,
)
from gruppo.config.schema import Config, Stage
from gruppo.config.sections import section_name, sections
from gruppo.config.stages import planned
from gruppo.errors import as_flag
from gruppo.modalities import find_modality
from gruppo.recipes import RECIPES
from gruppo.recipes.open import check_code, config_file, recipe_config
from gruppo.types import GruppoError

T = TypeVar("T")

HELP_FLAGS = ("-h", "--help", "--help-all")


def parse_config(command: str, args: Sequence[str], *, trust_run: bool = False) -> Config:
    """The config of ``RECIPE --options``; with ``--help`` its options are printed, and the process
    exits.

    Code that the config of a run names, and no option, is refused unless this user created the run
    or ``trust_run``.
    """
    if args and args[0] in HELP_FLAGS:
        print(
            help_text.config_help(
                Config(), f"{command} RECIPE", is_complete=args[0] == "--help-all"
            )
        )
        sys.exit(0)
    if not args or args[0].startswith("-"):
        raise GruppoError(f"""no recipe was given. gruppo {command} RECIPE, where RECIPE is
            {", ".join(RECIPES)}, file.py:function, or a config file (TOML, YAML, JSON).""")
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
    # as in a config file, where engine = "vllm" sets the kind
    words = [
        re.sub(r"^--(engine|environment)(?=$|=)", r"--\1.kind", arg)
        for arg in args
        if arg not in HELP_FLAGS
    ]
    values, stray = _split(words, options(config))
    if stray:
        raise GruppoError(
            f"not understood: {' '.join(stray)}. gruppo {command} --help lists the options."
        )
    if "objective" in values:
        objective = serialization.preset(" ".join(values.pop("objective")))
        if (
            config.objective.kl == "exact" and objective.kl_in == "loss"
        ):  # a property of the recipe's model
            objective = replace(objective, kl="exact")
        config = serialization.change(config, {"objective": objective})
    if "stages" in values:
        of_stage = {name: values.pop(name) for name in [*values] if name.startswith("stage.")}
        config = _change(config, of_stage, command)
        # Only now: what --stage.x sets is in every stage that is made from the config's.
        config = planned(" ".join(values.pop("stages")), config)
    config = _change(config, values, command)
    if requested := [arg for arg in args if arg in HELP_FLAGS]:
        # A recipe without a modality gets that of its --model, whose options the help would lack
        # otherwise.
        if (
            config.modality is None
            and config.model
            and (kind := find_modality(config.model).config_section)
        ):
            config = replace(config, modality=kind())
        print(help_text.config_help(config, command, is_complete="--help-all" in requested))
        sys.exit(0)
    return config


def pop_switch(args: Sequence[str], option: str) -> tuple[bool, list[str]]:
    """Whether an option without a value is given, and the other arguments."""
    return option in args, [arg for arg in args if arg != option]


def pop_option(args: Sequence[str], option: str) -> tuple[str | None, list[str]]:
    """The value of one option (None without it, "" if no value follows), and the other
    arguments."""
    words = [
        word
        for arg in args
        for word in (arg.split("=", 1) if arg.startswith(f"{option}=") else [arg])
    ]
    if option not in words:
        return None, words
    if words.count(option) > 1:
        raise GruppoError(f"{option} is given twice; leave one of them out.")
    at = words.index(option)
    return "".join(words[at + 1 : at + 2]), words[:at] + words[at + 2 :]


def parse_own(args: Sequence[str], own: T, command: str) -> tuple[T, list[str]]:
    """``own``, a dataclass of options beside those of a config, with those among ``args``; and the
    other arguments."""
    changes, rest = dict[str, Any](), [*args]
    for name, option in options(own).items():
        at = next((n for n, arg in enumerate(rest) if arg.partition("=")[0] == as_flag(name)), 0)
        text, rest = pop_option(rest, as_flag(name))
        if (
            option.hint is bool and text is not None and text.lower() not in ("true", "false")
        ):  # a switch
            # --dry-run alone is true, and what follows it is an argument of its own.
            rest[at:at], text = [text] if text else [], "true"
        if text is not None:
            changes[name] = _parse(option, [text] if text else [], command)
    own = replace(own, **changes)  # type: ignore[type-var]
    check_ranges(own)
    return own, rest


def parse_command(name: str, command: Callable[..., Any], args: Sequence[str]) -> dict[str, Any]:
    """The keyword arguments for a command's function; with ``--help`` they are described, and the
    process exits."""
    at = args.index("--") if "--" in args else len(args)
    args, literal = args[:at], args[at + 1 :]  # words after -- are no options
    if any(arg in HELP_FLAGS for arg in args):
        print(help_text.command_help(name, command))
        sys.exit(0)
    positional, table = help_text.parameters(command)
    values, words = _split(args, table)
    words += literal
    if unknown := next((option for option in values if option not in table), ""):
        raise _unknown(unknown, name, table)
    parsed: dict[str, Any] = {
        option: _parse(table[option], value, name) for option, value in values.items()
    }
    for parameter, option in positional.items():
        if is_list(option.hint):
            parsed[parameter], words = tuple(words), []
        elif words:
            parsed[parameter], *words = words
        elif option.value is inspect.Parameter.empty:
            raise GruppoError(f"{parameter.upper()} is missing. gruppo {name} --help says more.")
    if words:
        raise GruppoError(
            f"not understood: {' '.join(words)}. gruppo {name} --help lists the options."
        )
    return parsed


def _split(
    args: Sequence[str], table: Mapping[str, Option]
) -> tuple[dict[str, list[str]], list[str]]:
    """The words of each option, by dotted name, and the words that belong to none."""
    # The table says how many words an option takes. An unknown one takes all: the error names the
    # option, not a word.
    values, stray, name = dict[str, list[str]](), list[str](), ""
    option: Option | None = None
    for arg in args:
        if arg.startswith("--") and len(arg) > 2:
            typed, equals, text = arg.partition("=")
            name = typed[2:].replace("-", "_")
            option = table.get(re.sub(r"^stages\.\d+\.", "stage.", name))
            if name in values:
                is_many = option is not None and is_list(option.hint)
                advice = f"write {as_flag(name)} A B" if is_many else "leave one of them out"
                raise GruppoError(f"{as_flag(name)} is given twice; {advice}.")
            values[name] = [text] if equals else []
            continue
        takes_word = name and (option is None or is_list(option.hint) or not values[name])
        # After a switch without a value, another word is not its value.
        is_after_switch = (
            option is not None and option.hint is bool and arg.lower() not in ("true", "false")
        )
        (values[name] if takes_word and not is_after_switch else stray).append(arg)
    return values, stray


def _change(config: Config, values: Mapping[str, list[str]], command: str) -> Config:
    """The config with options by dotted name; those of a modality bring its section."""
    for name in {name.partition(".")[0] for name in values} & sections().keys():
        if config.modality is None:
            config = replace(config, modality=sections()[name]())
        elif section_name(config.modality) != name:
            raise GruppoError(f"""--{name} options were given, but gruppo {command} has
                --{section_name(config.modality)} options. Leave the --{name} options out, or use a
                recipe of another modality.""")
    table, changes = options(config), {}
    for name, words in values.items():
        if name not in table:
            raise _unknown(name, command, table, config.stages)
        changes[name] = _parse(table[name], words, command)
    return serialization.change(config, changes) if changes else config


def _parse(option: Option, words: list[str], command: str) -> Any:
    value: Any = (
        words
        if is_list(option.hint)
        else words[0]
        if words
        else "true"
        if option.hint is bool
        else None
    )
    if value is not None:
        with suppress(ValueError):
            return convert(option.hint, value, is_text=True)
    raise GruppoError(f"""{as_flag(option.name)} {" ".join(words) or "has no value"}: it needs
        {describe_type(option.hint)}. gruppo {command} --help says more.""")


def _unknown(
    name: str, command: str, table: Mapping[str, Option], stages: Sequence[Stage] | None = None
) -> GruppoError:
    """An unknown option, with the option that was probably meant: of another stage, here, or in
    another system.

    ``stages``: those of the run, where the options are those of a config.
    """
    match = re.fullmatch(r"stages\.([^.]+)\.(.+)", name)
    if match and stages is not None and match[1] not in map(str, range(len(stages))):
        field = match[2].replace("_", "-")
        if not stages:
            return GruppoError(
                f"unknown option {as_flag(name)}: this run has one stage, --stage.{field}",
                advice="Name several with $stages, as in $stages supervised:50,full",
            )
        names = [f"{number} {stage.name}".strip() for number, stage in enumerate(stages)]
        existing = (
            f"are the stages {' and '.join(names)}"
            if len(names) > 1
            else f"is the stage {names[0]} alone"
        )
        index = next(
            (n for n, stage in enumerate(stages) if stage.name == match[1]), len(stages) - 1
        )
        return GruppoError(
            f"unknown option {as_flag(name)}: there {existing}: --stages.{index}.{field}."
        )
    hint = peer_options.suggestion(name, table, as_flag)
    return GruppoError(f"unknown option {as_flag(name)}. {hint}gruppo {command} --help lists them.")
