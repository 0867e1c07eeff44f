"""A run's folder: config, manifest, metrics, samples, log, checkpoints, final model."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import fields
from pathlib import Path
from typing import Any

from gruppo import distributed as dist
from gruppo.config import serialization
from gruppo.config.schema import Config
from gruppo.loading import command_name
from gruppo.platforms import FileLock
from gruppo.seeds import seed_at
from gruppo.tracking import trackers
from gruppo.tracking.files import MetricsFile
from gruppo.tracking.samples import SamplesFile
from gruppo.trainer import checkpoint
from gruppo.trainer.hardware import hardware, versions
from gruppo.trainer.memory import token_budget
from gruppo.trainer.references import check_unchanged, remember
from gruppo.trainer.run import Run, State
from gruppo.trainer.weights import check_base, check_critic, first_weights, restore_weights
from gruppo.types import GruppoError

log = logging.getLogger("gruppo")


def boundary_state(run: Run) -> dict[str, Any]:
    """The JSON of a checkpoint at a step boundary; weights and optimizer state are held by the run itself.

    A collective: ``random`` holds the generators of every rank, as rewards that draw numbers draw others on each.
    """
    random_states = dist.all_gather(json.dumps(checkpoint.random_state()).encode())
    return {
        **{name: copy(value) for name, value in vars(run.state).items()},
        "base_sha256": run.policy.base_sha256,
        "source": run.source.state_dict(),
        "demos": None if run.demos is None else run.demos.state_dict(),
        "stage_schedule": run.stage_schedule.state_dict(),
        "random": list(map(json.loads, random_states)),
    }


class _LogFile(logging.FileHandler):
    """The run's log. What cannot be written is left out: the metrics file says that the disk is full."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


