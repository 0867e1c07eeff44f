"""Curves of a run as PNG files: one sheet of all, and each of them alone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gruppo.tracking.files import read_metrics
from gruppo.tracking.panels import Curve, Metrics, curves_of, is_zero, series

if TYPE_CHECKING:
    import numpy as np

COLOURS = ("#2563a8", "#c2571a", "#3f8f4f", "#8b5fbf", "#b8901f", "#c44569", "#4a9a9a", "#7a7a7a")
INK, PAPER, RULE, STAGE, ABSENT = "#222222", "#ffffff", "#dddddd", "#8a8a8a", "#eeeeee"
DECADES = 100
"""Largest over small value from which on colours go by decades."""
MOST_COLUMNS, MOST_ALONG = 60, 6
"""Of a heat map; and lines over denoising steps."""
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
    "legend.facecolor": PAPER,
    "legend.edgecolor": "none",
    "legend.framealpha": 0.85,
    "legend.borderpad": 0.2,
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
    curves = curves_of(metrics)
    if not curves:
        return []
    folder = Path(run_dir) / "plots"
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        starts = stage_starts(run_dir, metrics)
        overview = _sheet(folder / "overview.png", curves, metrics, starts)
        return [overview, *(_picture(folder / f"{curve.name}.png", curve, metrics, starts) for curve in curves)]


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


def stage_starts(run_dir: str | Path, metrics: Metrics) -> dict[int, str]:
    """The first step of each stage after the first, and the stage's name, or its number where it has none."""
    steps, numbers = series(metrics, "stage/number")
    try:
        config = json.loads((Path(run_dir) / "config.json").read_text(encoding="utf-8"))
        names = {number: str(stage["name"]) for number, stage in enumerate(config["stages"], start=1)}
    except (OSError, ValueError, KeyError, TypeError):  # metrics alone are enough to draw
        names = {}
    changes = zip(steps[1:], numbers[1:], numbers, strict=False)
    return {step: names.get(int(now)) or str(int(now)) for step, now, before in changes if now != before}


def _sheet(path: Path, curves: Sequence[Curve], metrics: Metrics, starts: Mapping[int, str]) -> Path:
    from matplotlib.figure import Figure

    curves = [curve for curve in curves if curve.is_on_overview]
    columns = min(len(curves), 3 if len(curves) <= 12 else 4)
    rows = math.ceil(len(curves) / columns)
    figure = Figure(figsize=(4.4 * columns, 3.1 * rows + 0.4), layout="constrained")
    figure.suptitle(path.absolute().parents[1].name, x=0.01, ha="left", fontsize=13, color=INK)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, curve in zip(panels, curves, strict=False):
        _draw(axes, curve, metrics, starts)
    for axes in panels[len(curves) :]:
        axes.set_visible(False)
    figure.savefig(path)
    return path


def _picture(path: Path, curve: Curve, metrics: Metrics, starts: Mapping[int, str]) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    _draw(figure.subplots(), curve, metrics, starts)
    figure.savefig(path)
    return path


def _draw(axes: Any, curve: Curve, metrics: Metrics, starts: Mapping[int, str]) -> None:
    """One panel, over the steps of the whole run, with a line where a stage begins."""
    if curve.style == "along":
        return _along(axes, curve, metrics)
    steps = [int(row["step"]) for row in metrics]
    margin = max(0.02 * (max(steps) - min(steps)), 0.5)
    axes.set_xlim(min(steps) - margin, max(steps) + margin)
    axes.set_title(curve.title, pad=17 if starts else None)  # the stages' names stand below it
    axes.set(xlabel="step", ylabel=curve.unit)
    for step, stage in starts.items():
        axes.axvline(step - 0.5, color=STAGE, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        at = {"transform": axes.get_xaxis_transform(), "color": STAGE, "fontsize": 7.5}
        axes.text(step - 0.5, 1.0, stage, ha="center", va="bottom", **at)
    if curve.style == "histogram":
        _histogram(axes, curve, metrics)
    elif curve.style == "heat":
        _heat(axes, curve, metrics)
    else:
        _lines(axes, curve, metrics)
    axes.xaxis.get_major_locator().set_params(integer=True)
    _legend(axes)


def _legend(axes: Any) -> None:
    """Above the curves, in room of its own, where there are several."""
    labels = axes.get_legend_handles_labels()[1]
    if len(labels) < 2:
        return
    columns = 3 if max(map(len, labels)) < 9 else 2
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.11 * math.ceil(len(labels) / columns) * (high - low))
    axes.legend(loc="upper left", ncols=columns, handlelength=1.3, columnspacing=1.2, borderaxespad=0.2)


