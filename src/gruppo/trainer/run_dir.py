"""Run folders: config, manifest, metrics, samples, log, checkpoints, final model."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from copy import copy
from dataclasses import fields
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from gruppo import distributed as dist
from gruppo.config import serialization
from gruppo.config.schema import IN_MEMORY, Config
from gruppo.integrity import check_links, explained_failures, read_json, replace_file
from gruppo.loading import code_digest, command_name, did_you_mean
from gruppo.platforms import lock_file, sync_to_disk
from gruppo.protocols import AdapterMixin, PromptMixin, digest, part, save_with_origin
from gruppo.seeds import seed_at
from gruppo.tracking import trackers
from gruppo.tracking.files import CompletionFiles, MetricsFile, read_lines
from gruppo.tracking.samples import SamplesFile
from gruppo.trainer import checkpoint, shards
from gruppo.trainer.callbacks import Callbacks
from gruppo.trainer.forward import token_budget
from gruppo.trainer.run import Run, State, trained
from gruppo.types import GruppoError

log = logging.getLogger("gruppo")


def check_is_run(path: Path) -> None:
    """Refuse what is not the folder of a run, and name the nearest run beside it; and links that
    lead out of it."""
    check_links(path)
    if (path / "config.json").is_file():
        return
    problem = "has no config.json" if path.exists() else "does not exist"
    runs = [str(config.parent) for config in path.parent.glob("*/config.json")]
    example = " Give the folder of a run, such as runs/arithmetic-..."
    raise GruppoError(f"the run folder {path} {problem}.{did_you_mean(str(path), runs, example)}")


class RunFolder:
    """The folder of a run. Only the main rank writes, except for shards of weights; methods of
    other ranks do nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.best = path / "best"
        self.completions: CompletionFiles | None = None
        self._unchecked: checkpoint.Save | None = None
        """The newest save of several ranks, until it was found complete."""
        self._written: set[Path] = set()
        """Checkpoints that this process has begun to write or was resumed from."""
        self._saved_best: Mapping[str, float] | None = None
        """``State.best`` of the newest checkpoint."""
        self._identity: os.stat_result | None = None
        """Of the folder that was opened, in case it is deleted or replaced."""
        self._opened = ExitStack()
        self.close = self._opened.close

    def check_is_new(self) -> None:
        """Refuse a folder that holds more than what an aborted start leaves."""
        if not self.path.exists():
            return
        aborted = {
            *(self.path / name for name in (".lock", "log.txt", "logs")),
            *checkpoint.leftovers(self.path),
        }
        if not self.path.is_dir() or {*self.path.iterdir()} - aborted:
            raise GruppoError(
                f"the run folder {self.path} exists already",
                advice=f"""Choose another $name, continue it with {command_name()} resume
                    {self.path}, or delete it""",
            )
        check_links(self.path)

    def create(self, config: Config) -> None:
        """Make a new folder with its config, and open it."""
        if not dist.is_main():
            return
        self.check_is_new()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise GruppoError(
                f"the run folder {self.path} cannot be made: {error.strerror}",
                advice="Choose another $runs_dir",
            ) from error
        self.open()
        replace_file(self.path / "config.json", json.dumps(serialization.to_dict(config), indent=2))
        self.checkpoints.mkdir(
            exist_ok=True
        )  # a resumed run without this folder has lost its checkpoints

    def open(self) -> None:
        """Lock the folder for this process, remove the partial writes of a killed one, and start
        the log."""
        if not dist.is_main():
            return
        try:
            self._opened.enter_context(lock_file(self.path / ".lock"))
            handler = logging.FileHandler(self.path / "log.txt", encoding="utf-8")
        except BlockingIOError:
            raise GruppoError(
                f"another process is writing to {self.path}; wait for it or stop it first."
            ) from None
        except OSError as error:
            self.close()
            raise GruppoError(f"""{error.filename} cannot be written: {error.strerror}. The run
                needs a folder with free space that it may write to.""") from error
        self._identity = self.path.stat()
        for name in (".", "checkpoints", "best", "completions", "images"):
            checkpoint.sweep(self.path / name)
        # lines that cannot be written are dropped: the metrics file reports a full disk
        handler.handleError = lambda record: None  # type: ignore[method-assign]
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(handler)
        self._opened.callback(_stop_log, handler)

    def check_exists(self) -> None:
        """Refuse to go on where the folder was deleted or moved: writing would make another one,
        without a config."""
        with suppress(FileNotFoundError):
            if self._identity is None or os.path.samestat(self._identity, self.path.stat()):
                return
        raise GruppoError(f"""the run folder {self.path} was deleted or moved during training, so
            nothing can be saved in it. Move it back and continue with {command_name()} resume, or
            give the command again.""")

    def trackers(self, *, from_step: int | None) -> list[Any]:
        """Open the metrics and samples files, then what ``Config.track`` names.

        Rows after ``from_step`` are removed, since they will be written again.
        """
        if not dist.is_main():
            return []
        files: list[MetricsFile | SamplesFile] = [MetricsFile(self.path), SamplesFile(self.path)]
        self.completions = CompletionFiles(self.path)
        for file in (*files, self.completions):
            file.cut(-1 if from_step is None else from_step)
        config = serialization.load(self.path / "config.json")
        return [
            *files,
            *trackers.open_trackers(config.track, self.path, config, from_step=from_step),
        ]

    # --- checkpoints ---

    def save(self, run: Run, state: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint of ``state``, which ``boundary_state`` made, and delete old ones.

        Without ``state``, keep weights and optimizer state as the best so far, for
        ``back_off.watch``. If weights are sharded, each rank writes its own; ``finish_saving``
        waits until all are written.
        """
        ranks = dist.world_size() if is_sharded(run) else 1
        if dist.rank() >= ranks:
            return
        if dist.is_main():
            self.check_exists()
        if state is None:
            target = self.best / checkpoint.name_of(run.state.step)
        else:
            target = self.checkpoints / checkpoint.name_of(int(state["step"]))
            # a run that resumes from it may return to the best weights that it names
            self._saved_best = state["best"]
            self._sync_logs()
        if target in self._written:
            return
        kept = [best["step"] for best in (self._saved_best, run.state.best) if best]
        keep = run.config.saving.keep

        def delete_old() -> None:
            if target.parent == self.checkpoints:
                checkpoint.prune(self.checkpoints, keep, newest=int(target.name[5:]))
            for other in {*checkpoint.steps(self.best)}.difference(kept):
                checkpoint.remove(self.best / checkpoint.name_of(other))

        parts = {
            name: shards.own_shards(tensors or {})
            for name, tensors in tensors_of(run).items()
            if tensors or name in checkpoint.REQUIRED
        }
        written = checkpoint.Save(target, ranks, delete_old)
        self._unchecked = written if ranks > 1 else None
        written.write(parts, state or {}, dist.rank())
        self._written.add(target)

    def _sync_logs(self) -> None:
        """Write what was logged to the disk: a checkpoint must not outlive the rows before it."""
        completions = sorted(self.path.glob("completions/step_*"))[-1:]
        for file in (self.path / "metrics.jsonl", self.path / "samples.jsonl", *completions):
            if dist.is_main() and file.exists():
                sync_to_disk(file)

    def finish_saving(self) -> None:
        """Wait until what all ranks have written is a complete checkpoint. A collective."""
        with dist.fail_together():
            if dist.is_main() and self._unchecked is not None:
                self._unchecked.check_committed()
                self._unchecked = None

    def return_to(self, run: Run, saved: checkpoint.Saved) -> None:
        """Restore weights, reference and optimizer; nothing else of the run changes.

        ValueError if the weights of the policy or the critic differ in names or shapes, before
        anything is restored.
        """
        weights = weights_of(run)
        loaded = {"model": saved.weights, "critic": saved.critic}
        for what, found in loaded.items():
            if (weights[what] is None) != (found is None):
                raise ValueError(f"it has {'a' if found else 'no'} {what}, unlike this run")
            own, theirs = _shapes(weights[what]), _shapes(found)
            if different := sorted(own.items() ^ theirs.items()):
                name = different[0][0]
                raise ValueError(
                    f"the shape of {name} in its {what} is {theirs.get(name)}, and "
                    f"{own.get(name)} in this run's"
                )
        with torch.no_grad():
            for what, found in loaded.items():
                for name, tensor in (found or {}).items():
                    weights[what][name].copy_(tensor)
        if run.reference is not None:
            run.reference.load_state_dict(saved.reference)
        checkpoint.restore_optimizer(run.optimizer, saved.optimizer, optimized_names(run))

    def restore(self, run: Run) -> bool:
        """Restore the run from its newest checkpoint; return False if there is none."""
        saved = checkpoint.load_latest(self.checkpoints, sharded_tensors(run))
        if saved is None:
            self._check_nothing_is_lost(run)
            return False
        try:
            _check_base(run, saved.state.get("base_sha256"))
            self.return_to(run, saved)
            restore_state(run, saved.state)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, ValueError):
                reason = str(error)
            raise GruppoError(f"""the checkpoint of step {saved.step} in {self.checkpoints} does not
                belong to this model and data ({reason}). Resume with the run's own config and the
                model as it was, or start a new run.""") from error
        self._saved_best = run.state.best
        self._written = {self.checkpoints / checkpoint.name_of(saved.step)}
        self.write_evaluations(run)  # the file may be torn, or ahead of the checkpoint
        return True

    def _check_nothing_is_lost(self, run: Run) -> None:
        """Refuse to begin again where a checkpoint was saved that is not there any more."""
        steps = max((row["step"] for row in read_lines(self.path / "metrics.jsonl")), default=0)
        # killed before its first save, a run has logged no step after the one at which it is due
        was_saved = 0 < run.config.saving.every < steps or (self.checkpoints / "latest").exists()
        if steps and (was_saved or not self.checkpoints.is_dir()):
            raise GruppoError(f"""{self.checkpoints} holds no checkpoint, and {steps} steps were
                logged: resuming would begin at step 0 and delete their metrics. Put the checkpoints
                back, or begin again under another name with {command_name()} train
                {self.path / "config.json"}.""")

    # --- other files ---

    def write_evaluations(self, run: Run) -> None:
        if dist.is_main():
            self.check_exists()
            # JSON has no NaN: null
            text = json.dumps(run.state.evaluations)
            evaluations = json.loads(text, parse_constant=lambda _: None)
            replace_file(self.path / "evaluations.json", json.dumps(evaluations, indent=2))

    def write_manifest(self, run: Run, model_source: Mapping[str, Any]) -> None:
        """Write versions, hardware, seed, and the origin of model and data; no environment
        variables."""
        if not dist.is_main():
            return
        config = run.config
        demos = run.demos and {
            "name": config.supervised.data or config.data,
            "fingerprint": run.demos.fingerprint(),
        }
        manifest = {
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "seed": config.seed,
            "data": {"name": config.data, "fingerprint": run.source.fingerprint()},
            "demonstrations": demos,
            "token_budget": token_budget(run),
            "compute_dtype": str(run.policy.compute_dtype).removeprefix("torch."),
            **_setup(run, model_source),
            "first_weights_sha256": _first_weights(run),
            "base_sha256": part(run.policy, AdapterMixin).base_sha256,
            "reference_sha256": run.reference_digest(),
        }
        replace_file(self.path / "manifest.json", json.dumps(manifest, indent=2))

    def check_manifest(
        self, run: Run, model_source: Mapping[str, Any], *, allow_changes: bool
    ) -> None:
        """Refuse to resume with what changes the results, unless ``allow_changes``; warn of every
        other difference.

        Never with a model whose weights are not those that the run began with: the reference is a
        copy of them, and a model given in memory may have been trained since.
        """
        # without a checkpoint, the run begins again, with the present setup
        if not dist.is_main() or not checkpoint.steps(self.checkpoints):
            return
        file = self.path / "manifest.json"
        present = _setup(run, model_source)
        try:
            manifest = read_json(file)
            first_weights = manifest["first_weights_sha256"]
            reference = manifest["reference_sha256"]
            changing, other = _differences(manifest, present, run.policy.device.type)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            log.warning(
                "%s is missing or damaged: whether code and versions have changed is not known.",
                file,
            )
            return
        if first_weights not in (None, _first_weights(run)):
            raise GruppoError(f"""the model {run.config.model} is not the one that {self.path} began
                with: its weights have changed. Resume with the model as it was before training,
                which is the KL reference and the starting point.""")
        run.reference_sha256 = reference
        run.check_reference()
        if changing and not allow_changes:
            raise GruppoError(
                f"{self.path} would not continue to the same results: {'; '.join(changing)}",
                advice="Restore what has changed, or continue with $allow_changes",
            )
        if changing:
            replace_file(file, json.dumps(manifest | present, indent=2))
        if changing or other:
            log.warning("since the run began: %s.", "; ".join([*changing, *other]))

    def write_final(self, run: Run, *, is_new: bool = False) -> Path:
        """Write the trained model to a folder of its own, as one process would. A collective.

        ``is_new``: also in place of one that is there.
        """
        target = self.path / "final"
        self.finish_saving()
        with dist.fail_together():
            self.check_exists()
            is_written = not dist.is_main() or (not is_new and checkpoint.seal_holds(target))
        if not dist.all_max(int(not is_written)):
            return target
        module, own = run.policy.module, run.policy.checkpoint_weights()
        read = dict(module.named_parameters()) if part(run.policy, AdapterMixin).saves_base else own
        whole = shards.whole_parameters(module, read)
        with explained_failures(target), whole, dist.fail_together():
            if dist.is_main():
                with checkpoint.replacing(target) as temporary:
                    save_with_origin(run.policy, temporary)
        return target


def _stop_log(handler: logging.Handler) -> None:
    log.removeHandler(handler)
    with suppress(OSError):
        handler.close()


def _shapes(tensors: Mapping[str, torch.Tensor] | None) -> dict[str, str]:
    return {name: str([*tensor.shape]) for name, tensor in (tensors or {}).items()}


def _check_base(run: Run, saved: str | None) -> None:
    """Refuse a checkpoint of an adapter on other weights; ``saved``: their SHA-256, None for all
    weights."""
    base = part(run.policy, AdapterMixin).base_sha256
    if base != saved:
        names = [f"an adapter of {sha:.16}..." if sha else "all weights" for sha in (saved, base)]
        raise ValueError(f"it holds {names[0]}, and this run trains {names[1]}")


def restore_state(run: Run, state: Mapping[str, Any]) -> None:
    """Restore what ``boundary_state`` returned."""
    run.source.load_state_dict(state["source"])
    if run.demos is not None:
        run.demos.load_state_dict(state["demos"])
    run.state = State(**{field.name: state[field.name] for field in fields(State)})
    run.stage_schedule.load_state_dict(state["stage_schedule"])
    callbacks = run.callbacks or Callbacks((), None)
    callbacks.load_state_dict(state.get("callbacks") or {})
    if dist.rank() < len(state["random"]):
        checkpoint.restore_random_state(state["random"][dist.rank()])
    else:  # there are more ranks than when it was saved
        seed = seed_at(run.config.seed, "rewards", dist.rank(), run.state.step)
        checkpoint.seed_random_state(seed)


def tensors_of(run: Run) -> dict[str, Any]:
    """The tensors of a checkpoint, by its files."""
    return weights_of(run) | {
        "optimizer": checkpoint.optimizer_tensors(run.optimizer, optimized_names(run))
    }


def weights_of(run: Run) -> dict[str, Any]:
    """Those of all files but the optimizer's."""
    return {
        "model": run.policy.checkpoint_weights(),
        "critic": None if run.critic is None else run.critic.checkpoint_weights(),
        "reference": {} if run.reference is None else run.reference.state_dict(),
    }


def optimized_names(run: Run) -> list[str]:
    """Names of the parameters in the order of the optimizer, which has sharded ones and whole ones
    apart."""
    named = trained(run.policy.module, run.critic)
    names = {id(parameter): name for name, parameter in named.items()}
    groups = run.optimizer.param_groups
    return [names[id(parameter)] for group in groups for parameter in group["params"]]


def sharded_tensors(run: Run) -> checkpoint.Sharded:
    """The tensors of a checkpoint that are divided among ranks, by its files."""
    # AdamW has no moments before its first step: those of a checkpoint are then known by their
    # parameters alone
    moments = {
        f"{moment}.{name}": parameter
        for moment in ("exp_avg", "exp_avg_sq")
        for name, parameter in trained(run.policy.module, run.critic).items()
    }
    files = weights_of(run) | {"optimizer": moments}
    return {file: shards.only_sharded(tensors or {}) for file, tensors in files.items()}


def is_sharded(run: Run) -> bool:
    return any(sharded_tensors(run).values())


def boundary_state(run: Run) -> dict[str, Any]:
    """The JSON of a checkpoint at a step boundary; weights and optimizer state are held by the run
    itself.

    A collective: ``random`` holds the generators of every rank, since rewards on each rank draw
    different numbers.
    """
    # first of all: the state of a source or a callback may fail on one rank alone
    random_states = dist.gather_json(checkpoint.random_state())
    return {
        **{name: copy(value) for name, value in vars(run.state).items()},
        "base_sha256": part(run.policy, AdapterMixin).base_sha256,
        "source": run.source.state_dict(),
        "demos": run.demos and run.demos.state_dict(),
        "stage_schedule": run.stage_schedule.state_dict(),
        "random": random_states,
        "callbacks": run.callbacks and run.callbacks.state_dict(),
    }


def _first_weights(run: Run) -> str | None:
    """SHA-256 of the untrained weights, if a resume depends on them and no file name identifies
    them."""
    if run.reference is None and run.config.model != IN_MEMORY:
        return None
    return run.first_weights_sha256 or digest(
        part(run.policy, AdapterMixin).frozen_base() | run.policy.checkpoint_weights()
    )


def functions_of(config: Config) -> list[str]:
    """Names of the functions, classes and kinds that a config has, except the model's."""
    names = [*config.reward, *config.environment.names, config.engine.kind]
    return [*names, config.objective.surrogate]


def _setup(run: Run, model_source: Mapping[str, Any]) -> dict[str, Any]:
    """What a resumed run is compared with: digests of code and of the tokenizer, versions,
    hardware."""
    inputs: dict[str, Any] = {}
    # once per file, whatever the number of its functions: a file may import a whole project
    digest_of = cache(code_digest)
    for name in functions_of(run.config):
        inputs[f"code of {name}"] = digest_of(f"{name.rpartition(':')[0]}:")
    inputs |= part(run.policy, PromptMixin).input_digests() | run.rewards.input_digests()
    if run.validation is not None:
        inputs["validation data"] = run.validation.fingerprint()
    inputs = {name: sha256 for name, sha256 in inputs.items() if sha256 is not None}
    return {
        "inputs": inputs,
        "model": dict(model_source),
        "world": dist.world_size(),
        **environment(),
    }


def _differences(
    manifest: Mapping[str, Any], present: Mapping[str, Any], device: str
) -> tuple[list[str], list[str]]:
    """What has changed since a manifest was written, in words: what changes the results, and
    everything else."""
    names = sorted(dict(manifest["inputs"].items() ^ present["inputs"].items()))
    changing = [f"the {name} has changed" for name in names]
    other: list[str] = []
    if manifest["model"].get("sha256") != present["model"].get("sha256"):
        other.append(f"the file of the model {present['model']['name']} has changed")
    now = present["versions"] | present["hardware"]
    then = manifest["versions"] | manifest["hardware"]
    for name, value in now.items():
        text = f"{name} was {then.get(name)} and is {value}"
        is_decisive = name in ("gruppo", "torch")
        if name == "threads" and device == "cpu":  # sums are divided among them
            text += f" (set OMP_NUM_THREADS={then.get(name)})"
            is_decisive = True
        if then.get(name) != value:
            (changing if is_decisive else other).append(text)
    if manifest["world"] != present["world"]:
        other.append(f"there were {manifest['world']} ranks and are {present['world']}")
    return changing, other


def environment() -> dict[str, Any]:
    """Versions of packages and the hardware, for the manifest."""
    versions = {"python": platform.python_version()}
    for name in ("gruppo", "torch", "transformers", "safetensors", "numpy"):
        versions[name] = metadata.version(name)
    cpu = platform.processor()
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        cpu = next(iter(re.findall(r"^model name\s*: (.*)", text, re.MULTILINE)), cpu)
    hardware = {
        "system": platform.platform(),
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
    return {"versions": versions, "hardware": hardware}
