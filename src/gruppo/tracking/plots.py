"""Plots of a run as PNG files: an overview, and each panel of ``panels.toml`` or of the logged metrics by itself."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gruppo.integrity import read_json
from gruppo.loading import install_command
from gruppo.tracking.files import read_metrics

Metrics = Sequence[Mapping[str, float]]

MAX_LINES = 8
"""Lines in a panel that can still be told apart."""
COLORS = ("#2563a8", "#c2571a", "#3f8f4f", "#8b5fbf", "#b8901f", "#c44569", "#4a9a9a", "#7a7a7a")
INK, PAPER, STAGE, ABSENT = "#222222", "#ffffff", "#8a8a8a", "#eeeeee"
LOG_RANGE = 100
"""Ratio of the largest value to a small one above which colors are logarithmic."""
MAX_COLUMNS, MAX_PROFILES = 60, 6
"""Columns of a heatmap, and lines over denoising steps."""
ROUNDING = 1e-6
"""Absolute value below which a number is zero up to rounding."""
UNSAFE = re.compile(r"[^A-Za-z0-9.-]+")
"""Characters of a metric's name that become an underscore in that of a file."""
STYLE = Path(__file__).with_name("plots.mplstyle")


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


def plot_run(
    run_dir: str | Path, *, note: Callable[[str], None] = lambda message: None
) -> list[Path]:
    """Write ``run_dir/plots/*.png`` and return the paths, the overview first; none if nothing was logged.

    Without matplotlib there are no plots, and ``note`` receives the reason.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        note(
            f"No plots were drawn: matplotlib is not installed. Install it with: {install_command('report')}"
        )
        return []
    metrics = read_metrics(run_dir)
    if not (panels := panels_of(metrics)):
        return []
    folder = Path(run_dir) / "plots"
    folder.mkdir(parents=True, exist_ok=True)
    starts, paths = stage_starts(run_dir, metrics), [folder / "overview.png"]
    with mpl.rc_context(fname=STYLE):
        overview = [panel for panel in panels if panel.in_overview]
        columns = min(len(overview), 3 if len(overview) <= 12 else 4)
        rows = math.ceil(len(overview) / columns)
        figure = Figure(figsize=(4.4 * columns, 3.1 * rows + 0.4), layout="constrained")
        figure.suptitle(folder.absolute().parent.name, x=0.01, ha="left", fontsize=13, color=INK)
        for i, panel in enumerate(overview, start=1):
            draw_panel(figure.add_subplot(rows, columns, i), panel, metrics, starts)
        figure.savefig(paths[0])
        for panel in panels:
            figure = Figure(figsize=(6.4, 4.0), layout="constrained")
            draw_panel(figure.subplots(), panel, metrics, starts)
            paths.append(folder / f"{panel.name}.png")
            figure.savefig(paths[-1])
    return paths


def smooth(values: Sequence[float], width: float) -> list[float]:
    """Mean of the neighbors, weighted by a Gaussian of ``width`` values, so that it neither lags nor leads.

    s_t = sum_i w_i x_i / sum_i w_i,  w_i = exp(-((t - i) / width)^2 / 2),  |t - i| <= 3 width.
    """
    reach = min(math.ceil(3 * width), len(values) - 1)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    sums = np.convolve(np.asarray(values, dtype=float), kernel)
    weights = np.convolve(np.ones(len(values)), kernel)
    return (sums / weights)[reach : reach + len(values)].tolist()


def stage_starts(run_dir: str | Path, metrics: Metrics) -> dict[int, str]:
    """First step of each stage after the first, with the stage's name, or its number if it has none."""
    (steps, numbers), names = series(metrics, "stage/number"), dict[int, str]()
    with suppress(OSError, ValueError, KeyError, TypeError):  # plots need no config
        config = read_json(Path(run_dir) / "config.json")
        names = {
            number: str(stage["name"]) for number, stage in enumerate(config["stages"], start=1)
        }
    changes = zip(steps[1:], numbers[1:], numbers, strict=False)
    return {
        step: names.get(int(now)) or str(int(now)) for step, now, before in changes if now != before
    }


