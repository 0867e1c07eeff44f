"""Learning and speed with vLLM servers against the local engine: ``python -m benchmarks.servers http://127.0.0.1:8000``.

Trains ``arithmetic`` with both engines and three seeds, in turns. It may be stopped at any time: finished runs are kept
in ``--runs-dir``, begun ones are resumed. Start the server before with ``gruppo serve smollm2-135m``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PARTS = {"rollout": "time/rollout_s", "update": "time/update_s", "publish": "time/sync_s", "proof": "time/proof_s"}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="address of a server")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--runs-dir", type=Path, default=Path("build/bench/servers"))
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="further options of gruppo train, after --")
    options = parser.parse_args(argv)
    rest = [word for word in options.rest if word != "--"]
    for seed in options.seeds:
        for engine in ("local", "vllm"):
            train(options, engine, seed, rest)
            print(table(options.runs_dir, options.seeds), flush=True)


def train(options: Any, engine: str, seed: int, rest: Sequence[str]) -> None:
    """Train, or go on with what an earlier call has begun."""
    folder = options.runs_dir / f"{engine}-{seed}"
    if (folder / "final").is_dir():
        return
    command = [sys.executable, "-m", "gruppo"]
    if any((folder / "checkpoints").glob("*")):
        command += ["resume", str(folder)]
    else:
        names = ["--seed", str(seed), "--runs-dir", str(options.runs_dir), "--name", folder.name]
        command += ["train", "arithmetic", "--steps", str(options.steps), "--saving.every", "5", *names, *rest]
        command += ["--engine", "vllm", "--engine.urls", options.url] if engine == "vllm" else []
    subprocess.run(command, check=True)


def table(runs: Path, seeds: Sequence[int]) -> str:
    """Held-out reward before and after, and medians of seconds and tokens per second, of each run."""
    lines = [f"{'run':10}{'before':>8}{'after':>8}{'tokens/s':>10}" + "".join(f"{part + ' s':>11}" for part in PARTS)]
    for name in (f"{engine}-{seed}" for seed in seeds for engine in ("local", "vllm")):
        file = runs / name / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
        rewards = [row["eval/reward_mean"] for row in rows if "eval/reward_mean" in row]
        steps = [row for row in rows if "time/step_s" in row]
        if not rewards or not steps:
            continue
        tokens = statistics.median(row["rate/tokens_per_s"] for row in steps)
        parts = [statistics.median(row.get(metric, 0.0) for row in steps) for metric in PARTS.values()]
        ends = f"{rewards[0]:8.3f}{rewards[-1]:8.3f}" if len(rewards) > 1 else f"{rewards[0]:8.3f}{'':8}"
        lines.append(f"{name:10}{ends}{tokens:10.1f}" + "".join(f"{seconds:11.2f}" for seconds in parts))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
