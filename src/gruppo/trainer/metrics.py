"""Batch metrics, reduced over ranks."""

from __future__ import annotations

from itertools import combinations

import torch
from jaxtyping import Int
from torch import Tensor

from gruppo import distributed as dist
from gruppo.core.advantages import Ema, normalized_rewards
from gruppo.core.groups import group_deviations, group_reduce, group_std, has_no_spread
from gruppo.environments import COUNTS, completion_lengths
from gruppo.rewards.scoring import Scores, reward_stats
from gruppo.trainer.advantages import Scored
from gruppo.trainer.collect import Collected, Sampled
from gruppo.trainer.recorder import reduced
from gruppo.trainer.run import Run
from gruppo.types import Rollouts, Stat, TrainBatch


def collected_metrics(run: Run, collected: Collected) -> dict[str, float]:
    """Return the metrics of what a step has collected; update the run's totals."""
    metrics: dict[str, float] = {}
    sampled = collected.sampled
    if sampled is not None:
        metrics = batch_metrics(run, collected.batch, sampled.rollouts, sampled.scores)
        metrics |= sampling_metrics(run, sampled)
        for name in ("tokens", "rollouts"):
            run.state.totals[name] += metrics[name]
    if run.environment is not None:
        metrics["time/environment_s"] = run.environment.elapsed_s
    return metrics | {f"progress/{name}": total for name, total in run.state.totals.items()}


def batch_metrics(
    run: Run, batch: TrainBatch, rollouts: Rollouts, scores: Scores
) -> dict[str, float]:
    """Return metrics of rewards, groups and lengths, over all samples; of advantages and values,
    over the batch.

    Rewards are those before any penalty. Discarded samples count, or the reward would look better
    than it is.
    """
    stats = _sample_stats(rollouts) | _batch_stats(run, batch)
    if run.config.objective.overlong:
        stats["mean:reward/overlong_mean"] = Stat.of(Scored(run, rollouts, scores).overlong)
    stats |= {f"sum:{name}": Stat(1, count) for name, count in reward_stats(scores).items()}
    # what reward functions logged: the mean over the ranks that logged it
    stats |= {f"mean:{name}": Stat(1, value) for name, value in scores.metrics.items()}
    stats |= _reward_stats("reward", scores.rewards, rollouts.group_ids)
    for name, part in scores.parts.items():
        stats |= _reward_stats(f"reward/{name}", part, rollouts.group_ids)
    for name, steps in scores.steps.items():
        stats[f"mean,std:reward/{name}/step_{{}}"] = _finite(steps)
        # 0 without a reward: not a row that it scores
        steps_per_row = steps.isfinite().sum(dim=1)
        stats[f"mean:reward/{name}/steps_per_row_mean"] = Stat.of(steps_per_row, steps_per_row > 0)
    # Merged statistics are those of all ranks: each rank computes the same metrics.
    stats = dist.merge_stats(stats)
    metrics = reduced(stats, keep_empty=True)
    own = run.statistics.batch_stats(rollouts, scores.rewards, run.sampling)
    metrics |= reduced(dist.merge_stats(own))
    for name in ("zero_spread_frac", "too_few_scored_count"):
        metrics[f"group/{name}"] = metrics.pop(f"reward/{name}")
    if batch.returns is not None:
        metrics["value/explained_variance_frac"] = explained_variance(
            stats["mean,std:return/{}"], stats["mean:value/residual"]
        )
        del metrics["value/residual"]
    metrics |= _correlations(rollouts, scores) | group_sizes(rollouts.group_ids)
    return metrics | _running(run)


