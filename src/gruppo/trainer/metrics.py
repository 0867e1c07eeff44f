"""Batch metrics, reduced over ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import combinations

import torch
from jaxtyping import Int
from torch import Tensor

from gruppo import distributed as dist
from gruppo.core.advantages import Ema, normalized_rewards
from gruppo.core.groups import group_deviations, group_reduce, group_std, has_no_spread
from gruppo.environments import COUNTS, completion_lengths
from gruppo.rewards.scoring import Scores, reward_stats
from gruppo.trainer.advantages import overlong
from gruppo.trainer.run import Run, flatten, reduced
from gruppo.types import Batch, Rollouts, Stat

_METRICS = {
    "reward/overlong": ("mean:reward/overlong_mean",),
    "size": ("mean:group/size_mean", "min:group/size_min", "max:group/size_max"),
    "advantage": (
        "mean:advantage/mean",
        "std:advantage/std",
        "min:advantage/min",
        "max:advantage/max",
    ),
    "advantage_abs": ("mean:advantage/mean_abs",),
    "return": ("mean:return/mean", "std:return/std"),
    "value": ("mean:value/mean",),
    "len": (
        "mean:len/mean_actions",
        "min:len/min_actions",
        "max:len/max_actions",
        "sum:tokens",
        "count:rollouts",
    ),
    "truncated": ("mean:finish/truncated_frac",),
    "error": ("sum:finish/error_count",),
    "turns": ("mean:turns/mean", "max:turns/max"),
    "context_full": ("sum:turns/context_full_count",),
    "reencoded": ("sum:turns/reencoded_count",),
    "ended": ("mean:environment/ended_frac",),
    "replies": ("mean:environment/reply_tokens_mean",),
    "environment_failed": ("sum:environment/failed_count",),
    "tools/calls": ("mean:tools/calls_mean", "sum:tools/calls_count"),
    **{f"tools/{name}": (f"sum:tools/{name}_count",) for name in COUNTS[1:]},
}
MOST_CLASSES = 100
"""Prompts of more classes have no metric per class."""
_OF_A_REWARD = {
    "rows": ("mean:{}/mean", "std:{}/std", "min:{}/min", "max:{}/max"),
    "within": ("mean:{}/std_within_group",),
    "between": ("std:{}/std_between_groups",),
    "best": ("mean:{}/best_of_group_mean",),
    "worst": ("mean:{}/worst_of_group_mean",),
    "normalised": ("min:{}/normalised_min", "max:{}/normalised_max"),
    "normalised_abs": ("mean:{}/normalised_mean_abs",),
    "alike": ("mean:{}/zero_spread_frac",),
    "too_few": ("sum:{}/too_few_scored_count",),
}
"""Metrics of the statistics of one reward; of the sum of all, the last two are named after the
groups."""


def batch_metrics(run: Run, batch: Batch, rollouts: Rollouts, scores: Scores) -> dict[str, float]:
    """Metrics of rewards, groups and lengths, over all samples; of advantages and values, over the
    batch.

    Rewards are those before any penalty. Discarded samples count, or the reward would look better
    than it is.
    """
    counts = {
        name: value for name, value in reward_stats(scores).items() if name.endswith("_count")
    }
    lengths, kept = completion_lengths(rollouts), batch.loss_mask
    if (
        run.config.objective.credit == "outcome"
    ):  # once a row, where its actions share one advantage
        kept = kept & (kept.cumsum(dim=1) == 1)
    stats = {"size": Stat.of(rollouts.group_ids.bincount()), "len": Stat.of(lengths)}
    for name, ending in {"truncated": "length", "error": "error"}.items():
        stats[name] = Stat.of(torch.tensor([end == ending for end in rollouts.finish]).double())
    stats |= {
        "advantage": Stat.of(batch.advantages, kept),
        "advantage_abs": Stat.of(batch.advantages.abs(), kept),
    }
    if "turns" in rollouts.per_row:  # conversations with an environment
        own = rollouts.per_row
        failed = torch.tensor([reason is not None for reason in own["environment_failure"]])
        stats |= {"turns": Stat.of(own["turns"]), "ended": Stat.of(own["ended"].double())}
        stats |= {name: Stat.of(own[name].double()) for name in ("context_full", "reencoded")}
        if "tool_counts" in own:
            of_tools = zip(COUNTS, own["tool_counts"].T, strict=True)
            stats |= {f"tools/{name}": Stat.of(column.double()) for name, column in of_tools}
        stats |= {
            "replies": Stat.of(rollouts.lengths - lengths),
            "environment_failed": Stat.of(failed.double()),
        }
    if batch.returns is not None and batch.old_values is not None:
        stats["return"] = Stat.of(batch.returns, batch.loss_mask)
        stats["value"] = Stat.of(batch.old_values, batch.loss_mask)
        stats["value/residual"] = Stat.of(batch.returns - batch.old_values, batch.loss_mask)
    stats |= of_rewards(rollouts, scores)
    if run.config.objective.overlong:
        stats["reward/overlong"] = Stat.of(overlong(run.config, rollouts))
    stats |= {f"count:{name}": Stat(1, value) for name, value in counts.items()}
    stats = dist.merge_stats(stats)
    # From here on the statistics are those of all ranks: each rank computes the same metrics.
    metrics = flatten(stats, _METRICS) | reward_metrics(stats, scores)
    metrics |= reduced(
        dist.merge_stats(run.statistics.batch_stats(rollouts, scores.rewards, run.sampling))
    )
    metrics |= {name: stats[f"count:{name}"].sum for name in counts}
    metrics |= sizes_of_groups(rollouts.group_ids)
    metrics |= of_classes(rollouts, scores)
    if "value/residual" in stats:
        metrics["value/explained_variance_frac"] = explained_variance(
            stats["return"], stats["value/residual"]
        )
    # Moving statistics that the objective compares rewards with, this batch included; the same on
    # all ranks.
    is_sum = run.config.objective.combine == "sum_then_normalize"
    for name, state in run.state.running.items():
        area = "reward" if is_sum and name == "sum" else f"reward/{name}"
        if "mean" in state:
            metrics[f"{area}/running_mean"] = Ema(*state["mean"]).value
        if "within_var" in state:
            metrics[f"{area}/running_std_within_group"] = Ema(*state["within_var"]).value ** 0.5
    # Metrics that reward functions logged: the mean over the ranks that logged one.
    logged: dict[str, list[float]] = {}
    for rank in map(json.loads, dist.all_gather(json.dumps(dict(scores.metrics)).encode())):
        for name, value in rank.items():
            logged.setdefault(name, []).append(value)
    return metrics | {name: sum(values) / len(values) for name, values in logged.items()}


def of_classes(rollouts: Rollouts, scores: Scores) -> dict[str, float]:
    """``prompt/reward_mean/ID``: the mean reward of each class that prompts name by its number,
    over all ranks."""
    inputs = [prompt.inputs for prompt in rollouts.prompts]
    are_classes = inputs and all(isinstance(one, int) and 0 <= one < MOST_CLASSES for one in inputs)
    classes = torch.tensor(inputs if are_classes else [])
    count = dist.all_max(int(classes.max()) + 1 if are_classes else 0)
    if not count:
        return {}
    sums = torch.zeros(2, count, dtype=torch.float64)
    if are_classes:
        label, is_scored = classes[rollouts.group_ids], scores.rewards.isfinite()
        sums[0].index_add_(0, label[is_scored], scores.rewards[is_scored].double())
        sums[1].index_add_(
            0, label[is_scored], torch.ones(int(is_scored.sum()), dtype=torch.float64)
        )
    total, number = dist.all_sum(sums)
    return {
        f"prompt/reward_mean/{n}": float(total[n] / number[n])
        for n in number.nonzero()[:, 0].tolist()
    }


def explained_variance(returns: Stat, residual: Stat) -> float:
    """1 - Var(return - value) / Var(return): 1 is a perfect critic, 0 one no better than a
    constant, below is worse.

    NaN where the returns do not vary by more than rounding: there is nothing to explain.
    """
    largest = max(abs(end) for stat in (returns, residual) for end in (stat.min, stat.max))
    return 1 - residual.std**2 / returns.std**2 if _varies(returns, largest) else float("nan")


def correlation(x: Stat, y: Stat, product: Stat) -> float:
    """Pearson's, of the same rows: (mean xy - mean x mean y) / (std x std y); NaN where x or y does
    not vary."""
    if not all(_varies(stat, max(abs(stat.min), abs(stat.max))) for stat in (x, y)):
        return float("nan")
    found = (product.mean - x.mean * y.mean) / (x.std * y.std)
    return min(max(found, -1.0), 1.0)  # rounding


def _varies(stat: Stat, largest: float) -> bool:
    """By more than the rounding of float32 numbers of that size."""
    return stat.max - stat.min > 8 * torch.finfo(torch.float32).eps * largest


# --- rewards and groups ---------------------------------------------------------------------------


def of_rewards(rollouts: Rollouts, scores: Scores) -> dict[str, Stat]:
    """Statistics of the sum, of each part and of each pair of parts; those of several ranks add up.

    A part counts the groups in which it scores any row: it does not apply to the others.
    """
    group_ids, parts = rollouts.group_ids, scores.parts
    stats = {f"reward/{name}:steps": _scored(steps) for name, steps in scores.steps.items()}
    for area, rewards in {
        "reward": scores.rewards,
        **{f"reward/{name}": part for name, part in parts.items()},
    }.items():
        score, spread = (
            normalized_rewards(rewards, group_ids),
            group_std(rewards, group_ids),
        )  # [B], [P]
        means = group_reduce(rewards, group_ids, "mean")
        is_group = group_ids.bincount() > 1  # one row has no spread to lack
        if area != "reward":
            is_group &= ~means.isnan()
        own = {
            "rows": _scored(rewards),
            "within": _scored(spread),
            "between": _scored(means),
            "best": _scored(group_reduce(rewards, group_ids, "amax")),
            "worst": _scored(group_reduce(rewards, group_ids, "amin")),
            "normalised": _scored(score),
            "normalised_abs": _scored(score.abs()),
            "alike": Stat.of(has_no_spread(rewards, group_ids).double(), is_group),
            "too_few": Stat.of(spread.isnan().double(), is_group),
        }
        stats |= {f"{area}:{name}": stat for name, stat in own.items()}
    for one, other in combinations(parts, 2):  # over the rows that both score
        both = parts[one].isfinite() & parts[other].isfinite()
        x, y = (parts[name].double().where(both, torch.nan) for name in (one, other))
        pair = {"reward_corr": (x, y)}
        pair["reward_corr_within_group"] = (
            group_deviations(x, group_ids),
            group_deviations(y, group_ids),
        )
        for area, (a, b) in pair.items():
            columns = {"x": a, "y": b, "xy": a * b}
            stats |= {
                f"{area}/{one}/{other}:{name}": _scored(values) for name, values in columns.items()
            }
    return stats


def _scored(x: Tensor) -> Stat:
    return Stat.of(x, x.isfinite())


def reward_metrics(stats: Mapping[str, Stat], scores: Scores) -> dict[str, float]:
    """The metrics of the statistics of ``of_rewards``, over all ranks."""
    metrics: dict[str, float] = {}
    for area in (f"reward/{name}" for name in scores.steps):
        steps, rows = stats[f"{area}:steps"], stats[f"{area}:rows"].count
        metrics |= {f"{area}/step_mean": steps.mean, f"{area}/step_std": steps.std}
        metrics[f"{area}/steps_per_row_mean"] = steps.count / rows if rows else float("nan")
    for area in ("reward", *(f"reward/{name}" for name in scores.parts)):
        entries = {
            f"{area}:{name}": tuple(e.format(area) for e in forms)
            for name, forms in _OF_A_REWARD.items()
        }
        metrics |= flatten(stats, entries)
    for name in ("zero_spread_frac", "too_few_scored_count"):
        metrics[f"group/{name}"] = metrics.pop(f"reward/{name}")
    for one, other in combinations(scores.parts, 2):
        for area in ("reward_corr", "reward_corr_within_group"):
            pair = f"{area}/{one}/{other}"
            metrics[pair] = correlation(*(stats[f"{pair}:{name}"] for name in ("x", "y", "xy")))
    return metrics


def sizes_of_groups(group_ids: Int[Tensor, "B"]) -> dict[str, float]:
    """``group/size_N_count``: how many groups of all ranks have N rows, of the sizes that occur."""
    sizes = group_ids.bincount()
    longest = dist.all_max(int(sizes.max()) if len(sizes) else 0)
    count = dist.all_sum(sizes.bincount(minlength=longest + 1))
    return {
        f"group/size_{size}_count": float(count[size]) for size in count.nonzero()[:, 0].tolist()
    }
