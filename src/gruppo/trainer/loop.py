"""The loop: collect, learn, publish."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from gruppo import distributed as dist
from gruppo.loading import command_name
from gruppo.platforms import peak_memory_gib
from gruppo.trainer import checkpoint
from gruppo.trainer.callbacks import Step
from gruppo.trainer.collect import Collected, collect
from gruppo.trainer.evaluate import Evaluated, evaluate, evaluate_reference, held_out
from gruppo.trainer.forward import whole_weights
from gruppo.trainer.metrics import collected_metrics
from gruppo.trainer.recorder import Recorder
from gruppo.trainer.run import Run
from gruppo.trainer.run_dir import RunFolder, boundary_state, sharded_tensors
from gruppo.trainer.samples import all_completions, show_samples
from gruppo.trainer.signals import Interrupted
from gruppo.trainer.stages import agreed
from gruppo.trainer.update import learn
from gruppo.trainer.weight_change import warn_if_idle
from gruppo.types import EngineLost, GruppoError, NumericalStop

log = logging.getLogger("gruppo")

LR_FACTOR = 0.5
"""Factor of the learning rate at each return to the best weights."""
LEAST_ACTIONS = 100
"""Actions chosen by the newest weights from which on their mean mismatch is checked: that of a few
is chance."""


class Stopped(Exception):
    """A signal, such as Ctrl-C, stopped the run; the message says how to continue it."""


def steps(run: Run, folder: RunFolder) -> Generator[Step]:
    """Run steps until the run is complete, from wherever it is, and yield each."""
    run.reference_digest()
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
            log.warning("back_off.metric %r was never measured.", metric)
    except Interrupted:
        raise Stopped(how_to_continue(folder.path)) from None
    except EngineLost as error:
        command = f"{command_name()} resume {folder.path}"
        raise EngineLost(
            f"{error} Start the servers again, then continue with: {command}"
        ) from None


def step(run: Run, folder: RunFolder) -> Step:
    """Collect, learn, publish; log the step, and evaluate if due."""
    recorder = run.recorder = Recorder()
    step_params = run.stage_schedule.step_params(run.state.step)
    with boundary_kept(run, folder), dist.phase("collect"):
        collected = collect(run, step_params)
        if run.callbacks is not None:
            run.callbacks.notify("on_rollouts", collected.rollouts, collected.scores)
        with recorder.time("credit"):
            metrics = collected_metrics(run, collected)
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
        warn_if_idle(run, metrics, folder.path)
        # before the save, which then holds it; stopped here, the step is saved without
        end_of_step(run, folder, metrics)
    evaluation = evaluation_at(run, done.step)
    if evaluation is None:
        return done
    return replace(done, metrics={**metrics, **evaluation.metrics()}, evaluation=evaluation)


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
        run.check_reference()  # else the KL was to something else: nothing is saved
        folder.save(run, boundary)


def end_of_step(run: Run, folder: RunFolder, metrics: Mapping[str, float]) -> None:
    """At a step boundary, after a step with these ``metrics``: evaluate if due, return to the best
    weights if the watched metric has fallen, and begin the next stage if this one is over."""
    step, schedule, reference = run.state.step, run.stage_schedule, run.reference
    evaluate_if_due(run, folder)
    if schedule.settled < step:
        done = evaluation_at(run, step)
        evaluated = done.metrics() if done else {}
        schedule.measure(step, evaluated)
        back_off(run, folder, {**metrics, **evaluated})
    message = schedule.advance(step)
    if message is None:
        return
    log.info("%s", message)
    if schedule.is_over:
        evaluate_if_due(run, folder)  # a metric of training may have ended it
    elif schedule.stage.new_reference and reference is not None and reference.follows_policy:
        reference.reset_to(run.policy)
        log.info("step %d: the reference is now the policy as it is.", step)


def back_off(run: Run, folder: RunFolder, metrics: Mapping[str, float]) -> None:
    """Keep the weights if the watched metric is the best so far; return to the best ones, with a
    lower learning rate, if it has fallen by ``drop``.

    The optimizer's state returns with the weights; the step, the prompts and the stage go on.
    """
    config, state, best = run.config.back_off, run.state, run.state.best
    if not config.metric or (value := agreed(metrics, config.metric)) is None:
        return
    if best is None or value > best["value"]:
        state.best = {"step": state.step, "value": value}
        folder.finish_saving()
        with dist.fail_together():
            folder.save(run)
    elif value < best["value"] - config.drop:
        folder.finish_saving()
        path = folder.best / checkpoint.name_of(int(best["step"]))
        with dist.fail_together():
            saved = checkpoint.load(path, sharded_tensors(run))
        folder.return_to(run, saved)
        state.best = {**best, "returned_at": state.step}
        schedule = run.stage_schedule
        schedule.lr_scale *= LR_FACTOR
        state.version += 1
        run.engine.sync(run.policy, state.version)
        state.totals["back_offs"] = state.totals.get("back_offs", 0.0) + 1
        log.warning(
            "step %d: %s fell to %.4g from %.4g; back to the weights of step %d, with %g of the "
            "learning rate.",
            *(state.step, config.metric, value, best["value"], best["step"], schedule.lr_scale),
        )
        run.log({"back_off/returns_count": state.totals["back_offs"]})


def evaluation_at(run: Run, step: int) -> Evaluated | None:
    """Return the evaluation at a step, if there was one."""
    return next((Evaluated(**done) for done in run.state.evaluations if done["step"] == step), None)


def evaluate_if_due(run: Run, folder: RunFolder) -> None:
    """Evaluate before the first step, after the last, and every ``evaluation.every`` steps, never
    twice at one step."""
    count, every, step = run.config.evaluation.prompts, run.config.evaluation.every, run.state.step
    is_due = step == 0 or run.is_complete or (every and step % every == 0)
    is_done = evaluation_at(run, step) is not None
    if not run.rewards.names:  # images were shown, and nothing was measured
        is_done = run.stage_schedule.settled >= step
    if count and is_due and not is_done:
        evaluate_now(run, folder)


def evaluate_now(run: Run, folder: RunFolder) -> None:
    """Evaluate and log."""
    with boundary_kept(run, folder), dist.phase("evaluate"):
        prompts = held_out(run, run.config.evaluation.prompts)
        with whole_weights(run.policy, engine=run.config.engine.kind):
            done, rows = evaluate(run, prompts)
        done = replace(done, reference=evaluate_reference(run))
    usage = run.rewards.usage()
    with dist.fail_together():
        if run.rewards.names:
            run.state.evaluations.append(asdict(done))
            folder.write_evaluations(run)
            run.log(done.metrics() | usage)
        shown = rows[: run.display.held_out_shown]
        if shown and dist.is_main() and run.config.show_samples_every:
            for tracker in run.trackers:
                tracker.log_samples(run.state.step, shown)
    call_back(run, folder, "on_evaluate", done)


def call_back(run: Run, folder: RunFolder, event: str, what: Any) -> None:
    """Call the callbacks between two steps; the run is stopped if a rank's wants it to be."""
    if run.callbacks is not None:
        with boundary_kept(run, folder, may_leave=False), dist.phase(event):
            run.callbacks.notify(event, what)
        run.is_stopped = bool(dist.all_max(int(run.is_stopped)))