def _lines(axes: Any, curve: Curve, metrics: Metrics) -> None:
    """A thin line of what was logged under a thick one of its moving average; evaluations as points."""
    colours = _shades(len(curve.metrics)) if curve.style == "shades" else COLOURS
    for (name, label), colour in zip(curve.metrics, cycle(colours), strict=False):
        steps, values = series(metrics, name)
        if not steps:
            continue
        if curve.style == "as it is":
            axes.plot(steps, values, color=colour, linewidth=1.9, label=label, drawstyle="steps-mid")
            continue
        axes.plot(steps, values, color=colour, alpha=0.3, linewidth=0.8)
        middle = smooth(values, max(len(values) / 40, 1.0))
        axes.plot(steps, middle, color=colour, linewidth=1.9, label=label)
        if curve.band and name == curve.metrics[0][0]:
            _band(axes, steps, middle, curve.band, metrics, colour)
    for (name, label), colour in zip(curve.points, [COLOURS[1], COLOURS[0]], strict=False):
        steps, values = series(metrics, name)
        if steps:
            axes.plot(steps, values, "o", color=colour, markersize=6, markeredgecolor=PAPER, label=label, zorder=4)
    if curve.when_zero and is_zero(metrics, curve):
        axes.set_ylim(-1, 1)
        at = {"transform": axes.transAxes, "ha": "center", "va": "bottom", "color": "#555555"}
        axes.text(0.5, 0.6, curve.when_zero, bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1}, **at)


def _band(axes: Any, steps: Sequence[int], middle: Sequence[float], name: str, metrics: Metrics, colour: str) -> None:
    """A standard deviation on both sides."""
    at, values = series(metrics, name)
    spread = dict(zip(at, smooth(values, max(len(values) / 40, 1.0)) if values else [], strict=True))
    low, high = ([y + sign * spread.get(x, math.nan) for x, y in zip(steps, middle, strict=True)] for sign in (-1, 1))
    axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)


def _histogram(axes: Any, curve: Curve, metrics: Metrics) -> None:
    """How many groups of each step have each size, as darkness."""
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    steps, sizes, share = shares(curve, metrics)
    ends = [steps[0] - 0.5, *(step + 0.5 for step in steps)]
    heights = [size - 0.5 for size in (*sizes, sizes[-1] + 1)]
    visible = ListedColormap(colormaps["Blues"](np.linspace(0.2, 1, 256)))
    shown = axes.pcolormesh(ends, heights, np.where(np.array(share) > 0, share, np.nan), cmap=visible, vmin=0, vmax=1)
    axes.figure.colorbar(shown, ax=axes, label="share of the groups")
    axes.yaxis.get_major_locator().set_params(integer=True)


def shares(curve: Curve, metrics: Metrics) -> tuple[list[int], range, list[list[float]]]:
    """Steps, sizes from the smallest to the largest, and of each size the share of each step's groups."""
    counts = {int(label): dict(zip(*series(metrics, name), strict=True)) for name, label in curve.metrics}
    steps = sorted({step for count in counts.values() for step in count})
    total = {step: sum(count.get(step, 0.0) for count in counts.values()) for step in steps}
    sizes = range(min(counts), max(counts) + 1)
    return steps, sizes, [[counts.get(size, {}).get(step, 0.0) / total[step] for step in steps] for size in sizes]


