"""The commands behind ``cli``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import tyro

from gruppo.cli.app import EXIT_STOPPED
from gruppo.cli.options import config_from, parsed, stem_of, taken
from gruppo.loading import program
from gruppo.recipes import RECIPES
from gruppo.tracking.formatting import is_array, shown
from gruppo.types import GruppoError


def train(args: list[str]) -> int:
    """Train from the beginning."""
    config = config_from("train", args)
    from gruppo import api

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
    from gruppo import api

    return _run(lambda watch: api.go_on(path, watch=watch), path)


def _run(go: Callable[[Any], Any], path: Path) -> int:
    from gruppo import distributed as dist
    from gruppo.api import finished
    from gruppo.trainer.loop import Stopped, how_to_continue
    from gruppo.trainer.watch import on_screen

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
    from gruppo import inference

    done, rows = inference.evaluate_run(path, prompts=prompts)
    for row in (row for row in rows[:show] if not is_array(row["prompt"])):  # a picture's are on the sheet alone
        is_picture = "group" in row  # it is on the sheet
        answer = "" if is_picture else f" -> '{shown(row['completion'])}'   wanted {row['target']!r}"
        print(f"  '{shown(row['prompt'])}'{answer}   reward {row['reward']:g}")
    if (sheet := inference.evaluation_sheet(path, rows)) is not None:
        print(f"  pictures: {sheet}")
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
        folder: Path = Path("pictures"),
    ) -> tuple[Any, ...]:
        """Answer prompts with a run's model, or any model folder, hub id or bundled model; an image model draws.

        Args:
            model: A run's folder, or a model.
            prompt: One or more prompts.
            n: Completions of each prompt; above 1, a temperature above 0 makes those of a text model differ.
            temperature: 0 is greedy; of an image model the ODE, and 1 draws as in training.
            max_new_tokens: Longest completion.
            seed: Another seed gives other completions.
            plain: Continue the text as it is, without the chat template.
            folder: Where an image model's pictures are written.
        """
        return model, prompt, n, temperature, max_new_tokens, seed, plain, folder

    model, prompts, n, temperature, longest, seed, plain, folder = parsed(command, args, "sample")
    if not prompts:
        raise GruppoError(f'no prompt was given. For example: {program()} sample RUN "What is 3 + 4?"')
    from gruppo import inference

    answers = inference.sample(
        model, prompts, folder, n=n, temperature=temperature, max_new_tokens=longest, seed=seed, is_plain=plain
    )
    if answers and isinstance(answers[0], Path):
        print(f"{len(answers) - 1} pictures in {folder}, all of them on {answers[-1]}")
        return 0
    for prompt, texts in zip(prompts, answers, strict=True):
        for text in texts:
            text = text if isinstance(text, str) else repr(text)
            print(text.strip() if len(prompts) == 1 and n == 1 else f"{prompt!r} -> {text.strip()!r}")
    return 0


def export(args: list[str]) -> int:
    """A model as a folder of its own."""

    def command(
        run: tyro.conf.Positional[str], folder: tyro.conf.Positional[Path], adapter: bool = False
    ) -> tuple[str, Path, bool]:
        """Write a run's model as a folder that transformers, or diffusers, opens by itself; an adapter is added.

        Args:
            run: A run's folder, or a model or adapter folder.
            folder: Where to; it must not exist.
            adapter: Keep the adapter as it is, for peft, instead of adding it to its base.
        """
        return run, folder, adapter

    model, folder, is_adapter_kept = parsed(command, args, "export")
    from gruppo import inference

    print(f"written to {inference.export(model, folder, is_adapter_kept=is_adapter_kept)}")
    return 0


def explain(args: list[str]) -> int:
    """What ``train`` would do; ``--names SYSTEM`` alone: its settings under the names of another system."""
    asked, args = taken(args, "--names")
    if asked is not None:
        return _names(asked, args)
    config = config_from("explain", args)
    from gruppo import api

    print("\n".join(api.explain(config)))
    return 0


def _names(asked: str, args: list[str]) -> int:
    """``--names trl RECIPE``; a single name, ``--names trl:beta``, needs no recipe."""
    from gruppo.config import peer_names
    from gruppo.config.schema import Config

    if not asked or asked.startswith("-"):
        raise GruppoError(
            f"--names has no value; it needs one of {', '.join(peer_names.NAMES)}, or one name of theirs as in "
            f"{program()} explain --names trl:beta."
        )
    peer_names.system_of(asked)  # before a recipe is asked for
    config = Config() if ":" in asked and not args else config_from("explain", args)
    print("\n".join(peer_names.asked(config, asked)))
    return 0


def doctor(args: list[str]) -> int:
    """Diagnose a run."""

    def command(run: tyro.conf.Positional[Path], json: bool = False) -> tuple[Path, bool]:
        """Check the metrics of a run for common problems: measurements, their meaning, options to change.

        Args:
            run: The run's folder; the run may be under way.
            json: Print it as JSON.
        """
        return run, json

    path, is_json = parsed(command, args, "doctor")
    from gruppo.doctor import report

    report.print_report(report.diagnose(path), is_json=is_json)
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
    "export": export,
    "explain": explain,
    "doctor": doctor,
    "recipes": recipes,
}
