"""The commands behind ``cli``."""

from __future__ import annotations

import difflib
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import tyro

from gruppo.core.objective import PRESETS
from gruppo.loading import is_file_name, load_object
from gruppo.recipes import RECIPES
from gruppo.training import config as configs
from gruppo.training.config import Config
from gruppo.types import GruppoError, Tracker

EXIT_STOPPED = 75


def train(args: list[str]) -> int:
    """Train from the beginning."""
    config = config_from("train", args)
    from gruppo.training import api

    if not config.name:
        config = replace(config, name=api.new_name(Path(args[0]).stem.split(":")[0]))
    return _run(lambda watch: api.start(config, watch=watch), Path(config.runs_dir) / config.name)


def resume(args: list[str]) -> int:
    """Continue a run."""

    def command(run: tyro.conf.Positional[Path]) -> Path:
        """Continue a stopped or killed run from its newest whole checkpoint, to the bit.

        Args:
            run: The run's folder, such as runs/arithmetic-20260101-120000.
        """
        return run

    path = _parse(command, "resume", args)
    from gruppo.training import api

    return _run(lambda watch: api.resume(path, watch=watch), path)


def _run(go: Callable[[Any], Any], path: Path) -> int:
    from gruppo.track.report import closing_lines
    from gruppo.training.api import plot
    from gruppo.training.loop import Stopped

    try:
        result = go(_watch)
    except Stopped:
        print(f"gruppo: stopped and saved. Continue with: gruppo resume {path}", file=sys.stderr)
        return EXIT_STOPPED
    from rich.console import Console

    plot(result.folder)
    Console().print(closing_lines(result.folder, result.before, result.after, question=result.question))
    return 0


def _watch(config: Config, folder: Path) -> list[Tracker]:
    from gruppo.track.console import ConsoleTracker

    console = ConsoleTracker(config.steps, title=folder.name, samples_every=max(config.show_samples_every, 1))
    log = logging.getLogger("gruppo")
    for handler in [h for h in log.handlers if type(h) is logging.StreamHandler]:
        log.removeHandler(handler)
    log.addHandler(_ToConsole(console))
    return [console]


class _ToConsole(logging.Handler):
    """Log lines above the live screen."""

    def __init__(self, console: Any) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        say = self.console.warn if record.levelno >= logging.WARNING else self.console.note
        say(record.getMessage())


def evaluate(args: list[str]) -> int:
    """Greedy answers of a run's model to its held-out prompts."""

    def command(run: tyro.conf.Positional[Path], prompts: int = 256, show: int = 5) -> tuple[Path, int, int]:
        """Evaluate a run's newest model on the run's held-out prompts with its reward, at temperature 0.

        Args:
            run: The run's folder.
            prompts: How many held-out prompts.
            show: How many answers to print.
        """
        return run, prompts, show

    path, prompts, show = _parse(command, "eval", args)
    from gruppo.training import api

    done, rows = api.evaluate_run(path, prompts=prompts)
    for row in rows[:show]:
        print(
            f"  {shown(row['prompt'])!r} -> {shown(row['completion'])!r}   wanted {row['target']!r}   reward {row['reward']:g}"
        )
    unscored = f", {done.prompts - done.scored} not scored" if done.scored < done.prompts else ""
    print(
        f"mean reward {done.mean:.3f}, 95% interval {done.low:.3f} to {done.high:.3f}, {done.prompts} held-out prompts{unscored}"
    )
    return 0


def sample(args: list[str]) -> int:
    """Completions of a model."""

    def command(
        model: tyro.conf.Positional[str],
        prompt: tyro.conf.Positional[tuple[str, ...]],
        n: int = 1,
        temperature: float = 0.0,
        max_new_tokens: int = 64,
        seed: int = 0,
        plain: bool = False,
    ) -> tuple[Any, ...]:
        """Answer prompts with a run's model, or any model folder, hub id or bundled model.

        Args:
            model: A run's folder, or a model.
            prompt: One or more prompts.
            n: Completions of each prompt; above 1, a temperature above 0 makes them differ.
            temperature: 0 is greedy.
            max_new_tokens: Longest completion.
            seed: Another seed gives other completions.
            plain: Continue the text as it is, without the chat template.
        """
        return model, prompt, n, temperature, max_new_tokens, seed, plain

    model, prompts, n, temperature, longest, seed, plain = _parse(command, "sample", args)
    if not prompts:
        raise GruppoError('no prompt was given. For example: gruppo sample RUN "What is 3 + 4?"')
    from gruppo.training import api

    answers = api.complete(
        model, prompts, n=n, temperature=temperature, max_new_tokens=longest, seed=seed, is_plain=plain
    )
    for prompt, texts in zip(prompts, answers, strict=True):
        for text in texts:
            print(text.strip() if len(prompts) == 1 and n == 1 else f"{prompt!r} -> {text.strip()!r}")
    return 0