def draw_panel(axes: Any, panel: Panel, metrics: Metrics, starts: Mapping[int, str]) -> None:
    """Draw one panel over the steps of the whole run, with a line where a stage starts."""
    axes.set(xlabel="step", ylabel=panel.unit)
    if panel.style == "profile":  # over denoising steps: no stage starts between two of them
        starts = {}
        axes.set(xlabel=panel.value)
        # A line over the metrics for some of the steps that logged them: the first, the last, and some between.
        rows = [
            row
            for row in metrics
            if any(math.isfinite(row.get(name, math.nan)) for name in panel.metrics)
        ]
        count = min(len(rows), MAX_PROFILES)
        rows = [rows[round(n * (len(rows) - 1) / max(count - 1, 1))] for n in range(count)]
        for row, color in zip(rows, _shades(count), strict=True):
            values = [row.get(name, math.nan) for name in panel.metrics]
            finite = [
                value if math.isfinite(value) else math.nan for value in values
            ]  # NaN leaves a gap in the line
            line = {
                "label": f"step {row['step']:g}",
                "color": color,
                "linewidth": 1.9,
                "markersize": 3.5,
            }
            axes.plot(list(map(int, panel.metrics.values())), finite, marker="o", **line)
    else:
        steps = [int(row["step"]) for row in metrics]
        margin = max(0.02 * (max(steps) - min(steps)), 0.5)
        axes.set_xlim(min(steps) - margin, max(steps) + margin)
        drawers = {"histogram": _draw_histogram, "heatmap": _draw_heatmap}
        drawers.get(panel.style, _draw_lines)(axes, panel, metrics)
    axes.set_title(panel.title, pad=17 if starts else None)  # the stages' names are below it
    for step, stage in starts.items():
        axes.axvline(step - 0.5, color=STAGE, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        at = axes.get_xaxis_transform()  # x in steps, y in the axes' height
        axes.text(
            step - 0.5,
            1.0,
            stage,
            ha="center",
            va="bottom",
            transform=at,
            color=STAGE,
            fontsize=7.5,
        )
    axes.xaxis.get_major_locator().set_params(integer=True)
    if (
        len(labels := axes.get_legend_handles_labels()[1]) > 1
    ):  # a legend above the curves, with space of its own
        columns = 3 if max(map(len, labels)) < 9 else 2
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + 0.11 * math.ceil(len(labels) / columns) * (high - low))
        axes.legend(
            loc="upper left", ncols=columns, handlelength=1.3, columnspacing=1.2, borderaxespad=0.2
        )


def _draw_lines(axes: Any, panel: Panel, metrics: Metrics) -> None:
    """Thin lines of the values under thick lines of their moving average; evaluations as points."""
    colors = _shades(len(panel.metrics)) if panel.style == "shades" else COLORS
    for i, ((name, label), color) in enumerate(
        zip(panel.metrics.items(), cycle(colors), strict=False)
    ):
        steps, values = series(metrics, name)
        if not steps:
            continue
        thick = {"color": color, "linewidth": 1.9, "label": label}
        if panel.style == "steps":
            axes.plot(steps, values, drawstyle="steps-mid", **thick)
            continue
        mean = smooth(values, max(len(values) / 40, 1.0))
        axes.plot(steps, values, color=color, alpha=0.3, linewidth=0.8)
        axes.plot(steps, mean, **thick)
        if panel.band and i == 0:
            # As smooth as the mean, and only where both were logged.
            band_steps, stds = series(metrics, panel.band)
            std = dict(
                zip(band_steps, smooth(stds, max(len(stds) / 40, 1.0)) if stds else [], strict=True)
            )
            low, high = (
                [m + s * std.get(x, math.nan) for x, m in zip(steps, mean, strict=True)]
                for s in (-1, 1)
            )
            axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
    for (name, label), color in zip(panel.points.items(), [COLORS[1], COLORS[0]], strict=False):
        steps, values = series(metrics, name)
        if steps:
            axes.plot(
                steps,
                values,
                "o",
                color=color,
                markersize=6,
                markeredgecolor=PAPER,
                label=label,
                zorder=4,
            )
    if panel.zero_note and all(
        abs(x) < ROUNDING for name in panel.metrics for x in series(metrics, name)[1]
    ):
        axes.set_ylim(-1, 1)
        at = {"transform": axes.transAxes, "ha": "center", "va": "bottom", "color": "#555555"}
        axes.text(
            0.5,
            0.6,
            panel.zero_note,
            bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1},
            **at,
        )


