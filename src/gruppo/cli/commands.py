"""The commands of ``gruppo``: parameters of a function are the arguments of its command, those
after * its options."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn

from gruppo.cli import help as help_text
from gruppo.cli.app import EXIT_STOPPED
from gruppo.cli.options import parse_config, parse_own
from gruppo.config import peer_options, serialization
from gruppo.config.schema import Config, EngineConfig, ExplainOptions, PlanOptions, TrainOptions
from gruppo.errors import DataError
from gruppo.loading import command_name, visible
from gruppo.recipes import RECIPES
from gruppo.recipes.open import run_stem
from gruppo.tracking.formatting import ARRAYS, as_text
from gruppo.types import GruppoError

TrustRun = Annotated[bool, "Import the code that the folder names, though you did not create it."]
TrustRemoteCode = Annotated[bool, "Allow code from a hub model's repository to run."]
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What moves the cursor, sets the clipboard or changes the order of text on a terminal."""


@contextmanager
def _until_stopped(path: Path) -> Iterator[None]:
    """Exit with the command that continues the run in ``path`` if a signal stops it; never with 0
    before its end."""
    from gruppo import distributed as dist
    from gruppo.trainer.loop import Stopped, how_to_continue

    process, leave = os.getpid(), os._exit
    problem = f"""before the run was complete. Remove that; what is saved continues with:
        {command_name()} resume {path}"""

    def leave_incomplete(status: int) -> NoReturn:
        if status == 0 and os.getpid() == process:  # not a child that was forked
            error = DataError(f"os._exit(0) was called {problem}")
            print(f"gruppo: {error}", file=sys.stderr, flush=True)
            status = error.exit_code
        leave(status)

    os._exit = leave_incomplete
    try:
        yield
    except (Stopped, KeyboardInterrupt):  # a second signal interrupts at once
        if dist.is_main():
            print(f"gruppo: {how_to_continue(path)}", file=sys.stderr)
        sys.exit(EXIT_STOPPED)
    except SystemExit as error:
        if error.code:
            raise
        raise DataError(f"sys.exit() was called {problem}") from None
    finally:
        os._exit = leave


def train(args: list[str]) -> None:
    """Train from the beginning."""
    own, args = parse_own(args, TrainOptions(), "train")
    replayed = own.replay
    if replayed:
        if not (Path(replayed) / "config.json").is_file() or (args and not args[0].startswith("-")):
            problem = f"--replay {replayed}: it needs the folder of a run, which has the recipe too"
            raise GruppoError(problem, advice="Give gruppo train --replay RUN --options")
        args = [replayed, *args]
    config = parse_config("train", args, trust_run=own.trust_run)
    if replayed:  # without the run's engine
        config = replace(config, engine=EngineConfig(lag=config.engine.lag, replay=replayed))
    from gruppo import api  # takes seconds: a wrong option is answered before

    if not config.name:  # the recipe, or the saved run without its time
        stem = run_stem(args[0]) + ("-replay" if replayed else "")
        config = replace(config, name=api.new_name(stem, config.runs_dir))
    with _until_stopped(Path(config.runs_dir) / config.name):
        api.finish(api.start(config, show=True, trust_run=own.trust_run), show=True)


def launch(args: list[str]) -> NoReturn:
    """Start trainers and vLLM servers, and keep them running until the run is complete."""
    from gruppo.launch import supervise

    sys.exit(supervise.launch(args))


