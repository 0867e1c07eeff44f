"""Starting a run, and continuing it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gruppo import distributed as dist
from gruppo.build import Parts, build, missing_parts, modality_of, name_of, require_named, with_absolute_paths
from gruppo.config import serialization
from gruppo.config.schema import Config
from gruppo.loading import RunDuringImport, is_importing
from gruppo.protocols import Tracker
from gruppo.seeds import seed_at
from gruppo.trainer import checkpoint, checks, dry_run, loop
from gruppo.trainer.evaluate import held_out
from gruppo.trainer.run import Run
from gruppo.trainer.run_dir import RunFolder
from gruppo.trainer.watch import draw, heard, on_screen, say_closing
from gruppo.types import GruppoError

Watch = Callable[[Run, Path], Sequence[Tracker]]
"""Makes further trackers once all is loaded, the console for one."""


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


def train(
    config: Config | None = None,
    *,
    model: Any = None,
    data: Any = None,
    reward: Any = None,
    environment: Any = None,
    engine: Any = None,
    steps: int | None = None,
    show: bool = True,
    **changes: Any,
) -> Result:
    """Train a model on data with a reward, and return where it is.

    ``model``: a hub id, a folder, a bundled name, ``file.py:function``, or a policy. ``data``: a name, a path, a
    list of dicts or strings, a Hugging Face data set, or a prompt source. ``reward``: a function in TRL's calling
    convention, a name, or a list of them. ``environment``: a function, or its name, that replies to the policy, so that
    it speaks again. ``engine``: an engine that samples, or the name of a function that makes one. ``changes`` are
    further fields of ``Config``, dotted ones with two underscores: ``rollout__group_size=16``, ``optim__lr=1e-5``.
    ``show``: the live screen, and the results at the end.

    A mistake raises ``GruppoError``. Ctrl-C or SIGTERM finishes what would be lost, saves, and raises
    ``gruppo.Stopped``; ``resume`` continues from there. A second one stops at once.
    """
    parts = Parts.of(model, data, reward, environment, engine)
    config = change(config or Config(), changes if steps is None else {"steps": steps, **changes})
    config = replace(
        config,
        model=config.model if model is None else name_of(model),
        data=config.data if data is None else name_of(data),
        reward=config.reward if parts.rewards is None else tuple(map(name_of, parts.rewards)),
    )
    if environment is not None:
        config = replace(config, environment=replace(config.environment, reply=name_of(environment)))
    if engine is not None:
        config = replace(config, engine=name_of(engine))
    with heard() if show else nullcontext():
        return finished(start(config, parts, watch=on_screen if show else None), show=show)


def resume(
    path: str | Path,
    *,
    model: Any = None,
    data: Any = None,
    reward: Any = None,
    environment: Any = None,
    engine: Any = None,
    show: bool = True,
) -> Result:
    """Continue a stopped or killed run to the bit, from its newest whole checkpoint; without one, from the start.

    What the run was given as Python objects without a name (a ``TextPolicy``, a list of rows, a lambda) is given again,
    the model as it was before training.
    """
    with heard() if show else nullcontext():
        done = go_on(path, Parts.of(model, data, reward, environment, engine), watch=on_screen if show else None)
        return finished(done, show=show)


def finished(result: Result, *, show: bool) -> Result:
    """The same result, after its curves are drawn and, where people watch, its table is shown."""
    if dist.is_main():
        draw(result.folder)
        if show:
            say_closing(result)
    return result


def start(config: Config, parts: Parts | None = None, *, watch: Watch | None = None) -> Result:
    """Train from the beginning."""
    if is_importing():
        raise RunDuringImport
    dist.init()
    parts = parts or Parts()
    checks.check(config, modality_of(config, parts))
    require_named(config, parts)
    config = with_absolute_paths(replace(config, name=config.name or new_name("run", config.runs_dir)))
    path = Path(config.runs_dir) / config.name
    with dist.fail_together():
        if dist.is_main():
            RunFolder(path).check_is_new()
    run, model_source = build(config, parts)
    folder = RunFolder.create(path, run.config)
    with ExitStack() as stack:
        stack.callback(folder.close)
        with dist.fail_together():
            folder.write_manifest(run, model_source)
        return _go(run, folder, watch, stack, from_step=None)


def go_on(path: str | Path, parts: Parts | None = None, *, watch: Watch | None = None) -> Result:
    """Continue a run; see ``resume``."""
    if is_importing():
        raise RunDuringImport
    dist.init()
    path, parts = Path(path), parts or Parts()
    if not (path / "config.json").is_file():
        what = "has no config.json" if path.exists() else "does not exist"
        raise GruppoError(f"the run folder {path} {what}. Give the folder of a run, such as runs/arithmetic-...")
    config = serialization.load(path / "config.json")
    if missing := missing_parts(config, parts):
        raise GruppoError(
            f"this run's {' and '.join(missing)} came from Python objects. Continue it with "
            f"gruppo.resume({str(path)!r}, {', '.join(f'{m}=...' for m in missing)})."
        )
    folder = RunFolder(path)
    with dist.fail_together():
        folder.open()
    with ExitStack() as stack:
        stack.callback(folder.close)
        run, model_source = build(config, parts)
        with dist.fail_together():
            folder.check_first_weights(run)
            folder.warn_of_other_source(model_source)
            is_going_on = folder.restore(run)
            if not is_going_on:
                folder.write_manifest(run, model_source)
        return _go(run, folder, watch, stack, from_step=run.state.step if is_going_on else None)


def _go(run: Run, folder: RunFolder, watch: Watch | None, stack: ExitStack, *, from_step: int | None) -> Result:
    began = time.perf_counter()
    stack.enter_context(run.stopper.listening())
    stack.callback(run.engine.close)
    with dist.fail_together():
        files = folder.trackers(from_step=from_step)
    for tracker in files:
        run.trackers.append(tracker)
        stack.callback(tracker.close)
    for tracker in watch(run, folder.path) if watch is not None and dist.is_main() else ():
        run.trackers.append(tracker)
        stack.callback(tracker.close)
    if from_step is None:
        checkpoint.seed_random_state(seed_at(run.config.seed, "rewards", dist.rank()))
    loop.train(run, folder)
    with dist.fail_together():
        model = folder.write_final(run)
    ends, seconds = loop.summary(run), time.perf_counter() - began
    return Result(
        folder.path, model, ends["before"], ends["after"], int(run.state.totals["tokens"]), seconds, _question(run)
    )


def explain(config: Config) -> list[str]:
    """Describe what training would do, without training: objective, stages, work, memory, one prompt and its reward."""
    parts = Parts()
    checks.check(config, modality_of(config, parts))
    require_named(config, parts)
    return dry_run.explain(build(config, parts)[0])


def new_name(stem: str, runs_dir: str | Path) -> str:
    """A name for a run that no other in ``runs_dir`` has."""
    name = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    others = (f"{name}-{n}" for n in range(2, 1000))
    return next((n for n in (name, *others) if not (Path(runs_dir) / n).exists()), name)


def change(config: Config, changes: dict[str, Any]) -> Config:
    """A config with the given leaves, dotted names with two underscores: ``{"rollout__group_size": 4}``."""
    return serialization.change(config, {name.replace("__", "."): value for name, value in changes.items()})


def _question(run: Run) -> str:
    example = next(iter(held_out(run, 1)), run.example)
    inputs = "" if example is None else example.inputs
    if not isinstance(inputs, list | tuple) or not all(isinstance(message, dict) for message in inputs):
        return str(inputs)
    return next((message["content"] for message in inputs if message["role"] == "user"), "")
