"""One GRPO step of gruppo against TRL, in turns, with the same prompts and rows of the same
lengths.

``python -m benchmarks.step``: SmolLM2-135M, 4 prompts x 8 completions; *short* (prompts of 55
tokens, 64 new), *long_prompt* (441, 64 new) and *ragged* (55; ends spread geometrically, 65 new on
average and at most 256). ``--short``: the short workload alone, 2 steps.

TRL in its best honest configuration: float32 master weights, bfloat16 autocast, no recomputed
activations, rows a forward chosen by ``--tune-trl``; all else as it comes, its log-probs in chunks
of the vocabulary's logits included. Memory is the most a process held less what it held after its
imports. Without TRL installed, gruppo alone.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import bars, report
from benchmarks.memory import GB, above_state
from benchmarks.turns import Side, in_turns
from benchmarks.workloads import WORKLOADS
from gruppo.modalities.text.bundled import smollm2_135m

Steps = Sequence[Mapping[str, Any]]


def measure(spec: Mapping[str, Any], steps: int, pythons: Mapping[str, str]) -> dict[str, Any]:
    """Steps of all sides in turn, after one warm-up step each, and the number of the model's
    parameters."""
    sides = [
        Side(name, ["benchmarks.sides", name, json.dumps(spec)], python=python)
        for name, python in pythons.items()
    ]
    try:
        done = in_turns(sides, steps)
        check_same_work(done)
        return {
            "parameters": sides[0].ready["parameters"],
            "compute": sides[0].ready.get("compute"),
            "steps": done,
        }
    finally:
        for side in sides:
            side.close()


def check_same_work(done: Mapping[str, Steps]) -> None:
    """Refuse a comparison of different work: each step's prompt lengths and completion lengths, row
    by row."""
    work = {
        name: [(step["prompt_tokens"], step["lengths"]) for step in steps]
        for name, steps in done.items()
    }
    first, *others = work
    for other in others:
        if work[other] != work[first]:
            raise SystemExit(
                f"{other} did other work than {first}, so nothing can be compared: "
                f"{span(done[other])} against "
                f"{span(done[first])}."
            )


def span(steps: Steps) -> str:
    """Lengths of prompts and completions: least, mean, most."""
    told = []
    for what, name in (("prompts", "prompt_tokens"), ("completions", "lengths")):
        tokens = [n for step in steps for n in step[name]]
        told.append(
            f"{what} of {min(tokens)} / {statistics.mean(tokens):.1f} / {max(tokens)} tokens"
        )
    return ", ".join(told)


def fastest_trl(spec: Mapping[str, Any], python: str) -> dict[str, Any]:
    """Of rows a forward and of recomputing activations, what makes one step of TRL shortest."""
    rows = spec["prompts"] * spec["group_size"]
    tried = [
        {"trl_batch": batch, "trl_checkpointing": False}
        for batch in (4, 8, 16, 32)
        if batch <= rows
    ]
    tried.append({"trl_batch": min(8, rows), "trl_checkpointing": True})
    for settings in tried:
        step = measure({**spec, **settings}, 1, {"trl": python})["steps"]["trl"][0]
        settings |= {"seconds": step["seconds"], "peak_gb": step["peak_bytes"] / GB}
        print(f"TRL {settings}", file=sys.stderr, flush=True)
    best = min(tried, key=lambda settings: settings["seconds"])
    return {
        "trl_batch": best["trl_batch"],
        "trl_checkpointing": best["trl_checkpointing"],
        "tried": tried,
    }


def summarise(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Medians and ranges of each side, and its memory; ratios of the two sides step by step."""
    done = measured["steps"]
    sides: dict[str, Any] = {
        name: _side(steps, measured["parameters"]) for name, steps in done.items()
    }
    if "trl" in done:
        pairs = [
            t["seconds"] / g["seconds"] for g, t in zip(done["gruppo"], done["trl"], strict=True)
        ]
        sides["trl_over_gruppo"] = {
            "median": statistics.median(pairs),
            "min": min(pairs),
            "max": max(pairs),
        }
        for phase in ("rollout_s", "update_s"):
            sides["trl_over_gruppo"][phase] = sides["trl"][phase] / sides["gruppo"][phase]
        sides["memory_gruppo_over_trl"] = {
            name: sides["gruppo"][name] / sides["trl"][name]
            for name in ("peak_gb", "above_state_gb")
        }
    return sides


