"""Collect: prompts, samples, rewards, advantages."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gruppo import distributed as dist
from gruppo.environments import environment_failures
from gruppo.rewards.scoring import Scores
from gruppo.trainer import dynamic_sampling
from gruppo.trainer.advantages import assemble
from gruppo.trainer.demonstrations import demonstrations, unsampled
from gruppo.trainer.dynamic_sampling import Round, empty_slots, join_rounds
from gruppo.trainer.metrics import batch_metrics
from gruppo.trainer.run import Run
from gruppo.trainer.stages import StepParams
from gruppo.types import Batch, DataError, NumericalStop, Prompt, Request, Rollouts, Stat

log = logging.getLogger("gruppo")

MAX_UNSCORED_STEPS = 10
"""So many steps in a row without a single scored row end the run: it would learn nothing."""


@dataclass(frozen=True, eq=False)
class Collected:
    """A batch, and what is said of it."""

    batch: Batch
    rollouts: Rollouts | None
    """All that was sampled: the batch's rows, and those that were thrown away. None where nothing was."""
    scores: Scores | None
    """Of all that was sampled."""
    metrics: dict[str, float]


def collect(run: Run, step_params: StepParams) -> Collected:
    """One step's data: every prompt ``group_size`` times, rewarded, with advantages; demonstrations; or both."""
    demos, metrics_of_demos = demonstrations(run, step_params)
    if not step_params.samples:
        so_far = {f"progress/{name}": total for name, total in run.state.totals.items()}
        return Collected(unsampled(demos), None, None, metrics_of_demos | so_far)
    passed_over = set_difficulty(run, step_params)
    environment_began = 0.0 if run.environment is None else run.environment.elapsed_s  # evaluations add to it too
    began = time.perf_counter()
    rounds, grown = sample(run, step_params)
    sampled_at, reward_s = time.perf_counter(), sum(one.reward_s for one in (*rounds, grown) if one is not None)
    rollout = run.config.rollout
    refills = rollout.refill_rounds > 0
    sampled = join_rounds(rounds, rollout.refill_by, refills=refills, grown=grown)
    if grown is not None:
        whole = dynamic_sampling.rescore_whole_groups(sampled.scores, sampled.rollouts.group_ids, run.rewards.weights)
        sampled = replace(sampled, scores=whole)
    _stop_if_useless(run, sampled.rollouts, sampled.scores)
    batch = assemble(run, step_params, *sampled.batch())
    metrics = batch_metrics(run, batch, sampled.rollouts, sampled.scores)
    if refills:
        metrics |= sampled.thrown() | {"refill/rounds_count": float(dist.all_max(len(rounds) - 1))}
    if rollout.first_samples:
        metrics |= dynamic_sampling.growth_metrics(rounds, grown, rollout, step_params)
    metrics |= difficulty_metrics(run, sampled.rollouts, passed_over)
    run.state.totals["tokens"] += metrics["tokens"]
    run.state.totals["rollouts"] += metrics["rollouts"]
    metrics |= {f"progress/{name}": total for name, total in run.state.totals.items()}
    metrics |= {"time/rollout_s": sampled_at - began - reward_s}  # drawing prompts and waiting for ranks too
    if run.environment is not None:
        metrics["time/environment_s"] = run.environment.elapsed_s - environment_began
    metrics |= {"time/reward_s": reward_s, "time/credit_s": time.perf_counter() - sampled_at}
    return Collected(replace(batch, demos=demos), sampled.rollouts, sampled.scores, metrics | metrics_of_demos)


def set_difficulty(run: Run, step_params: StepParams) -> int:
    """The level of a curriculum, for this step's draws; how many prompts it has passed over before them."""
    source: Any = run.source
    if source.level is None:
        return 0
    source.level = step_params.difficulty
    return source.passed_over


def difficulty_metrics(run: Run, rollouts: Rollouts, passed_over: int) -> dict[str, float]:
    """Of the prompts that were sampled, over all ranks; all ranks draw them all, and pass over the same ones."""
    source: Any = run.source
    if source.level is None:
        return {}
    difficulties = torch.tensor([source.difficulty(prompt) for prompt in rollouts.prompts], dtype=torch.float64)
    stat = dist.merge_stats({"difficulty": Stat.of(difficulties)})["difficulty"]
    metrics = {"difficulty/mean": stat.mean, "difficulty/max": stat.max}
    return metrics | {"difficulty/passed_over_count": float(source.passed_over - passed_over)}


