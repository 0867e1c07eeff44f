"""The commands of ``gruppo``: each takes its arguments and returns an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gruppo.cli import help as help_text
from gruppo.cli.app import EXIT_STOPPED
from gruppo.cli.options import parse_command, parse_config, pop_option, run_stem
from gruppo.config import peer_options, serialization
from gruppo.config.schema import Config
from gruppo.loading import command_name
from gruppo.recipes import RECIPES
from gruppo.tracking.formatting import as_text, is_array
from gruppo.types import GruppoError


def train(args: list[str]) -> int:
    """Train from the beginning."""
    config = parse_config("train", args)
    from gruppo import api

    if not config.name:
        config = replace(config, name=api.new_name(run_stem(args[0]), config.runs_dir))
    return _run(lambda watch: api.start(config, watch=watch), Path(config.runs_dir) / config.name)


@dataclass(frozen=True)
class ResumeOptions:
    """Continue a stopped or killed run from its newest complete checkpoint, to the bit."""

    run: str = ""
    """Folder of the run, such as runs/arithmetic-20260101-120000."""


def resume(args: list[str]) -> int:
    path = Path(parse_command(ResumeOptions, args, "resume", "run").run)
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
        dist.shutdown()
    return 0


@dataclass(frozen=True)
class EvalOptions:
    """Evaluate a run's newest model on its held-out prompts with its rewards, at temperature 0."""

    run: str = ""
    """Folder of the run."""
    prompts: int = 256
    """Number of held-out prompts."""
    show: int = 5
    """Number of answers to print."""


def evaluate(args: list[str]) -> int:
    options = parse_command(EvalOptions, args, "eval", "run")
    path = Path(options.run)
    from gruppo import inference

    result, rows = inference.evaluate_run(path, prompts=options.prompts)
    for row in (row for row in rows[: options.show] if not is_array(row["prompt"])):
        is_image = "group" in row  # shown on the sheet of images instead
        answer = "" if is_image else f" -> '{as_text(row['completion'])}'   target {row['target']!r}"
        print(f"  '{as_text(row['prompt'])}'{answer}   reward {row['reward']:g}")
    if (sheet := inference.evaluation_sheet(path, rows)) is not None:
        print(f"  pictures: {sheet}")
    unscored = f", {result.prompts - result.scored} not scored" if result.scored < result.prompts else ""
    print(
        f"mean reward {result.mean:.3f}, 95% interval {result.low:.3f} to {result.high:.3f}, "
        f"{result.prompts} held-out prompts{unscored}"
    )
    return 0


@dataclass(frozen=True)
class SampleOptions:
    """Sample from a run's model, or from any model folder, hub id or bundled model."""

    model: str = ""
    """Folder of a run, or a model."""
    prompt: tuple[str, ...] = ()
    """One or more prompts."""
    n: int = 1
    """Completions per prompt; to differ, those of a text model need a temperature above 0."""
    temperature: float = 0.0
    """0 is greedy, or the ODE of a diffusion model; 1 samples as in training."""
    max_new_tokens: int = 64
    """Maximum length of a completion."""
    seed: int = 0
    """Random seed."""
    plain: bool = False
    """Continue the text as it is, without the chat template."""
    folder: str = "pictures"
    """Folder for the images of a diffusion model."""


def sample(args: list[str]) -> int:
    options = parse_command(SampleOptions, args, "sample", "model", "prompt")
    if not options.prompt:
        raise GruppoError(f'no prompt was given. For example: {command_name()} sample RUN "What is 3 + 4?"')
    from gruppo import inference

    samples = inference.sample(
        options.model,
        options.prompt,
        Path(options.folder),
        n=options.n,
        temperature=options.temperature,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
        is_plain=options.plain,
    )
    if isinstance(samples[0], Path):
        print(f"{len(samples) - 1} images in {options.folder}, all of them on {samples[-1]}")
        return 0
    is_single = len(options.prompt) == 1 and options.n == 1
    for prompt, completions in zip(options.prompt, samples, strict=True):
        for completion in completions:
            text = (completion if isinstance(completion, str) else repr(completion)).strip()
            print(text if is_single else f"{prompt!r} -> {text!r}")
    return 0


