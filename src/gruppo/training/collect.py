"""Collect: prompts, samples, rewards, advantages."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gruppo import dist
from gruppo.rewards.score import Scores
from gruppo.training.credit import assemble
from gruppo.training.measures import batch_metrics
from gruppo.training.refill import Round, empty_slots, joined
from gruppo.training.run import Knobs, Run
from gruppo.types import Batch, DataError, NumericalStop, Prompt, Request, Rollouts

log = logging.getLogger("gruppo")

MAX_UNSCORED_STEPS = 10
"""So many steps in a row without a single scored row end the run: it would learn nothing."""


@dataclass(frozen=True, eq=False)
class Collected:
    """A batch, and what is said of it."""

    batch: Batch
    rollouts: Rollouts
    """All that was sampled: the batch's rows, and those that were thrown away."""
    scores: Scores
    """Of all that was sampled."""
    metrics: dict[str, float]


def collect(run: Run, knobs: Knobs) -> Collected:
    """One step's data: every prompt ``group_size`` times, rewarded, with advantages."""
    began = time.perf_counter()
    rounds = sample(run, knobs)
    sampled_at, reward_s = time.perf_counter(), sum(one.reward_s for one in rounds)
    refills = run.config.rollout.refill_rounds > 0
    sampled = joined(rounds, run.config.rollout.refill_by, refills=refills)
    _stop_if_useless(run, sampled.rollouts, sampled.scores)
    batch = assemble(run, knobs, *sampled.batch())
    metrics = batch_metrics(run, batch, sampled.rollouts, sampled.scores)
    if refills:
        metrics |= sampled.thrown() | {"refill/rounds_count": float(dist.all_max(len(rounds) - 1))}
    run.totals["tokens"] += metrics["tokens"]
    run.totals["rollouts"] += metrics["rollouts"]
    metrics |= {f"progress/{name}": total for name, total in run.totals.items()}
    metrics |= {"time/rollout_s": sampled_at - began - reward_s}  # drawing prompts and waiting for ranks too
    metrics |= {"time/reward_s": reward_s, "time/credit_s": time.perf_counter() - sampled_at}
    return Collected(batch, sampled.rollouts, sampled.scores, metrics)


def sample(run: Run, knobs: Knobs) -> list[Round]:
    """Every slot's prompt sampled and scored, then anew where its group has no spread, within the budget of rounds."""
    config = run.config.rollout
    rounds = [_round(run, knobs, take_prompts(run, range(config.prompts)))]
    run.example = run.example or rounds[0].rollouts.prompts[0]
    latest: Round | None = rounds[0]
    for _ in range(config.refill_rounds):
        empty = empty_slots(latest, config.refill_by, config.prompts)
        if not empty:
            break
        prompts = take_prompts(run, empty)
        latest = _round(run, knobs, prompts) if prompts else None  # none of them is this rank's
        rounds += [latest] if latest else []
    return rounds


def _round(run: Run, knobs: Knobs, prompts: dict[int, Prompt]) -> Round:
    requests = [Request(prompt, knobs.group_size) for prompt in prompts.values()]
    rollouts = run.engine.generate(requests, knobs.sampling, seed=run.config.seed)
    began = time.perf_counter()
    scores = run.rewards.score(rollouts, step=run.step, max_steps=run.config.steps)
    return Round(rollouts, scores, list(prompts), time.perf_counter() - began)


def take_prompts(run: Run, slots: Sequence[int]) -> dict[int, Prompt]:
    """The next prompt for each slot; of these, this rank's. One that cannot be sampled from gives way to the next."""
    mine, refused = {}, ""
    for slot in slots:
        for _ in range(100):
            prompt = run.source.take(1)[0]
            refused = run.policy.refuse(prompt, run.config.rollout.sampling)
            if refused is None:
                break
            log.warning("left out: %s", refused)
        else:
            raise DataError(f"100 prompts in a row cannot be used; the last: {refused}")
        if slot % dist.world() == dist.rank():
            mine[slot] = prompt
    return mine


def _stop_if_useless(run: Run, rollouts: Rollouts, scores: Scores) -> None:
    scored = int(scores.rewards.isfinite().sum())
    run.unscored_steps = 0 if dist.all_max(scored) else run.unscored_steps + 1
    if run.unscored_steps and not dist.all_max(sum(finish != "error" for finish in rollouts.finish)):
        raise NumericalStop(
            f"step {run.step}: every rollout ended in logits that are not finite; the weights are not usable. Train "
            "again with a lower --optim.lr, or with another --model."
        )
    if run.unscored_steps and (run.step == 0 or run.unscored_steps >= MAX_UNSCORED_STEPS):
        why = f": {scores.failures[0].message}" if scores.failures else " (every reward was None)"
        raise DataError(
            f"step {run.step}: the reward scored none of {len(rollouts)} completions"
            f"{f', {run.unscored_steps} steps in a row' if run.step else ''}{why}. Mend the reward function, then "
            "start or resume the run."
        )
    for failure in scores.failures[:3]:
        log.warning(
            "step %d row %d: reward %s: %s: %s", run.step, failure.row, failure.reward, failure.kind, failure.message
        )