def sample(run: Run, step_params: StepParams) -> tuple[list[Round], Round | None]:
    """Every slot's prompt sampled and scored, then anew where its group has no spread, within the budget of rounds;
    and at last what groups with spread grow by."""
    config = run.config.rollout
    size = dynamic_sampling.first_group_size(config, step_params)
    rounds = [_round(run, step_params, _requests(run, range(config.prompts), size))]
    run.example = run.example or rounds[0].rollouts.prompts[0]
    latest: Round | None = rounds[0]
    sampled = config.prompts * size
    for _ in range(config.refill_rounds):
        empty = empty_slots(latest, config.refill_by, config.prompts)
        if not empty:
            break
        sampled += len(empty) * size
        requests = _requests(run, empty, size)
        latest = _round(run, step_params, requests) if requests else None  # none of them is this rank's
        rounds += [latest] if latest else []
    further = (
        dynamic_sampling.further_requests(rounds, config, step_params, sampled=sampled) if config.first_samples else {}
    )
    return rounds, _round(run, step_params, further) if further else None


def _requests(run: Run, slots: Sequence[int], size: int) -> dict[int, Request]:
    return {slot: Request(prompt, size) for slot, prompt in take_prompts(run, slots).items()}


def _round(run: Run, step_params: StepParams, requests: dict[int, Request]) -> Round:
    rollouts = run.engine.generate(list(requests.values()), step_params.sampling, seed=run.config.seed)
    began = time.perf_counter()
    if len(rollouts.prompts) < len(requests) and (run.config.rollout.refill_rounds or run.config.rollout.first_samples):
        raise DataError(
            "two prompts of a step have the same id and draw, so their samples are one group; refilled or grown groups "
            "need to be told apart. Let the data source number its draws: Prompt(..., draw=n)."
        )
    scores = run.rewards.score(rollouts, step=run.state.step, max_steps=run.config.steps)
    return Round(rollouts, scores, list(requests), time.perf_counter() - began)


def take_prompts(run: Run, slots: Sequence[int]) -> dict[int, Prompt]:
    """The next prompt for each slot; of these, this rank's. One that cannot be sampled from gives way to the next."""
    mine: dict[int, Prompt] = {}
    refused: str | None = None
    for slot in slots:
        for _ in range(100):
            prompt = run.source.take(1)[0]
            refused = run.policy.check_prompt(prompt, run.sampling)
            if refused is None:
                break
            log.warning("left out: %s", refused)
        else:
            raise DataError(f"100 prompts in a row cannot be used; the last: {refused}")
        if slot % dist.world_size() == dist.rank():
            mine[slot] = prompt
    return mine


def _stop_if_useless(run: Run, rollouts: Rollouts, scores: Scores) -> None:
    scored = int(scores.rewards.isfinite().sum())
    run.state.unscored_steps = 0 if dist.all_max(scored) else run.state.unscored_steps + 1
    refused = environment_failures(rollouts)
    for row, why in list(refused.items())[:3]:
        log.warning("step %d row %d: the environment gave no reply: %s", run.state.step, row, why)
    is_hopeless = run.state.unscored_steps and (run.state.step == 0 or run.state.unscored_steps >= MAX_UNSCORED_STEPS)
    if is_hopeless and dist.all_max(len(refused)):
        raise DataError(
            f"step {run.state.step}: the environment failed in {len(refused)} of {len(rollouts)} conversations and no "
            f"other was scored{f': {next(iter(refused.values()))}' if refused else ''}. Mend the environment, then "
            "start or resume the run."
        )
    usable = sum(finish != "error" for finish in rollouts.finish) + len(refused)
    if run.state.unscored_steps and not dist.all_max(usable):
        raise NumericalStop(
            f"step {run.state.step}: every rollout ended in logits that are not finite; the weights are not usable. "
            "Train again with a lower --optim.lr, or with another --model."
        )
    if is_hopeless:
        in_a_row = f", {run.state.unscored_steps} steps in a row" if run.state.step else ""
        why = f": {scores.failures[0].message}" if scores.failures else " (every reward was None)"
        raise DataError(
            f"step {run.state.step}: the reward scored none of {len(rollouts)} completions"
            f"{in_a_row}{why}. Mend the reward function, then start or resume the run."
        )
    for failure in scores.failures[:3]:
        log.warning(
            "step %d row %d: reward %s: %s: %s",
            run.state.step,
            failure.row,
            failure.reward,
            failure.kind,
            failure.message,
        )
