"""Run folders as training writes them, without training."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from gruppo.config import serialization
from gruppo.recipes import RECIPES
from gruppo.tracking.files import CompletionFiles, MetricsFile

WORDS = [
    "the",
    "sum",
    "of",
    "seven",
    "and",
    "twelve",
    "is",
    "nineteen",
    "because",
    "we",
    "add",
    "both",
    "numbers",
]


def write_run(
    path: Path,
    *,
    steps: int = 6,
    prompts: int = 2,
    group: int = 4,
    recipe: str = "arithmetic",
    words: int = 12,
) -> Path:
    """A run whose rewards rise, with ``prompts`` times ``group`` completions a step."""
    draw = random.Random(0)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(serialization.to_dict(RECIPES[recipe]())))
    (path / "manifest.json").write_text(
        json.dumps({"seed": 0, "hardware": {"cpu": "a CPU", "cores": 2}})
    )
    names = [f"other/metric_{n}" for n in range(40)]
    lines, files = [], CompletionFiles(path, 1e12)
    for step in range(1, steps + 1):
        rows: list[dict[str, Any]] = []
        for g in range(prompts):
            a, b = draw.randrange(20), draw.randrange(20)
            rewards = [float(draw.random() < step / steps) for _ in range(group)]
            mean = sum(rewards) / group
            for reward in rewards:
                text = f"{a} + {b} = {a + b if reward else a - b}, " + " ".join(
                    draw.choices(WORDS, k=words)
                )
                rows.append(
                    {
                        "prompt": f"What is {a} + {b}?",
                        "completion": text,
                        "reward": reward,
                        "parts": {"exact_match": reward},
                        "target": str(a + b),
                        "finish": "stop" if draw.random() < 0.9 else "length",
                        "tokens": draw.randrange(4, 30),
                        "group": g,
                        "advantage": reward - mean,
                        "failures": "",
                    }
                )
        files.append(step, rows)
        values = [row["reward"] for row in rows]
        lines.append(
            {
                "step": step,
                "reward/mean": sum(values) / len(values),
                "reward/min": min(values),
                "reward/max": max(values),
                "reward/std_within_group": 0.4,
                "reward/std_between_groups": 0.2,
                "reward/exact_match/mean": sum(values) / len(values),
                "group/zero_spread_frac": draw.random() * 0.3,
                "kl/ref_nats": 0.001 * step / steps,
                "kl/old_nats": 0.0,
                "entropy/mean_nats": 1.5 * math.exp(-step / steps),
                "len/mean_actions": 12 + draw.random(),
                "loss/policy": 0.0,
                "grad/norm": 1 + draw.random(),
                "clip/high_frac": 0.0,
                "clip/low_frac": 0.0,
                "optim/lr": 1e-5,
                "time/step_s": 2.0,
                "advantage/mean": 0.0,
                "advantage/std": 1.0,
                "advantage/max": 2.0,
                "advantage/min": -2.0,
                **{name: draw.random() for name in names},
            }
        )
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def log_steps(path: Path, first: int, last: int) -> None:
    """More steps of metrics, as training appends them."""
    file = MetricsFile(path)
    for step in range(first, last + 1):
        file.log(step, {"reward/mean": step / last})