def _draw_histogram(axes: Any, panel: Panel, metrics: Metrics) -> None:
    """The fraction of a step's groups that has each size, as darkness; white where there is none."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    # Sizes in which no group was have no metric: the rows between the smallest and the largest are filled.
    counts = {
        int(label): dict(zip(*series(metrics, name), strict=True))
        for name, label in panel.metrics.items()
    }
    steps = sorted({step for count in counts.values() for step in count})
    sizes = range(min(counts), max(counts) + 1)
    table = np.array(
        [[counts.get(size, {}).get(step, 0.0) for step in steps] for size in sizes]
    )  # [sizes, steps]
    fractions, edges = table / table.sum(axis=0), [steps[0] - 0.5, *(step + 0.5 for step in steps)]
    heights = [size - 0.5 for size in (*sizes, sizes[-1] + 1)]
    colors = ListedColormap(colormaps["Blues"](np.linspace(0.2, 1, 256)))
    mesh = axes.pcolormesh(
        edges, heights, np.where(fractions > 0, fractions, np.nan), cmap=colors, vmin=0, vmax=1
    )
    axes.figure.colorbar(mesh, ax=axes, label="fraction of the groups")
    axes.yaxis.get_major_locator().set_params(integer=True)


def _draw_heatmap(axes: Any, panel: Panel, metrics: Metrics) -> None:
    """The value of each metric at each step as a color; gray where there is none."""
    edges, values = heatmap_cells(panel, metrics)
    norm, colors = color_scale(values)
    rows, clipped = np.arange(len(values) + 1) - 0.5, values.clip(norm.vmin, norm.vmax)
    mesh = axes.pcolormesh(edges, rows, clipped, norm=norm, cmap=colors)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, edges[0]), max(high, edges[-1]))
    axes.set_facecolor(ABSENT)
    axes.grid(False)
    every = math.ceil(len(values) / 12)
    axes.set_yticks(range(0, len(values), every), list(panel.metrics.values())[::every])
    axes.figure.colorbar(mesh, ax=axes, label=panel.value)


def heatmap_cells(
    panel: Panel, metrics: Metrics, *, max_columns: int = MAX_COLUMNS
) -> tuple[np.ndarray, np.ndarray]:
    """Edges of the columns [n + 1], and values by metric and column [m, n], NaN where nothing was logged.

    A column is as wide as the smallest distance of two logged steps, so that a gap in the run is a gap here. If there
    are more than ``max_columns``, neighbors are merged into their mean, or for a metric ``*_max`` their maximum.
    """
    logged = [series(metrics, name) for name in panel.metrics]
    steps = sorted({step for at, _ in logged for step in at})
    width = min((after - before for before, after in pairwise(steps)), default=1)
    half = width / 2
    width *= math.ceil(((steps[-1] - steps[0]) // width + 1) / max_columns)
    count = (steps[-1] - steps[0]) // width + 1
    values = np.full((len(logged), count), math.nan)
    for row, name, (at, found) in zip(values, panel.metrics, logged, strict=True):
        columns = (np.array(at, dtype=int) - steps[0]) // width
        for column in np.unique(columns):
            merged = np.array(found)[columns == column]
            row[column] = merged.max() if re.search(r"_max(/|$)", name) else merged.mean()
    return steps[0] - half + width * np.arange(count + 1), values


def color_scale(values: np.ndarray) -> tuple[Any, str]:
    """Normalization and color map: white at 0 if both signs matter, logarithmic over a large range, else linear."""
    from matplotlib.colors import LogNorm, Normalize

    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    if low < 0 < high and min(-low, high) > max(-low, high) / 4:
        return Normalize(-max(-low, high), max(-low, high)), "RdBu_r"
    small = (
        float(np.quantile(values[values > 0], 0.05, method="lower"))
        if low >= 0 and high > 0
        else high
    )
    return (
        LogNorm(small, high) if small > 0 and high > LOG_RANGE * small else Normalize(low, high)
    ), "viridis"


def _shades(count: int) -> list[Any]:
    """From light to dark."""
    from matplotlib import colormaps

    return [colormaps["viridis_r"](0.15 + 0.75 * n / max(count - 1, 1)) for n in range(count)]


# --- which panels there are -------------------------------------------------------------------------------------------


def panels_of(metrics: Metrics) -> list[Panel]:
    """All panels that have something to show, in the order of the overview."""
    names = list(dict.fromkeys(name for row in metrics for name in row))

    def matching(pattern: str, label: str = "{}", limit: int | None = None) -> dict[str, str]:
        """Metrics of a pattern, each with its group as the legend: numbers in order, then words."""
        found = [match for name in names if (match := re.fullmatch(pattern, name))]
        found.sort(key=lambda match: (not match[1].isdecimal(), len(match[1]), match[1]))
        return {match[0]: label.format(match[1]) for match in found[:limit]}

    fixed: dict[str, list[Panel]] = {}
    for section, panels in tomllib.loads(
        Path(__file__).with_name("panels.toml").read_text(encoding="utf-8")
    ).items():
        for name, fields in panels.items():
            if "matching" in fields:
                fields["metrics"] = matching(**fields.pop("matching"))
            fixed.setdefault(section, []).append(Panel(name, **fields))
    # Several reward functions: their means together, and a plot of each.
    functions = [
        match[1]
        for name in names
        if (match := re.fullmatch(r"reward/(.+)/best_of_group_mean", name))
    ]
    rewards: list[Panel] = []
    if len(functions) > 1:
        means = {f"reward/{name}/mean": name for name in functions[:MAX_LINES]}
        rewards.append(Panel("rewards", "Reward functions", "mean before weighting", means))
        for name in functions:
            lines = {f"reward/{name}/mean": "mean"}
            lines |= {f"reward/{name}/{end}_of_group_mean": end for end in ("best", "worst")}
            file, unit = f"reward_{UNSAFE.sub('_', name)}", "reward, mean over groups"
            rewards.append(Panel(file, f"Reward {name}", unit, lines, in_overview=False))
    # The strongest correlations within groups, which are what learning sees.
    prefix = "reward_corr_within_group/"
    values = {name: series(metrics, name)[1] for name in names if name.startswith(prefix)}
    strongest = sorted(
        values, key=lambda n: abs(sum(values[n])) / max(len(values[n]), 1), reverse=True
    )[:MAX_LINES]
    pairs = {name: name.removeprefix(prefix).replace("/", ", ") for name in strongest}
    unit = f"correlation of {next(iter(pairs.values()))}" if len(pairs) == 1 else "correlation"
    rewards.append(Panel("correlations", "Correlation of rewards within groups", unit, pairs))
    # Metrics by denoising step that have no panel of their own.
    known = {name for section in fixed.values() for panel in section for name in panel.metrics}
    steps = fixed["timesteps"]
    found = (re.fullmatch(r"timestep/(.+)/\d+", name) for name in names if name not in known)
    for family in dict.fromkeys(match[1] for match in found if match):
        file, title = (
            f"timestep_{UNSAFE.sub('_', family)}",
            f"{family.replace('_', ' ')} by denoising step",
        )
        rows = matching(rf"timestep/{re.escape(family)}/(\d+)")
        steps.append(
            Panel(file, title, "denoising step (0 = first)", rows, style="heatmap", value=family)
        )
    # All panels in the order of the overview; one without content is left out.
    shown: list[Panel] = []
    for panel in (
        *fixed["reward"],
        *rewards,
        *fixed["learning"],
        *steps,
        *fixed["prompts"],
        *fixed["stages"],
    ):
        logged = [series(metrics, name)[1] for name in (*panel.metrics, *list(panel.points)[:1])]
        distinct = {value for values in logged for value in values}
        has_content = any(logged)
        if panel.style == "histogram":
            has_content = sum(any(values) for values in logged) > 1
        elif panel.style in ("heatmap", "profile"):  # a single color shows nothing
            has_content = sum(map(bool, logged)) > 1 and len(distinct) > 1
        elif panel.shown == "if nonzero":
            has_content = any(abs(value) >= ROUNDING for value in distinct)
        elif panel.shown == "if it changes":
            has_content = any(len(set(values)) > 1 for values in logged)
        shown += [panel] if has_content else []
    return shown


def series(metrics: Metrics, name: str) -> tuple[list[int], list[float]]:
    """Steps and values where the metric was logged and finite."""
    pairs = [
        (int(row["step"]), row[name]) for row in metrics if math.isfinite(row.get(name, math.nan))
    ]
    return [step for step, _ in pairs], [value for _, value in pairs]
