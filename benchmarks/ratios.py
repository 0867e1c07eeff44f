"""TRL / gruppo on this machine's CPU: three workloads, at one and two threads, alone and beside one
other job.

``python -m benchmarks.ratios --out build/ratios``: each cell of the table is one
``benchmarks.step``, whose sides take turns, and leaves OUT/CELL.json when it is done; two more hold
the update against the measured matrix rate (``benchmarks.roofline``). After each cell the table is
printed and OUT/ratios.json written. Interrupt it at any point: the same command goes on with the
cells that are missing. The other job has one thread, and reads, writes and multiplies more than a
cache holds. About four hours; a cell of *short* takes 4 to 17 minutes. The machine must be quiet.
``--model FOLDER --prompts 2 --steps 1`` proves the command with a small model.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.workloads import WORKLOADS

ROOT = Path(__file__).parents[1]
OTHER_JOB = "--be-the-other-job"


@dataclass(frozen=True)
class Cell:
    benchmark: str
    workload: str
    threads: int
    is_alone: bool

    @property
    def name(self) -> str:
        company = "alone" if self.is_alone else "beside"
        return f"{self.benchmark}-{self.workload}-{self.threads}-{company}"


def cells(workloads: Sequence[str], threads: Sequence[int]) -> Iterator[Cell]:
    """The workload with the most to show first, under all conditions."""
    for workload in workloads:
        for is_alone in (True, False):
            for count in threads:
                yield Cell("step", workload, count, is_alone)
        if workload == "short":
            yield from (Cell("roofline", workload, count, True) for count in threads)


@contextmanager
def other_job() -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.ratios", OTHER_JOB], cwd=ROOT, env=_environment(1)
    )
    try:
        yield
        if process.poll() is not None:
            raise SystemExit(
                f"the other job ended with code {process.returncode}: the cell was not beside it."
            )
    finally:
        process.kill()
        process.wait()


def be_the_other_job() -> None:
    """Products of 1024 x 1024 and a sum over 64 MB, in turn, until whoever started it ends."""
    import torch

    torch.set_num_threads(1)
    square, long, parent = torch.randn(1024, 1024), torch.ones(2**23), os.getppid()
    while os.getppid() == parent:
        square @ square
        long.add_(long, alpha=1e-9)


def run(cell: Cell, path: Path, options: argparse.Namespace) -> None:
    """Run the cell; its file is there only if it is complete."""
    unfinished = path.with_suffix(".unfinished")
    arguments = [
        "--workloads",
        cell.workload,
        "--steps",
        str(options.steps),
        "--json",
        str(unfinished),
    ]
    arguments += ["--model", options.model] if options.model else []
    if cell.benchmark == "step":
        arguments += ["--prompts", str(options.prompts)]
        arguments += ["--trl-python", options.trl_python] if options.trl_python else []
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{cell.benchmark}", *arguments]
    with path.with_suffix(".log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=_environment(cell.threads),
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,  # Ctrl-C in a terminal reaches it once, from here
        )
        try:
            code = process.wait()
        except BaseException:
            process.send_signal(signal.SIGINT)  # it ends its sides, which are halted
            process.wait()
            raise
    if code:
        raise SystemExit(f"{cell.name} failed with code {code}; see {log.name}.")
    unfinished.replace(path)


def _environment(threads: int) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *sys.path[1:]])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}


def gathered(done: Sequence[tuple[Cell, Mapping[str, Any]]]) -> dict[str, Any]:
    """The ratios of the cells, in the form of a benchmark's JSON."""
    results: dict[str, Any] = {"ratios": [], "updates": []}
    for cell, found in done:
        about = {"workload": cell.workload, "threads": cell.threads, "is_alone": cell.is_alone}
        result = found["results"][cell.workload]
        if cell.benchmark == "step":
            seconds = {side: result[side]["seconds_median"] for side in ("gruppo", "trl")}
            results["ratios"].append(about | {"seconds": seconds} | result["trl_over_gruppo"])
        else:
            update = result["phases"]["update"]
            results["updates"].append(
                about | {"rate": update["rate"], "fraction": update["fraction"]}
            )
    return {"benchmark": "ratios", "machine": done[0][1]["machine"], "results": results}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("build/ratios"))
    parser.add_argument(
        "--workloads",
        nargs="+",
        default=["short", "ragged", "long_prompt"],
        choices=list(WORKLOADS),
    )
    parser.add_argument("--threads", nargs="+", type=int, default=[2, 1])
    parser.add_argument(
        "--steps", type=int, default=3, help="of each side in a cell, after one to warm up"
    )
    parser.add_argument(
        "--prompts", type=int, default=4, help="prompts a step, of 8 completions each"
    )
    parser.add_argument(
        "--model", default=None, help="a Hugging Face folder; without it, SmolLM2-135M"
    )
    parser.add_argument(
        "--trl-python", default=None, help="a Python that has TRL; without it, this one"
    )
    options = parser.parse_args(arguments)
    if options.trl_python is None and importlib.util.find_spec("trl") is None:
        parser.error(
            "TRL is not installed here. Run pip install trl==1.16.0, or name a Python that has it."
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    chosen, saved = (
        {name: getattr(options, name) for name in ("model", "prompts", "steps")},
        out / "options.json",
    )
    if saved.exists() and json.loads(saved.read_text(encoding="utf-8")) != chosen:
        parser.error(
            f"{out} has cells of other options, {saved.read_text(encoding='utf-8')}. Choose "
            f"another --out."
        )
    saved.write_text(json.dumps(chosen), encoding="utf-8")
    done = []
    for cell in cells(options.workloads, options.threads):
        path = out / f"{cell.name}.json"
        if not path.exists():
            print(f"{time.strftime('%H:%M')} {cell.name}", flush=True)
            if cell.is_alone:
                run(cell, path, options)
            else:
                with other_job():
                    run(cell, path, options)
        done.append((cell, json.loads(path.read_text(encoding="utf-8"))))
        table = gathered(done)
        (out / "ratios.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        print(tables.of_ratios(table["results"]), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == [OTHER_JOB]:
        be_the_other_job()
    else:
        main()
