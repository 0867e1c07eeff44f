"""The loop: collect, learn, publish."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from gruppo import distributed as dist
from gruppo.core.groups import has_no_spread
from gruppo.loading import command_name, did_you_mean
from gruppo.platforms import peak_memory_gib
from gruppo.rewards.scoring import Scores
from gruppo.seeds import seed_at
from gruppo.tracking.files import to_json
from gruppo.tracking.formatting import duration
from gruppo.trainer import back_off, checkpoint, references
from gruppo.trainer.callbacks import Step
from gruppo.trainer.collect import Collected, collect
from gruppo.trainer.evaluate import Evaluated, evaluate, held_out, sample_rows
from gruppo.trainer.memory import whole_weights
from gruppo.trainer.run import Run
from gruppo.trainer.run_dir import RunFolder, boundary_state
from gruppo.trainer.signals import Interrupted
from gruppo.trainer.update import learn
from gruppo.trainer.weight_change import warn_if_idle
from gruppo.types import EngineLost, GruppoError, NumericalStop

log = logging.getLogger("gruppo")

TIMED = ("demos", "rollout", "reward", "credit", "update")
"""Parts of a step."""
FORECAST_STEPS = 5
"""Steps from whose duration that of the run is forecast."""
LEAST_ACTIONS = 100
"""Actions chosen by the newest weights from which on their mean mismatch is checked: that of a few
is chance."""
SAMPLES_SHOWN = 4
GROUPS_SHOWN, IMAGES_SHOWN = 10, 8
"""Where samples are images: how many groups, and how many of each; of an evaluation, twice their
product in all."""
FAILURES_KEPT = 20
"""Failed rows of a step that samples.jsonl holds."""


class Stopped(Exception):
    """A signal, such as Ctrl-C, stopped the run; the message says how to continue it."""


def steps(run: Run, folder: RunFolder) -> Generator[Step]:
    """Run steps until the run is complete, from wherever it is, and yield each."""
    references.remember(run)
    every = run.config.saving.every
    try:
        end_of_step(run, folder, {})
        began, first = time.perf_counter(), run.state.step
        while not run.is_complete:
            step_params = run.stage_schedule.step_params(run.state.step)
            with boundary_kept(run, folder), dist.phase("collect"):
                collected = collect(run, step_params)
                if run.callbacks is not None:
                    run.callbacks.notify("on_rollouts", collected.rollouts, collected.scores)
            with dist.phase("learn"):
                run.engine.sleep()
                metrics = collected.metrics | learn(run, collected.batch, step_params)
                check_mismatch(run, metrics)
            with dist.phase("publish"):
                step = publish(
                    run, folder, collected, metrics | run.stage_schedule.metrics(step_params)
                )
            with dist.phase("signals"):
                is_signalled = not run.is_complete and dist.all_max(int(run.stopper.requested))
            if is_signalled or run.is_complete or (every and step.step % every == 0):
                save(run, folder)
            if is_signalled:
                folder.finish_saving()
                raise Interrupted
            if run.state.step - first == FORECAST_STEPS and (
                text := forecast(run, time.perf_counter() - began)
            ):
                log.info("%s", text)
            yield step
        if run.is_stopped:
            evaluate_if_due(run, folder)
            save(run, folder)
        if (metric := run.config.back_off.metric) and run.state.best is None:
            hint = did_you_mean(metric, run.known.keys() - {metric})
            log.warning(
                "back_off.metric %r was never measured, so that nothing was watched.%s",
                metric,
                hint,
            )
    except Interrupted:
        raise Stopped(how_to_continue(folder.path)) from None
    except EngineLost as error:
        has_save = checkpoint.steps(folder.path / "checkpoints")
        saved = "What is complete is saved." if has_save else "No step was complete."
        command = f"{command_name()} resume {folder.path}"
        raise EngineLost(
            f"{error} {saved} Start the servers again, then continue with: {command}"
        ) from None


def forecast(run: Run, seconds: float) -> str:
    """How long the run will take, from the seconds of its first steps; "" for what is left of less
    than a minute."""
    pace, left = seconds / FORECAST_STEPS, run.config.steps - run.state.step
    if pace * left < 60 or run.is_complete:
        return ""
    gate = run.config.plan[-1].until
    where = (
        torch.cuda.get_device_name()
        if run.policy.device.type == "cuda"
        else f"{torch.get_num_threads()} threads"
    )
    return (
        f"{pace:.1f} s a step over the first {FORECAST_STEPS} on {where}: the other {left} take "
        f"about "
        f"{duration(pace * left)}" + (f", fewer end the run once {gate}." if gate else ".")
    )


def check_mismatch(run: Run, metrics: Mapping[str, float]) -> None:
    """Stop before weights are published or saved that have learned from samples of another
    distribution."""
    engine = run.config.engine
    # with lag, most samples are of older weights, and differ also by what was learned since
    is_known = not engine.lag or metrics.get("mismatch/lag_0_count", 0.0) >= LEAST_ACTIONS
    mismatch = metrics.get("mismatch/lag_0_mean_nats" if engine.lag else "mismatch/mean_nats", 0.0)
    if (
        engine.urls and is_known and mismatch > engine.max_mismatch
    ):  # NaN where a step has trained on no row
        raise NumericalStop(
            f"""the servers' log-probs of version {run.state.version} are {mismatch:.2g} nats from
                the trainer's on average, more than engine.max_mismatch={engine.max_mismatch:g}""",
            advice="""Restart the servers with gruppo serve, and continue with gruppo resume. If
                rounding alone does this, set a higher $engine.max_mismatch""",
        )


