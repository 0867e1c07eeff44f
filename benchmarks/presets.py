"""Learning curves of every preset on one small task: the same model, prompts and number of samples
for all.

``python -m benchmarks.presets`` (``make curves``) trains each preset with three seeds by
``gruppo.train``, in processes of one thread each, and prints the held-out accuracy that each ends
with. The task is that of ``benchmarks/sorting.py``.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import platform
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks import sorting
from benchmarks.curves import draw
from gruppo.config.schema import (
    Config,
    CriticConfig,
    EvaluationConfig,
    OptimConfig,
    PromptsConfig,
    RolloutConfig,
    SavingConfig,
)
from gruppo.core.objective import GRPO, PRESETS
from gruppo.trainer.run_dir import environment

STEPS, POINTS = 80, 20
LR = 3e-4
OWN_LR: Mapping[str, float] = {}
"""Of presets that do not learn at ``LR``."""
CRITIC_LR = 1e-3
PROBLEMS = 4096
EXPLAINED = "value/explained_variance_frac"
CONTROL = "grpo_once"
"""GRPO with one update a batch: what the presets that can take only one are to be compared with."""


def config(preset: str, seed: int, steps: int) -> Config:
    """Four updates a batch where the objective has a ratio, else one; no KL, no entropy bonus, no
    schedule."""
    objective = GRPO if preset == CONTROL else PRESETS[preset]
    passes = 1 if preset == CONTROL or objective.surrogate == "reinforce" else 2
    return Config(
        model="given",
        data="given",
        reward=("exact_match",),
        steps=steps,
        seed=seed,
        name=preset,
        compute="float32",
        show_samples_every=0,
        objective=objective,
        rollout=RolloutConfig(prompts=32, group_size=8, max_new_tokens=sorting.DIGITS + 2),
        optim=OptimConfig(lr=OWN_LR.get(preset, LR), epochs=passes, minibatches=passes),
        critic=CriticConfig(kind="separate", lr=CRITIC_LR)
        if objective.has_critic
        else CriticConfig(),
        prompts=PromptsConfig(held_out_fraction=0.125),
        evaluation=EvaluationConfig(prompts=512, every=max(steps // POINTS, 1)),
        saving=SavingConfig(every=0, keep=1),
    )


def run(preset: str, seed: int, steps: int) -> dict[str, Any]:
    """One training run: its held-out accuracies, and how long a step took."""
    import torch

    import gruppo
    from gruppo.tracking.files import read_metrics

    torch.set_num_threads(1)
    model, chat = sorting.started(seed), sorting.Characters()
    policy = gruppo.from_module(model, chat, eos_ids=[sorting.END], context=sorting.CONTEXT)
    settings = config(preset, seed, steps)
    with tempfile.TemporaryDirectory() as folder:
        done = gruppo.train(
            replace(settings, runs_dir=folder),
            model=policy,
            data=sorting.problems(PROBLEMS),
            show=False,
        )
        rows = read_metrics(done.folder)
    evaluated = [row for row in rows if "eval/reward_mean" in row]
    explained = [row[EXPLAINED] for row in rows if math.isfinite(row.get(EXPLAINED, math.nan))]
    return {
        "preset": preset,
        "seed": seed,
        "lr": settings.optim.lr,
        "updates_per_batch": settings.updates_per_batch,
        "steps": [int(row["step"]) for row in evaluated],
        "accuracy": [row["eval/reward_mean"] for row in evaluated],
        "seconds_per_step": statistics.median(
            row["time/step_s"] for row in rows if "time/step_s" in row
        ),
        "seconds": done.seconds,
        "explained_variance": statistics.mean(explained) if explained else None,
    }


def be_quiet() -> None:
    """In a worker: warnings of 36 runs at once help nobody."""
    logging.getLogger("gruppo").setLevel(logging.ERROR)


def run_all(presets: Sequence[str], seeds: int, steps: int, processes: int) -> list[dict[str, Any]]:
    """Every preset with every seed; what is done is said as it comes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    runs = []
    with ProcessPoolExecutor(
        processes, mp_context=get_context("spawn"), initializer=be_quiet
    ) as pool:
        waiting = [
            pool.submit(run, preset, seed, steps) for seed in range(seeds) for preset in presets
        ]
        for future in as_completed(waiting):
            runs.append(one := future.result())
            where = f"{len(runs)}/{len(waiting)} {one['preset']} seed {one['seed']}"
            print(f"{where}: {one['accuracy'][-1]:.3f} after {one['seconds']:.0f} s", flush=True)
    return sorted(runs, key=lambda one: (presets.index(one["preset"]), one["seed"]))


