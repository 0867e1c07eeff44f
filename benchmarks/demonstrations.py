"""Demonstrations, then rewards, against rewards alone, in the time of one core: the
``arithmetic-format`` recipe.

``python -m benchmarks.demonstrations`` (``make bench-demonstrations``): SmolLM2-135M has to answer
in tags that no prompt mentions. The runs of a seed go side by side, each in a process of its own
with one thread, and stop when each has had ``--seconds`` of a core: processor time, so that what
else runs on the machine does not count. ``--read`` makes table and picture of runs that are there.
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gruppo.recipes.arithmetic import CLOSING, OPENING, in_tags
from gruppo.rewards.text import text_of

RECIPE = "arithmetic-format"
METRIC = "eval/in_tags"
_ALONE = ("--stages", "full", "--stages.0.warmup-steps", "3")
_REWARDS = "gruppo.recipes.arithmetic:"
VARIANTS: Mapping[str, tuple[str, Sequence[str]]] = {
    "both": ("demonstrations, then rewards", ()),
    "alone": ("rewards alone", _ALONE),
    "partly": (
        "rewards alone, part of it for each tag and for the number",
        (
            *_ALONE,
            "--reward",
            f"{__file__}:partly_in_tags",
            f"{_REWARDS}in_tags",
            "--scoring.weights",
            "1",
            "0",
        ),
    ),
}
Row = Mapping[str, Any]


def partly_in_tags(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 as in ``in_tags``; else 0.1 for each tag that occurs once, plus 0.3 for the right number
    alone.

    A shaped reward, of the kind often proposed where the whole format never occurs.
    """
    scores = []
    for completion, gold, whole in zip(
        completions, answer, in_tags(completions, answer), strict=True
    ):
        text = text_of(completion)
        tags = sum(text.count(tag) == 1 for tag in (OPENING, CLOSING))
        is_number = text.replace(OPENING, "").replace(CLOSING, "").strip() == str(gold)
        scores.append(whole or 0.1 * tags + 0.3 * is_number)
    return scores


class Clock:
    """A tracker that stamps evaluations with this process's time, and stops the run after
    ``$CLOCK_SECONDS`` of it."""

    def __init__(self, run_dir: Path, config: Any) -> None:
        self.file, self.first = (run_dir / "stamps.jsonl").open("a"), time.process_time()
        self.seconds = float(os.environ["CLOCK_SECONDS"])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.process_time()
        kept = {
            name: value
            for name, value in metrics.items()
            if name.startswith(("eval/", "reward/mean", "sup/"))
        }
        self.file.write(json.dumps({"step": step, "cpu_s": now, **kept}) + "\n")
        self.file.flush()
        if now - self.first > self.seconds:
            os.kill(os.getpid(), signal.SIGTERM)

    def log_samples(self, step: int, rows: Sequence[Any]) -> None:
        """Not of interest here."""

    def close(self) -> None:
        self.file.close()


def run_one(arguments: Sequence[str], seconds: float) -> None:
    """One run in this process, until it is over or has had its seconds."""
    import torch

    from gruppo import api
    from gruppo.cli.options import parse_config
    from gruppo.trainer.loop import Stopped

    torch.set_num_threads(1)
    with suppress(Stopped):
        os.environ["CLOCK_SECONDS"] = str(seconds)
        api.start(
            parse_config(
                "train", [RECIPE, *arguments, "--track", "benchmarks.demonstrations:Clock"]
            )
        )


def run_all(
    folder: Path, variants: Sequence[str], seeds: Sequence[int], seconds: float, more: Sequence[str]
) -> None:
    """Seed by seed, its variants side by side. Runs that are there are left as they are."""
    for seed in seeds:
        started = {}
        for variant in variants:
            if (name := name_of(variant, seed)) and not (folder / name).exists():
                own = [
                    "--runs-dir",
                    str(folder),
                    "--name",
                    name,
                    "--seed",
                    str(seed),
                    *VARIANTS[variant][1],
                    *more,
                ]
                command = [
                    sys.executable,
                    "-W",
                    "ignore",
                    "-m",
                    "benchmarks.demonstrations",
                    "--one",
                    json.dumps(own),
                ]
                started[name] = subprocess.Popen(
                    [*command, "--seconds", str(seconds)], cwd=Path(__file__).parents[1]
                )
        for name, child in started.items():
            if child.wait():
                raise SystemExit(f"{name} ended early.")