def _sample_stats(rollouts: Rollouts) -> dict[str, Stat]:
    """Return statistics of groups, lengths and endings, and of conversations with an
    environment."""
    lengths = completion_lengths(rollouts)
    is_truncated = torch.tensor([finish == "length" for finish in rollouts.finish])
    is_error = torch.tensor([finish == "error" for finish in rollouts.finish])
    stats = {
        "mean,min,max:group/size_{}": Stat.of(rollouts.group_ids.bincount()),
        "mean,min,max:len/{}_actions": Stat.of(lengths),
        "sum:tokens": Stat.of(lengths),
        "count:rollouts": Stat.of(lengths),
        "mean:finish/truncated_frac": Stat.of(is_truncated),
        "sum:finish/error_count": Stat.of(is_error),
    }
    own = rollouts.per_row
    if "turns" not in own:
        return stats
    has_failed = torch.tensor([reason is not None for reason in own["environment_failure"]])
    stats |= {
        "mean,max:turns/{}": Stat.of(own["turns"]),
        "sum:turns/context_full_count": Stat.of(own["context_full"]),
        "sum:turns/reencoded_count": Stat.of(own["reencoded"]),
        "mean:environment/ended_frac": Stat.of(own["ended"]),
        "mean:environment/reply_tokens_mean": Stat.of(rollouts.lengths - lengths),
        "sum:environment/failed_count": Stat.of(has_failed),
    }
    if "tool_counts" in own:
        for name, column in zip(COUNTS, own["tool_counts"].T, strict=True):
            stats[f"sum:tools/{name}_count"] = Stat.of(column)
        stats["mean:tools/calls_mean"] = stats["sum:tools/calls_count"]
    return stats


def _batch_stats(run: Run, batch: TrainBatch) -> dict[str, Stat]:
    """Return statistics of advantages, and of a critic's returns and values."""
    kept = batch.loss_mask
    if run.config.objective.credit == "outcome":
        # once a row, where its actions share one advantage
        kept = kept & (kept.cumsum(dim=1) == 1)
    stats = {
        "mean,std,min,max:advantage/{}": Stat.of(batch.advantages, kept),
        "mean:advantage/mean_abs": Stat.of(batch.advantages.abs(), kept),
    }
    if batch.returns is not None and batch.old_values is not None:
        residual = batch.returns - batch.old_values
        stats["mean,std:return/{}"] = Stat.of(batch.returns, batch.loss_mask)
        stats["mean:value/mean"] = Stat.of(batch.old_values, batch.loss_mask)
        stats["mean:value/residual"] = Stat.of(residual, batch.loss_mask)
    return stats


def _reward_stats(area: str, rewards: Tensor, group_ids: Int[Tensor, "B"]) -> dict[str, Stat]:
    """Return statistics of one reward, or of the sum of all.

    A part counts the groups in which it scores any row: it does not apply to the others.
    """
    normalized = normalized_rewards(rewards, group_ids)  # [B]
    std = group_std(rewards, group_ids)  # [P]
    means = group_reduce(rewards, group_ids, "mean")
    is_group = group_ids.bincount() > 1  # one row has no spread to lack
    if area != "reward":
        is_group &= ~means.isnan()
    is_silent = has_no_spread(rewards, group_ids).double()
    return {
        f"mean,std,min,max:{area}/{{}}": _finite(rewards),
        f"mean:{area}/std_within_group": _finite(std),
        f"std:{area}/std_between_groups": _finite(means),
        f"mean:{area}/best_of_group_mean": _finite(group_reduce(rewards, group_ids, "amax")),
        f"mean:{area}/worst_of_group_mean": _finite(group_reduce(rewards, group_ids, "amin")),
        f"min,max:{area}/normalised_{{}}": _finite(normalized),
        f"mean:{area}/normalised_mean_abs": _finite(normalized.abs()),
        f"mean:{area}/zero_spread_frac": Stat.of(is_silent, is_group),
        f"sum:{area}/too_few_scored_count": Stat.of(std.isnan().double(), is_group),
    }


def _finite(x: Tensor) -> Stat:
    return Stat.of(x, x.isfinite())


def _correlations(rollouts: Rollouts, scores: Scores) -> dict[str, float]:
    """Return the correlation of each pair of rewards within groups, over the rows that both
    score."""
    stats: dict[str, Stat] = {}
    pairs = list(combinations(scores.parts, 2))
    for one, other in pairs:
        both = torch.stack([scores.parts[one].double(), scores.parts[other].double()])
        both = both.where(both.isfinite().all(dim=0), torch.nan)
        x, y = (group_deviations(part, rollouts.group_ids) for part in both)
        for name, product in {"x": x, "y": y, "xy": x * y}.items():
            stats[f"{name} {one}/{other}"] = _finite(product)
    stats = dist.merge_stats(stats)
    return {
        f"reward_corr_within_group/{pair}": correlation(
            stats[f"x {pair}"], stats[f"y {pair}"], stats[f"xy {pair}"]
        )
        for pair in map("/".join, pairs)
    }


