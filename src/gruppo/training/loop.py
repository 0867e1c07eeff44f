"""The loop: collect, learn, publish."""

from __future__ import annotations

import random
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gruppo import dist
from gruppo.core.advantages import has_no_spread
from gruppo.seeds import seed_at
from gruppo.training.collect import Collected, collect
from gruppo.training.evaluate import evaluate, sample_rows
from gruppo.training.folder import Boundary, RunFolder
from gruppo.training.run import Run, knobs_at
from gruppo.training.signals import Interrupted
from gruppo.training.update import learn
from gruppo.types import NumericalStop

SAMPLES_SHOWN = 4


class Stopped(Exception):
    """A signal stopped the run; it is saved and can be resumed."""


def train(run: Run, folder: RunFolder) -> None:
    """Rounds until ``config.steps`` are complete, from wherever the run is."""
    try:
        evaluate_if_due(run, folder)
        while run.step < run.config.steps:
            knobs = knobs_at(run.config, run.step)
            with boundary_kept(run, folder):
                collected = collect(run, knobs)
            metrics = collected.metrics | learn(run, collected.batch, knobs)
            publish(run, folder, collected, metrics)
            stop_if_asked(run, folder)
    except Interrupted:
        raise Stopped(f"stopped by a signal. Continue with: gruppo resume {folder.path}") from None


@contextmanager
def boundary_kept(run: Run, folder: RunFolder) -> Iterator[None]:
    """For work that leaves the weights alone: where it fails or is interrupted, the state from before it is saved.

    Not where the weights themselves are what is wrong.
    """
    boundary = Boundary.of(run)
    try:
        with run.stopper.may_leave():
            yield
    except NumericalStop:
        raise
    except (Interrupted, Exception):
        if boundary.step > 0:
            folder.save(run, boundary)
        raise


def stop_if_asked(run: Run, folder: RunFolder) -> None:
    """After a whole step: leave when a signal came to any rank."""
    if run.step < run.config.steps and dist.all_max(int(run.stopper.requested)):
        folder.save(run, Boundary.of(run))
        raise Interrupted


def publish(run: Run, folder: RunFolder, collected: Collected, metrics: dict[str, float]) -> None:
    """Hand the new weights to the sampler, say what happened, evaluate and save where due."""
    began = time.perf_counter()
    run.step += 1
    run.version += 1
    run.engine.sync(run.policy, run.version)
    seconds = metrics["time/rollout_s"] + metrics["time/reward_s"] + metrics["time/update_s"]
    metrics["time/sync_s"] = time.perf_counter() - began
    metrics["time/step_s"] = seconds + metrics["time/sync_s"]
    metrics["rate/tokens_per_s"] = metrics.pop("tokens") / metrics["time/step_s"]
    metrics["mem/peak_gib"] = peak_gib()
    del metrics["rollouts"]
    run.log(metrics)
    show_samples(run, collected)
    evaluate_if_due(run, folder)  # before the save, which then holds it; stopped here, the step is saved without it
    every = run.config.saving.every
    if run.step == run.config.steps or (every and run.step % every == 0):
        folder.save(run, Boundary.of(run))


def show_samples(run: Run, collected: Collected) -> None:
    """The best and the worst of one group now and then: of one whose rewards differ, where there is one."""
    every = run.config.show_samples_every
    rollouts = collected.batch.rollouts
    if not dist.is_main() or not every or rollouts is None or (run.step - 1) % every:
        return
    differing = (~has_no_spread(collected.batch.rewards, rollouts.group_ids)).nonzero()[:, 0].tolist()
    groups = differing or range(len(rollouts.prompts))
    group = random.Random(seed_at(run.config.seed, "shown", run.step)).choice(groups)
    rows = (rollouts.group_ids == group).nonzero()[:, 0]
    order = collected.batch.rewards[rows].nan_to_num(nan=float("-inf")).argsort(descending=True, stable=True)
    ranked = rows[order].tolist()
    chosen = [*ranked[: SAMPLES_SHOWN // 2], *ranked[len(ranked) - SAMPLES_SHOWN // 2 :]]
    run.show(sample_rows(rollouts, collected.batch.rewards, collected.batch.reward_parts, list(dict.fromkeys(chosen))))


def evaluate_if_due(run: Run, folder: RunFolder) -> None:
    """Before the first step, after the last, and every so often; never twice at one step."""
    wanted, every = run.config.evaluation.prompts, run.config.evaluation.every
    is_due = run.step in (0, run.config.steps) or (every and run.step % every == 0)
    if not wanted or not is_due or any(done["step"] == run.step for done in run.evaluations):
        return
    with boundary_kept(run, folder):
        done = evaluate(run, folder.held_out(run))
    run.evaluations.append(done.to_dict())
    folder.write_evaluations(run)
    for tracker in run.trackers:
        tracker.log(run.step, done.metrics())


def peak_gib() -> float:
    """Peak memory of this process so far: the accelerator's where there is one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def summary(run: Run) -> dict[str, Any]:
    """What a finished run is remembered by."""
    ends = run.evaluations
    return {
        "steps": run.step,
        "before": next((e for e in ends if e["step"] == 0), None),
        "after": next((e for e in reversed(ends) if e["step"] == run.step and run.step), None),
        **run.totals,
    }
