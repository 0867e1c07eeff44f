"""Using what was trained: evaluate it, ask it, plot how it came about."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gruppo.build import Parts, build, missing_parts
from gruppo.config import serialization
from gruppo.config.schema import Config, LoraConfig, Stage
from gruppo.core.objective import Objective
from gruppo.data.image_files import read_image
from gruppo.data.restoration import WithReference
from gruppo.loading import program
from gruppo.modalities.common.adapters import is_adapter, model_of
from gruppo.modalities.diffusion import ClassLabels
from gruppo.modalities.restoration import load_restorer
from gruppo.modalities.text import from_pretrained
from gruppo.modalities.text.bundled import BUNDLED, bundled_model
from gruppo.modalities.text.custom import names_function
from gruppo.rewards.images import to_pillow
from gruppo.tracking.images import Cell, SheetRow, draw, to_pil
from gruppo.tracking.samples import FOLDER, write_sheet
from gruppo.trainer import checkpoint, restorers
from gruppo.trainer.evaluate import Evaluated, evaluate_rows, held_out
from gruppo.trainer.models import kind_of, open_images
from gruppo.types import DataError, GruppoError, Prompt, Request, Sampling

PIPELINE_ADAPTER = "pytorch_lora_weights.safetensors"
"""As diffusers names it."""


def evaluate_run(path: Path, *, prompts: int) -> tuple[Evaluated, list[dict[str, Any]]]:
    """The run's final model on its held-out prompts; the result, and each answer."""
    config = serialization.load(path / "config.json")
    if prompts < 1:
        raise GruppoError(f"--prompts {prompts} leaves nothing to evaluate; it needs at least 1.")
    if not config.reward:
        raise GruppoError(
            f"{path} was trained without a reward, so nothing is measured. Ask it: {program()} sample {path}"
        )
    first, evaluation = config, replace(config.evaluation, prompts=prompts)
    config = replace(config, model=model_of(path), evaluation=evaluation, stage=Stage(), stages=(), lora=LoraConfig())
    config = replace(config, objective=Objective(), modality=None)  # nothing is trained
    config = replace(config, prompts=replace(config.prompts, difficulty_column=""))  # held out are all of them
    if missing := missing_parts(config, Parts()):
        raise GruppoError(f"this run's {' and '.join(missing)} came from Python objects, which a file does not hold.")
    policy = None
    if kind_of(config) == "text":  # an adapter stays beside its base
        policy = from_pretrained(config.model, compute=config.compute, trust_remote_code=config.trust_remote_code)
    run, _ = build(config, Parts(policy))
    if isinstance(run.source, WithReference):  # by now against the trained policy
        run.source = restorers.of_the_run(path, first, run.source)
    if not (asked := held_out(run, prompts)):
        raise DataError(
            f"the data of {path} have no held-out prompts to evaluate on. Train with "
            "--prompts.held-out-fraction above 0."
        )
    return evaluate_rows(run, asked)