def explain(args: list[str]) -> int:
    """What ``train`` would do."""
    config = config_from("explain", args)
    from gruppo.training import explain as training_explain

    print("\n".join(training_explain.explain(config)))
    return 0


def recipes(args: list[str]) -> int:
    """The built-in recipes."""
    for name, recipe in RECIPES.items():
        lines = (recipe.__doc__ or "").strip().splitlines()
        print(f"{name}\n    " + "\n    ".join(line.strip() for line in lines))
    print(
        "\ngruppo train NAME starts one; gruppo explain NAME says what it would do; gruppo train NAME --help its options."
    )
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "resume": resume,
    "eval": evaluate,
    "sample": sample,
    "explain": explain,
    "recipes": recipes,
}


# --- a recipe and its overrides --------------------------------------------------------------------------------------


def config_from(command: str, args: list[str]) -> Config:
    """``RECIPE --overrides`` as a config."""
    if not args or args[0].startswith("-"):
        if args and args[0] in ("-h", "--help"):
            _options(Config(), ["--help"], f"{command} RECIPE")
        raise GruppoError(
            f"no recipe was given. gruppo {command} RECIPE, where RECIPE is {', '.join(RECIPES)}, file.py:function, or a "
            "run's config.json."
        )
    base = recipe_config(args[0])
    base, rest = with_preset(base, args[1:])
    return _options(base, rest, f"{command} {args[0]}")


def recipe_config(name: str) -> Config:
    """The config that a built-in name, file.py:function, or a saved config gives."""
    if name in RECIPES:
        return RECIPES[name]()
    if name.endswith(".json") or (Path(name) / "config.json").is_file():
        path = Path(name) if name.endswith(".json") else Path(name) / "config.json"
        return replace(configs.load(path), name="")
    if ":" not in name and not is_file_name(name):
        near = difflib.get_close_matches(name, RECIPES, 1)
        hint = f"Did you mean {near[0]}?" if near else f"Built in: {', '.join(RECIPES)}; or give file.py:function."
        raise GruppoError(f"unknown recipe {name!r}. {hint}")
    recipe = load_object(name)
    config = recipe() if callable(recipe) else recipe
    if not isinstance(config, Config):
        raise GruppoError(f"{name} gives a {type(config).__name__}; a recipe returns a gruppo.Config.")
    return config


def with_preset(config: Config, args: list[str]) -> tuple[Config, list[str]]:
    """``--objective NAME`` chooses a preset, which further ``--objective.x`` options change."""
    rest = [piece for arg in args for piece in (arg.split("=", 1) if arg.startswith("--objective=") else [arg])]
    if "--objective" not in rest:
        return config, rest
    at = rest.index("--objective")
    name = rest[at + 1].lower().replace("-", "_") if at + 1 < len(rest) else ""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, 1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise GruppoError(f"--objective {name or '(nothing)'} is no preset. {hint}Presets: {', '.join(PRESETS)}.")
    return replace(config, objective=PRESETS[name]), rest[:at] + rest[at + 2 :]


def _options(default: Config, args: list[str], name: str) -> Config:
    return tyro.cli(
        Config,
        default=default,
        args=args,
        prog=f"gruppo {name}",
        config=(tyro.conf.FlagConversionOff,),
        description="Options of a run; the defaults are the recipe's. --objective NAME chooses a preset: "
        + ", ".join(PRESETS),
    )


def _parse(command: Callable[..., Any], name: str, args: list[str]) -> Any:
    return tyro.cli(command, args=args, prog=f"gruppo {name}")


def shown(inputs: Any) -> str:
    """A prompt or completion on one line."""
    return inputs if isinstance(inputs, str) else " | ".join(str(message["content"]) for message in inputs)
