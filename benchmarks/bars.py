"""Pictures of ``benchmarks.step``, ``.generate`` and ``.roofline``: bars with their numbers beside
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.style import COLORS, INK, PAPER, STYLE

GREY = "#b9b9b9"
NAMES = {
    "gruppo": "gruppo",
    "trl": "TRL",
    "hf-fp32": "transformers, float32",
    "hf-bf16": "transformers, bfloat16",
}
NAMES |= {"vllm": "vLLM"}


def draw_steps(results: Mapping[str, Any], path: Path, heading: str) -> None:
    """Seconds of each side's step, rollout and update, and its memory above weights, gradients and
    optimiser state."""

    def panels(seconds: Any, memory: Any) -> None:
        rows = _rows(results, ("gruppo", "trl"))
        for place, workload, side in rows:
            s, light = results[workload][side], side != "gruppo"
            seconds.barh(place, s["rollout_s"], color=GREY if light else COLORS[0])
            seconds.barh(
                place,
                s["update_s"],
                left=s["rollout_s"],
                color=GREY if light else COLORS[0],
                alpha=0.6,
                hatch="//",
                edgecolor=PAPER,
            )
            seconds.text(
                s["rollout_s"] + s["update_s"], place, f" {s['seconds_median']:.1f} s", va="center"
            )
            memory.barh(place, s["above_state_gb"], color=GREY if light else COLORS[0])
            memory.text(s["above_state_gb"], place, f" {s['above_state_gb']:.2f} GB", va="center")
        for axes, title in (
            (seconds, "Seconds a step: rollout, update (hatched)"),
            (memory, "Memory above state, GB"),
        ):
            _label(
                axes,
                title,
                [(place, f"{_plain(workload)}: {NAMES[side]}") for place, workload, side in rows],
            )
        memory.set_yticklabels([])

    _figure(path, heading, panels, columns=2, height=0.9 + 0.75 * len(results))


def draw_rates(results: Mapping[Any, Any], path: Path, heading: str) -> None:
    """New tokens a second of each side, by the number of rows."""

    def panel(axes: Any) -> None:
        rows = _rows(results, tuple(NAMES))
        for place, count, side in rows:
            rate = results[count][side]["median"]
            axes.barh(place, rate, color=COLORS[0] if side == "gruppo" else GREY)
            axes.text(rate, place, f" {rate:.0f}", va="center")
        _label(
            axes,
            "New tokens a second",
            [
                (place, f"{count} row{'s' if int(count) > 1 else ''}: {NAMES[side]}")
                for place, count, side in rows
            ],
        )

    _figure(path, heading, panel, height=0.9 + 0.32 * sum(len(sides) for sides in results.values()))


def draw_fractions(results: Mapping[str, Any], path: Path, heading: str) -> None:
    """The fraction of the measured peak that each phase reaches."""

    def panel(axes: Any) -> None:
        found = {
            workload: {name.strip(): phase for name, phase in result["phases"].items()}
            for workload, result in results.items()
        }
        rows = _rows(
            found, tuple(dict.fromkeys(name for phases in found.values() for name in phases))
        )
        for place, workload, name in rows:
            phase = found[workload][name]
            axes.barh(place, phase["fraction"], color=COLORS[0] if "flops" in phase else GREY)
            peak = f"{phase['peak'] / 1e9:.0f} {'GFLOP/s' if 'flops' in phase else 'GB/s'}"
            axes.text(phase["fraction"], place, f" {phase['fraction']:.0%} of {peak}", va="center")
        _label(
            axes,
            "Of the measured peak",
            [(place, f"{_plain(workload)}: {name}") for place, workload, name in rows],
        )
        axes.set_xlim(
            0,
            max(1.35, 1.35 * max(found[workload][name]["fraction"] for _, workload, name in rows)),
        )
        axes.axvline(1, color=INK, linewidth=0.8)

    _figure(
        path,
        heading,
        panel,
        height=0.9 + 0.3 * sum(len(result["phases"]) for result in results.values()),
    )


def _rows(
    results: Mapping[Any, Mapping[str, Any]], kinds: tuple[str, ...]
) -> list[tuple[float, Any, str]]:
    """Place, group and kind of each bar, from the top; a gap between groups."""
    rows, place = [], 0.0
    for group, of_group in results.items():
        for kind in (kind for kind in kinds if kind in of_group):
            rows.append((place, group, kind))
            place -= 1
        place -= 0.5
    return rows


def _plain(workload: str) -> str:
    return workload.replace("_", " ")


def _label(axes: Any, title: str, names: list[tuple[float, str]]) -> None:
    axes.set_title(title)
    axes.set_yticks([place for place, _ in names], [name for _, name in names])
    axes.tick_params(length=0)
    axes.margins(x=0.22)
    axes.grid(False)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)


def _figure(
    path: Path, heading: str, panels: Callable[..., None], *, height: float, columns: int = 1
) -> None:
    """``panels`` draws into as many axes as there are columns."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(fname=STYLE):
        figure = Figure(figsize=(9.2 if columns > 1 else 7.4, height), layout="constrained")
        figure.suptitle(heading, x=0.01, ha="left", fontsize=9.5, color=INK)
        panels(*figure.subplots(1, columns, squeeze=False)[0])
        figure.savefig(path)
