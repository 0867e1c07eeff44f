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


def plot_run(run_dir: Path, *, note: Callable[[str], None] = lambda message: None) -> list[Path]:
    """Write ``run_dir/plots/*.png`` and return the paths, the overview first.

    Without matplotlib there are no plots, and ``note`` receives the reason.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        command = install_command("report")
        note(f"No plots were drawn: matplotlib is not installed. Install it with: {command}")
        return []
    metrics, folder = read_metrics(run_dir), run_dir / "plots"
    panels, starts = panels_of(metrics), stage_starts(run_dir, metrics)
    if not panels:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    columns = min(len(panels), 4)
    rows = math.ceil(len(panels) / columns)
    overview = Figure(figsize=(4.4 * columns, 3.1 * rows), layout="constrained")
    overview.suptitle(run_dir.absolute().name)
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
    for name in panel.metrics:
        steps, values = series(metrics, name)
        if panel.is_setting:
            axes.step(steps, values, where="post", label=name)
            continue
        if name in panel.points:
            axes.plot(steps, values, "o", label=name)
            continue
        smoothed = np.array(smooth(values))
        (line,) = axes.plot(steps, smoothed, label=name)
        axes.plot(steps, values, color=line.get_color(), alpha=0.25)
        band = series(metrics, panel.band)[1] if name == panel.metrics[0] else []
        if len(band) == len(values):
            axes.fill_between(steps, smoothed - band, smoothed + band, alpha=0.15)
    axes.legend(fontsize="small")
    for step, stage in starts.items():
        axes.axvline(step - 0.5, color="gray", linestyle="--", linewidth=0.9)
        axes.text(step - 0.5, 1, stage, transform=axes.get_xaxis_transform(), fontsize="small")


def smooth(values: list[float]) -> list[float]:
    """Mean of the neighbors, as many on both sides, so that it neither lags nor leads."""
    reach = round(SMOOTHING * len(values) / 2)
    means = []
    for i in range(len(values)):
        side = min(reach, i, len(values) - 1 - i)
        means.append(float(np.mean(values[i - side : i + side + 1])))
    return means
