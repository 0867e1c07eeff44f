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
from gruppo.config.schema import (
    Config,
    ExplainOptions,
    LaunchConfig,
    PlanOptions,
    Shortcuts,
    TrainOptions,
)
from gruppo.config.sections import sections
from gruppo.errors import as_flag
from gruppo.types import GruppoError

WIDTH, COLUMN = 100, 36


def _names(*lines: str) -> tuple[str, ...]:
    return tuple(" ".join(lines).split())


EXPERT = _names(
    "trust_run trust_remote_code back_off. distributed. saving.completions scoring.isolate",
    "engine.timeout_s engine.max_mismatch engine.replay engine.colocated engine.publish_dir",
    "environment.max_reply_tokens environment.timeout_s evaluation.data evaluation.samples",
    "lora.adapter lora.load_in_4bit rollout.first_samples rollout.stop scoring.timeout_s",
    "objective.ratio objective.scale_eps objective.dims objective.dual_clip",
    "objective.adv_clip objective.value_clip objective.kl_gradient objective.kl_mask",
    "objective.correction_ objective.clip_unit objective.combine objective.whiten",
    "optim.betas optim.eps optim.final_lr_frac optim.recompute optim.stop_kl",
    "prompts.target_column prompts.special_tokens",
    "prompts.chat_template reference.place reference.update_ reference.watch_prompts",
    "stage.name stage.steps stage.until stage.new_reference stage.cons_coef",
    "stage.weight_decay stage.warmup_steps stage.group_size stages.",
)
"""Beginnings of options that only ``--help-all`` lists, unless a recipe sets them."""
OF_CRITICS = ("critic.", "objective.gamma", "objective.lam", "stage.value_coef")
OF_TEXT = _names(
    "environment. engine. rollout.max_new_tokens rollout.temperature rollout.top_",
    "objective.overlong objective.mask_truncated stage.temperature stage.entropy_coef",
)
HELP_FLAGS = ("-h", "--help", "--help-all")
OWN: dict[str, Any] = {
    "train": TrainOptions,
    "explain": ExplainOptions,
    "plan": PlanOptions,
    "launch": LaunchConfig,
}
"""Options of a command besides those of a config."""
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

    found = own_options(command.split(" ")[0]) | options(config)
    if not is_complete:
        found = {name: replace(option, help=option.summary) for name, option in found.items()}
    parser = options_parser(found, command, is_shown)
    parser.usage = f"gruppo {command} [--option value ...]"
    parser.epilog = "--help-all lists all options, with details."
    return parser.format_help().rstrip()


def own_options(command: str) -> dict[str, Option]:
    """Options of a command that takes those of a config, besides them."""
    return (options(OWN[command]()) if command in OWN else {}) | options(Shortcuts())


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
            one = options_parser(own_options(name) | all_options(), name)
            one.add_argument("recipe", choices=recipes[name])
        else:
            one = command_parser(name, command)
        subparsers.add_parser(name, parents=[one], help=name)
    return shtab.complete(parser, shell=shell)