def resume(
    run: Annotated[str, "Folder of the run, such as runs/arithmetic-20260101-120000."],
    *,
    allow_changes: Annotated[
        bool, "Continue though code, tokenizer, versions or threads have changed."
    ] = False,
    trust_run: TrustRun = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Continue a stopped or killed run from its newest complete checkpoint, to the bit."""
    from gruppo import api

    with _until_stopped(Path(run)):
        result = api.start(
            run,
            allow_changes=allow_changes,
            show=True,
            trust_run=trust_run,
            trust_remote_code=trust_remote_code,
        )
        api.finish(result, show=True)


def eval_(
    run: Annotated[str, "Folder of the run."],
    *,
    prompts: Annotated[int, "Number of held-out prompts."] = 256,
    data: Annotated[str, "Data to evaluate on; default: the run's held-out prompts."] = "",
    samples: Annotated[
        int, "Samples per prompt besides the greedy one, for mean@k and pass@k."
    ] = 0,
    show: Annotated[int, "Number of answers to print."] = 5,
    trust_run: TrustRun = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Evaluate a run's newest model on its held-out prompts with its rewards, at temperature 0."""
    from gruppo import inference
    from gruppo.tracking.samples import FOLDER, write_sheet

    result, rows = inference.evaluate_run(
        Path(run),
        prompts=prompts,
        data=data,
        samples=samples,
        trust_run=trust_run,
        trust_remote_code=trust_remote_code,
    )
    for row in rows[:show]:
        if isinstance(row["prompt"], ARRAYS) or "group" in row:  # an image, on the sheet below
            continue
        answer = f"'{as_text(row['completion'])}'   target {row['target']!r}"
        print(f"  '{as_text(row['prompt'])}' -> {answer}   reward {row['reward']:g}")
    sheet = Path(run) / FOLDER / "evaluated.png"
    if write_sheet(sheet, rows):
        print(f"  images: {sheet}")
    unscored = result.prompts - result.scored
    interval = f"95% interval {result.low:.3f} to {result.high:.3f}"
    count = f"{result.prompts} held-out prompts" + (f", {unscored} not scored" if unscored else "")
    print(f"mean reward {result.mean:.3f}, {interval}, {count}")
    for name in (f"mean@{samples}", f"pass@{samples}") if samples else ():
        print(f"{name} {result.parts[name]:.3f}")


def sample(
    model: Annotated[str, "Folder of a run, or a model."],
    prompt: Annotated[tuple[str, ...], "One or more prompts."],
    *,
    n: Annotated[
        int, "Completions per prompt; to differ, those of a text model need a temperature above 0."
    ] = 1,
    temperature: Annotated[
        float, "0 is greedy, or the ODE of a diffusion model; 1 samples as in training."
    ] = 0.0,
    max_new_tokens: Annotated[int, "Maximum length of a completion."] = 64,
    seed: Annotated[int, "Random seed."] = 0,
    plain: Annotated[bool, "Continue the text as it is, without the chat template."] = False,
    chat_template_kwargs: Annotated[str, "Variables of the chat template, as JSON."] = "",
    folder: Annotated[str, "Folder for the images of a diffusion model."] = "samples",
    trust_run: TrustRun = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Sample from a run's model, or from any model folder, hub id or bundled model."""
    if not prompt:
        raise GruppoError(
            f'no prompt was given. For example: {command_name()} sample RUN "What is 3 + 4?"'
        )
    from gruppo import inference

    samples = inference.sample(
        model,
        prompt,
        Path(folder),
        n=n,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        seed=seed,
        is_plain=plain,
        chat_template_kwargs=chat_template_kwargs,
        trust_run=trust_run,
        trust_remote_code=trust_remote_code,
    )
    if isinstance(samples[0], Path):
        print(f"{len(samples) - 1} images in {folder}, all of them on {samples[-1]}")
        return
    for text_prompt, completions in zip(prompt, samples, strict=True):
        for completion in completions:
            text = str(completion).strip()
            if len(prompt) > 1 or n > 1:
                text = f"{text_prompt!r} -> {text!r}"
            elif sys.stdout.isatty():  # a pipe or a file gets the text as it was sampled
                text = _CONTROLS.sub(lambda match: visible(match[0]), text)
            print(text)


def export(
    run: Annotated[str, "Folder of a run, a model or an adapter."],
    folder: Annotated[str, "Folder to write, which must not exist; not needed with --push."] = "",
    *,
    adapter: Annotated[bool, "Keep the adapter separate, for peft."] = False,
    push: Annotated[str, "Upload it to this repository of the Hugging Face hub, OWNER/NAME."] = "",
    private: Annotated[bool, "Make the repository private."] = False,
    license: Annotated[str, "License for the model card."] = "",
    trust_run: TrustRun = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write a run's model as a folder that transformers or diffusers opens; an adapter is merged
    into its base."""
    from gruppo import export as exporting

    written = exporting.export(
        run,
        Path(folder) if folder else None,
        is_adapter_kept=adapter,
        push=push,
        private=private,
        license=license,
        trust_run=trust_run,
        trust_remote_code=trust_remote_code,
    )
    print(f"written to {written}")


def explain(args: list[str]) -> None:
    """Describe what ``train`` would do; with ``--names SYSTEM``, show the options under another
    system's names."""
    own, args = parse_own(args, ExplainOptions(), "explain")
    if own.names:
        peer_options.find_system(own.names)  # refused before a missing recipe is
        config = Config() if ":" in own.names and not args else parse_config("explain", args)
        print("\n".join(peer_options.explain_names(config, own.names)))
        return
    config = parse_config("explain", args, trust_run=own.trust_run)
    from gruppo import api

    print("\n".join(api.explain(config, trust_run=own.trust_run)))


def plan(args: list[str]) -> None:
    """Estimate step time, memory and the split of trainers and servers on a number of GPUs."""
    own, args = parse_own(args, PlanOptions(), "plan")
    config = parse_config("plan", args)
    from gruppo.plan import print_plan

    print_plan(config, own)


def doctor(
    run: Annotated[str, "Folder of the run, which may still be training."],
    *,
    json: Annotated[bool, "Print JSON."] = False,
    trust_run: TrustRun = False,
) -> None:
    """Check the metrics of a run for common problems: measurements, their meaning, options to
    change."""
    from gruppo.doctor import record
    from gruppo.doctor.report import diagnose, print_report

    print_report(diagnose(record.read(Path(run), trust_run=trust_run)), is_json=json)


def view(
    run: Annotated[tuple[str, ...], "One or more folders of runs, which may still be training."],
    *,
    port: Annotated[int, "Port on this machine; 0 for any free one."] = 8642,
) -> None:
    """Show runs in the browser while they train: curves, distributions, every completion, the
    doctor's findings."""
    from gruppo.view import server

    server.serve(run, port)


def report(
    run: Annotated[tuple[str, ...], "One or more folders of runs, finished or not."],
    *,
    output: Annotated[
        str, "File to write; default: report.html in the run's folder, or here for several runs."
    ] = "",
) -> None:
    """Write the page of gruppo view as one HTML file that needs no server."""
    from gruppo.view import report as page

    print(f"written to {page.write_report(run, Path(output) if output else None)}")


def config(args: list[str]) -> None:
    """Print the config of ``RECIPE --options`` as TOML."""
    print(serialization.to_toml(parse_config("config", args)), end="")


def recipes(name: Annotated[tuple[str, ...], "Name of a recipe."]) -> None:
    """List the built-in recipes, or describe one."""
    for recipe in name:
        if recipe not in RECIPES:
            raise GruppoError(f"unknown recipe {recipe!r}; it needs one of {', '.join(RECIPES)}.")
        print(f"{recipe}\n{RECIPES[recipe].__doc__}")
    for recipe, function in RECIPES.items() if not name else ():
        summary = " ".join((function.__doc__ or "").split()).partition(". ")[0].rstrip(".")
        indent = " " * 22
        print(textwrap.fill(f"{recipe:<20}  {summary}.", 100, subsequent_indent=indent))
    command = f"{command_name()} train {name[0] if name else 'NAME'}"
    print(f"\n{command} starts it, {command} --help lists its options.")


def completion(shell: Annotated[str, "bash, zsh or fish."]) -> None:
    """Print a completion script, as in: source <(gruppo completion bash)."""
    if shell not in ("bash", "zsh", "fish"):
        raise GruppoError(f"no completion for {shell!r}; it needs bash, zsh or fish.")
    print(help_text.completion(shell, COMMANDS, {name: list(RECIPES) for name in TAKING_RECIPE}))


def serve(
    model: Annotated[str, "The --model of the runs that will use the server."],
    options: Annotated[tuple[str, ...], "Options of vLLM, after --."],
    *,
    host: Annotated[str, "Address to listen on; any but a loopback one needs a key."] = "127.0.0.1",
    port: Annotated[int, "Port to listen on."] = 8000,
    lora_rank: Annotated[int, "Largest rank of adapters; 0 serves none."] = 0,
    python: Annotated[str, "Python with vLLM; default: VLLM_PYTHON, this one, or .venv-vllm."] = "",
) -> None:
    """Start a vLLM server for --engine vllm, as in: gruppo serve smollm2-135m -- --max-model-len
    1024."""
    from gruppo.cli import serve as server

    server.run(model, host=host, port=port, python=python, lora_rank=lora_rank, options=options)


_OF_RUNS = (train, launch, resume, eval_, sample, export, explain, plan, doctor, view, report)
_OTHERS = (serve, config, recipes, completion)
COMMANDS: dict[str, Callable[..., None]] = {
    run.__name__.rstrip("_"): run for run in (*_OF_RUNS, *_OTHERS)
}
TAKING_RECIPE = ("train", "launch", "explain", "plan", "config")
"""Commands of a recipe and the options of its config, which they parse themselves."""
