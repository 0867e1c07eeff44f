"""Panels of a run's plots: each shows some of the metrics that were logged. The fixed ones are in ``panels.toml``."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Metrics = Sequence[Mapping[str, float]]

MAX_LINES = 8
"""Lines in a panel that can still be told apart."""
MAX_PROMPTS = 40


@dataclass(frozen=True)
class Panel:
    """One plot: file name, title, axis label, and its metrics with their legends."""

    name: str
    title: str
    unit: str
    metrics: Mapping[str, str] = field(default_factory=dict)
    points: Mapping[str, str] = field(default_factory=dict)
    """Metrics of evaluations, drawn as points. The first one alone is enough to show the panel."""
    band: str = ""
    """Standard deviation that is drawn on both sides of the first metric."""
    zero_note: str = ""
    """Text where the curve is zero up to rounding, which is correct and looks wrong."""
    shown: Literal["always", "if nonzero", "if it changes"] = "always"
    style: Literal["smoothed", "steps", "shades", "histogram", "heatmap", "profile"] = "smoothed"
    """Shades: one color, darker with each line. Histogram: frequency of each size by step. Heatmap: a row for each
    metric, colored by its value; ``unit`` labels the rows. Profile: a line for some of the steps, over the metrics."""
    value: str = ""
    """Label of a heatmap's colors, and of a profile's horizontal axis."""
    in_overview: bool = True


EPOCHS = {
    "ratio_max": ("epoch_ratio", "Largest ratio", "new / old probability"),
    "clip_frac": ("epoch_clip", "Clipped actions", "fraction"),
    "kl_old_k3_nats": ("epoch_kl", "KL of the update", "nats per action"),
}
"""Metrics ``epoch/N/NAME``: file, title and unit."""
TIMESTEPS = {
    "kl_ref_nats": ("KL divergence", "KL to the reference, nats"),
    "ratio_abs_nats": ("Size of the log-ratio", "mean |log ratio|, nats"),
    "advantage_abs_mean": ("Size of the advantage", "mean |advantage|"),
    "trained_count": ("Trained states", "states"),
    "reward_std_within_group": ("Spread of rewards", "standard deviation within groups"),
}
"""Metrics ``timestep/NAME/K`` with a title and a unit; others are shown under their names."""


def panels_of(metrics: Metrics) -> list[Panel]:
    """All panels that have something to show, in the order of the overview."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    fixed = {key: [Panel(name, **fields) for name, fields in section.items()] for key, section in table.items()}
    names = list(dict.fromkeys(name for row in metrics for name in row))

    def matches(pattern: str) -> list[str]:
        return [match[1] for name in names if (match := re.fullmatch(pattern, name))]

    panels = list(fixed["reward"])
    # Several reward functions: their means together, and a plot of each.
    if len(functions := matches(r"reward/(.+)/best_of_group_mean")) > 1:
        means = {f"reward/{name}/mean": name for name in functions[:MAX_LINES]}
        panels.append(Panel("rewards", "Reward functions", "mean before weighting", means))
        for name in functions:
            lines = {"mean": "mean", "best_of_group_mean": "best", "worst_of_group_mean": "worst"}
            own = {f"reward/{name}/{metric}": label for metric, label in lines.items()}
            file = f"reward_{_file_name(name)}"
            panels.append(Panel(file, f"Reward {name}", "reward, mean over groups", own, in_overview=False))
    # The strongest correlations within groups, which are what learning sees.
    prefix = "reward_corr_within_group/"
    values = {name: series(metrics, name)[1] for name in names if name.startswith(prefix)}
    strongest = sorted(values, key=lambda n: abs(sum(values[n])) / max(len(values[n]), 1), reverse=True)[:MAX_LINES]
    pairs = {name: name.removeprefix(prefix).replace("/", ", ") for name in strongest}
    unit = f"correlation of {next(iter(pairs.values()))}" if len(pairs) == 1 else "correlation"
    panels.append(Panel("correlations", "Correlation of rewards within groups", unit, pairs))
    sizes = sorted(map(int, matches(r"group/size_(\d+)_count")))
    counts = {f"group/size_{size}_count": str(size) for size in sizes}
    panels.append(Panel("group_sizes", "Group sizes", "rollouts per prompt", counts, style="histogram"))
    panels += fixed["learning"]
    epochs = sorted(map(int, matches(r"epoch/(\d+)/updates_count")))
    for metric, (name, title, unit) in EPOCHS.items():
        lines = {f"epoch/{epoch}/{metric}": f"epoch {epoch}" for epoch in epochs}
        panels.append(Panel(name, f"{title} by epoch", unit, lines, style="shades"))
    panels += fixed["epochs"]
    # Metrics by denoising step K; K = 0 is the first, whose state is almost noise.
    step_axis, rewards = "denoising step (0 = first)", sorted(map(int, matches(r"timestep/reward/(\d+)")))
    profile = {f"timestep/reward/{step}": str(step) for step in rewards}
    title, unit = "Reward by denoising step", "reward of the predicted image"
    panels.append(Panel("timestep_reward", title, unit, profile, style="profile", value=step_axis))
    for family in dict.fromkeys(matches(r"timestep/(.+)/\d+")):
        if family != "reward":
            steps = sorted(map(int, matches(rf"timestep/{re.escape(family)}/(\d+)")))
            title, value = TIMESTEPS.get(family, (family.replace("_", " "), family))
            rows = {f"timestep/{family}/{step}": str(step) for step in steps}
            name, title = f"timestep_{_file_name(family)}", f"{title} by denoising step"
            panels.append(Panel(name, title, step_axis, rows, style="heatmap", value=value))
    ids = sorted(matches(r"prompt/reward_mean/(.+)"), key=lambda name: (not name.isdecimal(), len(name), name))
    prompts = {f"prompt/reward_mean/{name}": name for name in ids[:MAX_PROMPTS]}
    panels.append(Panel("prompts", "Reward by prompt", "prompt", prompts, style="heatmap", value="mean reward"))
    return [panel for panel in (*panels, *fixed["stages"]) if _has_content(panel, metrics)]


def series(metrics: Metrics, name: str) -> tuple[list[int], list[float]]:
    """Steps and values where the metric was logged and finite."""
    pairs = [(int(row["step"]), row[name]) for row in metrics if math.isfinite(row.get(name, math.nan))]
    return [step for step, _ in pairs], [value for _, value in pairs]


def is_zero(metrics: Metrics, panel: Panel) -> bool:
    """Whether all values are zero up to rounding."""
    return all(abs(value) < 1e-6 for name in panel.metrics for value in series(metrics, name)[1])


def _has_content(panel: Panel, metrics: Metrics) -> bool:
    lines = [series(metrics, name)[1] for name in (*panel.metrics, *list(panel.points)[:1])]
    if panel.style == "histogram":
        return sum(any(values) for values in lines) > 1
    if panel.style in ("heatmap", "profile"):  # a single color shows nothing
        return sum(map(bool, lines)) > 1 and len({value for values in lines for value in values}) > 1
    if panel.shown == "if nonzero":
        return not is_zero(metrics, panel)
    if panel.shown == "if it changes":
        return any(len(set(values)) > 1 for values in lines)
    return any(lines)


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "_", name)
