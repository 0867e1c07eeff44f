"""The picture of ``benchmarks.scaling``: a panel for each thing that grows, with the lines that are
fitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.style import COLORS, INK, PAPER, STYLE

PANELS = (
    ("Group size", ("group size, short prompts", "group size, long prompts")),
    ("Prompt length", ("prompt length",)),
    ("Completion length", ("completion length",)),
    ("Model size", ("model size",)),
)
PHASES = {"rollout_s": "rollout", "update_s": "update"}
DASHES = ((0, ()), (0, (4, 2)))
ROOM = 1.36
"""For the lines' names, right of the last point."""
APART = 0.075
"""Between two names, in shares of the panel's height."""


def draw(results: Mapping[str, Any], path: Path, heading: str) -> None:
    """Seconds of a rollout and of an update against each axis, all from zero."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    found, steps = results["series"], results["steps"]
    heading += (
        f". Points: shortest of {steps} step{'s' if steps > 1 else ''}; lines: least squares."
    )
    panels = [(title, [name for name in names if name in found]) for title, names in PANELS]
    panels = [(title, names) for title, names in panels if names]
    rows = (len(panels) + 1) // 2
    with mpl.rc_context(fname=STYLE):
        figure = Figure(figsize=(9.2, 3.1 * rows + 0.5), layout="constrained")
        figure.suptitle(heading, x=0.01, ha="left", fontsize=9.5, color=INK)
        axes = figure.subplots(rows, 2, squeeze=False).ravel()
        for one, (title, names) in zip(axes, panels, strict=False):
            _panel(one, title, [found[name] for name in names])
        for one in axes[len(panels) :]:
            one.set_visible(False)
        figure.savefig(path)


def _panel(axes: Any, title: str, kinds: Sequence[Mapping[str, Any]]) -> None:
    last = kinds[0]["x"][-1]
    top = (1.12 if len(kinds) == 1 else 1.42) * max(
        max(series[phase]) for series in kinds for phase in PHASES
    )
    ends: list[tuple[float, str, str]] = []
    for series, dashes in zip(kinds, DASHES, strict=False):
        for (phase, word), colour in zip(PHASES.items(), COLORS, strict=False):
            line = series["lines"][phase]
            ends.append(
                (
                    line["intercept"] + line["slope"] * last,
                    f"{word}, {line['distance']:.0%} off",
                    colour,
                )
            )
            axes.plot(
                (0, last),
                (line["intercept"], ends[-1][0]),
                color=colour,
                linewidth=1.5,
                linestyle=dashes,
            )
            inside = colour if dashes == DASHES[0] else PAPER
            axes.plot(
                series["x"],
                series[phase],
                "o",
                color=colour,
                markersize=5.5,
                markerfacecolor=inside,
            )
    ends.sort()
    for (_, text, colour), height in zip(
        ends, apart([end[0] for end in ends], APART * top), strict=True
    ):
        axes.text(1.03 * last, height, text, color=colour, fontsize=8.8, va="center")
    if len(kinds) > 1:
        axes.text(
            0.03,
            0.97,
            _key(kinds),
            transform=axes.transAxes,
            va="top",
            fontsize=8.8,
            backgroundcolor=PAPER,
        )
    axes.set(
        title=title, xlabel=kinds[0]["axis"], ylabel="seconds", xlim=(0, ROOM * last), ylim=(0, top)
    )
    axes.set_xticks([0, *kinds[0]["x"]])


def _key(kinds: Sequence[Mapping[str, Any]]) -> str:
    """Which line is which, and what a further completion of each prompt costs: both slopes
    together."""
    short, long = kinds
    costs = [sum(series["lines"][phase]["slope"] for phase in PHASES) for series in kinds]
    return (
        f"one more completion of each prompt:\n{costs[0]:.2f} s where it has "
        f"{short['prompt_tokens']} tokens (solid)\n"
        f"{costs[1]:.2f} s where it has {long['prompt_tokens']} (dashed)"
    )


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Rising heights, each at least ``gap`` above the one before; those that were too near move
    up."""
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + gap) if moved else height)
    return moved
