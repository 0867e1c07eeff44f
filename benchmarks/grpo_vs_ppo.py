"""Memory and time of a step: GRPO against PPO with a value head on the policy's trunk, and with a
critic of its own.

``python -m benchmarks.grpo_vs_ppo`` (``make bench-ppo``): SmolLM2-135M, 4 prompts x 8 completions
of exactly 64 new tokens, one update a batch, without and with a reference for the KL. Every variant
runs in a process of its own, on the same completions (looked at, not assumed): the learning rate is
0, and randomness is addressed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.variants import VARIANTS
from gruppo.modalities.text.modality import found_model
from gruppo.trainer.run_dir import environment

KL_COEF = {"off": 0.0, "on": 0.02}
PHASES = ("rollout_s", "credit_s", "update_s")
CLAIMED = 0.5
"""Of PPO's memory and compute, that GRPO is said to need."""


def measure(
    spec: Mapping[str, Any], variants: Sequence[str], kls: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """By KL and variant. The arithmetic that the first process finds faster is everyone's."""
    spec = dict(spec)
    results: dict[str, dict[str, Any]] = {}
    for kl in kls:
        for variant in variants:
            one = in_own_process(spec | {"variant": variant, "kl_coef": KL_COEF[kl]})
            spec["compute"] = one["compute"]
            results.setdefault(kl, {})[variant] = one
            print(
                f"{variant}, KL {kl}, {one['compute']}: {summary(one)['seconds']:.2f} s a step",
                file=sys.stderr,
                flush=True,
            )
    check_same_rollouts(results)
    return results


def in_own_process(spec: Mapping[str, Any]) -> dict[str, Any]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.variants", json.dumps(spec)]
    here = Path(__file__).parents[1]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=here, check=False
    )
    if done.returncode:
        raise SystemExit(f"{spec['variant']} ended early. {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def check_same_rollouts(results: Mapping[str, Mapping[str, dict[str, Any]]]) -> None:
    """Refuse a comparison of different work: each step's completions, and how many actions its
    update learns from."""
    work = {
        f"{variant}, KL {kl}": [
            (step["rollouts_sha256"], step["update_tokens"]) for step in one["steps"]
        ]
        for kl, of_kl in results.items()
        for variant, one in of_kl.items()
    }
    first, *others = work
    if odd := [name for name in others if work[name] != work[first]]:
        raise SystemExit(
            f"{odd[0]} learned from other actions than {first}, so nothing can be compared: "
            f"{work[odd[0]]} against "
            f"{work[first]}."
        )


def summary(one: Mapping[str, Any]) -> dict[str, float]:
    """Medians over the steps, and the range of the whole step."""
    seconds = [step["seconds"] for step in one["steps"]]
    medians = {phase: statistics.median(step[phase] for step in one["steps"]) for phase in PHASES}
    spread = {
        "seconds": statistics.median(seconds),
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
    }
    return spread | medians | {"peak_gib": one["peak_gib"], "held_gib": one["held_gib"]}


def summarise(
    results: Mapping[str, Mapping[str, dict[str, Any]]],
) -> dict[str, dict[str, dict[str, float]]]:
    """By KL and variant, with ratios to the first variant, GRPO."""
    summaries = {}
    for kl, of_kl in results.items():
        of_kl = {variant: summary(one) for variant, one in of_kl.items()}
        first = next(iter(of_kl.values()))
        for s in list(of_kl.values()):
            for name in (
                "seconds",
                "update_s",
                "peak_gib",
                "held_gib",
            ):  # a tiny model may hold nothing that is seen
                s[f"{name}_ratio"] = s[name] / first[name] if first[name] else math.nan
        summaries[kl] = of_kl
    return summaries


def table(summaries: Mapping[str, Mapping[str, dict[str, float]]]) -> str:
    lines = [
        f"{'':<18}{'seconds a step':^23}{'of which':^26}{'memory, GiB':^14}{'GRPO = 1':^20}",
        f"{'KL':<4}{'variant':<14}{'median':>7}{'(range)':>16}{'rollout':>9}{'credit':>8}{'update':>8}"
        f"{'peak':>8}{'held':>7}{'time':>8}{'peak':>6}{'held':>6}",
    ]
    for kl, of_kl in summaries.items():
        for variant, s in of_kl.items():
            spread = f"({s['seconds_min']:.2f} to {s['seconds_max']:.2f})"
            lines.append(
                f"{kl:<4}{variant:<14}{s['seconds']:7.2f}{spread:>16}{s['rollout_s']:9.2f}{s['credit_s']:8.2f}"
                f"{s['update_s']:8.2f}{s['peak_gib']:8.2f}{s['held_gib']:7.2f}{s['seconds_ratio']:8.2f}"
                f"{s['peak_gib_ratio']:6.2f}{s['held_gib_ratio']:6.2f}"
            )
    return "\n".join(lines)


def _inverse(ratio: float) -> float:
    return 1 / ratio if ratio else float("nan")  # of models too small for memory to show


def verdict(summaries: Mapping[str, Mapping[str, dict[str, float]]]) -> str:
    """GRPO's share of PPO's memory and time, next to what is claimed."""
    shares = [
        f"of {variant} with KL {kl} {_inverse(s['peak_gib_ratio']):.0%} of the peak memory and "
        f"{_inverse(s['seconds_ratio']):.0%} of the time"
        for kl, of_kl in summaries.items()
        for variant, s in of_kl.items()
        if variant != "grpo"
    ]
    return (
        f"Claimed: GRPO needs about {CLAIMED:.0%} of PPO's memory and compute. Measured: "
        f"{'; '.join(shares)}."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3, help="measured, after one that is not")
    parser.add_argument(
        "--passes", type=int, default=1, help="epochs, and minibatches of each: 2 makes 4 updates"
    )
    parser.add_argument("--compute", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--kl", nargs="+", default=list(KL_COEF), choices=list(KL_COEF))
    parser.add_argument("--json", type=Path, default=None, help="write the numbers here too")
    options = parser.parse_args(arguments)
    spec = {
        name: getattr(options, name)
        for name in ("prompts", "group_size", "new_tokens", "steps", "passes")
    }
    spec |= {"model": found_model(options.model)[0], "compute": options.compute, "words": 8}
    results = measure(spec, VARIANTS, options.kl)
    summaries = summarise(results)
    machine = {
        "cpu": environment()["hardware"]["cpu"],
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    compute = next(iter(results[options.kl[0]].values()))["compute"]
    document = {
        "machine": machine,
        "workload": spec | {"compute": compute},
        "summary": summaries,
        "steps": results,
    }
    text = json.dumps(document, indent=1)
    print(text)
    print(table(summaries))
    print(verdict(summaries))
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
