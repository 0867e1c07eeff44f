"""The picture of ``benchmarks.presets``: one small panel a preset, all others in grey behind it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.style import COLORS, INK, STYLE

COLUMNS = 4
GREY = "#c9c9c9"


class Band(NamedTuple):
    """Mean, lowest and highest accuracy of the seeds, by step."""

    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


def bands(runs: Sequence[dict[str, Any]]) -> dict[str, Band]:
    """By preset, in the order of the runs."""
    found: dict[str, list[dict[str, Any]]] = {}
    for one in runs:
        found.setdefault(one["preset"], []).append(one)
    return {preset: _band(of_preset) for preset, of_preset in found.items()}


def _band(runs: Sequence[dict[str, Any]]) -> Band:
    by_step = list(zip(*(one["accuracy"] for one in runs), strict=True))
    mean = [statistics.mean(values) for values in by_step]
    return Band(
        runs[0]["steps"],
        mean,
        [min(values) for values in by_step],
        [max(values) for values in by_step],
    )


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Panels of one scale."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    found, seeds = bands(runs), len({one["seed"] for one in runs})
    columns = min(COLUMNS, len(found))
    rows = math.ceil(len(found) / columns)
    with mpl.rc_context(fname=STYLE):
        figure = Figure(figsize=(2.75 * columns, 2.1 * rows + 0.5), layout="constrained")
        figure.suptitle(_key(seeds), x=0.01, ha="left", fontsize=9.5, color=INK)
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
        for axes, preset in zip(panels, found, strict=False):
            _panel(axes, preset, found)
        for axes in panels[len(found) :]:
            axes.set_visible(False)
        for place, axes in enumerate(panels[: len(found)]):
            axes.set_ylabel("held-out accuracy" if place % columns == 0 else "")
            axes.set_xlabel("step" if place + columns >= len(found) else "")
            axes.tick_params(labelbottom=place + columns >= len(found))
        figure.savefig(path)


def _key(seeds: int) -> str:
    of_seeds = f"mean of {seeds} seeds; band: lowest to highest" if seeds > 1 else "one seed"
    return (
        f"Blue: {of_seeds}. Number: at the end. Grey: the other presets. Dotted: before training."
    )


def _panel(axes: Any, preset: str, found: dict[str, Band]) -> None:
    for other, band in found.items():
        if other != preset:
            axes.plot(band.steps, band.mean, color=GREY, linewidth=0.8)
    band = found[preset]
    axes.axhline(band.mean[0], color=INK, linewidth=0.9, linestyle=(0, (1, 2)))
    axes.fill_between(band.steps, band.low, band.high, color=COLORS[0], alpha=0.22, linewidth=0)
    axes.plot(band.steps, band.mean, color=COLORS[0], linewidth=1.9)
    axes.set_title(preset)
    axes.text(
        0.97, 0.05, f"{band.mean[-1]:.2f}", color=COLORS[0], ha="right", transform=axes.transAxes
    )
    axes.set_ylim(0, 1.03)
    axes.set_xlim(0, band.steps[-1])
