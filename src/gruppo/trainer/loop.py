"""The loop: collect, learn, publish."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gruppo import distributed as dist
from gruppo.loading import command_name, did_you_mean
from gruppo.platforms import peak_memory_gib
from gruppo.trainer import back_off, checkpoint, references
from gruppo.trainer.callbacks import Step
from gruppo.trainer.collect import Collected, collect
from gruppo.trainer.evaluate import Evaluated, evaluate, held_out
from gruppo.trainer.forward import whole_weights
from gruppo.trainer.metrics import collected_metrics
from gruppo.trainer.recorder import Recorder
from gruppo.trainer.run import Run
from gruppo.trainer.run_dir import RunFolder, boundary_state
from gruppo.trainer.samples import all_completions, show_samples
from gruppo.trainer.signals import Interrupted
from gruppo.trainer.update import learn
from gruppo.trainer.weight_change import warn_if_idle
from gruppo.types import EngineLost, GruppoError, NumericalStop

log = logging.getLogger("gruppo")

LEAST_ACTIONS = 100
"""Actions chosen by the newest weights from which on their mean mismatch is checked: that of a few
is chance."""


class Stopped(Exception):
    """A signal, such as Ctrl-C, stopped the run; the message says how to continue it."""


def steps(run: Run, folder: RunFolder) -> Generator[Step]:
    """Run steps until the run is complete, from wherever it is, and yield each."""
    references.remember(run)
    every, metric = run.config.saving.every, run.config.back_off.metric
    try:
        end_of_step(run, folder, {})
        while not run.is_complete:
            done = step(run, folder)
            with dist.phase("signals"):
                is_signalled = not run.is_complete and dist.all_max(int(run.stopper.requested))
            if is_signalled or run.is_complete or (every and done.step % every == 0):
                save(run, folder)
            if is_signalled:
                folder.finish_saving()
                raise Interrupted
            yield done
        if run.is_stopped:
            evaluate_if_due(run, folder)
            save(run, folder)
        if metric and run.state.best is None:
            hint = did_you_mean(metric, run.known.keys() - {metric})
            log.warning("back_off.metric %r was never measured.%s", metric, hint)
    except Interrupted:
        raise Stopped(how_to_continue(folder.path)) from None
    except EngineLost as error:
        has_save = checkpoint.steps(folder.path / "checkpoints")
        saved = "What is complete is saved." if has_save else "No step was complete."
        command = f"{command_name()} resume {folder.path}"
        raise EngineLost(
            f"{error} {saved} Start the servers again, then continue with: {command}"
        ) from None


def step(run: Run, folder: RunFolder) -> Step:
    """Collect, learn, publish; log the step, and evaluate if due."""
    recorder = run.recorder = Recorder()
    step_params = run.stage_schedule.step_params(run.state.step)
    before = _totals(run)
    with boundary_kept(run, folder), dist.phase("collect"):
        collected = collect(run, step_params)
        if run.callbacks is not None:
            run.callbacks.notify("on_rollouts", collected.rollouts, collected.scores)
        with recorder.time("credit"):
            metrics = collected_metrics(run, collected, step_params)
    metrics |= {name: total - before[name] for name, total in _totals(run).items()}
    with dist.phase("learn"), recorder.time("update"):
        run.engine.sleep()
        metrics |= learn(run, collected.batch, step_params)
        check_mismatch(run, metrics)
    with dist.phase("publish"):
        with recorder.time("sync"):
            lost = publish(run)
        metrics |= run.stage_schedule.metrics(step_params) | recorder.metrics
        metrics |= run.engine.metrics() | run.rewards.usage()
        rows = _finish_metrics(metrics, recorder.seconds)
        run.stage_schedule.measure(run.state.step - 1, metrics, rows=rows)
        log_step(run, folder, collected, metrics)
        done = Step(run.state.step, metrics, collected.rollouts, collected.scores)
        # before an evaluation, within which a signal may end the run: no resume repeats it
        call_back(run, folder, "on_step", done)
        if lost is not None:
            save(run, folder)
            folder.finish_saving()
            raise lost
        warn_if_idle(run, metrics, folder.path, collected.rollouts)
        # before the save, which then holds it; stopped here, the step is saved without
        watched = end_of_step(run, folder, metrics)
    evaluation = evaluation_at(run, done.step)
    metrics = {**metrics, **watched, **(evaluation.metrics() if evaluation else {})}
    return Step(done.step, metrics, done.rollouts, done.scores, evaluation)


def publish(run: Run) -> GruppoError | None:
    """Give the new weights to the engine and the reference; return why the engine did not take
    them: the step is complete, and is logged and saved before the run ends."""
    run.state.step += 1
    run.state.version += 1
    lost: GruppoError | None = None
    try:
        run.engine.sync(run.policy, run.state.version)
    except GruppoError as error:
        lost = error
    if run.reference is not None:
        run.reference.update(run.policy, run.state.step)
    return lost


def _totals(run: Run) -> dict[str, float]:
    """Return totals whose increase in the samples of a step is a metric."""
    totals = {}
    if run.environment is not None:  # evaluations add to it too
        totals["time/environment_s"] = run.environment.elapsed_s
    return totals


def _finish_metrics(metrics: dict[str, float], seconds: float) -> float:
    """Add duration, rate and memory of the step; return its rows."""
    metrics["time/step_s"] = seconds
    if "tokens" in metrics:
        metrics["rate/tokens_per_s"] = metrics.pop("tokens") / seconds
    metrics["mem/peak_gib"] = peak_memory_gib()
    if torch.cuda.is_available():
        metrics["mem/peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return metrics.pop("rollouts", 0.0)


def log_step(
    run: Run, folder: RunFolder, collected: Collected, metrics: Mapping[str, float]
) -> None:
    """Write metrics and samples of a step."""
    completions = all_completions(run, collected)
    with dist.fail_together():
        folder.check_exists()
        run.log(metrics)
        show_samples(run, collected)
        if folder.completions is not None:
            folder.completions.append(run.state.step, completions)


def check_mismatch(run: Run, metrics: Mapping[str, float]) -> None:
    """Stop before weights are published or saved that have learned from samples of another
    distribution."""
    engine = run.config.engine
    mismatch = metrics.get("mismatch/mean_nats", 0.0)
    if engine.lag:  # most samples are of older weights, and differ also by what was learned since
        is_known = metrics.get("mismatch/lag_0_count", 0.0) >= LEAST_ACTIONS
        mismatch = metrics["mismatch/lag_0_mean_nats"] if is_known else 0.0
    if engine.urls and mismatch > engine.max_mismatch:
        raise NumericalStop(
            f"""the servers' log-probs of version {run.state.version} are {mismatch:.2g} nats from
                the trainer's on average, more than engine.max_mismatch={engine.max_mismatch:g}""",
            advice="""Restart the servers with gruppo serve, and continue with gruppo resume. If
                rounding alone does this, set a higher $engine.max_mismatch""",
        )