def evaluation_sheet(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path | None:
    """The pictures of an evaluation on one sheet in the run's folder, each with its reward; None of texts."""
    file = path / FOLDER / "evaluated.png"
    return file if write_sheet(file, rows, f"{path.name}, evaluated") else None


def complete(
    model: str | Path,
    prompts: Sequence[str],
    *,
    n: int = 1,
    temperature: float = 0.0,
    max_new_tokens: int = 64,
    seed: int = 0,
    is_plain: bool = False,
) -> list[list[str]]:
    """``n`` completions of each prompt, as chat unless ``is_plain`` or the model has no chat template."""
    policy = from_pretrained(_path_of(model))
    chats = policy.chat.can_chat and not is_plain
    asked = [[{"role": "user", "content": text}] if chats else text for text in prompts]
    requests = [Request(Prompt(str(i), inputs, draw=i), n) for i, inputs in enumerate(asked)]
    rollouts = policy.sample(requests, Sampling(temperature=temperature, max_actions=max_new_tokens), seed=seed)
    texts = [output if isinstance(output, str) else output[-1]["content"] for output in rollouts.completions]
    return [texts[i * n : (i + 1) * n] for i in range(len(prompts))]


def is_of_images(model: str | Path) -> bool:
    """Whether a run's model, or any other, draws pictures."""
    return kind_of(Config(model=str(model))) != "text"


def pictures(
    model: str | Path,
    prompts: Sequence[str],
    folder: Path,
    *,
    n: int = 1,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[Path]:
    """``n`` pictures of each prompt as PNG files in a folder, and after them a sheet with all; drawn as in training,
    or at temperature 0 by the ODE."""
    if n < 1:
        raise GruppoError(f"--n {n} draws nothing; it needs at least 1.")
    if kind_of(Config(model=str(model))) == "restorer":
        return _restored(model, prompts, folder, n=n, temperature=temperature, seed=seed)
    policy, sampling = open_images(model)
    asked = [Prompt(str(i), _asked_for(policy, text), draw=i) for i, text in enumerate(prompts)]
    for prompt in asked:
        if why := policy.check_prompt(prompt, sampling):
            raise GruppoError(why)
    sampling = replace(sampling, temperature=float(temperature), noise="independent", train_from=0, train_to=0)
    rollouts = policy.sample([Request(prompt, n) for prompt in asked], sampling, seed=seed)
    files, lines = [], []
    folder.mkdir(parents=True, exist_ok=True)
    for place, (text, prompt) in enumerate(zip(prompts, asked, strict=True)):
        drawn = rollouts.completions[place * n : (place + 1) * n]
        stem = re.sub(r"[^\w-]+", "-", text)[:40].strip("-") or f"prompt-{prompt.id}"
        for number, picture in enumerate(drawn):
            files.append(folder / f"{place}-{stem}-{number}.png")
            to_pillow(picture).save(files[-1])
        lines.append(SheetRow(text, [Cell(to_pil(picture)) for picture in drawn]))
    sheet, _ = draw(lines, title=f"{model}")
    files.append(folder / "sheet.png")
    sheet.save(files[-1])
    return files


def _restored(
    model: str | Path, files: Sequence[str], folder: Path, *, n: int, temperature: float, seed: int
) -> list[Path]:
    """Image files, restored by the mean action; above temperature 0 by drawn ones. Beside each other on a sheet."""
    policy = load_restorer(model_of(model))
    sampling = Sampling(temperature=float(temperature), max_actions=policy.columns)
    written, lines = [], []
    given = [read_image(file, channels=policy.channels) for file in files]
    asked = [Prompt(file, picture, draw=i) for i, (file, picture) in enumerate(zip(files, given, strict=True))]
    for prompt in asked:
        if why := policy.check_prompt(prompt, sampling):
            raise GruppoError(why)
    folder.mkdir(parents=True, exist_ok=True)
    for place, prompt in enumerate(asked):
        drawn = policy.sample([Request(prompt, n)], sampling, seed=seed).completions
        stem = re.sub(r"[^\w-]+", "-", Path(prompt.id).stem)[:40].strip("-") or "picture"
        for number, picture in enumerate(drawn):
            written.append(folder / f"{place}-{stem}-{number}.png")
            to_pillow(picture).save(written[-1])
        cells = [Cell(to_pil(prompt.inputs), note="input"), *(Cell(to_pil(one)) for one in drawn)]
        lines.append(SheetRow("", cells))
    sheet, _ = draw(lines, title=f"{model}")
    written.append(folder / "sheet.png")
    sheet.save(written[-1])
    return written


def _asked_for(policy: Any, text: str) -> Any:
    """What was typed: the name of a class or its number, or a caption."""
    condition = policy.denoiser.condition
    is_number = isinstance(condition, ClassLabels) and text not in condition.names and text.isdecimal()
    return int(text) if is_number else text


def export(model: str | Path, folder: Path, *, is_adapter_kept: bool = False) -> Path:
    """A run's (or any) model as a folder of its own, an adapter added to its base; or the adapter as it is."""
    if folder.exists():
        raise GruppoError(f"the folder {folder} exists already. Name a new one, or delete it.")
    path = Path(_path_of(model))
    if is_adapter_kept:
        if (path / PIPELINE_ADAPTER).is_file():
            raise GruppoError(
                f"the adapter of a pipeline lies in {path} already, as {PIPELINE_ADAPTER}: load it with "
                "pipeline.load_lora_weights(folder). Leave --adapter out for the model."
            )
        if not is_adapter(path):
            raise GruppoError(
                f"{model} has no adapter: its weights themselves were trained. Leave --adapter out for the model."
            )
        return checkpoint.write_folder(folder, partial(_copy_adapter, path))
    policy: Any
    if kind_of(Config(model=str(model))) == "restorer":
        policy = load_restorer(_path_of(model))
    elif is_of_images(model):
        policy, _ = open_images(_path_of(model))
    else:
        policy = from_pretrained(path, compute="float32", is_merged=True)
    return checkpoint.write_folder(folder, policy.save)


def _copy_adapter(path: Path, folder: Path) -> None:
    """All that lies beside the adapter, but not the seal, which a new folder gets of its own."""
    shutil.copytree(path, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("COMPLETE"))


def _path_of(model: str | Path) -> str:
    """Where a run's model, a bundled one or a folder lies; a hub id as it is."""
    name = model_of(model)
    path = Path(name)
    is_folder = not names_function(name)
    if is_folder and not path.exists() and path.parent != Path() and path.parent.is_dir():  # no hub id: it is here
        raise GruppoError(f"there is no {path.name} in {path.parent}. Name a run's folder or a model that is there.")
    return str(bundled_model(name).path) if name in BUNDLED else name