def summarise(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By preset, over its seeds."""
    by_preset: dict[str, list[dict[str, Any]]] = {}
    for one in runs:
        by_preset.setdefault(one["preset"], []).append(one)
    return {preset: _summary(of_preset) for preset, of_preset in by_preset.items()}


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    halves = [steps_to_half(one) for one in runs]
    ends = [one["accuracy"][-1] for one in runs]
    explained = [one["explained_variance"] for one in runs if one["explained_variance"] is not None]
    return {
        "explained_variance": statistics.mean(explained) if explained else None,
        "lr": runs[0]["lr"],
        "updates_per_batch": runs[0]["updates_per_batch"],
        "before": [one["accuracy"][0] for one in runs],
        "final": ends,
        "final_mean": statistics.mean(ends),
        "over_run_mean": statistics.mean(value for one in runs for value in one["accuracy"]),
        "steps_to_half": halves,
        "seconds_per_step": statistics.median(one["seconds_per_step"] for one in runs),
    }


def steps_to_half(one: dict[str, Any]) -> int | None:
    """Steps until half of what was missing before training is learned; None where it never is."""
    wanted = (1 + one["accuracy"][0]) / 2
    pairs = zip(one["steps"], one["accuracy"], strict=True)
    return next((step for step, accuracy in pairs if accuracy >= wanted), None)


def table(summaries: Mapping[str, dict[str, Any]]) -> str:
    seeds = len(next(iter(summaries.values()))["final"])
    columns = "".join(f"{f'seed {seed}':>8}" for seed in range(seeds))
    before = next(iter(summaries.values()))["before"]
    lines = [
        f"{'preset':<14}{'updates':>8}{'lr':>8}{columns}{'mean':>8}{'over run':>10}  "
        f"{'steps to half':<15}{'s/step':>7}"
    ]
    lines += [f"{'no training':<14}{'':>16}{_numbers(before)}{statistics.mean(before):8.3f}"]
    for preset, s in summaries.items():
        halves = " ".join("never" if half is None else str(half) for half in s["steps_to_half"])
        lines.append(
            f"{preset:<14}{s['updates_per_batch']:>8}{s['lr']:>8.0e}{_numbers(s['final'])}{s['final_mean']:8.3f}"
            f"{s['over_run_mean']:10.3f}  {halves:<15}{s['seconds_per_step']:7.2f}"
        )
        if s["explained_variance"] is not None:
            lines.append(
                f"{'':<14}its critic explained {s['explained_variance']:.2f} of the returns' "
                f"variance"
            )
    return "\n".join(lines)


def _numbers(values: Sequence[float]) -> str:
    return "".join(f"{value:8.3f}" for value in values)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*PRESETS, CONTROL]
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="PRESET")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count(), help="runs at a time, of one thread each"
    )
    parser.add_argument("--json", type=Path, default=None, help="write the numbers here too")
    parser.add_argument("--plot", type=Path, default=None, help="draw the curves here, as PNG")
    options = parser.parse_args(arguments)
    runs = run_all(options.only, options.seeds, options.steps, options.processes)
    summaries = summarise(runs)
    print(table(summaries))
    machine = {
        "cpu": environment()["hardware"]["cpu"],
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    results = {"machine": machine, "steps": options.steps, "summary": summaries, "runs": runs}
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        draw(runs, options.plot)


if __name__ == "__main__":
    main()
