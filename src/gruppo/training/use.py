"""Using what was trained: evaluate it, ask it, plot how it came about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gruppo.core.objective import Objective
from gruppo.policies.text import from_pretrained
from gruppo.policies.text.bundled import BUNDLED, bundled_model
from gruppo.track.texts import program
from gruppo.training import config_file
from gruppo.training.build import Parts, build, missing_parts
from gruppo.training.evaluate import Evaluated, evaluate_rows, held_out
from gruppo.types import DataError, GruppoError, Prompt, Request, Sampling


def model_of(name: str | Path) -> str:
    """The model folder of a run, else the name as it is."""
    path = Path(name)
    final = path / "final"
    if (final / "COMPLETE").is_file() and not (final / "config.json").is_file():
        raise GruppoError(f"the model of {path} is a module of your own; load {final}/model.safetensors into it.")
    if (final / "COMPLETE").is_file():
        return str(final)
    if (path / "manifest.json").is_file():
        raise GruppoError(f"the run {path} has no final model yet. Finish it with {program()} resume {path}.")
    return str(name)


def evaluate_run(path: Path, *, prompts: int) -> tuple[Evaluated, list[dict[str, Any]]]:
    """The run's final model on its held-out prompts; the result, and each answer."""
    config = config_file.load(path / "config.json")
    if prompts < 1:
        raise GruppoError(f"--prompts {prompts} leaves nothing to evaluate; it needs at least 1.")
    evaluation = replace(config.evaluation, prompts=prompts)
    config = replace(config, model=model_of(path), evaluation=evaluation, stage=replace(config.stage, kl_coef=0.0))
    config = replace(config, objective=Objective())  # nothing is trained: no reference, no critic
    if missing := missing_parts(config, Parts()):
        raise GruppoError(f"this run's {' and '.join(missing)} came from Python objects, which a file does not hold.")
    run, _ = build(config, Parts())
    if not (asked := held_out(run, prompts)):
        raise DataError(
            f"the data of {path} have no held-out prompts to evaluate on. Train with "
            "--prompts.held-out-fraction above 0."
        )
    return evaluate_rows(run, asked)


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
    name = model_of(model)
    path = bundled_model(name).path if name in BUNDLED else name
    policy = from_pretrained(path)
    chats = policy.chat.can_chat and not is_plain
    asked = [[{"role": "user", "content": text}] if chats else text for text in prompts]
    requests = [Request(Prompt(str(i), inputs, draw=i), n) for i, inputs in enumerate(asked)]
    rollouts = policy.sample(requests, Sampling(temperature=temperature, max_actions=max_new_tokens), seed=seed)
    texts = [output if isinstance(output, str) else output[-1]["content"] for output in rollouts.outputs]
    return [texts[i * n : (i + 1) * n] for i in range(len(prompts))]
