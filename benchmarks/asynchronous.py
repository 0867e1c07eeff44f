"""Time to a held-out reward with and without lag: ``python -m benchmarks.asynchronous
http://127.0.0.1:8000``.

Trains ``arithmetic`` until its held-out reward reaches ``--goal``: with lag 0, 1 and 4 corrected
for the age of samples, with lag 4 uncorrected, and by the local engine in one process, which uses
all cores; three seeds, in turns. It may be stopped at any time: finished runs are kept in
``--runs-dir``, begun ones are resumed. ``--report`` prints the table and draws the curves of what
is there.

Server and trainer on a core each, as on two machines:

    taskset -c 0 gruppo serve smollm2-135m
    taskset -c 1 python -m benchmarks.asynchronous http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gruppo
from gruppo.protocols import Tracker

LOCAL = "local engine"
VARIANTS = {
    "lag 0": ("0", "truncate"),
    "lag 1": ("1", "truncate"),
    "lag 4": ("4", "truncate"),
    "lag 4, no correction": ("4", "none"),
    LOCAL: ("0", "none"),
}
"""Options of each variant: lag, correction."""
COLUMNS = {
    "step s": "time/step_s",
    "trainer waits": "time/rollout_s",
    "lag": "lag/mean",
    "ESS": "correction/ess_frac",
}
CLOCK = "clock.jsonl"


class Clock(Tracker):
    """Appends the seconds of training at each log, evaluations included, pauses between processes
    not."""

    def __init__(self, folder: Path) -> None:
        self.path, self.began = folder / CLOCK, time.perf_counter()
        self.before: float | None = None

    def log(self, step: int, metrics: Any) -> None:
        if self.before is None:  # a resumed run logs steps after its checkpoint again
            earlier = [row for row in read(self.path) if row["step"] < step]
            self.before = max((row["seconds"] for row in earlier), default=0.0)
            self.path.write_text("".join(json.dumps(row) + "\n" for row in earlier))
        row = {"step": step, "seconds": self.before + time.perf_counter() - self.began}
        row |= {"reward": metrics["eval/reward_mean"]} if "eval/reward_mean" in metrics else {}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", nargs="?", default="", help="address of a server")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), metavar="VARIANT"
    )
    parser.add_argument("--steps", type=int, default=150, help="at most")
    parser.add_argument("--goal", type=float, default=0.8)
    parser.add_argument("--runs-dir", type=Path, default=Path("build/bench/asynchronous"))
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    words = [*(sys.argv[1:] if argv is None else argv), "--"]
    options = parser.parse_args(words[: words.index("--")])
    if options.child is not None:
        return train(options.child)
    if not options.report and not options.url:
        parser.error(
            "it needs the address of a server, as of gruppo serve smollm2-135m; or --report"
        )
    for seed in options.seeds:
        for variant in () if options.report else options.variants:
            run(options, variant, seed, words[words.index("--") + 1 : -1])
            print(table(options), flush=True)
    print(table(options))
    draw(options)


def folder_of(options: Any, variant: str, seed: int) -> Path:
    return options.runs_dir / f"{variant.replace(',', '').replace(' ', '-')}-{seed}"


def run(options: Any, variant: str, seed: int, rest: Sequence[str]) -> None:
    """Train in a process of its own, or go on with what an earlier call has begun."""
    folder, (lag, correction) = folder_of(options, variant, seed), VARIANTS[variant]
    if (folder / "final" / "COMPLETE").is_file():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    words = [
        "gruppo",
        "config",
        "arithmetic",
        "--steps",
        str(options.steps),
        "--seed",
        str(seed),
        "--name",
        folder.name,
    ]
    words += ["--runs-dir", str(options.runs_dir), "--saving.every", "5", "--evaluation.every", "5"]
    words += [
        "--stage.until",
        f"eval/reward_mean >= {options.goal}",
        "--objective.correction",
        correction,
    ]
    if variant != LOCAL:
        words += [
            "--engine",
            "vllm",
            "--engine.urls",
            options.url,
            "--engine.lag",
            lag,
            "--engine.timeout-s",
            "600",
        ]
    toml = subprocess.run(
        [sys.executable, "-m", *words, *rest], check=True, capture_output=True, text=True
    ).stdout
    file = folder.with_suffix(".toml")
    file.write_text(toml)
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.asynchronous", "--child", str(file)]
    )
    if variant == LOCAL and hasattr(os, "sched_setaffinity"):  # not only the trainer's core
        os.sched_setaffinity(child.pid, range(os.cpu_count() or 1))
    try:
        code = child.wait()
    except KeyboardInterrupt:  # the child has it too, and saves
        code = child.wait()
    if code:
        sys.exit(code)
    for weights in folder.rglob("*.safetensors"):  # 2 GB a run, which the report does not read
        weights.unlink()


def train(file: Path) -> None:
    """In the child: train the config of a file, or resume its run."""
    folder = file.with_suffix("")
    track = [Clock(folder)]
    try:
        if any((folder / "checkpoints").glob("step_*")):
            gruppo.resume(folder, track=track)
        else:
            if folder.is_dir():  # stopped before its first checkpoint
                folder.rename(folder.with_name(f".{folder.name}-{os.getpid()}"))
            gruppo.train(file, track=track)
    except gruppo.Stopped as stopped:
        print(stopped)
        sys.exit(128 + signal.SIGINT)


def reached(options: Any, variant: str, seed: int) -> dict[str, Any] | None:
    """The first evaluation at or above the goal."""
    rows = read(folder_of(options, variant, seed) / CLOCK)
    return next((row for row in rows if row.get("reward", 0.0) >= options.goal), None)


def table(options: Any) -> str:
    """Of each variant: seeds that reached the goal, their median step and seconds, and of metrics
    the medians.

    The mean step is that of all but the first, which fills the slots.
    """
    heads = f"{'':22}{'reached':>9}{'steps':>7}{'seconds':>9}{'mean step s':>13}"
    lines = [heads + "".join(f"{name:>15}" for name in COLUMNS)]
    for variant in VARIANTS:
        folders = [folder_of(options, variant, seed) for seed in options.seeds]
        rows = [
            row
            for folder in folders
            for row in read(folder / "metrics.jsonl")
            if "time/step_s" in row
        ]
        if not rows:
            continue
        goals = [goal for seed in options.seeds if (goal := reached(options, variant, seed))]
        steps, seconds = (
            statistics.median(g[k] for g in goals) if goals else float("nan")
            for k in ("step", "seconds")
        )
        begun = sum(folder.is_dir() for folder in folders)
        medians = [
            [row[name] for row in rows if row.get(name) is not None] for name in COLUMNS.values()
        ]
        cells = "".join(
            f"{statistics.median(values):15.3g}" if values else f"{'-':>15}" for values in medians
        )
        mean = statistics.mean(row["time/step_s"] for row in rows if row["step"] > 1)
        reached = f"{len(goals)} of {begun}"
        lines.append(f"{variant:22}{reached:>9}{steps:7.0f}{seconds:9.0f}{mean:13.1f}{cells}")
    return "\n".join(lines)


def draw(options: Any) -> None:
    """Held-out reward by seconds and by steps, a line for each run."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from benchmarks.style import COLORS, STYLE

    with mpl.rc_context(fname=STYLE):
        figure = Figure(figsize=(9, 3.5), layout="constrained")
        for axes, by in zip(figure.subplots(1, 2, sharey=True), ("seconds", "step"), strict=True):
            for color, variant in zip(COLORS, VARIANTS, strict=False):
                label = {"label": variant}  # once, where there is a run
                for seed in options.seeds:
                    rows = [
                        row
                        for row in read(folder_of(options, variant, seed) / CLOCK)
                        if "reward" in row
                    ]
                    if rows:
                        axes.plot(
                            [row[by] for row in rows],
                            [row["reward"] for row in rows],
                            color=color,
                            **label,
                        )
                        label = {}
            axes.axhline(options.goal, lw=0.8, ls=":", color="grey")
            axes.set_xlabel(by)
        figure.axes[0].set_ylabel("held-out reward")
        figure.axes[0].legend(fontsize=8)
        options.runs_dir.mkdir(parents=True, exist_ok=True)
        figure.savefig(options.runs_dir / "curves.png", dpi=150)
    print(options.runs_dir / "curves.png")


if __name__ == "__main__":
    main()
