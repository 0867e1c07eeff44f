"""The table of panels: what the page shows of a run's metrics, and what is drawn as PNG files."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from gruppo.integrity import read_json

Metrics = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class Panel:
    """One plot: file name, title, axis label, and its metrics with their legends.

    A metric may contain one ``*``, which any text may stand for: the legend is then that text, or
    has it for ``{}``.
    """

    name: str
    title: str
    unit: str
    metrics: Mapping[str, str]
    points: Mapping[str, str] = field(default_factory=dict)
    """Metrics of evaluations, drawn as points."""
    band: str = ""
    """Standard deviation on both sides of the first metric."""
    style: str = "smoothed"
    """smoothed, or steps: as it is."""
    least: int = 1
    """Metrics without which the panel shows nothing."""
    only_if_it_changes: bool = False
    zero_note: str = ""
    """Why a curve may be zero up to rounding, which looks wrong."""


def _setting(name: str, title: str, metrics: Mapping[str, str]) -> Panel:
    return Panel(name, title, "", metrics, style="steps", only_if_it_changes=True)


PANELS = (
    Panel(
        "reward",
        "Reward",
        "reward",
        {"reward/mean": "training"},
        points={"eval/reward_mean": "held-out"},
    ),
    Panel(
        "groups",
        "Reward in groups",
        "reward, mean over groups",
        {
            "reward/mean": "mean",
            "reward/best_of_group_mean": "best",
            "reward/worst_of_group_mean": "worst",
        },
    ),
    Panel(
        "spread",
        "Spread of rewards",
        "standard deviation",
        {
            "reward/std_within_group": "within groups",
            "reward/std_between_groups": "between groups",
            "reward/running_std_within_group": "within groups, moving",
        },
    ),
    Panel(
        "zero_spread",
        "Groups without spread",
        "fraction",
        {"group/zero_spread_frac": "all rewards equal"},
    ),
    Panel(
        "normalised_reward",
        "Normalized reward",
        "standard deviations of the group",
        {
            "reward/normalised_mean_abs": "mean absolute value",
            "reward/normalised_max": "largest",
            "reward/normalised_min": "smallest",
        },
    ),
    Panel(
        "advantage",
        "Advantage",
        "advantage",
        {
            "advantage/mean": "mean ± std",
            "advantage/max": "largest",
            "advantage/min": "smallest",
        },
        band="advantage/std",
    ),
    Panel("rewards", "Reward functions", "mean before weighting", {"reward/*/mean": ""}, least=2),
    Panel(
        "correlations",
        "Correlation of rewards within groups",
        "correlation",
        {"reward_corr_within_group/*": ""},
    ),
    Panel("group_sizes", "Group sizes", "groups", {"group/size_*_count": "{} samples"}, least=2),
    Panel(
        "loss",
        "Loss",
        "loss",
        {"loss/policy": "policy", "loss/kl": "KL term", "loss/cons": "consistency"},
        zero_note="Zero, because each batch is used once and advantages are centered in their "
        "group. The gradient norm shows whether it learns.",
    ),
    Panel(
        "supervised", "Demonstrations", "nats per token, or loss per pixel", {"sup/loss_nats": ""}
    ),
    Panel(
        "kl",
        "KL divergence",
        "nats per action",
        {"kl/ref_nats": "to the reference", "kl/old_nats": "of the update"},
    ),
    Panel("entropy", "Entropy", "nats per action", {"entropy/mean_nats": ""}),
    Panel("length", "Length", "actions per rollout", {"len/mean_actions": ""}),
    Panel(
        "turns", "Turns", "replies per conversation", {"turns/mean": "mean", "turns/max": "largest"}
    ),
    Panel(
        "clip",
        "Clipped actions",
        "fraction",
        {"clip/high_frac": "above", "clip/low_frac": "below"},
        only_if_it_changes=True,
    ),
    Panel("value", "Value", "expected reward", {"value/mean": "critic", "return/mean": "return"}),
    Panel(
        "critic",
        "Critic",
        "fraction of the returns' variance",
        {"value/explained_variance_frac": "explained"},
    ),
    Panel(
        "epoch_ratio",
        "Largest ratio by epoch",
        "new / old probability",
        {"epoch/*/ratio_max": "epoch {}"},
    ),
    Panel("epoch_clip", "Clipped actions by epoch", "fraction", {"epoch/*/clip_frac": "epoch {}"}),
    Panel(
        "epoch_kl",
        "KL of the update by epoch",
        "nats per action",
        {"epoch/*/kl_old_k3_nats": "epoch {}"},
    ),
    _setting("epochs", "Epochs before the KL limit", {"update/epochs_count": "epochs"}),
    Panel("prompts", "Reward by prompt", "mean reward", {"prompt/reward_mean/*": ""}, least=2),
    Panel(
        "reference",
        "Policy and reference",
        "reward",
        {},
        points={
            "reference/eval_reward_mean": "reference, held-out",
            "eval/reward_mean": "policy, held-out",
        },
    ),
    Panel(
        "distance",
        "Distance to the reference",
        "fraction of the weights' norm",
        {},
        points={"reference/distance_frac": ""},
    ),
    _setting(
        "coefficients",
        "KL and entropy coefficients",
        {"stage/kl_coef": "KL", "stage/entropy_coef": "entropy"},
    ),
    _setting(
        "terms",
        "Coefficients of the loss terms",
        {
            "stage/rl_coef": "policy",
            "stage/sup_coef": "demonstrations",
            "stage/cons_coef": "consistency",
            "stage/value_coef": "value",
        },
    ),
    _setting("temperature", "Temperature", {"stage/temperature": "sampling"}),
    _setting("lr", "Learning rate", {"optim/lr": "learning rate"}),
)
"""All panels, in the order of the page."""


def panels_of(metrics: Metrics) -> list[Panel]:
    """The panels that have something to show in these rows, with their metrics by full name."""
    names = dict.fromkeys(name for row in metrics for name in row)
    shown = []
    for panel in PANELS:
        found: dict[str, str] = {}
        for pattern, legend in panel.metrics.items():
            found |= _matching(names, pattern, legend)
        values = [series(metrics, name)[1] for name in (*found, *list(panel.points)[:1])]
        is_shown = any(values) and (len(found) >= panel.least or panel.points)
        if panel.only_if_it_changes:
            is_shown = is_shown and any(len(set(row)) > 1 for row in values)
        if is_shown:
            shown.append(replace(panel, metrics=found))
    return shown


def _matching(names: Iterable[str], pattern: str, legend: str) -> dict[str, str]:
    """Logged metrics of a pattern with their legends: numbers in order, then words."""
    expression = re.escape(pattern).replace(r"\*", "(.+)") + "()"
    found = [match for name in names if (match := re.fullmatch(expression, name))]
    found.sort(key=lambda match: (not match[1].isdecimal(), len(match[1]), match[1]))
    return {match[0]: (legend or "{}").format(match[1]) for match in found}


def series(metrics: Metrics, name: str) -> tuple[list[int], list[float]]:
    """Steps and values where the metric was logged and finite."""
    rows = [row for row in metrics if math.isfinite(row.get(name, math.nan))]
    return [int(row["step"]) for row in rows], [row[name] for row in rows]


def stage_starts(run_dir: Path, metrics: Metrics) -> dict[int, str]:
    """First step of each stage after the first, with the stage's name, or its number."""
    names: dict[int, str] = {}
    with suppress(OSError, ValueError, KeyError, TypeError):  # plots need no config
        stages = read_json(run_dir / "config.json")["stages"]
        names = {number: str(stage["name"]) for number, stage in enumerate(stages, start=1)}
    starts = dict[int, str]()
    for (_, before), (step, now) in pairwise(zip(*series(metrics, "stage/number"), strict=True)):
        if now != before:
            starts[step] = names.get(int(now)) or str(int(now))
    return starts
