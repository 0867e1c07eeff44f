"""Run folders that are written by hand: a healthy run's metrics, and what is planted in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gruppo.api import change
from gruppo.config import serialization
from gruppo.doctor.record import Record, read
from gruppo.recipes import RECIPES

STEPS = 30
Column = float | None | Sequence[float | None] | Callable[[int], float | None]
"""Values by step, from 1: a number is the same in all; None is not logged."""


def line(first: float, last: float, *, noise: float = 0.0) -> Callable[[int], float]:
    """Along a line, with ``noise`` to either side in turn."""
    return lambda step: first + (last - first) * (step - 1) / (STEPS - 1) + noise * (-1) ** step


def thirds(
    first: float, middle: float, last: float, *, noise: float = 0.0
) -> Callable[[int], float]:
    """Three levels of ten steps each."""
    return lambda step: (first, middle, last)[min((step - 1) // 10, 2)] + noise * (-1) ** step


def early(values: Mapping[int, float], otherwise: float | None) -> Callable[[int], float | None]:
    """Single steps, and all others."""
    return lambda step: values.get(step, otherwise)


HEALTHY: Mapping[str, Column] = {
    "reward/mean": line(0.1, 0.8, noise=0.01),
    "reward/min": 0.0,
    "reward/max": 1.0,
    "reward/std_within_group": line(0.4, 0.2),
    "reward/unscored_count": 0.0,
    "reward/exception_count": 0.0,
    "reward/timeout_count": 0.0,
    "reward/not_finite_count": 0.0,
    "progress/rollouts": lambda step: 384.0 * step,
    "group/zero_spread_frac": line(0.1, 0.5),
    "group/size_8_count": 48.0,
    "group/size_max": 8.0,
    "advantage/mean": 1e-9,
    "advantage/std": 0.7,
    "advantage/min": -2.4,
    "advantage/max": 2.4,
    "advantage/mean_abs": 0.5,
    "entropy/mean_nats": line(1.4, 0.3),
    "kl/ref_nats": line(0.0, 0.3),
    "kl/old_k3_nats": 0.0,
    "ratio/mean": 1.0,
    "ratio/max": 1.0,
    "clip/high_frac": 0.0,
    "clip/low_frac": 0.0,
    "mismatch/mean_nats": 1e-7,
    "mismatch/max_nats": 1e-6,
    "loss/policy": 1e-9,
    "len/mean_actions": 40.0,
    "finish/truncated_frac": 0.02,
    "grad/norm": 3.0,
    "optim/lr": early({1: 4e-6, 2: 8e-6}, 1.2e-5),
    "update/updates_count": 1.0,
    "update/skipped_count": 0.0,
    "update/changed_frac": early({1: 0.9}, None),
    "eval/reward_mean": early({1: 0.1, 10: 0.3, 20: 0.5, 30: 0.7}, None),
    "mem/peak_gib": 2.0,
}
"""Of a run like the arithmetic recipe's."""
CONFIG: Mapping[str, Any] = {
    "steps": STEPS,
    "compute": "float32",
    "stage__kl_coef": 0.05,
    "evaluation__every": 10,
}


@dataclass(frozen=True)
class Fault:
    """What is planted, the rules that have to fire and no others, and the changes that the last one
    proposes."""

    columns: Mapping[str, Column]
    found: tuple[str, ...]
    changes: tuple[str, ...] = ()
    """The first of them."""
    meaning: str = ""
    """Part of the last finding's meaning."""
    config: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Any] = field(default_factory=dict)
    """Further files of the folder: texts, or what JSON has."""


def plant(folder: Path, fault: Fault) -> Record:
    """The record of a healthy run with a fault."""
    return read(write(folder, fault.columns, fault.config, fault.files))


def write(
    folder: Path,
    columns: Mapping[str, Column],
    config: Mapping[str, Any] | None = None,
    files: Any = None,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    changed = change(RECIPES["arithmetic"](), {**CONFIG, **(config or {})})
    (folder / "config.json").write_text(json.dumps(serialization.to_dict(changed)))
    every = HEALTHY | columns
    rows = [{"step": step, **_row(every, step)} for step in range(1, STEPS + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "final").mkdir()
    for name, content in (files or {}).items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def _row(columns: Mapping[str, Column], step: int) -> dict[str, float]:
    values = {name: _value(column, step) for name, column in columns.items()}
    return {name: value for name, value in values.items() if value is not None}


def _value(column: Column, step: int) -> float | None:
    if callable(column):
        return column(step)
    return column[step - 1] if isinstance(column, Sequence) else column