def _heat(axes: Any, curve: Curve, metrics: Metrics) -> None:
    """The value of each metric at each step as a colour; grey where there is none."""
    import numpy as np

    ends, values = cells(curve, metrics)
    norm, colours = _scale(values)
    shown = axes.pcolormesh(
        ends, np.arange(len(values) + 1) - 0.5, values.clip(norm.vmin, norm.vmax), norm=norm, cmap=colours
    )
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, ends[0]), max(high, ends[-1]))
    axes.set_facecolor(ABSENT)
    axes.grid(False)
    every = math.ceil(len(values) / 12)
    axes.set_yticks(range(0, len(values), every), [label for _, label in curve.metrics[::every]])
    axes.figure.colorbar(shown, ax=axes, label=curve.value)


def _along(axes: Any, curve: Curve, metrics: Metrics) -> None:
    """A line over the metrics for some of the steps that logged them: the first, the last, and between them."""
    axes.set_title(curve.title)
    axes.set(xlabel=curve.value, ylabel=curve.unit)
    rows = [row for row in metrics if any(math.isfinite(row.get(name, math.nan)) for name, _ in curve.metrics)]
    count = min(len(rows), MOST_ALONG)
    rows = [rows[round(n * (len(rows) - 1) / max(count - 1, 1))] for n in range(count)]
    places = [int(label) for _, label in curve.metrics]
    for row, colour in zip(rows, _shades(count), strict=True):
        values = [row.get(name, math.nan) for name, _ in curve.metrics]
        finite = [value if math.isfinite(value) else math.nan for value in values]
        axes.plot(
            places, finite, color=colour, linewidth=1.9, marker="o", markersize=3.5, label=f"step {row['step']:g}"
        )
    axes.xaxis.get_major_locator().set_params(integer=True)
    _legend(axes)


def cells(curve: Curve, metrics: Metrics, *, most: int = MOST_COLUMNS) -> tuple[np.ndarray, np.ndarray]:
    """Ends of the columns [n + 1], and a value for each metric and column [m, n]: NaN where nothing was logged.

    A column is as wide as the least distance of two logged steps, so that a gap in the run is a gap here. Of more than
    ``most``, neighbours are one: their mean, or of a metric ``*_max`` the largest.
    """
    import numpy as np

    logged = [series(metrics, name) for name, _ in curve.metrics]
    steps = sorted({step for at, _ in logged for step in at})
    wide = min((after - before for before, after in pairwise(steps)), default=1)
    half = wide / 2
    wide *= math.ceil(((steps[-1] - steps[0]) // wide + 1) / most)
    count = (steps[-1] - steps[0]) // wide + 1
    values = np.full((len(logged), count), math.nan)
    for line, (name, _), (at, found) in zip(values, curve.metrics, logged, strict=True):
        columns = (np.array(at, dtype=int) - steps[0]) // wide
        for column in np.unique(columns):
            of_column = np.array(found)[columns == column]
            line[column] = of_column.max() if re.search(r"_max(/|$)", name) else of_column.mean()
    return steps[0] - half + wide * np.arange(count + 1), values


def _scale(values: np.ndarray) -> tuple[Any, str]:
    """Colours: from white at 0 where both signs matter, by decades where sizes differ much, else from low to high."""
    import numpy as np
    from matplotlib.colors import LogNorm, Normalize

    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    if low < 0 < high and min(-low, high) > max(-low, high) / 4:
        return Normalize(-max(-low, high), max(-low, high)), "RdBu_r"
    small = float(np.quantile(values[values > 0], 0.05, method="lower")) if low >= 0 and high > 0 else high
    by_decades = small > 0 and high > DECADES * small
    return (LogNorm(small, high) if by_decades else Normalize(low, high)), "viridis"


def _shades(count: int) -> list[Any]:
    """From light to dark."""
    from matplotlib import colormaps

    return [colormaps["viridis_r"](0.15 + 0.75 * n / max(count - 1, 1)) for n in range(count)]
