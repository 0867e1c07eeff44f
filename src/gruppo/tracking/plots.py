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

SMOOTHING = 0.03
"""Width of the Gaussian that smooths a curve, as a fraction of its values."""


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
    metrics = read_metrics(run_dir)
    panels = panels_of(metrics)
    if not panels:
        return []
    folder = Path(run_dir) / "plots"
    folder.mkdir(parents=True, exist_ok=True)
    starts = stage_starts(run_dir, metrics)
    columns = min(len(panels), 4)
    rows = math.ceil(len(panels) / columns)
    overview = Figure(figsize=(4.4 * columns, 3.1 * rows), layout="constrained")
    overview.suptitle(folder.absolute().parent.name)
    paths = [folder / "overview.png"]
    for i, panel in enumerate(panels, start=1):
        draw_panel(overview.add_subplot(rows, columns, i), panel, metrics, starts)
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        draw_panel(figure.subplots(), panel, metrics, starts)
        paths.append(folder / f"{panel.name}.png")
        figure.savefig(paths[-1])
    overview.savefig(paths[0])
    return paths


def draw_panel(axes: Any, panel: Panel, metrics: Metrics, starts: Mapping[int, str]) -> None:
    """Draw one panel over the steps, with a line where a stage starts."""
    axes.set(title=panel.title, xlabel="step", ylabel=panel.unit)
    if panel.style in ("heatmap", "histogram"):
        steps = sorted({step for name in panel.metrics for step in series(metrics, name)[0]})
        by_step = {int(row["step"]): row for row in metrics}
        table = np.array([[by_step[s].get(n, math.nan) for s in steps] for n in panel.metrics])
        mesh = axes.pcolormesh(steps, range(len(table)), table, shading="nearest")
        axes.set_yticks(range(len(table)), panel.metrics.values())
        axes.figure.colorbar(mesh, ax=axes, label=panel.value)
    for name, legend in panel.points.items():
        axes.plot(*series(metrics, name), "o", label=legend)
    lines = panel.metrics if panel.style in ("smoothed", "steps") else {}
    for i, (name, legend) in enumerate(lines.items()):
        steps, values = series(metrics, name)
        if panel.style == "steps":
            axes.step(steps, values, where="post", label=legend)
            continue
        smoothed = np.array(smooth(values))
        (line,) = axes.plot(steps, smoothed, label=legend)
        axes.plot(steps, values, color=line.get_color(), alpha=0.25)
        band = np.array(series(metrics, panel.band)[1] if i == 0 and panel.band else ())
        if values and len(band) == len(values):
            axes.fill_between(steps, smoothed - band, smoothed + band, alpha=0.15)
    if any(axes.get_legend_handles_labels()[1]):
        axes.legend(fontsize="small")
    for step, stage in starts.items():
        axes.axvline(step - 0.5, color="gray", linestyle="--", linewidth=0.9)
        axes.text(step - 0.5, 1, stage, transform=axes.get_xaxis_transform(), fontsize="small")


def smooth(values: list[float]) -> list[float]:
    """Mean of the neighbors, weighted by a Gaussian, so that it neither lags nor leads."""
    width = max(SMOOTHING * len(values), 1e-3)
    reach = min(math.ceil(3 * width), (len(values) - 1) // 2)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    sums = np.convolve(values, kernel, "same")
    return list(sums / np.convolve(np.ones(len(values)), kernel, "same"))