def how_to_continue(path: Path) -> str:
    """What a signal left of the run in this folder, and the command to type."""
    if not (path / "config.json").is_file():
        return (
            "stopped by a signal before the run began; nothing was written. Give the command again."
        )
    if checkpoint.steps(path / "checkpoints"):
        return (
            f"stopped by a signal; what is complete is saved. Continue with: {command_name()} "
            f"resume {path}"
        )
    advice = f"Begin again with: {command_name()} resume {path}"
    return (
        f"stopped by a signal before a step was complete and saved: there is nothing to "
        f"continue from. {advice}"
    )


@contextmanager
def boundary_kept(run: Run, folder: RunFolder, *, may_leave: bool = True) -> Iterator[None]:
    """For work that leaves the weights alone: where it fails or is interrupted, the state from
    before it is saved.

    Not after a ``NumericalStop``, where the weights themselves are wrong. Not a collective: a rank
    may fail alone. ``may_leave``: whether a signal interrupts the work.
    """
    boundary = boundary_state(run)
    try:
        with run.stopper.may_leave() if may_leave else nullcontext():
            yield
    except NumericalStop:
        raise
    except (Interrupted, Exception):
        if boundary["step"] > 0:
            folder.save(run, boundary)
            folder.writer.wait()
        raise


def save(run: Run, folder: RunFolder) -> None:
    """Save a checkpoint after a whole step. Where it fails, no rank waits for the one that
    writes."""
    boundary = boundary_state(run)
    with dist.phase("save"):
        folder.finish_saving()
    with dist.phase("save"), dist.fail_together():
        references.check_unchanged(run)  # else the KL was to something else: nothing is saved
        folder.save(run, boundary)


