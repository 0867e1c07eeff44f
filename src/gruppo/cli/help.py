"""Help texts and shell completion, generated from the option tables."""

from __future__ import annotations

import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from gruppo.config.options import Option, as_text, is_list, options
from gruppo.config.schema import Config, LaunchConfig
from gruppo.config.sections import sections
from gruppo.config.stages import KINDS
from gruppo.core.objective import PRESETS
from gruppo.errors import as_flag

WIDTH, COLUMN = 100, 38

EXPERT = {
    "": "trust_remote_code",
    "back_off": "metric drop",
    "distributed": "shard offload_params timeout_s",
    "engine": "timeout_s max_mismatch replay colocated publish_dir",
    "environment": "max_reply_tokens timeout_s",
    "evaluation": "samples",
    "lora": "adapter load_in_4bit",
    "objective": "ratio scale_eps dims dual_clip adv_clip value_clip kl_gradient kl_mask "
    "correction_level "
    "correction_low correction_high clip_unit combine whiten",
    "optim": "betas eps recompute stop_kl",
    "prompts": "difficulty_column special_tokens chat_template chat_template_kwargs",
    "reference": "place update_rate update_every watch_prompts",
    "rollout": "first_samples stop",
    "saving": "completions",
    "scoring": "timeout_s isolate",
    "stage": "name steps until new_reference cons_coef difficulty weight_decay warmup_steps "
    "group_size",
}
"""Options that only ``--help-all`` lists, unless a recipe sets them."""
OF_CRITICS = re.compile(r"critic\..*|objective\.(gamma|lam|value_clip)|stage\.value_coef")
OF_TEXT = re.compile(
    r"environment\..*|engine\..*|rollout\.(max_new_tokens|temperature|top_k|top_p|stop)|objective\.(overlong|mask_truncated)|"
    r"stage\.(temperature|entropy_coef)|critic\.model"
)


def config_help(config: Config, command: str, *, is_complete: bool) -> str:
    """The options of a config with its values as defaults, one or two lines each; all of them if
    ``is_complete``."""
    lines = [f"usage: gruppo {command} [--option value ...]", ""]
    lines += textwrap.wrap(
        f"--objective NAME chooses a preset: {', '.join(PRESETS)}. --stages NAME:STEPS,NAME splits "
        f"the run into stages "
        f"({', '.join(KINDS)}), whose options are --stages.0.lr and so on.",
        WIDTH,
    )
    lines.append(
        "--trust-run imports code that the folder of a run or model names, though you did not "
        "create it."
    )
    if command.startswith("train"):
        lines.append(
            "--replay RUN, in place of a recipe, trains from the ledger of a run with --engine.lag."
        )
    if command.startswith("explain"):
        lines.append(
            "--gpus N estimates the memory of each of N GPUs, with --distributed.shard as it is "
            "set."
        )
        lines.append(
            "--names trl, verl, ddpo or sources shows the options under the names that they have "
            "there."
        )
    if command.startswith("launch"):
        lines += ["Options of vLLM follow --.", "launch:"]
        lines += [
            line
            for o in options(LaunchConfig()).values()
            for line in _option_lines(o, is_complete=is_complete)
        ]
    hidden = [re.compile(r"stages\..*")]
    hidden += [] if config.objective.has_critic else [OF_CRITICS]
    hidden += [] if config.modality is None else [OF_TEXT]
    hidden += [re.compile(r"stage\..*")] if config.stages else []
    section: str | None = None
    for name, option in sorted(
        options(config).items(), key=lambda item: "." in item[0]
    ):  # single options first
        if (
            not is_complete
            and option.value == option.default
            and (
                name.rpartition(".")[2] in EXPERT.get(name.rpartition(".")[0], "").split()
                or any(pattern.fullmatch(name) for pattern in hidden)
            )
        ):
            continue
        if (group := name.rpartition(".")[0]) != section:
            section = group
            lines.append(f"{group or 'run'}:")
        lines += _option_lines(option, is_complete=is_complete)
    return "\n".join(
        [*lines, "", "--help-all lists all options, with details." if not is_complete else ""]
    ).rstrip()


def parameters(command: Callable[..., Any]) -> tuple[dict[str, Option], dict[str, Option]]:
    """Positional arguments and options of a command, by the name of its parameter."""
    positional, named = dict[str, Option](), dict[str, Option]()
    hints = typing.get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        value = parameter.default
        option = Option(
            name, hints[name].__origin__, value, value, hints[name].__metadata__[0], None
        )
        (named if parameter.kind is parameter.KEYWORD_ONLY else positional)[name] = option
    return positional, named


