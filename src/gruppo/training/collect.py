"""Collect: prompts, samples, rewards, advantages."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch

from gruppo import dist
from gruppo.core.advantages import group_advantages, group_std, has_no_spread
from gruppo.rewards.score import Scores, reward_stats
from gruppo.training.minibatches import with_old
from gruppo.training.run import Knobs, Run, flatten
from gruppo.types import Batch, DataError, NumericalStop, Prompt, Request, Rollouts, Stat

log = logging.getLogger("gruppo")

MAX_UNSCORED_STEPS = 10
"""So many steps in a row without a single scored row end the run: it would learn nothing."""


@dataclass(frozen=True, eq=False)
class Collected:
    """A batch, and what is said of it."""

    batch: Batch
    scores: Scores
    metrics: dict[str, float]


def collect(run: Run, knobs: Knobs) -> Collected:
    """One step's data: every prompt ``group_size`` times, rewarded, with advantages."""
    began = time.perf_counter()
    prompts = take_prompts(run, run.config.rollout.prompts)
    run.example = run.example or prompts[0]
    requests = [Request(prompt, knobs.group_size) for prompt in prompts]
    rollouts = run.engine.generate(requests, knobs.sampling, seed=run.config.seed)
    sampled = time.perf_counter()
    scores = run.rewards.score(rollouts, step=run.step, max_steps=run.config.steps)
    _stop_if_useless(run, rollouts, scores)
    batch = assemble(run, knobs, rollouts, scores)
    rewarded = time.perf_counter()
    metrics = batch_metrics(batch, scores)
    run.totals["tokens"] += metrics["tokens"]
    run.totals["rollouts"] += metrics["rollouts"]
    metrics |= {f"progress/{name}": total for name, total in run.totals.items()}
    metrics |= {"time/rollout_s": sampled - began, "time/reward_s": rewarded - sampled}
    return Collected(batch, scores, metrics)


def take_prompts(run: Run, count: int) -> list[Prompt]:
    """This rank's share of the next prompts. One that the policy cannot sample from is replaced by the next."""
    mine, refused = [], ""
    for place in range(count):
        for _ in range(100):
            prompt = run.source.take(1)[0]
            refused = run.policy.refuse(prompt, run.config.rollout.sampling)
            if refused is None:
                break
            log.warning("left out: %s", refused)
        else:
            raise DataError(f"100 prompts in a row cannot be used; the last: {refused}")
        if place % dist.world() == dist.rank():
            mine.append(prompt)
    return mine


def assemble(run: Run, knobs: Knobs, rollouts: Rollouts, scores: Scores) -> Batch:
    """Advantages, and which actions are learned from: chosen by the policy, scored, not an error, not masked out."""
    objective = run.config.objective
    advantages, _ = group_advantages(
        scores.rewards,
        rollouts.group_ids,
        rollouts.mask,
        baseline=objective.baseline,
        scale=objective.scale,
        eps=objective.scale_eps,
        all_sum=dist.all_sum,
    )
    usable = scores.rewards.isfinite() & torch.tensor([finish != "error" for finish in rollouts.finish])
    if objective.mask_truncated:
        usable &= torch.tensor([finish != "length" for finish in rollouts.finish])
    keep = rollouts.mask & usable[:, None]
    batch = Batch(rollouts, None, scores.rewards, scores.parts, advantages, keep)
    return batch if run.config.updates_per_batch == 1 else with_old(run, batch, knobs)


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


# --- what is said of a batch -----------------------------------------------------------------------------------------

_METRICS = {
    "reward": ("mean:reward/mean", "std:reward/std"),
    "reward/std_within_group": ("mean:reward/std_within_group",),
    "group/zero_spread": ("mean:group/zero_spread_frac",),
    "group/unscored": ("sum:group/too_few_scored_count",),
    "advantage": ("mean:advantage/mean", "std:advantage/std", "max:advantage/max"),
    "advantage_abs": ("mean:advantage/mean_abs",),
    "len": ("mean:len/mean_actions", "min:len/min_actions", "max:len/max_actions", "sum:tokens", "count:rollouts"),
    "truncated": ("mean:finish/truncated_frac",),
    "error": ("sum:finish/error_count",),
}


def batch_metrics(batch: Batch, scores: Scores) -> dict[str, float]:
    """Metrics of rewards, groups, advantages and lengths, over all ranks."""
    rollouts = batch.rollouts
    assert rollouts is not None
    scored = batch.rewards.isfinite()
    spread = group_std(batch.rewards, rollouts.group_ids)
    advantages = torch.where(rollouts.mask[:, 0], batch.advantages[:, 0], 0)
    finish = rollouts.finish
    stats = {
        "reward": Stat.of(batch.rewards, scored),
        "reward/std_within_group": Stat.of(spread, spread.isfinite()),
        "group/zero_spread": Stat.of(has_no_spread(batch.rewards, rollouts.group_ids).double()),
        "group/unscored": Stat.of(spread.isnan().double()),
        "advantage": Stat.of(advantages, scored),
        "advantage_abs": Stat.of(advantages.abs(), scored),
        "len": Stat.of(rollouts.lengths),
        "truncated": Stat.of(torch.tensor([f == "length" for f in finish]).double()),
        "error": Stat.of(torch.tensor([f == "error" for f in finish]).double()),
    }
    counts = {name: value for name, value in reward_stats(scores).items() if name.endswith("_count")}
    stats |= {f"count:{name}": Stat(1, value) for name, value in counts.items()}
    stats |= {f"part:{name}": Stat.of(part, part.isfinite()) for name, part in scores.parts.items()}
    stats = dist.merge_stats(stats)
    metrics = flatten(stats, _METRICS)
    metrics |= {name: stats[f"count:{name}"].sum for name in counts}
    for name in scores.parts:
        metrics |= {f"reward/{name}/mean": stats[f"part:{name}"].mean, f"reward/{name}/std": stats[f"part:{name}"].std}
    return metrics | dict(scores.metrics)
