"""Curves of a run as PNG files: one sheet of all, and each of them alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gruppo.track.files import read_metrics

Metrics = Sequence[dict[str, float]]


class Curve(NamedTuple):
    """One picture: the file's name, its title and axis label, and the metrics in it with their legends."""

    name: str
    title: str
    unit: str
    metrics: tuple[tuple[str, str], ...]
    points: str = ""
    """A held-out metric that is drawn as points."""
    when_zero: str = ""
    """Said where the curve is zero up to rounding, which is right and looks wrong."""


CURVES = (
    Curve("reward", "Reward", "reward", (("reward/mean", "while training"),), points="eval/reward_mean"),
    Curve(
        "normalised_reward",
        "Normalised reward",
        "size",
        (("advantage/mean_abs", "mean |advantage|"), ("reward/std_within_group", "reward's spread in a group")),
    ),
    Curve(
        "loss",
        "Loss",
        "loss",
        (("loss/policy", "policy"), ("loss/kl", "KL term")),
        when_zero="zero as it should be: each batch is used once,\nand advantages are centred in their group.\n"
        "Its gradient is not zero.",
    ),
    Curve(
        "kl",
        "Divergence",
        "KL, nats per action",
        (("kl/ref_nats", "to reference"), ("kl/old_nats", "of the step")),
        when_zero="zero as it should be: each batch is used once,\nand there is no reference (kl_coef is 0).",
    ),
    Curve("length", "Length", "actions per rollout", (("len/mean_actions", "mean"),)),
    Curve("entropy", "Entropy", "nats per action", (("entropy/mean_nats", "mean"),)),
    Curve("value", "Value", "reward to come", (("value/mean", "critic's mean"), ("return/mean", "mean return"))),
    Curve("critic", "Critic", "share of the returns' variance", (("value/explained_variance_frac", "explained"),)),
)
COLOURS = ("#2563a8", "#c2571a", "#3f8f4f")
INK, PAPER, RULE = "#222222", "#ffffff", "#dddddd"
STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": INK,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.facecolor": PAPER,
    "savefig.dpi": 130,
}


def plot_run(run_dir: str | Path, *, note: Callable[[str], None] = lambda message: None) -> list[Path]:
    """Draw ``run_dir/plots/*.png`` and return their paths, the overview first; none when nothing was logged.

    Without matplotlib there are no pictures, and ``note`` hears why.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        note('No curves were drawn: matplotlib is not installed. Install it with: pip install "gruppo[report]"')
        return []
    metrics = read_metrics(run_dir)
    curves = [curve for curve in CURVES if any(_series(metrics, name)[0] for name, _ in curve.metrics)]
    if not curves:
        return []
    folder = Path(run_dir) / "plots"
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        overview = _sheet(folder / "overview.png", curves, metrics, Path(run_dir).name)
        return [overview, *(_picture(folder / f"{curve.name}.png", curve, metrics) for curve in curves)]


def smooth(values: Sequence[float], width: float) -> list[float]:
    """Mean of the neighbours, weighted by a bell of ``width`` values, so that it neither lags nor leads.

    s_t = sum_i w_i x_i / sum_i w_i,  w_i = exp(-((t - i) / width)^2 / 2),  |t - i| <= 3 width.
    """
    import numpy as np

    reach = min(math.ceil(3 * width), len(values) - 1)
    bell = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    sums = np.convolve(np.asarray(values, dtype=float), bell)
    weights = np.convolve(np.ones(len(values)), bell)
    return (sums / weights)[reach : reach + len(values)].tolist()


def _series(metrics: Metrics, name: str) -> tuple[list[int], list[float]]:
    """Steps and values where the metric was logged and finite."""
    pairs = [(int(row["step"]), row[name]) for row in metrics if math.isfinite(row.get(name, math.nan))]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _is_zero(metrics: Metrics, curve: Curve) -> bool:
    return all(abs(value) < 1e-6 for name, _ in curve.metrics for value in _series(metrics, name)[1])


def _sheet(path: Path, curves: Sequence[Curve], metrics: Metrics, title: str) -> Path:
    from matplotlib.figure import Figure

    rows = math.ceil(len(curves) / 3)
    columns = min(len(curves), 3)
    figure = Figure(figsize=(4.4 * columns, 3.1 * rows + 0.4), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, color=INK)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, curve in zip(panels, curves, strict=False):
        _draw(axes, curve, metrics)
    for axes in panels[len(curves) :]:
        axes.set_visible(False)
    figure.savefig(path)
    return path


def _picture(path: Path, curve: Curve, metrics: Metrics) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    _draw(figure.subplots(), curve, metrics)
    figure.savefig(path)
    return path


def _draw(axes: Any, curve: Curve, metrics: Metrics) -> None:
    """A thin line of what was logged under a thick one of its moving average."""
    for (name, label), colour in zip(curve.metrics, COLOURS, strict=False):
        steps, values = _series(metrics, name)
        if not steps:
            continue
        axes.plot(steps, values, color=colour, alpha=0.3, linewidth=0.8)
        axes.plot(steps, smooth(values, max(len(values) / 40, 1.0)), color=colour, linewidth=1.9, label=label)
    steps, values = _series(metrics, curve.points)
    if steps:
        axes.plot(steps, values, "o", color=COLOURS[1], markersize=6, markeredgecolor=PAPER, label="held-out", zorder=4)
    axes.set(title=curve.title, xlabel="step", ylabel=curve.unit)
    if curve.when_zero and _is_zero(metrics, curve):
        axes.set_ylim(-1, 1)
        axes.text(0.5, 0.6, curve.when_zero, transform=axes.transAxes, ha="center", va="bottom", color="#555555")
    axes.xaxis.get_major_locator().set_params(integer=True)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend()
