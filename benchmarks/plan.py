"""Predictions of ``gruppo plan`` against measurements: ``python -m benchmarks.plan``.

Fits this machine's constants (``gruppo plan --fit``), then trains in sizes and with options that were not fitted, each
for a few steps of a real ``gruppo train``, and holds the seconds that its metrics tell against the predicted ones. The
model has the shape of SmolLM2-135M and random weights: its rows never end before they are cut, so that steps differ by
what the machine does alone. It may be stopped at any time: what is measured is kept in ``--folder``. ``--report``
measures nothing. ``benchmarks.plan_published`` calibrates on published tables and predicts others.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import random_model
from gruppo.cli.options import apply_options
from gruppo.config import schema
from gruppo.config.schema import Config
from gruppo.plan.capacity import Work, machine_for, splits
from gruppo.plan.fit import Constants
from gruppo.plan.formulas import open_shape
from gruppo.plan.hardware import THIS

RECIPE = f"{Path(__file__).resolve()}:recipe"
MODEL, SMALL = "smollm2-135m", "smollm2-45m"
"""Shapes of ``benchmarks.random_model``."""
STEPS = 3
"""Of each setting; the first is not counted."""


def recipe() -> Config:
    """Sums, of which none is right. The reward gives each row an advantage, so that all are learned from."""
    return Config(
        data="arithmetic:0:20:natural",
        reward=(f"{Path(__file__).resolve()}:alternating",),
        steps=STEPS,
        rollout=schema.RolloutConfig(prompts=4, group_size=8, max_new_tokens=16),
        optim=schema.OptimConfig(lr=1e-7),
        evaluation=schema.EvaluationConfig(prompts=0),
        saving=schema.SavingConfig(every=0),
    )


def alternating(completions: Sequence[Any], **_: Any) -> list[float]:
    return [float(row % 2) for row in range(len(completions))]


@dataclass(frozen=True)
class Setting:
    prompts: int
    group_size: int
    tokens: int
    options: tuple[str, ...] = ()
    model: str = MODEL

    @property
    def name(self) -> str:
        changes = (
            " ".join(self.options).replace("--", "").replace("optim.", "").replace("stage.", "")
        )
        changes += self.model if self.model != MODEL else ""
        return (
            f"{self.prompts} x {self.group_size} x {self.tokens}{' ' + changes if changes else ''}"
        )

    def words(self, folder: Path) -> list[str]:
        sizes = ["--rollout.prompts", self.prompts, "--rollout.group-size", self.group_size]
        sizes += [
            "--rollout.max-new-tokens",
            self.tokens,
            "--model",
            random_model.write(folder / self.model, self.model),
        ]
        return [*map(str, sizes), *self.options]


SETTINGS = (
    Setting(4, 4, 8),
    Setting(6, 8, 16),
    Setting(16, 4, 8),
    Setting(2, 16, 24),
    Setting(3, 4, 40),
    Setting(10, 6, 12),
    Setting(6, 4, 32),
    Setting(4, 12, 6),
    Setting(24, 4, 4),
    Setting(16, 12, 4),
    Setting(4, 8, 16, ("--stage.kl-coef", "0.01")),
    Setting(4, 8, 16, ("--optim.epochs", "2")),
    Setting(6, 8, 12, ("--optim.minibatches", "4")),
    Setting(4, 8, 16, ("--lora.rank", "8")),
    Setting(4, 8, 16, ("--objective", "ppo", "--critic.kind", "separate")),
    Setting(6, 8, 16, ("--optim.token-budget", "256")),
    Setting(8, 8, 16, model=SMALL),
)
PARTS = ("generate", "learn", "step")


def measure(setting: Setting, folder: Path) -> dict[str, float]:
    """Seconds of the fastest of a run's steps but the first, from its metrics; other work on a machine only adds."""
    name = f"{setting.name.replace(' ', '-').replace('.', '-')}-{time.time_ns()}"
    words = [
        "train",
        RECIPE,
        *setting.words(folder),
        "--runs-dir",
        str(folder / "runs"),
        "--name",
        name,
    ]
    try:
        subprocess.run(
            [sys.executable, "-m", "gruppo", *words], check=True, stdout=subprocess.DEVNULL
        )
        rows = [
            json.loads(line)
            for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
        ]
    finally:
        shutil.rmtree(folder / "runs" / name, ignore_errors=True)  # 2 GB of weights
    row = min([row for row in rows if "time/step_s" in row][1:], key=lambda row: row["time/step_s"])
    generate, step = row["time/rollout_s"], row["time/step_s"]
    return {"generate": generate, "learn": step - generate, "step": step}


def predict(setting: Setting, folder: Path, constants: Constants) -> dict[str, float]:
    """As ``gruppo plan`` does for one machine."""
    config = apply_options(recipe(), setting.words(folder), "plan")
    shape = open_shape(config.model)
    machine = machine_for(THIS, constants, shape)
    best = splits(Work(config, shape, machine, constants.prompt_tokens, constants.survival), 1)[0]
    generate = best.trainer_waits * best.step_s
    return {"generate": generate, "learn": best.step_s - generate, "step": best.step_s}


def table(folder: Path, constants: Constants) -> tuple[str, dict[str, float]]:
    """Predicted and measured seconds of each setting; the median error of each part."""
    lines = [
        f"{'prompts x samples x tokens':<36}"
        + "".join(f"{part + ', s':>17}{'error':>8}" for part in PARTS)
    ]
    errors: dict[str, list[float]] = {part: [] for part in PARTS}
    for setting in SETTINGS:
        file = folder / f"{setting.name}.json"
        if not file.exists():
            continue
        measured, predicted = json.loads(file.read_text()), predict(setting, folder, constants)
        cells = ""
        for part in PARTS:
            error = predicted[part] / measured[part] - 1
            errors[part].append(abs(error))
            cells += f"{predicted[part]:9.2f} /{measured[part]:6.2f}{error:+8.0%}"
        lines.append(f"{setting.name:<36}{cells}")
    medians = {part: statistics.median(found) for part, found in errors.items() if found}
    largest = {part: max(found) for part, found in errors.items() if found}
    lines.append(
        f"{'median, largest error':<36}"
        + "".join(f"{medians[p]:17.0%}{largest[p]:8.0%}" for p in medians)
    )
    return "\n".join(lines), medians


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("build/bench/plan"))
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin nothing after so many"
    )
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args(argv)
    began, folder = time.perf_counter(), options.folder
    folder.mkdir(parents=True, exist_ok=True)
    constants = folder / "plan.json"
    if not constants.exists() and not options.report:
        model = random_model.write(folder / MODEL, MODEL)
        words = ["plan", RECIPE, "--fit", "--constants", str(constants), "--", "--model", model]
        subprocess.run([sys.executable, "-m", "gruppo", *words], check=True)
    for setting in () if options.report else SETTINGS:
        file = folder / f"{setting.name}.json"
        if not file.exists() and time.perf_counter() - began < options.seconds:
            file.write_text(json.dumps(measure(setting, folder)))
            print(setting.name, file.read_text(), flush=True)
    print(table(folder, Constants.load(constants))[0])


if __name__ == "__main__":
    main()
