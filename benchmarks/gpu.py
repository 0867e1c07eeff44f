"""All that is measured on a GPU, as one command for a machine that is available for minutes.

``python -m benchmarks.gpu --out build/gpu``: the tests in tests/gpu, a step against TRL on three
workloads and two models of random weights, generation (against vLLM too, with ``--vllm-python``),
and the share of the device's matrix rate. Each part is a process with a time limit, and leaves
OUT/NAME.json and OUT/NAME.log when it ends; after each, OUT/summary.md is written anew. What fails,
or no longer fits into ``--minutes``, is listed there, and costs no other part. Interrupt it at any
point: what is complete stays, and the same command goes on with the rest. ``--tiny`` proves the kit
on a CPU with a model of two layers.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.workloads import WORKLOADS

ROOT = Path(__file__).parents[1]
END_S = 15.0
"""Kept of the time for the summary and for copying files."""


@dataclass(frozen=True)
class Part:
    """A command, its limit, and the least time with which it is worth to start it."""

    name: str
    command: Sequence[str]
    limit_s: float
    least_s: float = 20.0


def parts(out: Path, *, is_tiny: bool, vllm_python: str) -> Iterator[Part]:
    """Parts in the order in which their results are needed."""

    def python(name: str, *arguments: str) -> list[str]:
        return [sys.executable, "-W", "ignore", "-m", name, *arguments]

    def json_of(name: str) -> list[str]:
        return ["--json", str(out / f"{name}.json")]

    small, large = ("tiny", "tiny") if is_tiny else ("smollm2-135m", "qwen2.5-0.5b")
    folders = {model: str(out / "models" / model) for model in (small, large)}
    scale = ["--prompts", "2"] if is_tiny else ["--prompts", "16"]
    quick = ["--steps", "1"] if is_tiny else ["--steps", "3"]
    if importlib.util.find_spec("pytest"):
        yield Part(
            "tests", python("pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/gpu"), 150
        )
    for model, folder in folders.items():
        yield Part(f"model-{model}", python("benchmarks.random_model", model, folder), 60, 5)
        for workload in WORKLOADS:
            name = f"step-{model}-{workload}"
            step = python(
                "benchmarks.step", "--model", folder, "--workloads", workload, *scale, *quick
            )
            yield Part(name, [*step, *json_of(name)], 100)
    vllm = ["--vllm-python", vllm_python] if vllm_python else []
    rows = ["--rows", "8"] if is_tiny else ["--rows", "32", "128"]
    generate = python("benchmarks.generate", "--model", folders[small], "--short", *rows, *vllm)
    yield Part("generate", [*generate, *json_of("generate")], 90)
    yield Part(
        "roofline",
        [
            *python("benchmarks.roofline", "--model", folders[small], "--short"),
            *json_of("roofline"),
        ],
        90,
    )


def run(part: Part, log: Path, timeout_s: float) -> str:
    """Run a part and return what became of it: "done", or why it is not."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), *sys.path[1:]])
    }
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            part.command,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"over its {timeout_s:.0f} s"
        finally:
            # Also of an interrupt: the process, and those that it started, which have groups of
            # their own.
            for entry in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):  # ended meanwhile
                    if os.getsid(int(entry.name)) == process.pid:
                        os.kill(int(entry.name), signal.SIGKILL)
            process.kill()
            process.wait()
    return "done" if code == 0 else f"failed with code {code}, see {log.name}"


def summary(out: Path, states: Mapping[str, Mapping[str, Any]]) -> str:
    """What became of each part, and the tables that the benchmarks printed, as Markdown."""
    lines = ["# GPU kit", "", device(), "", "| part | result | seconds |", "|---|---|---|"]
    lines += [
        f"| {name} | {record['state']} | {record['seconds']:.0f} |"
        for name, record in states.items()
    ]
    for name, record in states.items():
        log = out / f"{name}.log"
        if record["state"] == "done" and log.exists() and not name.startswith("model"):
            text = log.read_text(encoding="utf-8", errors="replace").rstrip()
            lines += [
                "",
                f"## {name}",
                "",
                "```",
                text.rpartition("\n" if name == "tests" else "\n\n")[2],
                "```",
            ]
    return "\n".join(lines) + "\n"


@cache
def device() -> str:
    """One line that names the device, its driver and torch."""
    import torch

    if not torch.cuda.is_available():
        return f"No CUDA device: the CPU, torch {torch.__version__}."
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(
            query, capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
        return f"{answer.splitlines()[0]}, torch {torch.__version__}"
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything")
    parser.add_argument("--only", default="", help="parts whose name contains this")
    parser.add_argument("--again", action="store_true", help="run complete parts again")
    parser.add_argument(
        "--tiny", action="store_true", help="a model of two layers: proves the kit on a CPU"
    )
    parser.add_argument(
        "--vllm-python", default="", help="a Python that has vLLM, which is then timed too"
    )
    options = parser.parse_args(arguments)
    out, until = options.out.absolute(), time.monotonic() + 60 * options.minutes - END_S
    out.mkdir(parents=True, exist_ok=True)
    print(device(), flush=True)
    chosen = parts(out, is_tiny=options.tiny, vllm_python=options.vllm_python)
    try:
        states = run_all(chosen, out, until, only=options.only, again=options.again)
    except KeyboardInterrupt:
        return 130
    finally:
        print(out / "summary.md", flush=True)
    return int(any(record["state"] != "done" for record in states.values()))


def run_all(
    parts: Iterable[Part], out: Path, until: float, *, only: str = "", again: bool = False
) -> dict[str, dict[str, Any]]:
    """Run the parts that are not done yet until that time, and write what became of each after
    each."""
    saved = out / "parts.json"
    states = json.loads(saved.read_text(encoding="utf-8")) if saved.exists() else {}
    for part in parts:
        is_done = states.get(part.name, {}).get("state") == "done"
        if (is_done and not (again and only in part.name)) or not (
            only in part.name or part.name.startswith("model")
        ):
            continue
        began, left_s, state = time.monotonic(), until - time.monotonic(), "interrupted"
        try:
            is_short = left_s < part.least_s
            state = (
                "no time left"
                if is_short
                else run(part, out / f"{part.name}.log", min(part.limit_s, left_s))
            )
        finally:
            states[part.name] = {"state": state, "seconds": time.monotonic() - began}
            for file, text in (
                (saved, json.dumps(states, indent=1) + "\n"),
                (out / "summary.md", summary(out, states)),
            ):
                partial = file.with_suffix(".new")  # the machine may be taken back at any point
                partial.write_text(text, encoding="utf-8")
                partial.replace(file)
        print(f"{part.name}: {state} ({states[part.name]['seconds']:.0f} s)", flush=True)
    return states


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):  # before any part
        sys.exit(main())
    sys.exit(130)
