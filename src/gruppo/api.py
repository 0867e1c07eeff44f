"""Training runs: step by step, as a whole, resumed, explained."""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import shlex
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console

from gruppo import distributed as dist
from gruppo import trust
from gruppo.build import (
    PARTS,
    Parts,
    build,
    missing_parts,
    name_of,
    validate,
    with_absolute_paths,
)
from gruppo.config import peer_options, serialization
from gruppo.config.options import options
from gruppo.config.schema import IN_MEMORY, Config
from gruppo.config.sections import sections
from gruppo.config.stages import SCHEDULED, stage_path
from gruppo.errors import as_argument, as_flag
from gruppo.loading import code_digest, command_name, importing, refuse_during_import
from gruppo.protocols import Policy
from gruppo.recipes.open import check_code, config_file, recipe_config, run_stem
from gruppo.seeds import seed_at
from gruppo.tasksets import is_taskset
from gruppo.tracking import trackers
from gruppo.tracking.plots import plot_run
from gruppo.tracking.report import closing_lines
from gruppo.trainer import checkpoint, checks, dry_run, loop
from gruppo.trainer.callbacks import Callbacks, Step
from gruppo.trainer.evaluate import Evaluated
from gruppo.trainer.prefetch import PrefetchEngine
from gruppo.trainer.run import Run
from gruppo.trainer.run_dir import RunFolder, check_is_run, environment, functions_of
from gruppo.trainer.watch import logged, on_screen, output_may_close
from gruppo.types import GruppoError

log = logging.getLogger("gruppo")


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
    """Since the start of training or of its continuation: loading, steps, evaluations and
    saving."""
    next: tuple[tuple[str, str], ...] = ()
    """Commands that work for this run, each with what it does."""
    costs: tuple[str, ...] = ()
    """What judges have used, a line each."""