class RunFolder:
    """Only the main rank writes; the others have the same object and do nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints, self.best = path / "checkpoints", path / "best"
        self._saved_best: int | None = None
        """Step of the best weights that the newest checkpoint names."""
        self._lock: FileLock | None = None
        self._handler: logging.Handler | None = None

    @classmethod
    def create(cls, path: Path, config: Config) -> RunFolder:
        """A new folder; one that is there already is left alone."""
        folder = cls(path)
        with dist.fail_together():
            if dist.is_main():
                folder._fill(config)
        return folder

    def _fill(self, config: Config) -> None:
        self.check_is_new()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise GruppoError(
                f"the run folder {self.path} cannot be made: {error.strerror}. Choose another --runs-dir."
            ) from error
        self.open()
        try:
            checkpoint.write_text(self.path / "config.json", json.dumps(serialization.to_dict(config), indent=2))
        except GruppoError:
            self.close()
            raise

    def check_is_new(self) -> None:
        """Refuse a folder that holds more than a start which wrote nothing leaves."""
        if not self.path.exists():
            return
        if not self.path.is_dir() or {path.name for path in self.path.iterdir()} - {".lock", ".lock-owner", "log.txt"}:
            raise GruppoError(
                f"the run folder {self.path} exists already. Choose another --name, continue it with {command_name()} "
                f"resume {self.path}, or delete it."
            )

    def open(self) -> None:
        """Take the folder for this process, clear away what a killed one left half-written, and start the log."""
        if not dist.is_main():
            return
        try:
            self._lock = FileLock(self.path / ".lock")
            self._handler = _LogFile(self.path / "log.txt", encoding="utf-8")
        except BlockingIOError:
            raise GruppoError(f"another process is writing to {self.path}; wait for it or stop it first.") from None
        except OSError as error:
            self.close()
            raise GruppoError(
                f"{error.filename} cannot be written: {error.strerror}. The run needs a folder with free space that it "
                "may write to."
            ) from error
        for folder in (self.path, self.checkpoints):
            checkpoint.sweep(folder)
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logging.getLogger("gruppo").addHandler(self._handler)

    def close(self) -> None:
        if self._handler is not None:
            logging.getLogger("gruppo").removeHandler(self._handler)
            with suppress(OSError):
                self._handler.close()
        if self._lock is not None:
            self._lock.release()
        self._handler = self._lock = None

    def trackers(self, *, from_step: int | None) -> list[Any]:
        """The files that are always written, then what ``Config.track`` names.

        Rows after ``from_step`` are cut away: they will be written again.
        """
        if not dist.is_main():
            return []
        files: list[MetricsFile | SamplesFile] = [MetricsFile(self.path), SamplesFile(self.path)]
        for file in files:
            file.cut(-1 if from_step is None else from_step)
        config = serialization.load(self.path / "config.json")
        return [*files, *trackers.open_trackers(config.track, self.path, config, from_step=from_step)]

    # --- saving and restoring ---

    def save(self, run: Run, state: Mapping[str, Any]) -> None:
        """Write a checkpoint of ``state``, which ``boundary_state`` made, and delete old ones."""
        if dist.is_main():
            self._write(self.checkpoints, run, state["step"], state)
            checkpoint.prune(self.checkpoints, run.config.saving.keep, newest=state["step"])
            self._saved_best = None if state["best"] is None else int(state["best"]["step"])
            newest_best = None if run.state.best is None else int(run.state.best["step"])
            checkpoint.keep_only(self.best, {self._saved_best, newest_best})

    def keep_best(self, run: Run) -> None:
        """The weights and the optimiser's state as the best so far, beside those that the last checkpoint names."""
        if dist.is_main():
            self._write(self.best, run, run.state.step, {})
            checkpoint.keep_only(self.best, {self._saved_best, run.state.step})

    def _write(self, folder: Path, run: Run, step: int, state: Mapping[str, Any]) -> None:
        checkpoint.save(
            folder,
            step=step,
            weights=run.policy.checkpoint_weights(),
            optimizer=checkpoint.optimizer_tensors(run.optimizer, run.parameter_names),
            state=state,
            critic=None if run.critic is None else run.critic.checkpoint_weights(),
            reference={} if run.reference is None else run.reference.state_dict(),
        )

    def best_weights(self, run: Run) -> checkpoint.Saved:
        """What was kept at the run's best."""
        assert run.state.best is not None
        return checkpoint.load(self.best / checkpoint.name_of(int(run.state.best["step"])))

    def return_to(self, run: Run, saved: checkpoint.Saved) -> None:
        """Weights, reference and optimiser as they were saved; the rest of the run goes on."""
        restore_weights(run.policy.checkpoint_weights(), saved.weights)
        if run.critic is not None and saved.critic is not None:
            restore_weights(run.critic.checkpoint_weights(), saved.critic)
        if run.reference is not None:
            run.reference.load_state_dict(saved.reference)
        checkpoint.restore_optimizer(run.optimizer, saved.optimizer, run.parameter_names)

    def restore(self, run: Run) -> bool:
        """Put the run where its newest checkpoint is; False where there is none."""
        saved = checkpoint.load_latest(self.checkpoints)
        if saved is None:
            return False
        check_critic(run, saved, self.checkpoints)
        check_base(run, saved, self.checkpoints)
        try:
            self.return_to(run, saved)
            run.source.load_state_dict(saved.state["source"])
            if run.demos is not None:
                run.demos.load_state_dict(saved.state["demos"])
            run.state = State(**{field.name: saved.state[field.name] for field in fields(State)})
            run.stage_schedule.load_state_dict(saved.state["stage_schedule"])
            self._restore_random_state(run, saved.state["random"])
            self._saved_best = None if run.state.best is None else int(run.state.best["step"])
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            raise GruppoError(
                f"the checkpoint of step {saved.step} in {self.checkpoints} does not belong to this model and data "
                f"({type(error).__name__}: {error}). Resume with the run's own config, or start a new run."
            ) from error
        run.engine.sync(run.policy, run.state.version)
        return True

    def _restore_random_state(self, run: Run, states: Sequence[Mapping[str, Any]]) -> None:
        if dist.rank() < len(states):
            checkpoint.restore_random_state(states[dist.rank()])
        else:  # there are more ranks than when it was saved
            checkpoint.seed_random_state(seed_at(run.config.seed, "rewards", dist.rank(), run.state.step))

    # --- other files ---

    def write_evaluations(self, run: Run) -> None:
        if dist.is_main():
            checkpoint.write_text(self.path / "evaluations.json", json.dumps(_no_nan(run.state.evaluations), indent=2))

    def write_manifest(self, run: Run, model_source: Mapping[str, Any]) -> None:
        """Versions, hardware, seed, and where model and data came from. Nothing of the environment is copied."""
        if not dist.is_main():
            return
        manifest = {
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "seed": run.config.seed,
            "model": dict(model_source),
            "data": _of_source(run.config.data, run.source),
            "demonstrations": _of_source(run.config.supervised.data or run.config.data, run.demos),
            "token_budget": token_budget(run),
            "compute_dtype": str(run.policy.compute_dtype).removeprefix("torch."),
            "versions": versions(),
            "hardware": hardware(),
            "world": dist.world_size(),
            "first_weights_sha256": first_weights(run),
            "base_sha256": run.policy.base_sha256,
            "reference_sha256": remember(run),
        }
        checkpoint.write_text(self.path / "manifest.json", json.dumps(manifest, indent=2))

    def check_first_weights(self, run: Run) -> None:
        """Refuse to resume with a model that is not the one the run began with, where nothing else would tell.

        The reference is a copy of it; and a model given in memory may have been trained since.
        """
        if not dist.is_main():
            return
        try:
            manifest = json.loads((self.path / "manifest.json").read_text(encoding="utf-8"))
            then, of_reference = manifest["first_weights_sha256"], manifest["reference_sha256"]
        except (OSError, ValueError, KeyError, TypeError):
            return  # a run killed before its manifest was written has no step to continue
        if then is not None and then != first_weights(run):
            raise GruppoError(
                f"the model {run.config.model} is not the one that {self.path} began with: its weights have changed. "
                "Resume with the model as it was before training, which is the KL reference and the starting point."
            )
        run.reference_sha256 = of_reference
        check_unchanged(run)

    def warn_of_other_source(self, model_source: Mapping[str, Any]) -> None:
        """Say where the model's file is another than when the run began; the weights are checked apart."""
        try:
            then = json.loads((self.path / "manifest.json").read_text(encoding="utf-8"))["model"]["sha256"]
        except (OSError, ValueError, KeyError, TypeError):
            return
        if dist.is_main() and (now := model_source.get("sha256")) != then:
            log.warning(
                "the file of the model %s has changed since %s began (SHA-256 %.12s..., now %.12s...): it may go on "
                "otherwise than it would have.",
                model_source["name"],
                self.path,
                then or "none",
                now or "none",
            )

    def write_final(self, run: Run) -> Path:
        """The trained model as a folder of its own."""
        target = self.path / "final"
        if dist.is_main() and not checkpoint.seal_holds(target):
            checkpoint.write_folder(target, run.policy.save_with_origin)
        return target


def _of_source(name: str, source: Any) -> dict[str, Any] | None:
    """What a manifest says of prompts; None where there are none."""
    if source is None:
        return None
    return {"name": name, "fingerprint": source.fingerprint()}


def _no_nan(value: Any) -> Any:
    """NaN as null, which is what JSON has."""
    if isinstance(value, Mapping):
        return {name: _no_nan(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_no_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
