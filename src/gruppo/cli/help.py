"""Parsers of the commands, made from the options of a config and the signatures of functions: help
texts and shell completion."""

from __future__ import annotations

import argparse
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import shtab

from gruppo.config.options import Option, as_text, options
from gruppo.config.schema import Config, LaunchConfig
from gruppo.config.sections import sections
from gruppo.config.stages import KINDS
from gruppo.core.objective import PRESETS
from gruppo.errors import as_flag
from gruppo.types import GruppoError

WIDTH, COLUMN = 100, 36


def _names(*lines: str) -> tuple[str, ...]:
    return tuple(" ".join(lines).split())


EXPERT = _names(
    "trust_remote_code back_off. distributed. saving.completions scoring.isolate",
    "engine.timeout_s engine.max_mismatch engine.replay engine.colocated engine.publish_dir",
    "environment.max_reply_tokens environment.timeout_s evaluation.data evaluation.samples",
    "lora.adapter lora.load_in_4bit rollout.first_samples rollout.stop scoring.timeout_s",
    "objective.ratio objective.scale_eps objective.dims objective.dual_clip",
    "objective.adv_clip objective.value_clip objective.kl_gradient objective.kl_mask",
    "objective.correction_ objective.clip_unit objective.combine objective.whiten",
    "optim.betas optim.eps optim.final_lr_frac optim.recompute optim.stop_kl",
    "prompts.target_column prompts.difficulty_column prompts.special_tokens",
    "prompts.chat_template reference.place reference.update_ reference.watch_prompts",
    "stage.name stage.steps stage.until stage.new_reference stage.cons_coef",
    "stage.difficulty stage.weight_decay stage.warmup_steps stage.group_size stages.",
)
"""Beginnings of options that only ``--help-all`` lists, unless a recipe sets them."""
OF_CRITICS = ("critic.", "objective.gamma", "objective.lam", "stage.value_coef")
OF_TEXT = _names(
    "environment. engine. rollout.max_new_tokens rollout.temperature rollout.top_",
    "objective.overlong objective.mask_truncated stage.temperature stage.entropy_coef",
)
SHORTCUTS = {
    "objective": f"Preset of the objective: {', '.join(PRESETS)}.",
    "stages": f"Stages NAME:STEPS,NAME ({', '.join(KINDS)}), whose options are --stages.0.lr ...",
}
OWN = {
    "train": {"replay": "Run with --engine.lag to train from, in place of a recipe."},
    "explain": {
        "gpus": "Number of GPUs whose memory is estimated, with --distributed.shard.",
        "names": "System (trl, verl, ddpo or sources) whose names are shown; trl:beta for one.",
    },
}
"""Options of a command besides those of a config."""
CLOSING = """--trust-run imports code that the folder of a run or model names, though you did not
create it. --help-all lists all options, with details."""
METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", bool: "{true,false}"}


