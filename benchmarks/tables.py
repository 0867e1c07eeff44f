"""Writes the tables of ``docs/dev/performance.md`` from the benchmarks' JSON, so that no number is
copied by hand.

``python -m benchmarks.tables build/bench``: each table stands between ``<!-- NAME -->`` and ``<!--
end -->``, and is replaced where the folder has ``NAME.json``; its picture follows it, where there
is one.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bars import NAMES
from benchmarks.report import heading
from benchmarks.scaling import LINEAR

DOCUMENT = Path(__file__).parents[1] / "docs" / "dev" / "performance.md"
Row = Sequence[str]


def markdown(head: Row, rows: Sequence[Row]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(
    found: Mapping[str, float], digits: int, *, median: str = "median", unit: str = ""
) -> str:
    least, most = found[median.replace("median", "min")], found[median.replace("median", "max")]
    return f"{found[median]:.{digits}f}{unit} ({least:.{digits}f} to {most:.{digits}f})"


def of_steps(results: Mapping[str, Any]) -> str:
    head = (
        "workload",
        "",
        "seconds a step",
        "rollout",
        "update",
        "new tokens/s",
        "peak, GB",
        "above state, GB",
    )
    rows: list[Row] = []
    for workload, sides in results.items():
        for side in ("gruppo", "trl"):
            if side in sides:
                s = sides[side]
                seconds = spread(s, 1, median="seconds_median")
                phases = (
                    f"{s['rollout_s']:.1f}",
                    f"{s['update_s']:.1f}",
                    f"{s['tokens_per_s']:.0f}",
                )
                memory = (f"{s['peak_gb']:.2f}", f"{s['above_state_gb']:.2f}")
                rows.append((workload.replace("_", " "), NAMES[side], seconds, *phases, *memory))
        if "trl_over_gruppo" in sides:
            r, m = sides["trl_over_gruppo"], sides["memory_gruppo_over_trl"]
            phases = (f"{r['rollout_s']:.2f}", f"{r['update_s']:.2f}", "")
            memory = (f"{m['peak_gb']:.0%} of TRL's", f"**{m['above_state_gb']:.0%}** of TRL's")
            rows.append(
                (
                    "",
                    "TRL / gruppo",
                    f"**{r['median']:.2f}** ({r['min']:.2f} to {r['max']:.2f})",
                    *phases,
                    *memory,
                )
            )
    return markdown(head, rows)


def of_generation(results: Mapping[str, Any]) -> str:
    rows: list[Row] = []
    for count, sides in results.items():
        for side, s in sides.items():
            ratio = s.get("gruppo_over_it")
            rows.append((count, NAMES[side], spread(s, 0), spread(ratio, 2) if ratio else ""))
    return markdown(("rows", "", "new tokens/s", "gruppo over it"), rows)


def of_roofline(results: Mapping[str, Any]) -> str:
    rows: list[Row] = []
    for workload, found in results.items():
        phases = [(name, phase) for name, phase in found["phases"].items()]
        phases += [
            (f"{name}, its reading", phase["memory"]) for name, phase in phases if "memory" in phase
        ]
        for name, phase in phases:
            work, unit = (phase["flops"], "FLOP") if "flops" in phase else (phase["bytes"], "B")
            numbers = (f"{n / 1e9:.0f} G{unit}" for n in (work, phase["rate"], phase["peak"]))
            done, rate, peak = numbers
            told = (
                f"{phase['seconds']:.2f}",
                done,
                f"{rate}/s",
                f"{peak}/s",
                f"{phase['fraction']:.0%}",
            )
            rows.append((workload.replace("_", " "), name.strip(), *told))
    return markdown(
        ("workload", "phase", "seconds", "work", "rate", "measured peak", "reached"), rows
    )


def of_scaling(results: Mapping[str, Any]) -> str:
    words = {"rollout_s": "rollout, s", "update_s": "update, s", "peak_gb": "peak, GB"}
    rows: list[Row] = []
    for name, series in results["series"].items():
        for what, line in series["lines"].items():
            values = ", ".join(f"{value:.2f}" for value in series[what])
            off = f"{line['distance']:.0%}" + ("" if line["distance"] <= LINEAR else ", not linear")
            rows.append((name, ", ".join(map(str, series["x"])), words[what], values, off))
    told = markdown(("grows with", "at", "of", "cost", "off the line"), rows)
    further = results["one_more_completion_s"]
    if further:
        told += (
            f"\n\nOne more completion of each prompt costs {further['short']:.3f} s with short "
            f"prompts and "
            f"{further['long']:.3f} s with long ones, {further['long_over_short']:.2f} times as "
            f"much."
        )
    return told


def of_ratios(results: Mapping[str, Any]) -> str:
    """A line of ratios for each workload, a column for each condition, and the update's share of
    the matrix rate."""
    conditions = [
        (is_alone, count)
        for is_alone in (True, False)
        for count in sorted({one["threads"] for one in results["ratios"]})
    ]
    found = {(one["workload"], one["is_alone"], one["threads"]): one for one in results["ratios"]}
    rows: list[Row] = []
    for workload in dict.fromkeys(one["workload"] for one in results["ratios"]):
        cells = [found.get((workload, *condition)) for condition in conditions]
        told = (
            f"{spread(one, 2)}; rollout {one['rollout_s']:.1f}, update {one['update_s']:.1f}"
            if one
            else ""
            for one in cells
        )
        rows.append((workload.replace("_", " "), *told))
    shares = {(True, one["threads"]): f"{one['fraction']:.0%}" for one in results["updates"]}
    if shares:
        rows.append(
            ("update of gruppo, share of the matrix rate", *(shares.get(c, "") for c in conditions))
        )
    names = (
        f"{'alone' if is_alone else 'beside a job'}, threads: {count}"
        for is_alone, count in conditions
    )
    return markdown(("TRL / gruppo", *names), rows)


TABLES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "step": of_steps,
    "generate": of_generation,
    "roofline": of_roofline,
    "scaling": of_scaling,
    "ratios": of_ratios,
}


PICTURES = {
    "step": "Seconds and memory of a step",
    "generate": "New tokens a second",
    "roofline": "Share of the measured peak that each phase reaches",
    "scaling": "Cost against group size, lengths and layers",
}
"""What each shows; below the table where there is one, ``docs/images/NAME.png``."""


def replaced(
    document: str, name: str, told: Mapping[str, Any], *, has_picture: bool = False
) -> str:
    """The document with the table of a benchmark, under a line that says when and where it was
    measured."""
    begin, end = f"<!-- {name} -->", "<!-- end -->"
    about = f"{told['machine']['date']}, {heading(told['machine'])}:"
    picture = f"\n\n![{PICTURES[name]}](../images/{name}.png)" if has_picture else ""
    table = f"{begin}\n{about}\n\n{TABLES[name](told['results'])}{picture}\n{end}"
    changed, count = re.subn(
        f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: table, document, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"the document has {count} places {begin} ... {end}; it needs one.")
    return changed


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    options = parser.parse_args(arguments)
    text = options.document.read_text(encoding="utf-8")
    for name in TABLES:
        if (path := options.folder / f"{name}.json").is_file():
            has_picture = (DOCUMENT.parents[1] / "images" / f"{name}.png").is_file()
            text = replaced(
                text, name, json.loads(path.read_text(encoding="utf-8")), has_picture=has_picture
            )
    options.document.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
