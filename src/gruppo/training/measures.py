"""What is said of a batch, over all ranks."""

from __future__ import annotations

import torch

from gruppo import dist
from gruppo.core.advantages import group_std, has_no_spread
from gruppo.rewards.score import Scores, reward_stats
from gruppo.training.credit import overlong
from gruppo.training.run import Run, flatten
from gruppo.types import Batch, Rollouts, Stat

_METRICS = {
    "reward": ("mean:reward/mean", "std:reward/std"),
    "reward/overlong": ("mean:reward/overlong_mean",),
    "reward/std_within_group": ("mean:reward/std_within_group",),
    "group/zero_spread": ("mean:group/zero_spread_frac",),
    "group/unscored": ("sum:group/too_few_scored_count",),
    "advantage": ("mean:advantage/mean", "std:advantage/std", "max:advantage/max"),
    "advantage_abs": ("mean:advantage/mean_abs",),
    "return": ("mean:return/mean", "std:return/std"),
    "value": ("mean:value/mean",),
    "len": ("mean:len/mean_actions", "min:len/min_actions", "max:len/max_actions", "sum:tokens", "count:rollouts"),
    "truncated": ("mean:finish/truncated_frac",),
    "error": ("sum:finish/error_count",),
}


def batch_metrics(run: Run, batch: Batch, rollouts: Rollouts, scores: Scores) -> dict[str, float]:
    """Metrics of rewards, groups and lengths, over all that was sampled; of advantages and values, over the batch.

    Rewards are those before any penalty. What was thrown away counts, or the reward would look better than it is.
    """
    counts = {name: value for name, value in reward_stats(scores).items() if name.endswith("_count")}
    stats = _of_samples(rollouts, scores) | _of_advantages(run, batch) | _of_critic(batch)
    if run.config.objective.overlong:
        stats["reward/overlong"] = Stat.of(overlong(run, rollouts))
    stats |= {f"count:{name}": Stat(1, value) for name, value in counts.items()}
    stats |= {f"part:{name}": Stat.of(part, part.isfinite()) for name, part in scores.parts.items()}
    stats = dist.merge_stats(stats)
    metrics = flatten(stats, _METRICS)
    metrics |= {name: stats[f"count:{name}"].sum for name in counts}
    for name in scores.parts:
        metrics |= {f"reward/{name}/mean": stats[f"part:{name}"].mean, f"reward/{name}/std": stats[f"part:{name}"].std}
    if "value/residual" in stats:
        metrics["value/explained_variance_frac"] = explained_variance(stats["return"], stats["value/residual"])
    return metrics | dict(scores.metrics)


def explained_variance(returns: Stat, residual: Stat) -> float:
    """1 - Var(return - value) / Var(return): 1 is a perfect critic, 0 one no better than a constant, below is worse.

    NaN where the returns do not vary by more than rounding: there is nothing to explain.
    """
    largest = max(abs(end) for stat in (returns, residual) for end in (stat.min, stat.max))
    rounding = 8 * torch.finfo(torch.float32).eps * largest
    return 1 - residual.std**2 / returns.std**2 if returns.max - returns.min > rounding else float("nan")


def _of_samples(rollouts: Rollouts, scores: Scores) -> dict[str, Stat]:
    rewards, finish = scores.rewards, rollouts.finish
    spread = group_std(rewards, rollouts.group_ids)
    is_group = rollouts.group_ids.bincount() > 1  # one row has no spread to lack
    return {
        "reward": Stat.of(rewards, rewards.isfinite()),
        "reward/std_within_group": Stat.of(spread, spread.isfinite()),
        "group/zero_spread": Stat.of(has_no_spread(rewards, rollouts.group_ids).double(), is_group),
        "group/unscored": Stat.of(spread.isnan().double(), is_group),
        "len": Stat.of(rollouts.lengths),
        "truncated": Stat.of(torch.tensor([f == "length" for f in finish]).double()),
        "error": Stat.of(torch.tensor([f == "error" for f in finish]).double()),
    }


def _of_advantages(run: Run, batch: Batch) -> dict[str, Stat]:
    """Of each kept action; once a row where its actions share one."""
    where = batch.keep
    if not run.config.objective.has_credit_in_time:
        where = where & (where.cumsum(dim=1) == 1)
    return {"advantage": Stat.of(batch.advantages, where), "advantage_abs": Stat.of(batch.advantages.abs(), where)}


def _of_critic(batch: Batch) -> dict[str, Stat]:
    if batch.returns is None or batch.old_values is None:
        return {}
    return {
        "return": Stat.of(batch.returns, batch.keep),
        "value": Stat.of(batch.old_values, batch.keep),
        "value/residual": Stat.of(batch.returns - batch.old_values, batch.keep),
    }
