"""Help texts and shell completion, generated from the option tables."""

from __future__ import annotations

import inspect
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from gruppo.config.options import Option, as_text, flag, is_list, options
from gruppo.config.schema import Config
from gruppo.config.sections import sections
from gruppo.config.stages import KINDS
from gruppo.core.objective import PRESETS

WIDTH, COLUMN = 100, 38

EXPERT = {
    *("rollout.refill_by", "rollout.max_group_size", "optim.betas", "optim.eps", "optim.terms_every"),
    *("objective.scale_eps", "objective.running_decay", "objective.dims", "objective.tau_pos", "objective.tau_neg"),
    *("objective.kl_gradient", "objective.kl_mask", "objective.correction_level", "objective.correction_low"),
    *("objective.correction_high", "objective.clip_unit", "objective.combine", "objective.whiten"),
    *("stage.name", "stage.steps", "stage.until", "stage.cons_coef", "stage.difficulty", "stage.weight_decay"),
    *("reference.watch_prompts", "evaluation.along_steps", "prompts.difficulty_column"),
    *("environment.max_reply_tokens", "environment.timeout_s", "back_off.drop", "lora.adapter"),
}
"""Options that only ``--help-all`` lists, unless a recipe sets them."""
OF_CRITICS = {"objective.gamma", "objective.lam", "objective.value_clip", "stage.value_coef"}
"""With ``critic.*``, listed where the objective has a critic."""
OF_TEXT = {
    *("rollout.max_new_tokens", "rollout.temperature", "rollout.top_k", "rollout.top_p", "rollout.stop"),
    *("objective.overlong", "objective.mask_truncated", "stage.temperature", "stage.entropy_coef", "critic.model"),
}
"""With ``environment.*``, not listed for models of images."""


def config_help(config: Config, command: str, *, is_complete: bool) -> str:
    """The options of a config with its values as defaults, one or two lines each; all of them if ``is_complete``."""
    lines = [f"usage: gruppo {command} [--option value ...]", ""]
    lines += textwrap.wrap(
        f"--objective NAME chooses a preset: {', '.join(PRESETS)}. --stages NAME:STEPS,NAME splits the run into stages "
        f"({', '.join(KINDS)}), whose options are --stages.0.lr and so on.",
        WIDTH,
    )
    if command.startswith("explain"):
        lines.append("--names trl, verl, ddpo or sources shows the options under the names that they have there.")
    section: str | None = None
    table = options(config)
    for name in sorted(table, key=lambda name: "." in name):  # the sort is stable: single options first
        option, group = table[name], name.rpartition(".")[0]
        is_critic = name in OF_CRITICS or group == "critic"
        is_hidden = name in EXPERT or (is_critic and not config.objective.has_critic)
        is_hidden |= config.modality is not None and (name in OF_TEXT or group == "environment")
        is_hidden |= (group == "stage" and bool(config.stages)) or group.startswith("stages.")
        if is_hidden and not is_complete and option.value == option.default:
            continue
        if group != section:
            section = group
            lines.append(f"{group or 'run'}:")
        lines += _option_lines(option, is_complete=is_complete)
    return "\n".join([*lines, "", "--help-all lists all options, with details." if not is_complete else ""]).rstrip()


def command_help(kind: type, name: str, positional: Sequence[str]) -> str:
    """The usage, description and options of a command."""
    table = options(kind())
    usage = " ".join(f"{field.upper()} ..." if is_list(table[field].hint) else field.upper() for field in positional)
    lines = [f"usage: gruppo {name} {usage} [--option value ...]", "", inspect.getdoc(kind) or "", ""]
    for field, option in table.items():
        if field in positional:
            lines.append(f"  {field.upper():<{COLUMN - 4}}  {option.help}")
        else:
            lines += _option_lines(option, is_complete=True)
    return "\n".join(lines)


def _option_lines(option: Option, *, is_complete: bool) -> list[str]:
    left = f"  {flag(option.name)} {_metavar(option.hint)}"
    summary, _, details = option.help.partition("\n\n")
    is_explained = option.value in (None, "", ()) and "efault: " in summary
    text = " ".join((summary if is_explained else f"{summary} (default: {as_text(option.value) or 'empty'})").split())
    if len(left) < COLUMN - 1 and len(text) <= 2 * (WIDTH - COLUMN) - 12:
        lines = textwrap.wrap(text, WIDTH, initial_indent=f"{left:<{COLUMN}}", subsequent_indent=" " * COLUMN)
    else:
        lines = [left, *textwrap.wrap(text, 2 * WIDTH, initial_indent=" " * 6)]
    if is_complete and details:
        lines += textwrap.wrap(details, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return lines


def _metavar(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "{" + ",".join(map(str, inner)) + "}"
    if origin in (typing.Union, types.UnionType):
        return "|".join(_metavar(kind) for kind in inner)
    if origin is tuple:
        return f"{_metavar(inner[0])} ..." if inner[-1] is Ellipsis else " ".join(map(_metavar, inner))
    return {int: "INT", float: "FLOAT", str: "TEXT", bool: "{true,false}", type(None): "None"}.get(hint, "PATH")


# --- completion -------------------------------------------------------------------------------------------------------


def all_options() -> dict[str, Option]:
    """The options of a config with the sections of all modalities."""
    found = options(Config())
    for name, kind in sections().items():
        found |= options(kind(), f"{name}.")
    return found


def completion(shell: str, commands: Mapping[str, type | None], recipes: Sequence[str]) -> str:
    """A script that completes commands, recipes, options and their choices.

    ``commands``: each with the dataclass of its own options, or None where it takes a recipe and a config's options.
    """
    tables = {name: options(kind()) if kind else all_options() for name, kind in commands.items()}
    if shell == "fish":
        lines = [f"complete -c gruppo -f -n __fish_use_subcommand -a '{' '.join(commands)}'"]
        for name, table in tables.items():
            where = f"complete -c gruppo -n '__fish_seen_subcommand_from {name}'"
            if commands[name] is None:
                lines.append(f"{where} -a '{' '.join(recipes)}'")
            for option in table.values():
                text = option.help.partition("\n\n")[0].replace("'", "").replace("\n", " ")
                choices = f" -x -a '{' '.join(_choices(option))}'" if _choices(option) else " -r"
                lines.append(f"{where} -l {flag(option.name)[2:]}{choices} -d '{text}'")
        return "\n".join(lines)
    cases = []
    for name, table in tables.items():
        words = [flag(option.name) for option in table.values()] + (list(recipes) if commands[name] is None else [])
        cases.append(f'    {name}) words="{" ".join(words)}" ;;')
    choices_of = {flag(o.name): _choices(o) for table in tables.values() for o in table.values() if _choices(o)}
    choice_cases = "\n".join(f'    {name}) words="{" ".join(values)}" ;;' for name, values in choices_of.items())
    return f"""{"autoload -U bashcompinit && bashcompinit" if shell == "zsh" else ""}
_gruppo() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then words="{" ".join(commands)}"; else case "${{COMP_WORDS[1]}}" in
{chr(10).join(cases)}
  esac; fi
  case "$prev" in
{choice_cases}
  esac
  COMPREPLY=( $(compgen -W "$words" -- "$cur") )
}}
complete -o default -F _gruppo gruppo""".lstrip()


def _choices(option: Option) -> list[str]:
    kinds = [option.hint, *typing.get_args(option.hint)]
    return [str(value) for kind in kinds if typing.get_origin(kind) is Literal for value in typing.get_args(kind)]