class Parser(argparse.ArgumentParser):
    """An argument parser whose mistakes are one line."""

    def __init__(self, **settings: Any) -> None:
        formatter = partial(argparse.HelpFormatter, max_help_position=COLUMN, width=WIDTH)
        super().__init__(
            allow_abbrev=False,
            add_help=False,
            formatter_class=formatter,
            **settings,
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse an option that is given twice, of which the last would silently count."""
        given = [str(arg).partition("=")[0] for arg in args or ()]
        for name, action in self._option_string_actions.items():
            if given.count(name) > 1:
                text = f"write {name} A B" if action.nargs == "*" else "leave one of them out"
                self.error(f"{name} is given twice; {text}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise GruppoError(f"{message.removeprefix('argument ')}. {self.prog} --help says more.")


def flags_parser(flags: Mapping[str, str], command: str) -> Parser:
    """Parser of options with one value each, by their help."""
    parser = Parser(prog=f"gruppo {command}")
    for name, text in flags.items():
        parser.add_argument(f"--{name}", metavar="VALUE", help=text)
    return parser


def options_parser(
    found: Mapping[str, Option], command: str, is_shown: Callable[[Option], bool] = bool
) -> Parser:
    """Parser of options, in groups of their sections; values stay text."""
    parser = Parser(prog=f"gruppo {command}")
    groups: dict[str, Any] = {}
    for name, option in found.items():
        section = name.rpartition(".")[0] or "run"
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        is_switch = option.hint is bool
        choices = [*option.choices, "none"] if option.value is None else option.choices
        groups[section].add_argument(
            as_flag(name),
            dest=name,
            default=argparse.SUPPRESS,
            nargs="*" if option.is_list else "?" if is_switch else None,
            const="true" if is_switch else None,
            choices=choices if option.choices else None,
            metavar=None if option.choices else METAVARS.get(option.hint, "VALUE"),
            help=_describe(option) if is_shown(option) else argparse.SUPPRESS,
        )
    return parser


def _describe(option: Option) -> str:
    # "default: ..." in the text says more than an empty value.
    is_explained = option.value in (None, "", ()) and "efault: " in option.summary
    default = "" if is_explained else f" (default: {as_text(option.value) or 'empty'})"
    return f"{option.help}{default}".replace("%", "%%")


def config_help(config: Config, command: str, *, is_complete: bool) -> str:
    """The options of a config with its values as defaults; all of them, with details, if
    ``is_complete``."""
    hidden = EXPERT + (("stage.",) if config.stages else ())
    hidden += () if config.objective.has_critic else OF_CRITICS
    hidden += () if config.modality is None else OF_TEXT

    def is_shown(option: Option) -> bool:
        is_set = option.value != option.default
        return is_complete or is_set or not option.name.startswith(hidden)

    found = options(config)
    if not is_complete:
        found = {name: replace(option, help=option.summary) for name, option in found.items()}
    name = command.split(" ")[0]
    parents = [flags_parser(SHORTCUTS | OWN.get(name, {}), command)]
    if name == "launch":
        parents.append(options_parser(options(LaunchConfig()), command))
    parents.append(options_parser(found, command, is_shown))
    usage = f"gruppo {command} [--option value ...]"
    return Parser(usage=usage, parents=parents, epilog=CLOSING).format_help().rstrip()


def command_parser(name: str, command: Callable[..., Any]) -> Parser:
    """Parser of a command: parameters of its function are arguments, those after * options."""
    parser = Parser(prog=f"gruppo {name}", description=inspect.getdoc(command))
    hints = typing.get_type_hints(command, include_extras=True)
    for field, parameter in inspect.signature(command).parameters.items():
        hint, text = hints[field].__origin__, hints[field].__metadata__[0]
        is_required = parameter.default is parameter.empty
        default = None if is_required else parameter.default
        if parameter.kind is not parameter.KEYWORD_ONLY:
            count = "*" if typing.get_origin(hint) is tuple else None if is_required else "?"
            parser.add_argument(field, nargs=count, default=default, help=text)
        elif hint is bool:
            parser.add_argument(as_flag(field), action="store_true", help=text)
        else:
            shown = "" if "efault: " in text else f" (default: {as_text(default) or 'empty'})"
            parser.add_argument(as_flag(field), type=hint, default=default, help=text + shown)
    return parser


def all_options() -> dict[str, Option]:
    """The options of a config with the sections of all modalities."""
    found = options(Config())
    for name, kind in sections().items():
        found |= options(kind(), f"{name}.")
    return found


def completion(
    shell: str, commands: Mapping[str, Callable[..., Any]], recipes: Mapping[str, Any]
) -> str:
    """A script that completes commands, recipes, options and their choices.

    ``recipes``: what stands before the options in those commands that take the options of a config.
    """
    parser = Parser(prog="gruppo")
    subparsers = parser.add_subparsers()
    for name, command in commands.items():
        if name in recipes:
            table = (options(LaunchConfig()) if name == "launch" else {}) | all_options()
            flags = flags_parser(SHORTCUTS | OWN.get(name, {}), name)
            parents = [flags, options_parser(table, name)]
        else:
            parents = [command_parser(name, command)]
        one = subparsers.add_parser(name, parents=parents, help=name)
        if name in recipes:
            one.add_argument("recipe", choices=recipes[name])
    return shtab.complete(parser, shell=shell)
