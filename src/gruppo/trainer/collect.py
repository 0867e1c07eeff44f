"""Collect: prompts, samples, rewards, advantages."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gruppo import distributed as dist
from gruppo.environments import environment_failures
from gruppo.rewards.scoring import Scores
from gruppo.trainer import dynamic_sampling
from gruppo.trainer.advantages import assemble
from gruppo.trainer.demonstrations import demonstrations, unsampled
from gruppo.trainer.dynamic_sampling import Round, further_requests, join_rounds
from gruppo.trainer.memory import whole_weights
from gruppo.trainer.metrics import batch_metrics
from gruppo.trainer.run import Run
from gruppo.trainer.stages import StepParams
from gruppo.types import Batch, DataError, NumericalStop, Prompt, Request, Rollouts, Stat

log = logging.getLogger("gruppo")

MAX_UNSCORED_STEPS = 10
"""Consecutive steps without a scored row that end the run: it would learn nothing."""


@dataclass(frozen=True, eq=False)
class Collected:
    """A batch and its metrics."""

    batch: Batch
    rollouts: Rollouts | None
    """All samples: the batch's rows, and those that were discarded. None where nothing was
    sampled."""
    scores: Scores | None
    """Of all samples."""
    metrics: dict[str, float]
    advantages: Float[Tensor, "B"] | None = None
    """Of all samples, the mean over the actions that are learned from; NaN where there is none."""


def collect(run: Run, step_params: StepParams) -> Collected:
    """One step's data: every prompt ``group_size`` times, rewarded, with advantages;
    demonstrations; or both."""
    demos, demo_metrics = demonstrations(run, step_params)
    totals = run.state.totals
    if not step_params.samples:
        so_far = {f"progress/{name}": total for name, total in totals.items()}
        return Collected(unsampled(demos), None, None, demo_metrics | so_far)
    source: Any = run.source
    skipped_before = 0
    if source.level is not None:  # a curriculum
        source.level, skipped_before = step_params.difficulty, source.passed_over
    environment_began = (
        0.0 if run.environment is None else run.environment.elapsed_s
    )  # evaluations add to it too
    began = time.perf_counter()
    with whole_weights(run.policy, engine=run.config.engine.kind):
        rounds, grown = sample(run, step_params)
    sampled_at, reward_s = (
        time.perf_counter(),
        sum(one.reward_s for one in (*rounds, grown) if one is not None),
    )
    rollout = run.config.rollout
    refills = rollout.refill_rounds > 0
    sampled = join_rounds(rounds, refills=refills, grown=grown)
    if grown is not None:
        whole = dynamic_sampling.rescore_whole_groups(
            sampled.scores, sampled.rollouts.group_ids, run.rewards.weights
        )
        sampled = replace(sampled, scores=whole)
    _stop_if_useless(run, sampled.rollouts, sampled.scores)
    batch = assemble(run, step_params, *sampled.batch())
    metrics = batch_metrics(run, batch, sampled.rollouts, sampled.scores)
    if refills:
        metrics |= sampled.thrown() | {"refill/rounds_count": float(dist.all_max(len(rounds) - 1))}
    if rollout.first_samples:
        metrics |= dynamic_sampling.growth_metrics(rounds, grown, rollout, step_params)
    if source.level is not None:  # every rank draws all prompts, and passes over the same ones
        difficulties = [source.difficulty(prompt) for prompt in sampled.rollouts.prompts]
        stat = dist.merge_stats(
            {"difficulty": Stat.of(torch.tensor(difficulties, dtype=torch.float64))}
        )["difficulty"]
        metrics |= {"difficulty/mean": stat.mean, "difficulty/max": stat.max}
        metrics["difficulty/passed_over_count"] = float(source.passed_over - skipped_before)
    run.state.totals["tokens"] += metrics["tokens"]
    run.state.totals["rollouts"] += metrics["rollouts"]
    metrics |= {f"progress/{name}": total for name, total in totals.items()}
    metrics |= {
        "time/rollout_s": sampled_at - began - reward_s
    }  # drawing prompts and waiting for ranks too
    if run.environment is not None:
        metrics["time/environment_s"] = run.environment.elapsed_s - environment_began
    metrics |= {"time/reward_s": reward_s, "time/credit_s": time.perf_counter() - sampled_at}
    advantages = torch.full((len(sampled.rollouts),), torch.nan)
    learned = torch.where(batch.loss_mask, batch.advantages, 0.0).sum(1) / batch.loss_mask.sum(1)
    advantages[sampled.rows] = learned.float().cpu()
    metrics |= demo_metrics
    return Collected(
        replace(batch, demos=demos), sampled.rollouts, sampled.scores, metrics, advantages
    )


def sample(run: Run, step_params: StepParams) -> tuple[list[Round], Round | None]:
    """Sample and score every slot's prompt; resample groups without spread, within the budget of
    rounds; and at last grow groups with spread."""
    config = run.config.rollout
    size = (
        config.first_samples or step_params.group_size
    )  # where groups may grow, the first samples only
    rounds = [_round(run, step_params, _requests(run, range(config.prompts), size))]
    run.example = run.example or rounds[0].rollouts.prompts[0]
    latest: Round | None = rounds[0]
    sampled = config.prompts * size
    for _ in range(config.refill_rounds):
        is_empty = torch.zeros(
            config.prompts
        )  # of all ranks' slots, those whose group has no spread
        if latest is not None:
            is_empty[torch.tensor(latest.slots)] = (latest.spread() == 0).float()
        with dist.phase("dynamic sampling"):
            empty = dist.all_sum(is_empty).nonzero()[:, 0].tolist()
        if not empty:
            break
        sampled += len(empty) * size
        requests = _requests(run, empty, size)
        latest = (
            _round(run, step_params, requests) if requests else None
        )  # none of them is this rank's
        rounds += [latest] if latest else []
    further = (
        further_requests(rounds, config, step_params, sampled=sampled)
        if config.first_samples
        else {}
    )
    return rounds, _round(run, step_params, further) if further else None


def _requests(run: Run, slots: Sequence[int], size: int) -> dict[int, Request]:
    """The next prompt for each slot; of these, this rank's. One that cannot be sampled from gives
    way to the next."""
    requests: dict[int, Request] = {}
    problem: str | None = None
    for slot in slots:
        for _ in range(100):
            prompt: Prompt = run.source.take(1)[0]
            problem = run.policy.check_prompt(prompt, run.sampling)
            if problem is None:
                break
            log.warning("left out: %s", problem)
        else:
            raise DataError(f"100 prompts in a row cannot be used; the last: {problem}")
        if slot % dist.world_size() == dist.rank():
            requests[slot] = Request(prompt, size)
    return requests


def _round(run: Run, step_params: StepParams, requests: dict[int, Request]) -> Round:
    with dist.phase("sample"):
        rollouts = run.engine.generate(
            list(requests.values()), step_params.sampling, seed=run.config.seed
        )
    began = time.perf_counter()
    if len(rollouts.prompts) < len(requests) and (
        run.config.rollout.refill_rounds or run.config.rollout.first_samples
    ):
        raise DataError("""two prompts of a step have the same id and draw, so their samples are one
            group; refilled or grown groups need to be told apart. Let the data source number its
            draws: Prompt(..., draw=n).""")
    with dist.phase("reward"):
        scores = run.rewards.score(rollouts, run.trainer_state)
    return Round(rollouts, scores, list(requests), time.perf_counter() - began)


def _stop_if_useless(run: Run, rollouts: Rollouts, scores: Scores) -> None:
    """Warn of rows that failed; end the run where no row has been scored for too long, with the
    reason."""
    state = run.state
    has_scored = dist.all_max(int(scores.rewards.isfinite().any()))
    state.unscored_steps = 0 if has_scored else state.unscored_steps + 1
    failures = environment_failures(rollouts)
    for row, reason in list(failures.items())[:3]:
        log.warning("step %d row %d: the environment gave no reply: %s", state.step, row, reason)
    is_hopeless = state.unscored_steps and (
        state.step == 0 or state.unscored_steps >= MAX_UNSCORED_STEPS
    )
    if is_hopeless and dist.all_max(len(failures)):
        first = f": {next(iter(failures.values()))}" if failures else ""
        raise DataError(f"""step {state.step}: the environment failed in {len(failures)} of
            {len(rollouts)} conversations and no other was scored{first}. Fix the environment, then
            start or resume the run.""")
    usable = sum(finish != "error" for finish in rollouts.finish) + len(failures)
    if state.unscored_steps and not dist.all_max(usable):
        raise NumericalStop(
            f"""step {state.step}: every rollout ended in logits that are not finite; the weights
                are not usable""",
            advice="Train again with a lower $optim.lr, or with another $model",
        )
    if is_hopeless:
        first = f": {scores.failures[0].message}" if scores.failures else " (every reward was None)"
        in_a_row = f", {state.unscored_steps} steps in a row" if state.step else ""
        raise DataError(f"""step {state.step}: the reward scored none of {len(rollouts)}
            completions{in_a_row}{first}. Fix the reward function, then start or resume the run.""")
    for failed in scores.failures[:3]:
        where = (state.step, failed.row, failed.reward)
        log.warning("step %d row %d: reward %s: %s: %s", *where, failed.kind, failed.message)
