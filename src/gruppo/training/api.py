"""Building a run from a config, starting it, continuing it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gruppo import dist
from gruppo.data.open import open_source
from gruppo.engines import LocalEngine
from gruppo.policies.reference import FrozenReference
from gruppo.policies.text import TextPolicy, from_pretrained
from gruppo.policies.text.bundled import BUNDLED, bundled_model
from gruppo.rewards.resolve import resolve_reward
from gruppo.rewards.score import RewardSet
from gruppo.track.plots import plot_run
from gruppo.training import config as configs
from gruppo.training import loop
from gruppo.training.config import Config
from gruppo.training.evaluate import Evaluated, evaluate_rows
from gruppo.training.folder import RunFolder
from gruppo.training.run import Run
from gruppo.types import DataError, GruppoError, Prompt, Request, Sampling, Tracker

IN_MEMORY = "<in memory>"
"""Written to a config in place of a Python object that has no name to load it by."""


@dataclass(frozen=True)
class Parts:
    """Python objects given in place of a config's names."""

    model: TextPolicy | None = None
    data: Any = None
    rewards: Sequence[Callable[..., Any]] | None = None


@dataclass(frozen=True)
class Result:
    """What a finished run returns."""

    folder: Path
    model: Path
    """The trained model's folder."""
    before: dict[str, Any] | None
    """Held-out evaluation before training: mean, low, high (95%), prompts."""
    after: dict[str, Any] | None
    tokens: int
    """Sampled in training."""
    seconds: float
    question: str
    """A prompt like those of the data, for people to try."""


def start(
    config: Config, parts: Parts | None = None, *, watch: Callable[[Config, Path], Sequence[Tracker]] | None = None
) -> Result:
    """Train from the beginning. ``watch`` makes further trackers once all is loaded, the console for one."""
    dist.start()
    parts = parts or Parts()
    configs.check(config)
    if not config.name:
        config = replace(config, name=new_name("run"))
    run, model_source = build(config, parts)
    folder = RunFolder.create(Path(config.runs_dir) / config.name, run.config)
    return _go(run, folder, watch, model_source=model_source, is_new=True)


def resume(
    path: str | Path, parts: Parts | None = None, *, watch: Callable[[Config, Path], Sequence[Tracker]] | None = None
) -> Result:
    """Continue a stopped or killed run to the bit, from its newest whole checkpoint, or from the beginning without one."""
    dist.start()
    path = Path(path)
    if not (path / "config.json").is_file():
        what = "has no config.json" if path.exists() else "does not exist"
        raise GruppoError(f"the run folder {path} {what}. Give the folder of a run, such as runs/arithmetic-...")
    config = configs.load(path / "config.json")
    missing = missing_parts(config, parts or Parts())
    if missing:
        raise GruppoError(
            f"this run's {' and '.join(missing)} came from Python objects. Continue it with "
            f"gruppo.resume({str(path)!r}, {', '.join(f'{m}=...' for m in missing)})."
        )
    run, model_source = build(config, parts or Parts())
    folder = RunFolder(path)
    folder.open()
    return _go(run, folder, watch, model_source=model_source, is_new=False)


def missing_parts(config: Config, parts: Parts) -> list[str]:
    named = {
        "model": config.model == IN_MEMORY and parts.model is None,
        "data": config.data == IN_MEMORY and parts.data is None,
        "reward": any(r.startswith(IN_MEMORY) for r in config.reward) and parts.rewards is None,
    }
    return [name for name, is_missing in named.items() if is_missing]


def build(config: Config, parts: Parts) -> tuple[Run, dict[str, Any]]:
    """All parts of a run, the cheap checks first; and where the model came from."""
    source = open_data(config, parts)
    rewards = RewardSet(
        [resolve_reward(reward) for reward in parts.rewards or config.reward],
        config.scoring.weights,
        config.scoring.timeout_s,
    )
    if hasattr(source, "columns"):
        rewards.check(reward_columns(source.columns, config))
    policy, model_source = open_model(config, parts)
    config = replace(config, compute=str(policy.compute_dtype).removeprefix("torch."))
    check_lengths(source, policy, config)
    run = Run(
        config=config,
        policy=policy,
        engine=LocalEngine(policy),
        source=source,
        rewards=rewards,
        optimizer=adamw(policy.module, config),
        reference=FrozenReference(policy) if config.stage.kl_coef > 0 else None,
    )
    return run, model_source


def reward_columns(columns: Sequence[str], config: Config) -> set[str]:
    """What a reward may ask for: the data's columns, and the target under the names answer and target."""
    targets = {"answer", "target", "solution", "label", config.prompts.target_column}
    return {*columns} | ({"answer", "target"} if targets & {*columns} else set())


def open_data(config: Config, parts: Parts) -> Any:
    return open_source(
        config.data if parts.data is None else parts.data,
        seed=config.seed,
        prompt_column=config.prompts.column,
        target_column=config.prompts.target_column,
        held_out_fraction=config.prompts.held_out_fraction,
    )


def open_model(config: Config, parts: Parts) -> tuple[TextPolicy, dict[str, Any]]:
    if parts.model is not None:
        return parts.model, {"name": config.model}
    path, source = config.model, {"name": config.model}
    if config.model in BUNDLED:
        found = bundled_model(config.model)
        path, source = str(found.path), {"name": config.model, "source": found.source, "sha256": found.sha256}
    policy = from_pretrained(path, compute=config.compute, trust_remote_code=config.trust_remote_code)
    return policy, source


