"""One GRPO step of gruppo against TRL, in turns, so that a noisy machine is noisy for both.

``python -m benchmarks.step --short`` (``make bench``): SmolLM2-135M, 4 prompts x 8 completions, prompts of about 60
tokens, exactly 64 new tokens. TRL in its best honest configuration: float32 master weights, bfloat16 autocast. Without
TRL installed, gruppo alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from gruppo.policies.text.bundled import smollm2_135m
from gruppo.training.machine import cpu_name

WORKLOADS = {
    "short": {"words": 8, "new_tokens": 64},
    "long_prompt": {"words": 350, "new_tokens": 64},
}


class Side:
    """One library in a process of its own."""

    def __init__(self, name: str, spec: dict[str, Any], python: str) -> None:
        self.name = name
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        self.process = subprocess.Popen(
            [python, "-W", "ignore", "-m", "benchmarks.sides", name, json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if name == "trl" else None,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[1],
        )
        self.read()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{") and "peak_gib" in line:
                return json.loads(line)
        errors = self.process.stderr.read()[-2000:] if self.process.stderr else ""
        raise SystemExit(f"the {self.name} side ended early. {errors}")

    def step(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def measure(spec: dict[str, Any], steps: int, trl_python: str | None) -> dict[str, list[dict[str, Any]]]:
    """Steps of both sides in turn, after one warm-up step each."""
    sides = [Side("gruppo", spec, sys.executable)]
    if trl_python:
        sides.append(Side("trl", spec, trl_python))
    try:
        for side in sides:
            side.step()
        done: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
        for _ in range(steps):
            for side in sides:
                done[side.name].append(side.step())
        return done
    finally:
        for side in sides:
            side.close()


def summarise(done: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    sides = {}
    for name, steps in done.items():
        seconds = [step["seconds"] for step in steps]
        sides[name] = {
            "seconds_median": statistics.median(seconds),
            "seconds_min": min(seconds),
            "seconds_max": max(seconds),
            "tokens_per_s": steps[0]["tokens"] / statistics.median(seconds),
            "peak_gib": max(step["peak_gib"] for step in steps),
        }
        for phase in ("rollout_s", "update_s"):
            if phase in steps[0]:
                sides[name][phase] = statistics.median(step[phase] for step in steps)
    if "trl" in sides:
        pairs = [t["seconds"] / g["seconds"] for g, t in zip(done["gruppo"], done["trl"], strict=True)]
        sides["trl_over_gruppo"] = {"median": statistics.median(pairs), "min": min(pairs), "max": max(pairs)}
    return sides


def table(results: dict[str, Any]) -> str:
    lines = [f"{'workload':<12} {'side':<8} {'s/step':>8} {'min':>7} {'max':>7} {'tokens/s':>9} {'peak GiB':>9}"]
    for workload, sides in results.items():
        for name in ("gruppo", "trl"):
            if name in sides:
                s = sides[name]
                lines.append(
                    f"{workload:<12} {name:<8} {s['seconds_median']:8.2f} {s['seconds_min']:7.2f} "
                    f"{s['seconds_max']:7.2f} {s['tokens_per_s']:9.0f} {s['peak_gib']:9.1f}"
                )
        if "trl_over_gruppo" in sides:
            r = sides["trl_over_gruppo"]
            lines.append(
                f"{workload:<12} TRL / gruppo, step by step: {r['median']:.2f} ({r['min']:.2f} to {r['max']:.2f})"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="the short workload alone, 3 steps")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--compute", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--trl-python", default=None, help="a Python that has TRL; without it, this one if it has")
    parser.add_argument("--trl-batch", type=int, default=8, help="rows of one TRL forward")
    parser.add_argument("--trl-checkpointing", action="store_true", help="let TRL recompute activations")
    parser.add_argument("--json", type=Path, default=None, help="write the numbers here too")
    options = parser.parse_args()
    trl_python = options.trl_python or (sys.executable if importlib.util.find_spec("trl") else None)
    if trl_python is None:
        print("TRL is not installed here (pip install trl==1.16.0), so gruppo is timed alone.", file=sys.stderr)
    common = {
        "model": str(smollm2_135m().path),
        "prompts": 4,
        "group_size": 8,
        "compute": options.compute,
        "token_budget": 4096,
        "trl_batch": options.trl_batch,
        "trl_checkpointing": options.trl_checkpointing,
    }
    names = ["short"] if options.short else list(WORKLOADS)
    steps = min(options.steps, 3) if options.short else options.steps
    results = {name: summarise(measure({**common, **WORKLOADS[name]}, steps, trl_python)) for name in names}
    machine = {"cpu": cpu_name(), "cores": os.cpu_count(), "python": platform.python_version()}
    text = json.dumps({"machine": machine, "steps": steps, "results": results}, indent=1)
    print(text)
    print(table(results))
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