def publish(run: Run, folder: RunFolder, collected: Collected, metrics: dict[str, float]) -> Step:
    """Hand the new weights to the engine, log, and evaluate where due."""
    began, state = time.perf_counter(), run.state
    rows = metrics.get("rollouts", 0.0)
    state.step += 1
    state.version += 1
    lost: GruppoError | None = None
    try:
        run.engine.sync(run.policy, run.state.version)
    except GruppoError as error:  # the step is complete: it is logged and saved before the run ends
        lost = error
    if run.reference is not None:
        run.reference.update(run.policy, run.state.step)
    seconds = sum(metrics.get(f"time/{part}_s", 0.0) for part in TIMED)
    metrics["time/sync_s"] = time.perf_counter() - began
    metrics |= run.engine.metrics() | run.rewards.usage()
    metrics["time/step_s"] = seconds + metrics["time/sync_s"]
    if collected.rollouts is not None:
        metrics["rate/tokens_per_s"] = metrics.pop("tokens") / metrics["time/step_s"]
        del metrics["rollouts"]
    on_cuda = torch.cuda.is_available()
    metrics["mem/peak_gib"] = (
        torch.cuda.max_memory_allocated() / 2**30 if on_cuda else peak_memory_gib()
    )
    run.stage_schedule.measure(state.step - 1, metrics, rows=rows)
    completions = all_completions(run, collected)
    with dist.fail_together():
        folder.check_exists()
        run.log(metrics)
        show_samples(run, collected)
        if folder.completions is not None:
            folder.completions.append(state.step, completions)
    step = Step(state.step, metrics, collected.rollouts, collected.scores)
    # before an evaluation, within which a signal may end the run: no resume repeats it
    call_back(run, folder, "on_step", step)
    if lost is not None:
        save(run, folder)
        folder.finish_saving()
        raise lost
    warn_if_idle(run, metrics, folder.path, collected.rollouts)
    # before the save, which then holds it; stopped here, the step is saved without
    watched = end_of_step(run, folder, metrics)
    evaluation = evaluation_at(run, state.step)
    metrics = {**metrics, **watched, **(evaluation.metrics() if evaluation else {})}
    return replace(step, metrics=metrics, evaluation=evaluation)


def end_of_step(run: Run, folder: RunFolder, metrics: Mapping[str, float]) -> dict[str, float]:
    """At a step boundary, after a step with these ``metrics``: evaluate where due, return to the
    best weights where the watched metric has fallen, and begin the next stage where this one is
    over.

    Returns the metrics of what is watched beside the rewards.
    """
    step = run.state.step
    watched = evaluate_if_due(run, folder)
    if run.stage_schedule.settled < step:
        done = evaluation_at(run, step)
        evaluated = (done.metrics() if done else {}) | watched
        run.stage_schedule.measure(step, evaluated)
        back_off.watch(run, folder, {**metrics, **evaluated})
    if (message := run.stage_schedule.advance(step, run.known)) is not None:
        log.info("%s", message)
        if run.stage_schedule.is_over:
            evaluate_if_due(run, folder)  # a metric of training may have ended it
        elif (
            run.stage_schedule.stage.new_reference
            and run.reference is not None
            and run.reference.follows_policy
        ):
            run.reference.reset_to(run.policy)
            log.info("step %d: the reference is now the policy as it is.", step)
    return watched


def evaluation_at(run: Run, step: int) -> Evaluated | None:
    """The evaluation at a step, if there was one."""
    return next((Evaluated(**done) for done in run.state.evaluations if done["step"] == step), None)


def evaluate_if_due(run: Run, folder: RunFolder) -> dict[str, float]:
    """Evaluate before the first step, after the last, and every ``evaluation.every`` steps, never
    twice at one step.

    Returns the metrics of what is watched beside the rewards, such as a mixed reference.
    """
    count, every, step = run.config.evaluation.prompts, run.config.evaluation.every, run.state.step
    is_due = step == 0 or run.is_complete or (every and step % every == 0)
    is_done = evaluation_at(run, step) is not None
    if not run.rewards.names:  # images were shown, and nothing was measured
        is_done = run.stage_schedule.settled >= run.state.step
    return evaluate_now(run, folder) if count and is_due and not is_done else {}


def evaluate_now(run: Run, folder: RunFolder) -> dict[str, float]:
    """Evaluate and log; return the metrics of what is watched beside the rewards."""
    with boundary_kept(run, folder), dist.phase("evaluate"):
        prompts = held_out(run, run.config.evaluation.prompts)
        with whole_weights(run.policy, engine=run.config.engine.kind):
            done, rows = evaluate(run, prompts)
        watched = references.watch(run)
    usage = run.rewards.usage()
    with dist.fail_together():
        if run.rewards.names:
            run.state.evaluations.append(asdict(done))
            folder.write_evaluations(run)
            run.log(done.metrics() | watched | usage)
        if run.display.renders_images and dist.is_main() and run.config.show_samples_every:
            for tracker in run.trackers:
                tracker.log_samples(run.state.step, rows[: 2 * IMAGES_SHOWN * GROUPS_SHOWN])
    call_back(run, folder, "on_evaluate", done)
    return watched