@dataclass(frozen=True)
class ExportOptions:
    """Write a run's model as a folder that transformers or diffusers opens; an adapter is merged into its base."""

    run: str = ""
    """Folder of a run, a model or an adapter."""
    folder: str = ""
    """Folder to write, which must not exist."""
    adapter: bool = False
    """Keep the adapter separate, for peft."""


def export(args: list[str]) -> int:
    options = parse_command(ExportOptions, args, "export", "run", "folder")
    from gruppo import inference

    print(f"written to {inference.export(options.run, Path(options.folder), is_adapter_kept=options.adapter)}")
    return 0


def explain(args: list[str]) -> int:
    """Describe what ``train`` would do; with ``--names SYSTEM``, show the options under another system's names."""
    names, args = pop_option(args, "--names")
    if names is None:
        config = parse_config("explain", args)
        from gruppo import api

        print("\n".join(api.explain(config)))
        return 0
    if not names or names.startswith("-"):
        raise GruppoError(
            f"--names has no value; it needs one of {', '.join(peer_options.SYSTEMS)}, or one of their options, as in "
            f"{command_name()} explain --names trl:beta."
        )
    peer_options.find_system(names)  # refused before a missing recipe is
    config = Config() if ":" in names and not args else parse_config("explain", args)
    print("\n".join(peer_options.explain_names(config, names)))
    return 0


@dataclass(frozen=True)
class DoctorOptions:
    """Check the metrics of a run for common problems: measurements, their meaning, options to change."""

    run: str = ""
    """Folder of the run, which may still be training."""
    json: bool = False
    """Print JSON."""


def doctor(args: list[str]) -> int:
    options = parse_command(DoctorOptions, args, "doctor", "run")
    from gruppo.doctor import record, report

    report.print_report(report.diagnose(record.read(Path(options.run))), is_json=options.json)
    return 0


def config(args: list[str]) -> int:
    """Print the config of ``RECIPE --options`` as TOML."""
    print(serialization.to_toml(parse_config("config", args)), end="")
    return 0


@dataclass(frozen=True)
class RecipesOptions:
    """List the built-in recipes, or describe one."""

    name: tuple[str, ...] = ()
    """Name of a recipe."""


def recipes(args: list[str]) -> int:
    names = parse_command(RecipesOptions, args, "recipes", "name").name
    if unknown := [name for name in names if name not in RECIPES]:
        raise GruppoError(f"unknown recipe {unknown[0]!r}; it needs one of {', '.join(RECIPES)}.")
    for name in names:
        lines = (RECIPES[name].__doc__ or "").strip().splitlines()
        print(f"{name}\n    " + "\n    ".join(line.strip() for line in lines))
    if names:
        print(f"\n{command_name()} train {names[0]} starts it, {command_name()} explain {names[0]} describes it.")
        return 0
    width = max(map(len, RECIPES))
    for name, recipe in RECIPES.items():
        print(f"{name:<{width}}  {(recipe.__doc__ or '').strip().splitlines()[0]}")
    print(f"\n{command_name()} recipes NAME says more; {command_name()} train NAME --help lists its options.")
    return 0


@dataclass(frozen=True)
class CompletionOptions:
    """Print a completion script, as in: source <(gruppo completion bash)."""

    shell: str = ""
    """bash, zsh or fish."""


def completion(args: list[str]) -> int:
    shell = parse_command(CompletionOptions, args, "completion", "shell").shell
    if shell not in ("bash", "zsh", "fish"):
        raise GruppoError(f"no completion for {shell!r}; it needs one of bash, zsh, fish.")
    print(help_text.completion(shell, {name: kind for name, (_, kind) in COMMANDS.items()}, list(RECIPES)))
    return 0


COMMANDS: dict[str, tuple[Callable[[list[str]], int], type | None]] = {
    "train": (train, None),
    "resume": (resume, ResumeOptions),
    "eval": (evaluate, EvalOptions),
    "sample": (sample, SampleOptions),
    "export": (export, ExportOptions),
    "explain": (explain, None),
    "doctor": (doctor, DoctorOptions),
    "config": (config, None),
    "recipes": (recipes, RecipesOptions),
    "completion": (completion, CompletionOptions),
}
"""Each command with its options; None for those that take a recipe and the options of a config."""
