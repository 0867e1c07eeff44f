"""The commands behind ``cli``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import tyro

from gruppo.cli import EXIT_STOPPED
from gruppo.options import config_from, parsed, stem_of
from gruppo.recipes import RECIPES
from gruppo.track.texts import program, shown
from gruppo.types import GruppoError


def train(args: list[str]) -> int:
    """Train from the beginning."""
    config = config_from("train", args)
    from gruppo.training import api

    if not config.name:
        config = replace(config, name=api.new_name(stem_of(args[0]), config.runs_dir))
    return _run(lambda watch: api.start(config, watch=watch), Path(config.runs_dir) / config.name)


def resume(args: list[str]) -> int:
    """Continue a run."""

    def command(run: tyro.conf.Positional[Path]) -> Path:
        """Continue a stopped or killed run from its newest whole checkpoint, to the bit.

        Args:
            run: The run's folder, such as runs/arithmetic-20260101-120000.
        """
        return run

    path = parsed(command, args, "resume")
    from gruppo.training import api

    return _run(lambda watch: api.go_on(path, watch=watch), path)


def _run(go: Callable[[Any], Any], path: Path) -> int:
    from gruppo import dist
    from gruppo.training.api import finished
    from gruppo.training.loop import Stopped, how_to_continue
    from gruppo.training.watch import on_screen

    try:
        finished(go(on_screen), show=True)
    except (Stopped, KeyboardInterrupt):
        if dist.is_main():
            print(f"gruppo: {how_to_continue(path)}", file=sys.stderr)
        return EXIT_STOPPED
    finally:
        dist.stop()
    return 0


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

    path, prompts, show = parsed(command, args, "eval")
    from gruppo.training import use

    done, rows = use.evaluate_run(path, prompts=prompts)
    for row in rows[:show]:
        print(
            f"  '{shown(row['prompt'])}' -> '{shown(row['completion'])}'   wanted {row['target']!r}   "
            f"reward {row['reward']:g}"
        )
    unscored = f", {done.prompts - done.scored} not scored" if done.scored < done.prompts else ""
    print(
        f"mean reward {done.mean:.3f}, 95% interval {done.low:.3f} to {done.high:.3f}, "
        f"{done.prompts} held-out prompts{unscored}"
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

    model, prompts, n, temperature, longest, seed, plain = parsed(command, args, "sample")
    if not prompts:
        raise GruppoError(f'no prompt was given. For example: {program()} sample RUN "What is 3 + 4?"')
    from gruppo.training import use

    answers = use.complete(
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
        f"\n{program()} train NAME starts one; {program()} explain NAME says what it would do; "
        f"{program()} train NAME --help its options."
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