def _side(steps: Steps, parameters: int) -> dict[str, Any]:
    seconds = [step["seconds"] for step in steps]
    peak = max(step["peak_bytes"] for step in steps)
    return {
        "seconds_median": statistics.median(seconds),
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "rollout_s": statistics.median(step["rollout_s"] for step in steps),
        "update_s": statistics.median(step["update_s"] for step in steps),
        "tokens_per_s": statistics.median(sum(step["lengths"]) / step["seconds"] for step in steps),
        "peak_gb": peak / GB,
        "above_state_gb": above_state(peak, parameters) / GB,
        "work": span(steps),
    }


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [
        f"{'':<20}{'seconds a step':^26}{'of which':^16}{'new':>8}{'memory, GB':^20}",
        f"{'workload':<12}{'side':<8}{'median':>8}{'(range)':>18}{'rollout':>8}{'update':>8}{'tok/s':>8}"
        f"{'peak':>8}{'above state':>13}",
    ]
    for workload, sides in results.items():
        for name in ("gruppo", "trl"):
            if name in sides:
                s = sides[name]
                spread = f"({s['seconds_min']:.2f} to {s['seconds_max']:.2f})"
                lines.append(
                    f"{workload:<12}{name:<8}{s['seconds_median']:8.2f}{spread:>18}{s['rollout_s']:8.2f}"
                    f"{s['update_s']:8.2f}{s['tokens_per_s']:8.0f}{s['peak_gb']:8.2f}{s['above_state_gb']:13.2f}"
                )
        if "trl_over_gruppo" in sides:
            r, m = sides["trl_over_gruppo"], sides["memory_gruppo_over_trl"]
            lines.append(
                f"{workload:<12}TRL / gruppo in time, step by step: {r['median']:.2f} "
                f"({r['min']:.2f} to "
                f"{r['max']:.2f}); rollout {r['rollout_s']:.2f}, update {r['update_s']:.2f}"
            )
            lines.append(
                f"{workload:<12}gruppo / TRL in memory: peak {m['peak_gb']:.0%}, above weights, "
                f"gradients and "
                f"optimiser state {m['above_state_gb']:.0%}"
            )
        lines.append(f"{workload:<12}every side's {sides['gruppo']['work']}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--prompts", type=int, default=4, help="prompts a step, of 8 completions each"
    )
    parser.add_argument(
        "--trl-python", default=None, help="a Python that has TRL; without it, this one if it has"
    )
    parser.add_argument("--trl-batch", type=int, default=8, help="rows of one TRL forward")
    parser.add_argument(
        "--trl-checkpointing", action="store_true", help="let TRL recompute activations"
    )
    parser.add_argument(
        "--tune-trl", action="store_true", help="try TRL's settings first, and take the fastest"
    )
    options = parser.parse_args(arguments)
    trl_python = options.trl_python or (sys.executable if importlib.util.find_spec("trl") else None)
    if trl_python is None:
        print(
            "TRL is not installed here (pip install trl==1.16.0), so gruppo is timed alone.",
            file=sys.stderr,
        )
    pythons = {"gruppo": sys.executable} | ({"trl": trl_python} if trl_python else {})
    common = {
        "model": options.model or str(smollm2_135m().path),
        "prompts": options.prompts,
        "group_size": 8,
        "compute": options.compute,
        "trl_batch": options.trl_batch,
        "trl_checkpointing": options.trl_checkpointing,
    }
    steps = min(options.steps, 2) if options.short else options.steps
    results, measured = {}, {}
    for name in ["short"] if options.short else options.workloads:
        spec = {**common, **WORKLOADS[name]}
        tuned = fastest_trl(spec, trl_python) if options.tune_trl and trl_python else {}
        measured[name] = {"spec": spec | tuned, **measure(spec | tuned, steps, pythons)}
        results[name] = summarise(measured[name])
    report.tell("step", results, table(results), options, draw=bars.draw_steps, measured=measured)


if __name__ == "__main__":
    main()