def correlation(x: Stat, y: Stat, product: Stat) -> float:
    """Pearson's correlation, of the same rows: (mean xy - mean x mean y) / (std x std y); NaN if x
    or y does not vary."""
    if not all(_varies(stat, max(abs(stat.min), abs(stat.max))) for stat in (x, y)):
        return float("nan")
    found = (product.mean - x.mean * y.mean) / (x.std * y.std)
    return min(max(found, -1.0), 1.0)  # rounding


def explained_variance(returns: Stat, residual: Stat) -> float:
    """1 - Var(return - value) / Var(return): 1 is a perfect critic, 0 one no better than a
    constant, below is worse.

    NaN if the returns do not vary by more than rounding: there is nothing to explain.
    """
    largest = max(abs(end) for stat in (returns, residual) for end in (stat.min, stat.max))
    return 1 - residual.std**2 / returns.std**2 if _varies(returns, largest) else float("nan")


def _varies(stat: Stat, largest: float) -> bool:
    """Return whether it varies by more than the rounding of float32 numbers of that size."""
    return stat.max - stat.min > 8 * torch.finfo(torch.float32).eps * largest


def group_sizes(group_ids: Int[Tensor, "B"]) -> dict[str, float]:
    """``group/size_N_count``: how many groups of all ranks have N rows, of the sizes that occur."""
    sizes = group_ids.bincount()
    longest = dist.all_max(int(sizes.max()) if len(sizes) else 0)
    count = dist.all_sum(sizes.bincount(minlength=longest + 1))
    return {f"group/size_{n}_count": float(count[n]) for n in count.nonzero()[:, 0].tolist()}


def _running(run: Run) -> dict[str, float]:
    """Return the moving statistics that the objective compares rewards with, this batch
    included."""
    metrics = {}
    is_sum = run.config.objective.combine == "sum_then_normalize"
    for name, state in run.state.running.items():
        area = "reward" if is_sum and name == "sum" else f"reward/{name}"
        if "mean" in state:
            metrics[f"{area}/running_mean"] = Ema(*state["mean"]).value
        if "within_var" in state:
            metrics[f"{area}/running_std_within_group"] = Ema(*state["within_var"]).value ** 0.5
    return metrics


def sampling_metrics(run: Run, sampled: Sampled) -> dict[str, float]:
    """Return metrics of resampling and growth, over all ranks."""
    config, stats = run.config.rollout, dict[str, Stat]()
    if config.refill_rounds:
        # what no update learns from: discarded, or the last group of a slot left unfilled
        is_discarded = torch.ones(len(sampled.rollouts), dtype=torch.bool)
        is_discarded[torch.tensor(sampled.rows)[sampled.is_filled]] = False
        groups = sampled.rollouts.group_ids[is_discarded].unique()
        stats |= {
            "max:refill/rounds_count": Stat.of(torch.tensor([len(sampled.rounds) - 1])),
            "sum:refill/thrown_groups_count": Stat(1, len(groups)),
            "sum:refill/thrown_tokens_count": Stat.of(
                completion_lengths(sampled.rollouts)[is_discarded]
            ),
        }
    if config.first_samples:
        # of the first samples alone: groups that grow are those that are neither always nor never
        # right, so that the mean of all rows says less of the policy
        first = torch.cat([one.scores.rewards for one in sampled.rounds])
        grown = sampled.grown
        stats |= {
            "mean:growth/first_reward_mean": _finite(first),
            "sum:growth/grown_groups_count": Stat(1, len(grown.slots) if grown else 0),
            "sum:growth/grown_rows_count": Stat(1, len(grown.rollouts) if grown else 0),
        }
    return reduced(dist.merge_stats(stats), keep_empty=True)