def command_help(name: str, command: Callable[..., Any]) -> str:
    """The usage, description and options of a command."""
    positional, named = parameters(command)
    words = {
        field: f"{field.upper()} ..." if is_list(o.hint) else field.upper()
        for field, o in positional.items()
    }
    usage = " ".join(
        f"[{words[f]}]" if o.value is not inspect.Parameter.empty else words[f]
        for f, o in positional.items()
    )
    usage += " [--option value ...]" if named else ""
    lines = [f"usage: gruppo {name} {usage}", "", inspect.getdoc(command) or "", ""]
    lines += [
        f"  {field.upper():<{COLUMN - 4}}  {option.help}" for field, option in positional.items()
    ]
    return "\n".join(
        [
            *lines,
            *(
                line
                for option in named.values()
                for line in _option_lines(option, is_complete=True)
            ),
        ]
    )


def _option_lines(option: Option, *, is_complete: bool) -> list[str]:
    left = f"  {as_flag(option.name)} {_metavar(option.hint)}"
    summary, _, details = option.help.partition("\n\n")
    # "default: ..." in the text says more than an empty value.
    is_explained = option.value in (None, "", ()) and "efault: " in summary
    text = " ".join(
        (
            summary if is_explained else f"{summary} (default: {as_text(option.value) or 'empty'})"
        ).split()
    )
    # Beside the option if that takes at most two lines, else below it in the full width.
    if len(left) < COLUMN - 1 and len(text) <= 2 * (WIDTH - COLUMN) - 12:
        lines = textwrap.wrap(
            text, WIDTH, initial_indent=f"{left:<{COLUMN}}", subsequent_indent=" " * COLUMN
        )
    else:
        lines = [left, *textwrap.wrap(text, 2 * WIDTH, initial_indent=" " * 6)]
    if is_complete:
        lines += textwrap.wrap(details, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return lines


def _metavar(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "{" + ",".join(map(str, inner)) + "}"
    if origin in (typing.Union, types.UnionType):
        return "|".join(map(_metavar, inner))
    if origin is tuple:
        return (
            f"{_metavar(inner[0])} ..." if inner[-1] is Ellipsis else " ".join(map(_metavar, inner))
        )
    return {int: "INT", float: "FLOAT", str: "TEXT", bool: "{true,false}", type(None): "None"}.get(
        hint, "VALUE"
    )


# --- completion -----------------------------------------------------------------------------------


def all_options() -> dict[str, Option]:
    """The options of a config with the sections of all modalities."""
    found = options(Config())
    for name, kind in sections().items():
        found |= options(kind(), f"{name}.")
    return found


def completion(
    shell: str, commands: Mapping[str, Callable[..., Any]], recipes: Mapping[str, Sequence[str]]
) -> str:
    """A script that completes commands, recipes, options and their choices.

    ``recipes``: what stands before the options in those commands that take the options of a config.
    """
    config_options = all_options()
    tables = {
        name: config_options if name in recipes else parameters(run)[1]
        for name, run in commands.items()
    }
    tables["launch"] = options(LaunchConfig()) | config_options
    choices = {}
    for option in (option for table in tables.values() for option in table.values()):
        literals = [
            kind
            for kind in (option.hint, *typing.get_args(option.hint))
            if typing.get_origin(kind) is Literal
        ]
        choices[as_flag(option.name)] = " ".join(
            str(value) for kind in literals for value in typing.get_args(kind)
        )
    # fish has conditions and descriptions of its own; zsh runs the script of bash.
    if shell == "fish":
        lines = [f"complete -c gruppo -f -n __fish_use_subcommand -a '{' '.join(tables)}'"]
        for name, table in tables.items():
            where = f"complete -c gruppo -n '__fish_seen_subcommand_from {name}'"
            lines += [f"{where} -a '{' '.join(recipes[name])}'"] if name in recipes else []
            for option in table.values():
                text, values = (
                    option.help.partition("\n\n")[0].replace("'", ""),
                    choices[as_flag(option.name)],
                )
                takes = f"-x -a '{values}'" if values else "-r"
                lines.append(f"{where} -l {as_flag(option.name)[2:]} {takes} -d '{text}'")
        return "\n".join(lines)
    words = {name: [*map(as_flag, table), *recipes.get(name, ())] for name, table in tables.items()}
    of_command = "\n".join(
        f'    {name}) words="{" ".join(known)}" ;;' for name, known in words.items()
    )
    of_option = "\n".join(
        f'    {name}) words="{values}" ;;' for name, values in choices.items() if values
    )
    return f"""{"autoload -U bashcompinit && bashcompinit" if shell == "zsh" else ""}
_gruppo() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then words="{" ".join(tables)}"; else case "${{COMP_WORDS[1]}}" in
{of_command}
  esac; fi
  case "$prev" in
{of_option}
  esac
  COMPREPLY=( $(compgen -W "$words" -- "$cur") )
}}
complete -o default -F _gruppo gruppo""".lstrip()