def how_to_continue(path: Path) -> str:
    """Return what a signal left of the run in this folder, and the command to type."""
    if not (path / "config.json").is_file():
        return "stopped by a signal before the run began: nothing was written."
    command = f"{command_name()} resume {path}"
    if checkpoint.steps(path / "checkpoints"):
        return f"stopped by a signal; what is complete is saved. Continue with: {command}"
    return f"stopped by a signal before a step was saved. Begin again with: {command}"


@contextmanager
def boundary_kept(run: Run, folder: RunFolder, *, may_leave: bool = True) -> Iterator[None]:
    """For work that leaves the weights alone: if it fails or is interrupted, the state from before
    it is saved.

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
        raise


def save(run: Run, folder: RunFolder) -> None:
    """Save a checkpoint after a whole step. If it fails, no rank waits for the one that writes."""
    boundary = boundary_state(run)
    with dist.phase("save"):
        folder.finish_saving()
    with dist.phase("save"), dist.fail_together():
        references.check_unchanged(run)  # else the KL was to something else: nothing is saved
        folder.save(run, boundary)


def end_of_step(run: Run, folder: RunFolder, metrics: Mapping[str, float]) -> dict[str, float]:
    """At a step boundary, after a step with these ``metrics``: evaluate if due, return to the best
    weights if the watched metric has fallen, and begin the next stage if this one is over.

    Returns the metrics of what is watched besides the rewards.
    """
    step, schedule, reference = run.state.step, run.stage_schedule, run.reference
    watched = evaluate_if_due(run, folder)
    if schedule.settled < step:
        done = evaluation_at(run, step)
        evaluated = (done.metrics() if done else {}) | watched
        schedule.measure(step, evaluated)
        back_off.watch(run, folder, {**metrics, **evaluated})
    message = schedule.advance(step, run.known)
    if message is None:
        return watched
    log.info("%s", message)
    if schedule.is_over:
        evaluate_if_due(run, folder)  # a metric of training may have ended it
    elif schedule.stage.new_reference and reference is not None and reference.follows_policy:
        reference.reset_to(run.policy)
        log.info("step %d: the reference is now the policy as it is.", step)
    return watched


def evaluation_at(run: Run, step: int) -> Evaluated | None:
    """Return the evaluation at a step, if there was one."""
    return next((Evaluated(**done) for done in run.state.evaluations if done["step"] == step), None)


def evaluate_if_due(run: Run, folder: RunFolder) -> dict[str, float]:
    """Evaluate before the first step, after the last, and every ``evaluation.every`` steps, never
    twice at one step.

    Returns the metrics of what is watched besides the rewards, such as a mixed reference.
    """
    count, every, step = run.config.evaluation.prompts, run.config.evaluation.every, run.state.step
    is_due = step == 0 or run.is_complete or (every and step % every == 0)
    is_done = evaluation_at(run, step) is not None
    if not run.rewards.names:  # images were shown, and nothing was measured
        is_done = run.stage_schedule.settled >= step
    return evaluate_now(run, folder) if count and is_due and not is_done else {}


def evaluate_now(run: Run, folder: RunFolder) -> dict[str, float]:
    """Evaluate and log; return the metrics of what is watched besides the rewards."""
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
        shown = rows[: run.display.held_out_shown]
        if shown and dist.is_main() and run.config.show_samples_every:
            for tracker in run.trackers:
                tracker.log_samples(run.state.step, shown)
    call_back(run, folder, "on_evaluate", done)
    return watched


def call_back(run: Run, folder: RunFolder, event: str, what: Any) -> None:
    """Call the callbacks between two steps; the run is stopped if a rank's wants it to be."""
    if run.callbacks is not None:
        with boundary_kept(run, folder, may_leave=False), dist.phase(event):
            run.callbacks.notify(event, what)
        run.is_stopped = bool(dist.all_max(int(run.is_stopped)))
