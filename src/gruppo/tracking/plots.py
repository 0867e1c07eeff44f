"""Plots of a run as PNG files: an overview, and each panel of the page by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gruppo.loading import install_command
from gruppo.tracking.files import read_metrics
from gruppo.tracking.panels import Metrics, Panel, panels_of, series, stage_starts

SMOOTHING = 0.1
"""Width of the window that smooths a curve, as a fraction of its values."""


def plot_run(
    run_dir: str | Path, *, note: Callable[[str], None] = lambda message: None
) -> list[Path]:
    """Write ``run_dir/plots/*.png`` and return the paths, the overview first.

    Without matplotlib there are no plots, and ``note`` receives the reason.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        command = install_command("report")
        note(f"No plots were drawn: matplotlib is not installed. Install it with: {command}")
        return []
    metrics, folder = read_metrics(run_dir), Path(run_dir) / "plots"
    panels, starts = panels_of(metrics), stage_starts(run_dir, metrics)
    if not panels:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    columns = min(len(panels), 4)
    rows = math.ceil(len(panels) / columns)
    paths = [folder / f"{panel.name}.png" for panel in panels]
    overview = Figure(figsize=(4.4 * columns, 3.1 * rows), layout="constrained")
    overview.suptitle(folder.absolute().parent.name)
    for i, panel in enumerate(panels):
        draw_panel(overview.add_subplot(rows, columns, i + 1), panel, metrics, starts)
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        draw_panel(figure.subplots(), panel, metrics, starts)
        figure.savefig(paths[i])
    overview.savefig(folder / "overview.png")
    return [folder / "overview.png", *paths]


def draw_panel(axes: Any, panel: Panel, metrics: Metrics, starts: Mapping[int, str]) -> None:
    """Draw one panel over the steps, with a line where a stage starts."""
    axes.set(title=panel.title, xlabel="step", ylabel=panel.unit)
    is_table = panel.style in ("heatmap", "histogram")
    if is_table:
        _draw_table(axes, panel, metrics)
    lines = {} if is_table else panel.metrics
    for name, legend in panel.points.items():
        axes.plot(*series(metrics, name), "o", label=legend)
    for name, legend in lines.items():
        steps, values = series(metrics, name)
        if panel.style == "steps":
            axes.step(steps, values, where="post", label=legend)
            continue
        smoothed = np.array(smooth(values))
        (line,) = axes.plot(steps, smoothed, label=legend)
        axes.plot(steps, values, color=line.get_color(), alpha=0.25)
        band = series(metrics, panel.band)[1] if name in list(lines)[:1] else []
        if len(band) == len(values):
            axes.fill_between(steps, smoothed - band, smoothed + band, alpha=0.15)
    if any(axes.get_legend_handles_labels()[1]):
        axes.legend(fontsize="small")
    for step, stage in starts.items():
        axes.axvline(step - 0.5, color="gray", linestyle="--", linewidth=0.9)
        axes.text(step - 0.5, 1, stage, transform=axes.get_xaxis_transform(), fontsize="small")


def _draw_table(axes: Any, panel: Panel, metrics: Metrics) -> None:
    """Draw a row for each metric, colored by its value."""
    rows = [row for row in metrics if not row.keys().isdisjoint(panel.metrics)]
    table = np.array([[row.get(name, math.nan) for row in rows] for name in panel.metrics])
    places = range(len(table))
    mesh = axes.pcolormesh([row["step"] for row in rows], places, table, shading="nearest")
    axes.set_yticks(places, panel.metrics.values())
    axes.figure.colorbar(mesh, ax=axes, label=panel.value)


def smooth(values: list[float]) -> list[float]:
    """Mean of the neighbors, as many on both sides, so that it neither lags nor leads."""
    reach = round(SMOOTHING * len(values) / 2)
    means = []
    for i in range(len(values)):
        side = min(reach, i, len(values) - 1 - i)
        means.append(float(np.mean(values[i - side : i + side + 1])))
    return means
