"""Learning and speed with vLLM servers against the local engine: ``python -m benchmarks.servers
http://127.0.0.1:8000``.

Trains ``arithmetic`` with both engines and three seeds, in turns. It may be stopped at any time:
finished runs are kept in ``--runs-dir``, begun ones are resumed. Start the server before with
``gruppo serve smollm2-135m``. Options of ``gruppo train`` follow ``--``.

``--turns 7`` compares sampling alone: the same requests by each engine in turn, in one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PARTS = {
    "rollout": "time/rollout_s",
    "update": "time/update_s",
    "publish": "time/sync_s",
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="address of a server")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--runs-dir", type=Path, default=Path("build/bench/servers"))
    parser.add_argument(
        "--turns", type=int, default=0, help="compare sampling only, in as many turns"
    )
    parser.add_argument("--rows", type=int, default=64, help="rows of a turn, in groups of 8")
    parser.add_argument("--tokens", type=int, default=64, help="longest completion of a turn")
    words = [*(sys.argv[1:] if argv is None else argv), "--"]
    options = parser.parse_args(words[: words.index("--")])
    rest = words[words.index("--") + 1 : -1]
    if options.turns:
        return print(rates(options))
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
        command += [
            "train",
            "arithmetic",
            "--steps",
            str(options.steps),
            "--saving.every",
            "5",
            *names,
            *rest,
        ]
        served = [
            "--engine",
            "vllm",
            "--engine.urls",
            options.url,
            "--engine.timeout-s",
            "600",
        ]  # of a loaded machine
        command += served if engine == "vllm" else []
    subprocess.run(command, check=True)


def rates(options: Any) -> str:
    """Medians of tokens per second of both engines over the turns, and the mismatch of the last
    one, in nats."""
    import torch

    from gruppo.engines import LocalEngine
    from gruppo.engines.vllm import VllmEngine, WeightCheck
    from gruppo.inference import load_policy
    from gruppo.types import MicroBatch, Prompt, Request, Sampling

    policy = load_policy("smollm2-135m", compute="bfloat16")
    texts = [
        [{"role": "user", "content": f"What is {n} + {n * n % 23}? Explain."}]
        for n in range(options.rows // 8)
    ]
    requests = [Request(Prompt(str(n), text, draw=n), 8) for n, text in enumerate(texts)]
    sampling = Sampling(temperature=1.0, max_actions=options.tokens)
    lines = [f"{'engine':8}{'tokens/s':>10}{'least':>8}{'most':>8}{'mismatch mean':>15}{'max':>7}"]
    with tempfile.TemporaryDirectory(prefix="gruppo-rates-") as folder:
        prompts = [request.prompt for request in requests]
        checker = WeightCheck(policy, prompts, sampling, max_mismatch=0.2)
        place = Path(folder) / "published"
        served = VllmEngine(policy, [options.url], place, checker=checker, timeout_s=600)
        try:
            served.check(256 + options.tokens)
            served.sync(policy, 1)
            measured: dict[str, list[float]] = {"local": [], "vllm": []}
            for turn in range(options.turns):
                for name, engine in (("local", LocalEngine(policy)), ("vllm", served)):
                    began = time.perf_counter()
                    rollouts = engine.generate(requests, sampling, seed=turn)
                    measured[name].append(int(rollouts.mask.sum()) / (time.perf_counter() - began))
                    if turn < options.turns - 1:
                        continue
                    parts = torch.arange(len(rollouts)).split(8)
                    columns = slice(0, rollouts.actions.shape[1])
                    with torch.no_grad():
                        scores = [
                            policy.likelihood(rollouts, MicroBatch(part, columns)).logprobs
                            for part in parts
                        ]
                    gap = (torch.cat(scores) - rollouts.sampler_logprobs).abs()[rollouts.mask]
                    speeds = measured[name]
                    lines.append(
                        f"{name:8}{statistics.median(speeds):10.1f}{min(speeds):8.1f}{max(speeds):8.1f}"
                        f"{gap.mean().item():15.4f}{gap.max().item():7.2f}"
                    )
        finally:
            served.close()
    return "\n".join(lines)


def table(runs: Path, seeds: Sequence[int]) -> str:
    """Held-out reward before and after, and medians of seconds and tokens per second, of each
    run."""
    lines = [
        f"{'run':10}{'before':>8}{'after':>8}{'tokens/s':>10}"
        + "".join(f"{part + ' s':>11}" for part in PARTS)
    ]
    for name in (f"{engine}-{seed}" for seed in seeds for engine in ("local", "vllm")):
        file = runs / name / "metrics.jsonl"
        rows = (
            [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
        )
        rewards = [row["eval/reward_mean"] for row in rows if "eval/reward_mean" in row]
        steps = [row for row in rows if "time/step_s" in row]
        if not rewards or not steps:
            continue
        tokens = statistics.median(row["rate/tokens_per_s"] for row in steps)
        parts = [
            statistics.median(row.get(metric, 0.0) for row in steps) for metric in PARTS.values()
        ]
        ends = (
            f"{rewards[0]:8.3f}{rewards[-1]:8.3f}"
            if len(rewards) > 1
            else f"{rewards[0]:8.3f}{'':8}"
        )
        lines.append(
            f"{name:10}{ends}{tokens:10.1f}" + "".join(f"{seconds:11.2f}" for seconds in parts)
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