class Trainer:
    """A run, step by step: ``for step in trainer``, or ``trainer.step()``, with your own code in
    between.

        with gruppo.Trainer("arithmetic", steps=50) as trainer:
            for step in trainer:
                if step.metrics["reward/mean"] > 0.9:
                    trainer.stop()
        print(trainer.result.model)

    ``config``: a ``Config``, or what ``gruppo train`` takes: a recipe's name, a config file, the
    folder of a run, or ``file.py:function``. ``model``: a hub id, a folder, a bundled name,
    ``file.py:function``, or a policy. ``data``: a name, a path, a list of dicts or strings, a
    Hugging Face data set, or a prompt source. ``reward``: a function in TRL's calling convention, a
    name, or a list of them. ``environment``: what replies to the policy, so that it speaks again,
    or its name: a function, or a class with ``reset`` whose methods are tools. ``tools``: functions
    that the policy may call, or their names. ``engine``: an engine that samples, or the name of a
    function that makes one. ``validation``: data to evaluate on, like ``data``; by default a part
    of it is held out. ``callbacks``: objects like ``gruppo.Callback``. ``track``: names of
    trackers, classes, or objects with ``log``, ``log_samples`` and ``close``. ``changes`` are
    further fields of ``Config``, dotted ones with two underscores: ``rollout__group_size=16``,
    ``optim__lr=1e-5``. ``show``: the live screen. ``trust_run``: import the code that the folder of
    the model or of the config's run names, though you did not create it.

    A mistake raises ``GruppoError``. Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 during a step finishes what
    would be lost, saves, and raises ``gruppo.Stopped``. What is complete is also saved where the
    ``with`` block is left early; ``Trainer.resume`` continues from there.
    """

    config: Config
    policy: Policy
    folder: Path
    """The run's folder."""

    def __init__(
        self,
        config: Config | str | Path | None = None,
        *,
        model: Any = None,
        data: Any = None,
        reward: Any = None,
        environment: Any = None,
        tools: Any = None,
        engine: Any = None,
        validation: Any = None,
        steps: int | None = None,
        callbacks: Sequence[Any] = (),
        track: Sequence[Any] | None = None,
        show: bool = False,
        trust_run: bool = False,
        **changes: Any,
    ) -> None:
        refuse_during_import()
        if steps is not None:
            changes["steps"] = steps
        try:
            parts = Parts.of(model, data, reward, environment, tools, engine, validation)
            file = config_file(str(config)) if isinstance(config, str | Path) else None
            if isinstance(config, str | Path):
                chosen = recipe_config(str(config))
            else:
                chosen = Config() if config is None else config
            if not isinstance(chosen, Config):
                raise GruppoError(f"""config is {config!r:.80} ({type(config).__name__}); it needs a
                    gruppo.Config, a recipe's name such as "arithmetic", file.py:function, a config
                    file or the folder of a run. Pass single settings by name:
                    gruppo.train(steps=50).""")
            # a file does not turn on remote code: the caller does
            new = chosen if file is None else replace(chosen, trust_remote_code=False)
            new = serialization.change(change(new, changes), parts.config_entries())
            if track is not None:
                # a resumed run opens the trackers that its config names; objects it is given again
                names = [name_of(one) for one in track]
                new = replace(new, track=tuple(name for name in names if name != IN_MEMORY))
            if file is not None:
                check_code(file, chosen, new, trust_run=trust_run)
            if isinstance(config, str | Path) and not new.name:
                new = replace(new, name=new_name(run_stem(str(config)), new.runs_dir))
            options: dict[str, Any] = {"callbacks": callbacks, "track": track or ()}
            with logged() if show else nullcontext():
                self._open(new, parts, show=show, trust_run=trust_run, **options)
        except GruppoError as error:
            error.spell = as_argument
            raise

    @classmethod
    def resume(cls, path: str | Path, **arguments: Any) -> Trainer:
        """Open a stopped or killed run; see ``gruppo.resume``."""
        objects = [arguments.pop(name, None) for name in PARTS]
        return cls.open(path, Parts.of(*objects), **arguments)

    @classmethod
    def open(
        cls, source: Config | str | Path, parts: Parts | None = None, **options: Any
    ) -> Trainer:
        """Open a new run of a config, or the run in a folder; see ``start``."""
        trainer = cls.__new__(cls)
        trainer._open(source, parts or Parts(), **options)
        return trainer

    @dist.leaving()
    def _open(
        self,
        source: Config | str | Path,
        parts: Parts,
        *,
        callbacks: Sequence[Any] = (),
        track: Sequence[Any] = (),
        allow_changes: bool = False,
        show: bool = False,
        trust_run: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        refuse_during_import()
        self._began = time.perf_counter()
        self._result: Result | None = None
        if isinstance(source, Config):
            config = prepared(source, parts)
            path = Path(config.runs_dir) / config.name
            # torchrun gives the command again
            is_new = not (dist.restarts() and (path / "config.json").is_file())
        else:
            path = Path(source)
            is_new = False
        if not is_new:
            config = saved_config(path, parts, track)
        dist.set_advice(f"Continue on as many ranks with: {command_name()} resume {path}")
        check_equal_ranks(config)
        # the config of a new run is this user's own; the models that it names may not be
        settings = serialization.to_dict(config)
        self._code = trust.imports_of_run(settings, path)
        foreign = trust.imports_of_models(settings) if is_new else {path: self._code}
        self._listed = [*self._code, *trust.imports(parts.names)]
        self.folder = path
        self._files = RunFolder(path)
        with ExitStack() as stack, output_may_close(), ExitStack() as opening:
            stack.callback(self._files.close)
            with dist.fail_together():  # before the model is opened, which may take minutes
                if dist.is_main():
                    for place, names in foreign.items():
                        trust.check(
                            place, names, trust_run=trust_run, trust_remote_code=trust_remote_code
                        )
                if is_new:
                    self._files.check_is_new()
                else:
                    self._files.open()
            # Only now: what an open folder lists is trusted.
            opening.enter_context(importing(self._listed))
            with dist.phase("build"):
                run, origin = build(config, parts)
            check_equal({"the data": run.source.fingerprint(), **run.rewards.input_digests()})
            if config.engine.lag or config.engine.replay:
                PrefetchEngine.attach(run, path)
            run.callbacks = Callbacks(callbacks, self) if callbacks else None
            self.run = run
            self.config = run.config
            self.policy = run.policy
            with dist.fail_together():
                is_restored = self._begin(origin, is_new=is_new, allow_changes=allow_changes)
            stack.callback(run.engine.close)
            run.rewards.attach(path)
            # until now it held the first weights, or none
            run.engine.sync(run.policy, run.state.version)
            # closed in reverse order: the screen gives the terminal back before anything else is
            # printed
            with run.stopper.listening():
                with dist.fail_together():
                    files = self._files.trackers(from_step=run.state.step if is_restored else None)
                if dist.is_main():
                    objects = [one for one in track if name_of(one) == IN_MEMORY]
                    run.trackers += [*files, *trackers.guarded(objects)]
                if show and dist.is_main():
                    run.trackers.append(on_screen(run, path))
                for tracker in run.trackers:
                    stack.callback(tracker.close)
            if not is_restored:  # reward functions may draw from the global generators
                checkpoint.seed_random_state(seed_at(config.seed, "rewards", dist.rank()))
            self._first = run.state.step
            self.steps = loop.steps(run, self._files)
            # also where a trainer is forgotten, and at the end of the process
            self._close = weakref.finalize(self, stack.pop_all().close)

    def _begin(self, origin: dict[str, Any], *, is_new: bool, allow_changes: bool) -> bool:
        """Create the run's folder, or restore the run from it; return whether it was restored."""
        if is_new:
            if dist.is_main():  # first: a run that is killed between the two can be resumed
                trust.record(self.folder, self._code)
            self._files.create(self.config)
        else:
            self._files.check_manifest(self.run, origin, allow_changes=allow_changes)
            if self._files.restore(self.run):
                return True
        self._files.write_manifest(self.run, origin)
        return False

    @property
    def is_complete(self) -> bool:
        """Whether all steps are done, or the run was stopped."""
        return self.run.is_complete

    @property
    def result(self) -> Result:
        """Of the complete run."""
        return self.finish()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """For work on the run: its code may be imported, closed streams end nothing, signals stop
        between steps."""
        listening = self.run.stopper.listening()
        with importing(self._listed), output_may_close(), listening, dist.leaving():
            yield

    def train(self) -> Result:
        """Run all steps that are left."""
        with self._running():
            for _ in self.steps:
                pass
            return self.finish()

    def __iter__(self) -> Iterator[Step]:
        """Run the steps that are left and yield each; a signal stops the run between two, in your
        own code too."""
        with self._running():
            # yield from would end the steps where a loop is left
            while (step := next(self.steps, None)) is not None:
                yield step
            self.finish()

    def step(self) -> Step:
        """Run one step: sample, score, update, and evaluate and save where that is due."""
        with self._running():
            if (step := next(self.steps, None)) is None:
                advice = "Start another run for more."
                if not self.is_complete:
                    advice = f"Continue it with gruppo.Trainer.resume({str(self.folder)!r})."
                raise GruppoError(f"""the run {self.folder} has ended after {self.run.state.step} of
                    {self.config.steps} steps. {advice}""")
            if self.is_complete:
                self.finish()
            return step

    def evaluate(self) -> Evaluated:
        """Evaluate on the held-out prompts as training does; at most once at a step."""
        run = self.run
        if not run.config.evaluation.prompts or not run.rewards.names:
            raise GruppoError("""this run has nothing to evaluate: it needs a reward and held-out
                prompts. Set evaluation__prompts, and prompts__held_out_fraction above 0 or
                evaluation__data.""")
        if loop.evaluation_at(run, run.state.step) is None:
            with run.stopper.listening():
                loop.evaluate_now(run, self._files)
        done = loop.evaluation_at(run, run.state.step)
        assert done is not None
        return done

    def save(self) -> Path:
        """Save a checkpoint, from which ``resume`` continues, and return the folder of the model as
        it is now."""
        with self._running():
            if self.run.state.step:
                loop.save(self.run, self._files)
            return self._files.write_final(self.run, is_new=True)

    def stop(self) -> None:
        """End the run after the step that is under way, as if it were the last; with several ranks,
        on any of them."""
        self.run.is_stopped = True

    def set(self, **params: Any) -> None:
        """Change step parameters from the next step on: fields of ``Stage``, such as ``lr``,
        ``kl_coef``, ``temperature`` or ``group_size``. None returns to the schedule. With several
        ranks, alike on all of them.

        Values are saved in the next checkpoint: a resumed run repeats what a callback set in
        ``on_step``.
        """
        stages = range(len(self.config.plan))
        for name, value in params.items():
            if name not in SCHEDULED:
                known = [f"stage.{n}" for n in SCHEDULED]
                hint = peer_options.suggestion(name, known, lambda option: option.split(".")[-1])
                raise GruppoError(
                    f"unknown step parameter {name}. {hint}It needs one of {', '.join(SCHEDULED)}."
                )
            if value is None:
                continue
            if not isinstance(value, int | float):
                raise GruppoError(
                    f"set({name}={value!r}): it needs a number, or None for the schedule's."
                )
            leaves = {f"{stage_path(self.config, index)}.{name}": value for index in stages}
            try:
                checks.check(serialization.change(self.config, leaves), self.policy.modality)
            except GruppoError as error:
                error.problem = f"set({name}={value!r}): {error.problem}"
                raise error from None
            lacks = {
                "kl_coef": self.run.reference is None and "reference to measure a KL against",
                "sup_coef": self.run.demos is None and "demonstrations",
            }
            if value > 0 and lacks.get(name):
                raise GruppoError(f"""set({name}={value}): the run was built without {lacks[name]}.
                    Start it with a small stage__{name}.""")
        schedule = self.run.stage_schedule
        values = {**schedule.overrides, **params}
        schedule.overrides = {name: value for name, value in values.items() if value is not None}

    def finish(self) -> Result:
        """Write the model of a complete run and return the result; called where the last step is
        done."""
        if self._result is not None:
            return self._result
        run, state = self.run, self.run.state
        if not self.is_complete:
            raise GruppoError(f"""the run {self.folder} has {state.step} of {self.config.steps}
                steps and no result yet. Call trainer.train(), or trainer.save() for the model as it
                is.""")
        for _ in self.steps:  # what comes after the last step
            pass
        with dist.phase("final save"):
            model = self._files.write_final(run, is_new=state.step > self._first)
        with dist.fail_together():
            # a policy given in memory may have been made by a function that the config does not
            # name
            if dist.is_main() and set(names := trust.imports_of_model(model)) - set(self._code):
                trust.record(model, names)
        last = state.step
        if state.best is not None and state.best.get("returned_at") == last:
            last = int(state.best["step"])  # the weights are those of the best step
        evaluated = {done["step"]: done for done in state.evaluations}
        self._result = Result(
            self.folder,
            model,
            before=evaluated.get(0),
            after=evaluated.get(last) if state.step else None,
            tokens=int(state.totals["tokens"]),
            seconds=time.perf_counter() - self._began,
            next=next_commands(run, self.folder),
            costs=tuple(run.rewards.describe_usage(run.rewards.usage())),
        )
        return self._result

    def close(self) -> None:
        """Save the complete steps that are not saved yet; close the trackers and the engine, and
        unlock the folder."""
        with self._running(), ExitStack() as last:
            last.callback(self._close)
            # only between two steps: within one, the weights are not those of a step
            if inspect.getgeneratorstate(self.steps) == inspect.GEN_SUSPENDED:
                self._files.finish_saving()
                if self.run.state.step not in checkpoint.steps(self._files.checkpoints):
                    loop.save(self.run, self._files)
                    self._files.finish_saving()
            self.steps.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and dist.world_size() > 1:
            self.steps.close()  # a rank that fails alone would wait for the others in a save
        self.close()


def train(
    config: Config | str | Path | None = None, *, show: bool = True, **arguments: Any
) -> Result:
    """Train a model on data with a reward, and return where it is.

    ``arguments`` are those of ``gruppo.Trainer``: ``model``, ``data``, ``reward``, ``environment``,
    ``tools``, ``engine``, ``validation``, ``steps``, ``callbacks``, ``track``, ``trust_run``, and
    fields of ``Config``, dotted ones with two underscores: ``rollout__group_size=16``,
    ``optim__lr=1e-5``. ``show``: the live screen, and the results at the end.

    A mistake raises ``GruppoError``. Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 finishes what would be
    lost, saves, and raises ``gruppo.Stopped``; ``resume`` continues from there. A second Ctrl-C or
    SIGTERM stops at once.
    """
    with logged() if show else nullcontext():
        with Trainer(config, show=show, **arguments) as trainer:
            result = trainer.train()
        return finish(result, show=show)


def resume(path: str | Path, *, show: bool = True, **arguments: Any) -> Result:
    """Continue a stopped or killed run to the bit, from its newest whole checkpoint; without one,
    from the start.

    What the run was given as Python objects without a name (a ``TextPolicy``, a list of rows, a
    lambda) is given again, under the names of ``gruppo.Trainer``, the model as it was before
    training; so are its ``callbacks``, and trackers that are objects (``track``). Where code,
    tokenizer, versions or the number of threads have changed since the run began, so that its
    results would, it is refused unless ``allow_changes``. ``trust_run``: import the code that the
    folder names, though you did not create it; ``trust_remote_code``: run code of its model's
    repository.
    """
    with logged() if show else nullcontext():
        with Trainer.resume(path, show=show, **arguments) as trainer:
            result = trainer.train()
        return finish(result, show=show)


def start(source: Config | str | Path, parts: Parts | None = None, **options: Any) -> Result:
    """Train a config from the beginning, or continue the run in a folder from its newest whole
    checkpoint.

    ``parts``: Python objects in place of the config's names. ``options``: ``callbacks``, ``track``,
    ``allow_changes``, ``show``, ``trust_run`` and ``trust_remote_code`` of ``resume``.
    """
    with Trainer.open(source, parts, **options) as trainer:
        return trainer.train()


def finish(result: Result, *, show: bool) -> Result:
    """Draw the curves and write the report of a finished run, print its results and the next
    commands if ``show``."""
    if not dist.is_main():
        return result
    from gruppo.view import report  # the doctor's rules take a moment to import

    folder = result.folder
    drawings = {
        "curves": lambda: plot_run(folder, note=log.info),
        "report": lambda: report.write_report([folder]),
    }
    for what, draw in drawings.items():
        try:
            draw()
        except Exception as error:  # the run is complete: a failed drawing is a warning
            log.warning("the %s could not be drawn: %s: %s", what, type(error).__name__, error)
    if show:
        lines = closing_lines(folder, result.before, result.after, result.next, result.seconds)
        with output_may_close():  # soft_wrap: a command must not be broken over two lines
            Console().print(lines, *result.costs, sep="\n", soft_wrap=True)
    return result


# --- configs --------------------------------------------------------------------------------------


def prepared(config: Config, parts: Parts) -> Config:
    """The config of a new run, checked, with a name and absolute paths. A collective."""
    config = with_own_environment(config)
    validate(config, parts)
    join_ranks(config)
    # absolute paths: the run may be continued, evaluated and exported from another folder
    config = replace(config, name=config.name or new_name("run", config.runs_dir))
    config = with_absolute_paths(config)
    # the name of rank 0: the ranks may read other clocks
    return replace(config, name=dist.gather_json(config.name)[0])


def saved_config(path: Path, parts: Parts, track: Sequence[Any]) -> Config:
    """The config of a run that is continued, on the present ranks. A collective."""
    check_is_run(path)
    place = path.resolve()  # wherever the config says that it is
    config = serialization.load(path / "config.json")
    config = replace(config, name=place.name, runs_dir=str(place.parent))
    if missing := missing_parts(config, parts):
        raise GruppoError(f"""this run's {" and ".join(missing)} came from Python objects. Continue
            it with gruppo.resume({str(path)!r}, {", ".join(f"{m}=..." for m in missing)}).""")
    if added := {name_of(one) for one in track} - {IN_MEMORY, *config.track}:
        raise GruppoError(f"""track={min(added)!r}: a run continues with the trackers of its config,
            {list(config.track)}, and with objects. Leave the name out, or pass an object.""")
    join_ranks(config)
    return config


def with_own_environment(config: Config) -> Config:
    """Return the config of a taskset with its environment, unless rewards or another environment
    are given."""
    if is_taskset(config.data) and not config.reward and not config.environment.names:
        return replace(config, environment=replace(config.environment, kind=config.data))
    return config


def next_commands(run: Run, path: Path) -> tuple[tuple[str, str], ...]:
    """Commands that work for a finished run, each with what it does."""
    gruppo, folder = shlex.quote(command_name()), shlex.quote(str(path))
    missing = missing_parts(run.config, Parts())
    commands = []
    if "model" not in missing:
        commands.append((f"{gruppo} sample {folder} PROMPT", "sample from the model"))
    if not missing and run.state.evaluations:
        commands.append((f"{gruppo} eval {folder}", "evaluate it again"))
    commands.append((f"{gruppo} doctor {folder}", "check its metrics for problems"))
    return tuple(commands)


def explain(config: Config, *, trust_run: bool = False) -> list[str]:
    """Describe what training would do, without training: objective, stages, work, memory, one
    prompt and its reward."""
    config = with_own_environment(config)
    validate(config, Parts())
    settings = serialization.to_dict(config)
    models = trust.imports_of_models(settings)
    for place, names in models.items():
        trust.check(place, names, trust_run=trust_run)
    with importing([*trust.imports(settings), *chain(*models.values())]):
        run, _ = build(config.without_servers, Parts())  # they need not run yet
        return dry_run.explain(run, config)


# --- ranks ----------------------------------------------------------------------------------------


def join_ranks(config: Config) -> None:
    chosen = config.distributed
    dist.init(chosen.timeout_s, is_sharded=chosen.shard != "none")


def check_equal_ranks(config: Config) -> None:
    """Refuse ranks with other settings, code or versions: they would train other models, or wait
    for each other."""
    if dist.world_size() == 1:
        return
    leaves = options(replace(config, name=""))
    own: dict[str, Any] = {as_flag(name): str(leaf.value) for name, leaf in leaves.items()}
    functions = [config.model, *functions_of(config)]
    own |= {f"the code of {name}": code_digest(name) for name in functions}
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    code = b"".join(file.read_bytes() for file in sources)
    own["gruppo's code"] = hashlib.sha256(code).hexdigest()
    versions = environment()["versions"]
    check_equal(own | {f"the version of {name}": version for name, version in versions.items()})


def check_equal(own: dict[str, Any]) -> None:
    """A collective: refuse ranks whose values differ from those of rank 0, and name the first that
    does."""
    first, *others = dist.gather_json(own)
    for number, other in enumerate(others, start=1):
        for name in sorted(first.keys() | other.keys()):
            theirs, ours = str(other.get(name)), str(first.get(name))
            if theirs != ours:
                raise GruppoError(f"""rank {number} differs from rank 0 in {name}: {theirs:.40}, not
                    {ours:.40}. Give all ranks the same command, files and versions.""")


def new_name(stem: str, runs_dir: str | Path) -> str:
    """A name for a run that no other in ``runs_dir`` has."""
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        raise GruppoError(
            """torchrun --max-restarts runs the command again, and a run without a name would start
                    from step 0 each time""",
            advice="Add $name NAME: a restart then continues that run from its last checkpoint",
        )
    name = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    others = (f"{name}-{n}" for n in range(2, 1000))  # two runs may start in one second
    return next((n for n in (name, *others) if not (Path(runs_dir) / n).exists()), name)


def change(config: Config, changes: dict[str, Any]) -> Config:
    """A config with the given leaves, dotted names with two underscores: ``{"rollout__group_size":
    4}``."""
    dotted = {name.replace("__", "."): value for name, value in changes.items()}
    try:
        return serialization.change(config, dotted)
    except serialization.UnknownEntry as error:
        known = [*options(config)]
        for section, kind in sections().items():
            known += [] if type(config.modality) is kind else options(kind(), f"{section}.")
        # the whole name: the unknown entry of verl's actor_rollout_ref.actor.clip_ratio_low is its
        # first part
        name = next((n for n in dotted if n.startswith(f"{error.option}.")), error.option)
        hint = peer_options.suggestion(name, known, as_argument)
        raise GruppoError(f"""unknown option {as_argument(name)}. {hint}docs/reference/config.md
            lists the options; in Python, two underscores stand for a dot.""") from None
