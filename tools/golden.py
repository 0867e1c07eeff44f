"""Record what ten runs compute, and compare two recordings bit for bit: the proof of a refactoring.

    python tools/golden.py record build/golden/before           # the package that is installed
    python tools/golden.py record build/golden/after
    python tools/golden.py compare build/golden/before build/golden/after

Each run takes three steps at one thread in float32 through the command line. Compared are all
columns of ``metrics.jsonl`` but times, rates and memory, and the SHA-256 of the final weights.
``--source OTHER/src`` records another checkout. Bits depend on the processor, so that recordings of
two machines do not compare.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMON = [
    "--compute",
    "float32",
    "--steps",
    "3",
    "--seed",
    "1",
    "--evaluation.prompts",
    "4",
    "--show-samples-every",
    "0",
]
SMALL = ["--rollout.prompts", "4", "--rollout.group-size", "4"]
RUNS: dict[str, list[str]] = {
    "text": ["arithmetic", *SMALL],
    "ppo": ["arithmetic-ppo", "--model", "{tiny}", *SMALL],
    "lora": [
        *("arithmetic-format", "--model", "{tiny}", *SMALL, "--lora.rank", "4"),
        *("--stages", "supervised:1,ramp:1,full"),
    ],
    "turns": ["guess", "--model", "{tiny}", *SMALL],
    "tools": ["{root}/examples/tool_recipes.py:tool_search", *SMALL, "--stages.0.steps", "1"],
    "pretrain": ["digits-pretrain", "--supervised.batch", "8"],
    "diffusion": ["digits-compress", "--model", "{out}/pretrain", *SMALL],
    "restoration": [
        "{root}/examples/documents.py:restore_progressive",
        "--stages.0.steps",
        "1",
        "--stages.1.steps",
        "1",
        *SMALL,
    ],
    "routes": ["{root}/examples/routes.py:routes", *SMALL],
    "pendulum": ["{root}/examples/pendulum.py:pendulum", *SMALL],
}
"""Options that stay the same through a refactoring; an option that is renamed is renamed here."""
RENAMED: dict[str, str] = {}
"""Columns of ``metrics.jsonl``: the name before to the name after."""
NOT_COMPARED = ("_s", "_gib", "_per_s", "seconds", "time", "_bytes", "_mb")


def tiny_model(folder: Path) -> str:
    """A two-layer Llama with a character tokenizer, from the tests."""
    if not (folder / "config.json").exists():
        sys.path.insert(0, str(ROOT))
        from tests import tiny

        tiny.write_model(folder, context=2048, width=32)
    return str(folder)


def record(out: Path, source: Path, names: list[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    out = out.resolve()
    values = {"tiny": tiny_model(out / "tiny"), "out": str(out), "root": str(ROOT)}
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    for name in names or RUNS:
        command = [word.format(**values) for word in RUNS[name]]
        command += [*COMMON, "--name", name, "--runs-dir", str(out)]
        done = subprocess.run(
            [sys.executable, "-m", "gruppo", "train", *command],
            env=environment,
            cwd=out,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            print(
                f"{name}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
            continue
        (out / f"{name}.json").write_text(json.dumps(read_run(out / name), indent=1))
        print(f"{name}: recorded", flush=True)


def read_run(run: Path) -> dict[str, object]:
    """The metrics of each step, and a digest of each file of the final weights."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [
        {key: value for key, value in row.items() if not key.endswith(NOT_COMPARED)} for row in rows
    ]
    weights = sorted((run / "final").rglob("*.safetensors"))
    return {
        "metrics": kept,
        "weights": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in weights},
    }


def compare(before: Path, after: Path) -> int:
    """Print each difference; 1 if there is one."""
    differences = []
    for file in sorted(before.glob("*.json")):
        if not (after / file.name).exists():
            differences.append(f"{file.stem}: not recorded in {after}")
            continue
        old, new = (json.loads((folder / file.name).read_text()) for folder in (before, after))
        if old["weights"] != new["weights"]:
            differences.append(f"{file.stem}: the final weights differ")
        if len(old["metrics"]) != len(new["metrics"]):
            differences.append(
                f"{file.stem}: {len(old['metrics'])} rows of metrics, then {len(new['metrics'])}"
            )
        for row, (first, second) in enumerate(zip(old["metrics"], new["metrics"], strict=False)):
            renamed = {RENAMED.get(key, key): value for key, value in first.items()}
            for key in sorted(renamed.keys() | second.keys()):
                if not equal(renamed.get(key), second.get(key)):
                    differences.append(
                        f"{file.stem}, row {row}, {key}: {renamed.get(key)} -> {second.get(key)}"
                    )
    print("\n".join(differences) or f"equal: {len(list(before.glob('*.json')))} runs")
    return int(bool(differences))


def equal(first: object, second: object) -> bool:
    both_nan = (
        isinstance(first, float)
        and isinstance(second, float)
        and math.isnan(first)
        and math.isnan(second)
    )
    return both_nan or first == second


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    recording = verbs.add_parser("record")
    recording.add_argument("out", type=Path)
    recording.add_argument("names", nargs="*", help=f"of {', '.join(RUNS)}; default: all")
    recording.add_argument("--source", type=Path, default=ROOT / "src")
    comparing = verbs.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    given = parser.parse_args()
    if given.verb == "record":
        record(given.out, given.source.resolve(), given.names)
    else:
        sys.exit(compare(given.before, given.after))
