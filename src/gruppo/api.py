"""Training runs: start, resume, explain."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shlex
import time
from collections.abc import Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from gruppo import distributed as dist
from gruppo import trust, watchdog
from gruppo.build import Parts, build, missing_parts, name_of, validate, warn_of_overlap, with_absolute_paths
from gruppo.config import peer_options, serialization
from gruppo.config.options import flag, options
from gruppo.config.schema import IN_MEMORY, Config
from gruppo.config.sections import sections
from gruppo.config.stages import stage_path
from gruppo.distributed import sharding
from gruppo.loading import RunDuringImport, code_digest, command_name, is_importing
from gruppo.recipes.open import check_code, config_file, recipe_config, run_stem
from gruppo.seeds import seed_at
from gruppo.trainer import checkpoint, dry_run, loop
from gruppo.trainer.evaluate import held_out
from gruppo.trainer.run import Run
from gruppo.trainer.run_dir import RunFolder, check_is_run, environment
from gruppo.trainer.watch import finish, logged, on_screen, output_may_close
from gruppo.types import GruppoError

log = logging.getLogger("gruppo")

MAX_PROMPT = 120
"""Characters of a prompt that is put into a command."""


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
    """Since the start of training or of its continuation: loading, steps, evaluations and saving."""
    next: tuple[tuple[str, str], ...] = ()
    """Commands that work for this run, each with what it does."""


def train(
    config: Config | str | Path | None = None,
    *,
    model: Any = None,
    data: Any = None,
    reward: Any = None,
    environment: Any = None,
    engine: Any = None,
    steps: int | None = None,
    show: bool = True,
    trust_run: bool = False,
    **changes: Any,
) -> Result:
    """Train a model on data with a reward, and return where it is.

    ``config``: a ``Config``, or what ``gruppo train`` takes: a recipe's name, a config file, the folder of a run, or
    ``file.py:function``. ``model``: a hub id, a folder, a bundled name, ``file.py:function``, or a policy. ``data``: a
    name, a path, a list of dicts or strings, a Hugging Face data set, or a prompt source. ``reward``: a function in
    TRL's calling convention, a name, or a list of them. ``environment``: a function, or its name, that replies to the
    policy, so that it speaks again. ``engine``: an engine that samples, or the name of a function that makes one.
    ``changes`` are further fields of ``Config``, dotted ones with two underscores: ``rollout__group_size=16``,
    ``optim__lr=1e-5``. ``show``: the live screen, and the results at the end. ``trust_run``: import the code that the
    folder of the model or of the config's run names, though you did not create it.

    A mistake raises ``GruppoError``. Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 finishes what would be lost, saves, and raises
    ``gruppo.Stopped``; ``resume`` continues from there. A second Ctrl-C or SIGTERM stops at once.
    """
    if is_importing():
        raise RunDuringImport
    if config is not None and not isinstance(config, Config | str | Path):
        raise GruppoError(
            f"config is {config!r:.80} ({type(config).__name__}); it needs a gruppo.Config, a recipe's name such as "
            '"arithmetic", file.py:function, a config file or the folder of a run. Pass single settings by name: '
            "gruppo.train(steps=50)."
        )
    name = str(config) if isinstance(config, str | Path) else None
    file = None if name is None else config_file(name)
    recipe = recipe_config(str(config)) if isinstance(config, str | Path) else config or Config()
    # a file does not turn on remote code: the caller does
    config = recipe if file is None else replace(recipe, trust_remote_code=False)
    parts = Parts.of(model, data, reward, environment, engine)
    changes = changes if steps is None else {"steps": steps, **changes}
    changes = changes if engine is None else {"engine": name_of(engine), **changes}
    try:
        config = change(config, changes)
        config = replace(
            config,
            model=config.model if model is None else name_of(model),
            data=config.data if data is None else name_of(data),
            reward=config.reward if parts.rewards is None else tuple(map(name_of, parts.rewards)),
        )
        if environment is not None:
            config = replace(config, environment=replace(config.environment, reply=name_of(environment)))
        if parts.rewards and not any(isinstance(reward, str) for reward in parts.rewards):
            # on the command line too they are then called in the trainer's process, whose random state is saved
            config = replace(config, scoring=replace(config.scoring, isolate=False))
        if file is not None:
            check_code(file, recipe, config, trust_run=trust_run)
        if name is not None and not config.name:
            config = replace(config, name=new_name(run_stem(name), config.runs_dir))
        with logged() if show else nullcontext():
            return finish(start(config, parts, show=show, trust_run=trust_run), show=show)
    except GruppoError as error:
        error.args = (as_passed(str(error), config, changes),)
        raise


def resume(
    path: str | Path,
    *,
    model: Any = None,
    data: Any = None,
    reward: Any = None,
    environment: Any = None,
    engine: Any = None,
    allow_changes: bool = False,
    show: bool = True,
    trust_run: bool = False,
    trust_remote_code: bool = False,
) -> Result:
    """Continue a stopped or killed run to the bit, from its newest whole checkpoint; without one, from the start.

    What the run was given as Python objects without a name (a ``TextPolicy``, a list of rows, a lambda) is given again,
    the model as it was before training. Where code, tokenizer, versions or the number of threads have changed since the
    run began, so that its results would, it is refused unless ``allow_changes``. ``trust_run``: import the code
    that the folder names, though you did not create it; ``trust_remote_code``: run code of its model's repository.
    """
    parts = Parts.of(model, data, reward, environment, engine)
    trusts = {"trust_run": trust_run, "trust_remote_code": trust_remote_code}
    with logged() if show else nullcontext():
        return finish(start(path, parts, allow_changes=allow_changes, show=show, **trusts), show=show)


@dist.leaving()
def start(
    source: Config | str | Path,
    parts: Parts | None = None,
    *,
    allow_changes: bool = False,
    show: bool = False,
    trust_run: bool = False,
    trust_remote_code: bool = False,
) -> Result:
    """Train a config from the beginning, or continue the run in a folder from its newest whole checkpoint.

    ``parts``: Python objects in place of the config's names. ``allow_changes``: see ``resume``. ``show``: the live
    screen.
    """
    if is_importing():
        raise RunDuringImport
    began, parts, is_new = time.perf_counter(), parts or Parts(), isinstance(source, Config)
    if isinstance(source, Config):
        validate(source, parts)
        dist.init(source.distributed.timeout_s, backend=source.distributed.backend)
        # absolute paths: the run may be continued, evaluated and exported from another folder
        config = with_absolute_paths(replace(source, name=source.name or new_name("run", source.runs_dir)))
        config = replace(config, name=dist.all_gather(config.name.encode())[0].decode())  # ranks may read other clocks
        path = Path(config.runs_dir) / config.name
        if dist.restarts() and (path / "config.json").is_file():  # torchrun gives the command again
            source, is_new = path, False
    if not isinstance(source, Config):
        path = Path(source)
        check_is_run(path)
        config = serialization.load(path / "config.json")
        if missing := missing_parts(config, parts):
            raise GruppoError(
                f"this run's {' and '.join(missing)} came from Python objects. Continue it with "
                f"gruppo.resume({str(path)!r}, {', '.join(f'{m}=...' for m in missing)})."
            )
        dist.init(config.distributed.timeout_s, backend=config.distributed.backend)
        config = on_these_ranks(config, path)
    dist.set_advice(f"Continue on as many ranks with: {command_name()} resume {path}")
    settings = serialization.to_dict(config)
    check_equal_ranks(config)
    models, code = trust.imports_of_models(settings), trust.imports_of_run(settings, path)
    with ExitStack() as stack:
        stack.enter_context(output_may_close())
        folder = RunFolder(path)
        stack.callback(folder.close)
        with dist.fail_together():  # before the model is opened, which may take minutes
            if dist.is_main():  # the config of a new run is this user's own; the models that it names may not be
                for place, names in models.items() if is_new else [(path, code)]:
                    trust.check(place, names, trust_run=trust_run, trust_remote_code=trust_remote_code)
            if not is_new:
                folder.open()
            elif dist.is_main():
                folder.check_is_new()
        closed_for = None if is_new or trust_run else path
        stack.enter_context(trust.importing(code, closed_for=closed_for, typed=parts.names))
        with dist.phase("build"):
            run, model_source = build(config, parts)
        check_equal({"the data": run.source.fingerprint()})
        with dist.fail_together():
            if is_new:
                if dist.is_main():  # first: a run that is killed between the two can be resumed
                    trust.record(path, code)
                folder.create(run.config)
                folder.check_is_shared(run)
                warn_of_overlap(run)
            else:
                folder.check_manifest(run, model_source, allow_changes=allow_changes)
            is_restored = not is_new and folder.restore(run)
            if not is_new and not run.is_complete:
                log.info("%s is incomplete: %d of %d steps are saved.", path, run.state.step, run.config.steps)
            if not is_restored:
                folder.write_manifest(run, model_source)
        stack.callback(run.engine.close)
        run.engine.sync(run.policy, run.state.version)  # until now it held the first weights, or none
        stack.callback(setattr, watchdog, "run_folder", watchdog.run_folder)
        watchdog.run_folder = str(path)
        stack.enter_context(run.stopper.listening())
        # closed in reverse order: the screen gives the terminal back before anything else is printed
        with dist.fail_together():
            files = folder.trackers(from_step=run.state.step if is_restored else None)
        for tracker in files:
            run.trackers.append(tracker)
            stack.callback(tracker.close)
        if show and dist.is_main():
            run.trackers.append(on_screen(run, folder.path))
            stack.callback(run.trackers[-1].close)
        if not is_restored:  # reward functions may draw from the global generators
            checkpoint.seed_random_state(seed_at(run.config.seed, "rewards", dist.rank()))
        loop.train(run, folder)
        with dist.phase("final save"):
            model = folder.write_final(run)
        with dist.fail_together():
            # a policy given in memory may have been made by a function that the config does not name
            if dist.is_main() and set(names := trust.imports_of_model(model)) - set(code):
                trust.record(model, names)
        seconds = time.perf_counter() - began
    state, last = run.state, run.state.step
    if state.best is not None and state.best.get("returned_at") == last:  # the weights are those of the best step
        last = int(state.best["step"])
    before = next((e for e in state.evaluations if e["step"] == 0), None)
    after = next((e for e in reversed(state.evaluations) if e["step"] == last and state.step), None)
    commands = next_commands(run, folder.path)
    return Result(folder.path, model, before, after, int(state.totals["tokens"]), seconds, commands)


def on_these_ranks(config: Config, path: Path) -> Config:
    """Return a saved config for the present number of ranks, which may be another than when the run was saved."""
    ranks = dist.world_size()
    if config.rollout.prompts < ranks:
        raise GruppoError(
            f"{path} samples {config.rollout.prompts} prompts per step, too few for {ranks} ranks. "
            f"Resume it on at most {config.rollout.prompts}."
        )
    if config.distributed.shard == "hybrid" and ranks > 1 and not sharding.is_hybrid_possible():
        log.warning("%s was sharded within machines; on this one, it is sharded over all %d ranks.", path, ranks)
        return replace(config, distributed=replace(config.distributed, shard="fsdp"))
    return config


def next_commands(run: Run, path: Path) -> tuple[tuple[str, str], ...]:
    """Commands that work for a finished run, each with what it does."""
    config, policy, gruppo, folder = run.config, run.policy, shlex.quote(command_name()), shlex.quote(str(path))
    needed = [part for part in missing_parts(config, Parts()) if part != "model"]
    # of a policy that was a Python object, final/ may hold weights alone, without what makes the policy
    is_opened = config.model != IN_MEMORY or any((path / "final").glob("*.json"))
    reads_policy = policy.modality.rewards_read_reference and "reference" in run.rewards.requested_columns
    commands = []
    # a prompt to type: a held-out one, or one that was trained on, where a prompt is a text
    prompt = next(iter(held_out(run, 1)), run.example)
    inputs = "" if prompt is None else prompt.inputs
    if isinstance(inputs, list | tuple) and all(isinstance(message, dict) for message in inputs):
        inputs = next((message["content"] for message in inputs if message["role"] == "user"), "")
    lines = str(inputs).strip().splitlines() if isinstance(inputs, str | int) else []
    if is_opened and lines and lines[0].isprintable():
        text = shlex.quote(lines[0][:MAX_PROMPT])
        commands.append((f"{gruppo} sample {folder} {text}", "sample from the model"))
    if is_opened and run.state.evaluations and not needed and not (config.model == IN_MEMORY and reads_policy):
        commands.append((f"{gruppo} eval {folder}", "evaluate it again"))
    commands.append((f"{gruppo} doctor {folder}", "check its metrics for problems"))
    if not needed and config.model != IN_MEMORY:
        # a last stage of a fixed length would refuse more steps
        to_the_end = f" --{stage_path(config, len(config.plan) - 1)}.steps 0" if config.plan[-1].steps else ""
        file = shlex.quote(str(path / "config.json"))
        longer = f"--steps {2 * config.steps}{to_the_end}"
        commands.append((f"{gruppo} train {file} {longer}", "train again, for longer"))
    return tuple(commands)


def explain(config: Config, *, trust_run: bool = False) -> list[str]:
    """Describe what training would do, without training: objective, stages, work, memory, one prompt and its reward."""
    validate(config, Parts())
    models = trust.imports_of_models(serialization.to_dict(config))
    for place, names in models.items():
        trust.check(place, names, trust_run=trust_run)
    with trust.importing([*chain(*models.values())]):
        return dry_run.explain(build(config, Parts())[0])


def check_equal_ranks(config: Config) -> None:
    """Refuse ranks with other settings, code or versions: they would train other models, or wait for each other."""
    if dist.world_size() == 1:
        return
    own: dict[str, Any] = {}
    entries = [*serialization.to_dict(replace(config, name="")).items()]
    for name, value in entries:
        if isinstance(value, dict):
            entries += [(f"{name}.{key}", entry) for key, entry in value.items()]
        else:
            own[flag(name)] = value
    functions = (config.model, *config.reward, config.environment.reply, config.engine.kind)
    own |= {f"the code of {name}": code_digest(name) for name in functions}
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    own["gruppo's code"] = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()
    check_equal(own | {f"the version of {name}": version for name, version in environment()["versions"].items()})


def check_equal(own: dict[str, Any]) -> None:
    """A collective: refuse ranks whose values differ from those of rank 0, and name the first that does."""
    first, *others = (json.loads(part) for part in dist.all_gather(json.dumps(own).encode()))
    for number, other in enumerate(others, start=1):
        for name in sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name)):
            theirs, ours = (str(values.get(name)) for values in (other, first))
            raise GruppoError(
                f"rank {number} differs from rank 0 in {name}: {theirs:.40}, not {ours:.40}. Give all ranks the same "
                "command, files and versions."
            )


def new_name(stem: str, runs_dir: str | Path) -> str:
    """A name for a run that no other in ``runs_dir`` has."""
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        raise GruppoError(
            "torchrun --max-restarts gives the command again, and a run without a name would begin anew each time. Add "
            "--name NAME: a restart then continues that run from its last checkpoint."
        )
    name = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    others = (f"{name}-{n}" for n in range(2, 1000))
    return next((n for n in (name, *others) if not (Path(runs_dir) / n).exists()), name)


def change(config: Config, changes: dict[str, Any]) -> Config:
    """A config with the given leaves, dotted names with two underscores: ``{"rollout__group_size": 4}``."""

    def spell(name: str) -> str:
        return name.replace(".", "__")

    try:
        return serialization.change(config, {name.replace("__", "."): value for name, value in changes.items()})
    except serialization.UnknownEntry as error:
        known = [*options(config)]
        for section, kind in sections().items():
            known += [] if type(config.modality) is kind else options(kind(), f"{section}.")
        hint = peer_options.suggestion(error.entry, known, spell)
        raise GruppoError(
            f"unknown option {spell(error.entry)}. {hint}docs/reference/config.md lists the options; in Python, two "
            "underscores stand for a dot."
        ) from None


def as_passed(message: str, config: Config, changes: Iterable[str]) -> str:
    """A message with flags, and the dotted names of ``changes``, as they are passed in Python: rollout__group_size."""
    known, changed = options(config), {name.replace("__", ".") for name in changes if "__" in name}

    def in_python(match: re.Match[str]) -> str:
        dotted = match[0].removeprefix("--").replace("-", "_")
        return dotted.replace(".", "__") if dotted in (known if match[0].startswith("--") else changed) else match[0]

    return re.sub(r"(?<![\w.-])(?:--)?[a-z][\w-]*(?:\.\w[\w-]*)*(?![.-]?\w)", in_python, message)
