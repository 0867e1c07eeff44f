"""New tokens a second: gruppo's ``policy.sample``, Hugging Face ``generate``, and vLLM where a
Python has it, in turns.

``python -m benchmarks.generate --vllm-python .../bin/python``: SmolLM2-135M, 4 prompts of 55 tokens
x 8 completions of 64 tokens each, ends switched off. ``--rows 1 8 32 128`` repeats it for other
numbers of rows. vLLM is compiled, has all cores and keeps none back, and returns neither texts nor
log-probs; gruppo returns both.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import bars, report
from benchmarks.step import check_same_work
from benchmarks.turns import Side, in_turns
from benchmarks.workloads import WORDS
from gruppo.modalities.text.bundled import smollm2_135m

GROUP = 8


def measure(
    spec: Mapping[str, Any], turns: int, sides: Sequence[str], vllm_python: str, *, warm: int = 2
) -> dict[str, Any]:
    """Turns of all sides, after a warm-up."""
    started: list[Side] = []
    try:
        for name in sides:
            is_vllm = name == "vllm"
            started.append(
                Side(
                    name,
                    ["benchmarks.writers", name, json.dumps(spec)],
                    python=vllm_python if is_vllm else sys.executable,
                    environment=vllm_environment(vllm_python) if is_vllm else {},
                )
            )
        done = in_turns(started, turns, warm=warm)
    finally:
        for side in started:
            side.close()
    check_same_work(done)
    return done


def vllm_environment(python: str) -> dict[str, str]:
    """All cores for its threads, and Intel's OpenMP, which it asks for, where it is installed
    beside it."""
    cores = (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else range(os.cpu_count() or 1)
    )
    openmp = Path(python).absolute().parents[1] / "lib" / "libiomp5.so"
    return {
        **({"LD_PRELOAD": str(openmp)} if openmp.is_file() else {}),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }


def summarise(done: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Tokens a second of each side, and gruppo's over each other's, turn by turn."""
    rates = {
        name: [sum(turn["lengths"]) / turn["seconds"] for turn in turns]
        for name, turns in done.items()
    }
    sides: dict[str, Any] = {name: spread(values) for name, values in rates.items()}
    for name, values in rates.items():
        if name != "gruppo":
            sides[name]["gruppo_over_it"] = spread(
                [g / v for g, v in zip(rates["gruppo"], values, strict=True)]
            )
    return sides


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def table(results: Mapping[int, Mapping[str, Any]]) -> str:
    lines = [f"{'rows':>5}  {'side':<10}{'tokens/s':>9}{'(range)':>18}   gruppo over it"]
    for rows, sides in results.items():
        for name, s in sides.items():
            ratio = s.get("gruppo_over_it")
            shown = (
                f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})" if ratio else ""
            )
            of_turns = f"({s['min']:.0f} to {s['max']:.0f})"
            lines.append(f"{rows:>5}  {name:<10}{s['median']:9.0f}{of_turns:>18}   {shown}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.parser(__doc__)
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[32], help="completions at once, in groups of 8"
    )
    parser.add_argument("--sides", nargs="+", default=["gruppo", "hf-fp32", "hf-bf16"])
    parser.add_argument(
        "--vllm-python", default="", help="a Python that has vLLM, which is then timed too"
    )
    parser.add_argument("--vllm-eager", action="store_true", help="vLLM without torch.compile")
    parser.add_argument(
        "--words", type=int, default=WORDS[55], help="of filler in a prompt: 347 make 441 tokens"
    )
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args(arguments)
    sides = [*options.sides, *(["vllm"] if options.vllm_python else [])]
    turns = min(options.turns, 3) if options.short else options.turns
    results, measured = {}, {}
    for rows in options.rows:
        spec = {
            "model": options.model or str(smollm2_135m().path),
            "compute": options.compute,
            "prompts": max(1, rows // GROUP),
            "group_size": min(GROUP, rows),
            "words": options.words,
            "new_tokens": options.new_tokens,
            "vllm_eager": options.vllm_eager,
        }
        measured[rows] = measure(
            spec, turns, sides, options.vllm_python, warm=1 if options.short else 2
        )
        results[rows] = summarise(measured[rows])
    report.tell(
        "generate", results, table(results), options, draw=bars.draw_rates, measured=measured
    )


if __name__ == "__main__":
    main()