def check_lengths(source: Any, policy: TextPolicy, config: Config) -> None:
    """Refuse data with a prompt that the model's context cannot hold, before anything is trained."""
    for prompt in source.finite() if hasattr(source, "finite") else ():
        if policy.context and len(str(prompt.inputs).encode()) + config.rollout.max_new_tokens < policy.context:
            continue  # a token is at least a byte
        if why := policy.refuse(prompt, config.rollout.sampling):
            raise DataError(why)


def adamw(module: torch.nn.Module, config: Config) -> torch.optim.AdamW:
    optim = config.optim
    return torch.optim.AdamW(
        [parameter for parameter in module.parameters() if parameter.requires_grad],
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        fused=True,
    )


def _go(run: Run, folder: RunFolder, watch: Any, *, model_source: dict[str, Any], is_new: bool) -> Result:
    began = time.perf_counter()
    try:
        if is_new:
            folder.write_manifest(run, model_source)
        is_going_on = not is_new and folder.restore(run)
        run.trackers = folder.trackers(from_step=run.step if is_going_on else None)
        if watch is not None and dist.is_main():
            run.trackers += watch(run.config, folder.path)
        loop.train(run, folder)
        model = folder.write_final(run)
    finally:
        for tracker in run.trackers:
            tracker.close()
        run.engine.close()
        folder.close()
    ends = loop.summary(run)
    seconds = time.perf_counter() - began
    tokens = int(run.totals["tokens"])
    return Result(folder.path, model, ends["before"], ends["after"], tokens, seconds, _question(run))


# --- the ten-line way --------------------------------------------------------------------------------------------------


def train(
    config: Config | None = None,
    *,
    model: Any = None,
    data: Any = None,
    reward: Any = None,
    steps: int | None = None,
    show: bool = True,
    **changes: Any,
) -> Result:
    """Train a model on data with a reward, and return where it is.

    ``model``: a hub id, a folder, a bundled name, or a ``TextPolicy``. ``data``: a name, a path, a list of dicts or strings, a
    Hugging Face data set, or a prompt source. ``reward``: a function in TRL's calling convention, a name, or a list of
    them. ``changes`` are further fields of ``Config``, dotted ones with two underscores: ``rollout__group_size=16``,
    ``optim__lr=1e-5``. A mistake raises ``GruppoError``.
    """
    config = change(config or Config(), changes if steps is None else {"steps": steps, **changes})
    rewards = None if reward is None else list(reward) if isinstance(reward, list | tuple) else [reward]
    config = replace(
        config,
        model=config.model if model is None else _name(model),
        data=config.data if data is None else _name(data),
        reward=config.reward if rewards is None else tuple(_name(r) for r in rewards),
    )
    given = Parts(model if isinstance(model, TextPolicy) else None, data, rewards)
    return start(config, given, watch=_console if show else None)


def new_name(stem: str) -> str:
    """A name for a run that no other has."""
    return f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def change(config: Any, changes: dict[str, Any]) -> Any:
    """A config with the given leaves: ``{"rollout__group_size": 4}``."""
    data = configs.to_dict(config)
    for name, value in changes.items():
        *path, leaf = name.split("__")
        place = data
        for part in path:
            place = place.setdefault(part, {})
        place[leaf] = configs.to_dict(value) if hasattr(value, "__dataclass_fields__") else value
    return configs.from_dict(data)


def _name(part: Any) -> str:
    """What a config says of a part: its name or path, or, of a function in a file, file.py:function."""
    if isinstance(part, str | os.PathLike):
        return str(part)
    name, code = getattr(part, "__qualname__", ""), getattr(part, "__code__", None)
    if code is not None and name.isidentifier() and Path(code.co_filename).is_file():
        return f"{Path(code.co_filename).resolve()}:{name}"
    return IN_MEMORY


def _question(run: Run) -> str:
    inputs = run.source.take(1)[0].inputs
    if isinstance(inputs, str):
        return inputs
    return next((message["content"] for message in inputs if message["role"] == "user"), "")


def _console(config: Config, folder: Path) -> list[Tracker]:
    from gruppo.track.console import ConsoleTracker

    return [ConsoleTracker(config.steps, title=folder.name)]


# --- using what was trained --------------------------------------------------------------------------------------------


def plot(folder: Path) -> list[Path]:
    """The run's curves as PNG files; none where matplotlib is missing."""
    return plot_run(folder, note=logging.getLogger("gruppo").info)


def model_of(name: str | Path) -> str:
    """The model folder of a run, else the name as it is."""
    path = Path(name)
    if (path / "final" / "COMPLETE").is_file():
        return str(path / "final")
    if (path / "manifest.json").is_file():
        raise GruppoError(f"the run {path} has no final model yet. Finish it with gruppo resume {path}.")
    return str(name)


def evaluate_run(path: Path, *, prompts: int) -> tuple[Evaluated, list[dict[str, Any]]]:
    """The run's final model on its held-out prompts; the result, and each answer."""
    config = configs.load(path / "config.json")
    if missing := missing_parts(config, Parts(model=None)):
        raise GruppoError(f"this run's {' and '.join(missing)} came from Python objects, which a file does not hold.")
    evaluation = replace(config.evaluation, prompts=prompts)
    config = replace(config, model=model_of(path), evaluation=evaluation, stage=replace(config.stage, kl_coef=0.0))
    run, _ = build(config, Parts())
    return evaluate_rows(run, RunFolder(path).held_out(run))


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
