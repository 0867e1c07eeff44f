"""The loop: collect, learn, publish."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gruppo import distributed as dist
from gruppo.core.groups import has_no_spread
from gruppo.loading import command_name
from gruppo.platforms import peak_memory_gib
from gruppo.protocols import Policy
from gruppo.rewards.scoring import Scores
from gruppo.seeds import seed_at
from gruppo.trainer import back_off, checkpoint, references
from gruppo.trainer.collect import Collected, collect
from gruppo.trainer.evaluate import Evaluated, evaluate_rows, evaluate_steps, held_out, sample_rows
from gruppo.trainer.run import Run
from gruppo.trainer.run_dir import RunFolder, boundary_state
from gruppo.trainer.signals import Interrupted
from gruppo.trainer.update import learn
from gruppo.types import NumericalStop, Rollouts

log = logging.getLogger("gruppo")

TIMED = ("demos", "rollout", "reward", "credit", "update")
"""Parts of a step, those that it has."""
SAMPLES_SHOWN = 4
GROUPS_SHOWN, PICTURES_SHOWN = 10, 8
"""Where samples are pictures: so many groups, and so many of each; and of an evaluation so many in all, times two."""
FAILURES_KEPT = 20
"""Failed rows of a step that samples.jsonl holds."""


class Stopped(Exception):
    """A signal, such as Ctrl-C, stopped the run; the message says how to continue it."""


def train(run: Run, folder: RunFolder) -> None:
    """Rounds until ``config.steps`` are complete, from wherever the run is."""
    references.remember(run)
    try:
        settle(run, folder, {})
        while run.state.step < run.config.steps:
            step_params = run.stage_schedule.step_params(run.state.step)
            with boundary_kept(run, folder):
                collected = collect(run, step_params)
            metrics = (
                collected.metrics | learn(run, collected.batch, step_params) | run.stage_schedule.metrics(step_params)
            )
            publish(run, folder, collected, metrics)
            stop_if_asked(run, folder)
        back_off.warn_if_never(run)
    except Interrupted:
        raise Stopped(how_to_continue(folder.path)) from None


def how_to_continue(path: Path) -> str:
    """What a signal left of the run in this folder, and what to type."""
    if not (path / "config.json").is_file():
        return "stopped by a signal before the run began; nothing was written. Give the command again."
    if checkpoint.steps(path / "checkpoints"):
        return f"stopped by a signal; what is complete is saved. Continue with: {command_name()} resume {path}"
    return (
        "stopped by a signal before a step was complete and saved: there is nothing to continue from. "
        f"Begin again with: {command_name()} resume {path}"
    )


@contextmanager
def boundary_kept(run: Run, folder: RunFolder) -> Iterator[None]:
    """For work that leaves the weights alone: where it fails or is interrupted, the state from before it is saved.

    Not where the weights themselves are what is wrong. No rank asks another here: it may have failed alone.
    """
    boundary = boundary_state(run)
    try:
        with run.stopper.may_leave():
            yield
    except NumericalStop:
        raise
    except (Interrupted, Exception):
        if boundary["step"] > 0:
            folder.save(run, boundary)
        raise


def stop_if_asked(run: Run, folder: RunFolder) -> None:
    """After a whole step: leave when a signal came to any rank."""
    if run.state.step < run.config.steps and dist.all_max(int(run.stopper.requested)):
        save(run, folder)
        raise Interrupted


def save(run: Run, folder: RunFolder) -> None:
    """A checkpoint after a whole step. Where it fails, no rank waits for the one that writes."""
    boundary = boundary_state(run)
    with dist.fail_together():
        references.check_unchanged(run)
        folder.save(run, boundary)


def publish(run: Run, folder: RunFolder, collected: Collected, metrics: dict[str, float]) -> None:
    """Hand the new weights to the sampler, say what happened, evaluate and save where due."""
    began = time.perf_counter()
    rows = metrics.get("rollouts", 0.0)
    run.state.step += 1
    run.state.version += 1
    run.engine.sync(run.policy, run.state.version)
    if run.reference is not None:
        run.reference.update(run.policy, run.state.step)
    seconds = sum(metrics.get(f"time/{part}_s", 0.0) for part in TIMED)
    metrics["time/sync_s"] = time.perf_counter() - began
    metrics["time/step_s"] = seconds + metrics["time/sync_s"]
    if collected.rollouts is not None:
        metrics["rate/tokens_per_s"] = metrics.pop("tokens") / metrics["time/step_s"]
        del metrics["rollouts"]
    metrics["mem/peak_gib"] = peak_gib()
    run.stage_schedule.measure(run.state.step - 1, metrics, rows=rows)
    with dist.fail_together():
        run.log(metrics)
        show_samples(run, collected)
    settle(run, folder, metrics)  # before the save, which then holds it; stopped here, the step is saved without it
    every = run.config.saving.every
    if run.state.step == run.config.steps or (every and run.state.step % every == 0):
        save(run, folder)


def settle(run: Run, folder: RunFolder, measured: Mapping[str, float]) -> None:
    """At a step boundary, of which a step ``measured`` this: evaluate where due, return to the best weights where that
    is called for, and let the next stage begin where this one is over."""
    watched = evaluate_if_due(run, folder)
    if run.stage_schedule.settled < run.state.step:
        done = next(
            (Evaluated(**done).metrics() for done in run.state.evaluations if done["step"] == run.state.step), {}
        )
        done |= watched
        run.stage_schedule.measure(run.state.step, done)
        back_off.watch(run, folder, {**measured, **done})
    if (said := run.stage_schedule.advance(run.state.step, run.known)) is not None:
        log.info("%s", said)
        references.renew_if_asked(run)


def show_samples(run: Run, collected: Collected) -> None:
    """Rows for the screen and for samples.jsonl: now and then some of one group, and each time those that failed."""
    rollouts, scores, every = collected.rollouts, collected.scores, run.config.show_samples_every
    if rollouts is None or scores is None or not dist.is_main():
        return
    rows = failed_rows(run.policy, rollouts, scores)
    if every and (run.state.step - 1) % every == 0:
        best = rows_of_a_sheet if run.policy.renders_images else best_and_worst_of_a_group
        rows += sample_rows(run.policy, rollouts, scores, best(run, rollouts, scores.rewards))
    if rows:
        run.show(rows)


def failed_rows(policy: Policy, rollouts: Rollouts, scores: Scores) -> list[dict[str, Any]]:
    """The first rows of this rank that a reward could not score, with what each reward said."""
    failures: dict[int, list[dict[str, str]]] = {}
    for failure in scores.failures:
        said = {"reward": failure.reward, "kind": failure.kind, "message": failure.message}
        failures.setdefault(failure.row, []).append(said)
    rows = sorted(failures)[:FAILURES_KEPT]
    shown = sample_rows(policy, rollouts, scores, rows)
    return [row | {"failures": failures[place]} for place, row in zip(rows, shown, strict=True)]


def best_and_worst_of_a_group(run: Run, rollouts: Rollouts, rewards: Float[Tensor, "B"]) -> list[int]:
    """Rows of one group: of one whose rewards differ, where there is one."""
    differing = (~has_no_spread(rewards, rollouts.group_ids)).nonzero()[:, 0].tolist()
    groups = differing or range(len(rollouts.prompts))
    group = random.Random(seed_at(run.config.seed, "shown", run.state.step)).choice(groups)
    rows = (rollouts.group_ids == group).nonzero()[:, 0]
    order = rewards[rows].nan_to_num(nan=float("-inf")).argsort(descending=True, stable=True)
    ranked = rows[order].tolist()
    chosen = [*ranked[: SAMPLES_SHOWN // 2], *ranked[len(ranked) - SAMPLES_SHOWN // 2 :]]
    return list(dict.fromkeys(chosen))


def rows_of_a_sheet(run: Run, rollouts: Rollouts, rewards: Float[Tensor, "B"]) -> list[int]:
    """Rows of the first groups, each from its best on: pictures are seen at a glance, many of them."""
    chosen: list[int] = []
    for group in range(min(len(rollouts.prompts), GROUPS_SHOWN)):
        rows = (rollouts.group_ids == group).nonzero()[:, 0]
        order = rewards[rows].nan_to_num(nan=float("-inf")).argsort(descending=True, stable=True)
        chosen += rows[order].tolist()[:PICTURES_SHOWN]
    return chosen


def evaluate_if_due(run: Run, folder: RunFolder) -> dict[str, float]:
    """Before the first step, after the last, and every so often; never twice at one step. What is said of a reference
    that is watched beside it."""
    wanted, every = run.config.evaluation.prompts, run.config.evaluation.every
    is_due = run.state.step in (0, run.config.steps) or (every and run.state.step % every == 0)
    is_done = any(done["step"] == run.state.step for done in run.state.evaluations)
    if not run.rewards.names:  # pictures were shown, and nothing was measured
        is_done = run.stage_schedule.settled >= run.state.step
    if not wanted or not is_due or is_done:
        return {}
    with boundary_kept(run, folder):
        prompts = held_out(run, wanted)
        done, rows = evaluate_rows(run, prompts)
        watched = references.watch(run) | evaluate_steps(run, prompts)
    with dist.fail_together():
        if run.rewards.names:
            run.state.evaluations.append(done.to_dict())
            folder.write_evaluations(run)
            run.log(done.metrics() | watched)
        if run.policy.renders_images and dist.is_main() and run.config.show_samples_every:
            run.show(rows[: 2 * PICTURES_SHOWN * GROUPS_SHOWN])
    return watched


def peak_gib() -> float:
    """Peak memory of this process so far: the accelerator's where there is one, else resident."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else peak_memory_gib()


def summary(run: Run) -> dict[str, Any]:
    """What a finished run is remembered by. After a return at the last step, the weights are those of the best one."""
    ends, last = run.state.evaluations, run.state.step
    if run.state.best is not None and run.state.best.get("returned_at") == run.state.step:
        last = int(run.state.best["step"])
    return {
        "steps": run.state.step,
        "before": next((e for e in ends if e["step"] == 0), None),
        "after": next((e for e in reversed(ends) if e["step"] == last and run.state.step), None),
        **run.state.totals,
    }
