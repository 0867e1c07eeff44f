"""The table of panels: what the page shows of a run's metrics, and what is drawn as PNG files."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from gruppo.integrity import read_json

Metrics = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class Panel:
    """One plot: file name, title, axis label, and its metrics.

    A metric may contain one ``*``, which any text may stand for. Those of evaluations are drawn as
    points, settings as steps, and everything else is smoothed.
    """

    name: str
    title: str
    unit: str
    metrics: tuple[str, ...]
    band: str = ""
    """Standard deviation on both sides of the first metric."""
    is_setting: bool = False
    """Whether it is drawn as it is, and only if it changes."""
    least: int = 1
    """Metrics without which the panel shows nothing."""
    zero_note: str = ""
    """Why a curve may be zero up to rounding, which looks wrong."""

    @property
    def points(self) -> list[str]:
        return [name for name in self.metrics if name.startswith(("eval/", "reference/"))]


PANELS = (
    Panel("reward", "Reward", "reward", ("reward/mean", "eval/reward_mean")),
    Panel(
        "groups",
        "Reward in groups",
        "reward, mean over groups",
        ("reward/mean", "reward/best_of_group_mean", "reward/worst_of_group_mean"),
        least=2,
    ),
    Panel(
        "spread",
        "Spread of rewards",
        "standard deviation",
        (
            "reward/std_within_group",
            "reward/std_between_groups",
            "reward/running_std_within_group",
        ),
    ),
    Panel("zero_spread", "Groups without spread", "fraction", ("group/zero_spread_frac",)),
    Panel(
        "normalised_reward",
        "Normalized reward",
        "standard deviations of the group",
        ("reward/normalised_mean_abs", "reward/normalised_max", "reward/normalised_min"),
    ),
    Panel(
        "advantage",
        "Advantage",
        "advantage, with its standard deviation",
        ("advantage/mean", "advantage/max", "advantage/min"),
        band="advantage/std",
    ),
    Panel("rewards", "Reward functions", "mean before weighting", ("reward/*/mean",), least=2),
    Panel(
        "correlations",
        "Correlation of rewards within groups",
        "correlation",
        ("reward_corr_within_group/*",),
    ),
    Panel("group_sizes", "Group sizes", "groups", ("group/size_*_count",), least=2),
    Panel(
        "loss",
        "Loss",
        "loss",
        ("loss/policy", "loss/kl", "loss/cons"),
        zero_note="Zero, because each batch is used once and advantages are centered in their "
        "group. The gradient norm shows whether it learns.",
    ),
    Panel("supervised", "Demonstrations", "nats per token, or loss per pixel", ("sup/loss_nats",)),
    Panel("kl", "KL divergence", "nats per action", ("kl/ref_nats", "kl/old_nats")),
    Panel("entropy", "Entropy", "nats per action", ("entropy/mean_nats",)),
    Panel("length", "Length", "actions per rollout", ("len/mean_actions",)),
    Panel("turns", "Turns", "answers per conversation", ("turns/mean", "turns/max")),
    Panel("clip", "Clipped actions", "fraction", ("clip/high_frac", "clip/low_frac")),
    Panel("value", "Value", "expected reward", ("value/mean", "return/mean")),
    Panel(
        "critic",
        "Critic",
        "fraction of the returns' variance",
        ("value/explained_variance_frac",),
    ),
    Panel("epoch_ratio", "Largest ratio by epoch", "new / old probability", ("epoch/*/ratio_max",)),
    Panel("epoch_clip", "Clipped actions by epoch", "fraction", ("epoch/*/clip_frac",)),
    Panel("epoch_kl", "KL of the update by epoch", "nats per action", ("epoch/*/kl_old_k3_nats",)),
    Panel(
        "epochs",
        "Epochs before the KL limit",
        "epochs",
        ("update/epochs_count",),
        is_setting=True,
    ),
    Panel(
        "reference",
        "Policy and reference",
        "held-out reward",
        ("reference/eval_reward_mean", "eval/reward_mean"),
        least=2,
    ),
    Panel(
        "distance",
        "Distance to the reference",
        "fraction of the weights' norm",
        ("reference/distance_frac",),
    ),
    Panel(
        "coefficients",
        "Coefficients of the loss terms",
        "coefficient",
        ("stage/*_coef",),
        is_setting=True,
    ),
    Panel("temperature", "Temperature", "", ("stage/temperature",), is_setting=True),
    Panel("lr", "Learning rate", "", ("optim/lr",), is_setting=True),
)
"""All panels, in the order of the page."""


def panels_of(metrics: Metrics) -> list[Panel]:
    """The panels that have something to show in these rows, with their metrics by full name."""
    names = {name for row in metrics for name in row}
    shown = []
    for panel in PANELS:
        found = list[str]()
        for pattern in panel.metrics:
            expression = re.compile(re.escape(pattern).replace(r"\*", ".+"))
            found += sorted(filter(expression.fullmatch, names), key=lambda name: (len(name), name))
        different = max((len({*series(metrics, name)[1]}) for name in found), default=0)
        if len(found) >= panel.least and different > panel.is_setting:
            shown.append(replace(panel, metrics=tuple(found)))
    return shown


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