def call_back(run: Run, folder: RunFolder, event: str, what: Any) -> None:
    """Call the callbacks between two steps; the run is stopped where a rank's wants it to be."""
    if run.callbacks is not None:
        with boundary_kept(run, folder, may_leave=False), dist.phase(event):
            run.callbacks.notify(event, what)
        run.is_stopped = bool(dist.all_max(int(run.is_stopped)))


def failures_of(scores: Scores) -> dict[int, list[dict[str, str]]]:
    """Failures of the rewards, by row."""
    failures: dict[int, list[dict[str, str]]] = {}
    for failure in scores.failures:
        reason = {"reward": failure.reward, "kind": failure.kind, "message": failure.message}
        failures.setdefault(failure.row, []).append(reason)
    return failures


def all_completions(run: Run, collected: Collected) -> list[dict[str, Any]]:
    """Rows of all ranks for completions/, each with its group in the step; a collective, empty if
    they are not kept."""
    rollouts, scores = collected.rollouts, collected.scores
    if rollouts is None or scores is None or run.config.saving.completions == "shown":
        return []
    failures, groups = failures_of(scores), rollouts.group_ids.tolist()
    rows = sample_rows(None, rollouts, scores, range(len(rollouts)))
    for number, (row, group) in enumerate(zip(rows, groups, strict=True)):
        reasons = (": ".join(failure.values()) for failure in failures.get(number, ()))
        row |= {
            "group": group,
            "failures": "; ".join(reasons),
        }  # a text in each row: Arrow wants one type per column
        if collected.advantages is not None:
            row["advantage"] = float(collected.advantages[number])
    gathered, first = list[dict[str, Any]](), 0
    for part in dist.all_gather(json.dumps(to_json(rows)).encode()):
        rows = json.loads(part)
        gathered += [row | {"group": first + row["group"]} for row in rows]
        first += 1 + max((row["group"] for row in rows), default=-1)
    return gathered


def show_samples(run: Run, collected: Collected) -> None:
    """Samples for the screen and samples.jsonl: every ``show_samples_every`` steps some, and each
    step those that failed, with the reasons."""
    rollouts, scores, every = collected.rollouts, collected.scores, run.config.show_samples_every
    if rollouts is None or scores is None or not dist.is_main():
        return
    failures = failures_of(scores)
    failed = sorted(failures)[:FAILURES_KEPT]
    rows = sample_rows(run.display, rollouts, scores, failed)
    rows = [row | {"failures": failures[number]} for number, row in zip(failed, rows, strict=True)]
    if every and (run.state.step - 1) % every == 0:
        # Images: rows of the first groups, each from its best on. Else the best and the worst of
        # one group, whose rewards differ where there is such a group.
        group_ids, rewards, count = rollouts.group_ids, scores.rewards, len(rollouts.prompts)
        shown = list(range(min(count, GROUPS_SHOWN)))
        if not run.display.renders_images:
            differing = (~has_no_spread(rewards, group_ids)).nonzero()[:, 0].tolist()
            shown = [
                random.Random(seed_at(run.config.seed, "shown", run.state.step)).choice(
                    differing or range(count)
                )
            ]
        chosen: list[int] = []
        for group in shown:
            own = (group_ids == group).nonzero()[:, 0]
            ranked = own[
                rewards[own].nan_to_num(nan=float("-inf")).argsort(descending=True, stable=True)
            ].tolist()
            ends = [*ranked[: SAMPLES_SHOWN // 2], *ranked[len(ranked) - SAMPLES_SHOWN // 2 :]]
            chosen += ranked[:IMAGES_SHOWN] if run.display.renders_images else ends
        # once each: of a small group, the best may be the worst too
        rows += sample_rows(run.display, rollouts, scores, list(dict.fromkeys(chosen)))
    for tracker in run.trackers if rows else ():
        tracker.log_samples(run.state.step, rows)