def name_of(variant: str, seed: int) -> str:
    return f"{variant}-s{seed}"


# --- what came of it ------------------------------------------------------------------------------


def stamps(
    folder: Path, variants: Sequence[str], seeds: Sequence[int]
) -> dict[str, dict[int, list[Row]]]:
    """By variant and seed, the evaluations of runs that are there: seconds since the first, and
    seconds in all."""
    found: dict[str, dict[int, list[Row]]] = {}
    for variant in variants:
        for seed in seeds:
            path = folder / name_of(variant, seed) / "stamps.jsonl"
            rows = (
                [json.loads(line) for line in path.read_text().splitlines()]
                if path.exists()
                else []
            )
            done = [row for row in rows if METRIC in row]
            if done:
                first, had = done[0]["cpu_s"], rows[-1]["cpu_s"] - done[0]["cpu_s"]
                said = [row | {"seconds": row["cpu_s"] - first, "had": had} for row in done]
                found.setdefault(variant, {})[seed] = said
    return found


def at(rows: Sequence[Row], seconds: float) -> float:
    """The last evaluation within the time."""
    return [row[METRIC] for row in rows if row["seconds"] <= seconds][-1]


def shared_seconds(found: Mapping[str, Mapping[int, Sequence[Row]]]) -> float:
    """How far every run has come."""
    return min(rows[-1]["had"] for of_variant in found.values() for rows in of_variant.values())


def table(found: Mapping[str, Mapping[int, Sequence[Row]]], parts: int = 4) -> str:
    """Held-out exact match by variant, mean over seeds and each seed, at parts of the time that all
    runs have had."""
    end = shared_seconds(found)
    times = [end * n / parts for n in range(1, parts + 1)]
    head = ["variant", *(f"{seconds:.0f} s" for seconds in times)]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for variant, of_seeds in found.items():
        cells = []
        for seconds in times:
            each = [at(rows, seconds) for rows in of_seeds.values()]
            cells.append(
                f"{statistics.mean(each):.3f} ({', '.join(f'{value:.3f}' for value in each)})"
            )
        lines.append(f"| {VARIANTS[variant][0]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(found: Mapping[str, Mapping[int, Sequence[Row]]], path: Path) -> None:
    """Held-out exact match against seconds of a core, a line a run."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from benchmarks.style import COLORS, INK, STYLE

    with mpl.rc_context(fname=STYLE):
        figure = Figure(figsize=(6.4, 3.2), layout="constrained")
        axes = figure.subplots()
        for colour, (variant, of_seeds) in zip(COLORS, found.items(), strict=False):
            for n, rows in enumerate(of_seeds.values()):
                label = VARIANTS[variant][0] if n == 0 else None
                x, y = [row["seconds"] for row in rows], [row[METRIC] for row in rows]
                axes.plot(x, y, color=colour, label=label, marker="o", markersize=2.5)
        axes.set_xlabel("seconds of one core, evaluations included")
        axes.set_ylabel("held-out exact match, in tags")
        axes.set_ylim(-0.02, 1.02)
        axes.legend(loc="upper left", fontsize=8, labelcolor=INK)
        figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--seconds", type=float, default=300.0, help="of a core, for each run")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/demonstrations"))
    parser.add_argument("--plot", type=Path, default=None, help="draw the curves here")
    parser.add_argument("--read", action="store_true", help="run nothing")
    parser.add_argument("--one", type=json.loads, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--more", nargs=argparse.REMAINDER, default=[], help="options of every run")
    options = parser.parse_args(arguments)
    if options.one is not None:
        return run_one(options.one, options.seconds)
    folder = options.runs_dir.resolve()
    if not options.read:
        more = [
            "--evaluation.every",
            "5",
            "--evaluation.prompts",
            "128",
            "--steps",
            "1000",
            *options.more,
        ]
        run_all(folder, options.variants, options.seeds, options.seconds, more)
    found = stamps(folder, options.variants, options.seeds)
    print(table(found))
    if options.plot:
        draw(found, options.plot)


if __name__ == "__main__":
    main()
