"""A run's folder as the rules read it: metrics by name, config, samples and evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from gruppo import trust
from gruppo.config import serialization
from gruppo.config.schema import Config
from gruppo.config.stages import stage_path
from gruppo.integrity import json_lines, parse_json
from gruppo.modalities import find_modality
from gruppo.tracking.files import read_metrics
from gruppo.trainer.run_dir import check_is_run
from gruppo.trainer.weight_change import EVENTS
from gruppo.types import GruppoError

TREND_STEPS = 9
"""Steps that a trend needs: three in each third."""
NEAR_TOP = 0.9
"""Fraction of the way from the lowest to the highest reward above which there is no room left."""


@dataclass(frozen=True)
class Series:
    """A metric by step, where it was logged and finite."""

    name: str
    points: Mapping[int, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.points)

    @property
    def values(self) -> list[float]:
        return list(self.points.values())

    @property
    def mean(self) -> float:
        """NaN without values, so that no comparison is true."""
        return sum(self.values) / len(self) if self.points else math.nan

    def third(self, number: int) -> Series:
        """First (0), middle (1) or last (2) third; the middle one has the remainder."""
        size = max(len(self) // 3, 1)
        middle = max(len(self) - size, size)
        start, stop = ((0, size), (min(size, middle - 1), middle), (-size, None))[number]
        return Series(self.name, dict(list(self.points.items())[start:stop]))

    @property
    def first(self) -> float:
        return self.third(0).mean

    @property
    def last(self) -> float:
        return self.third(2).mean

    @property
    def noise(self) -> float:
        """Standard deviation without the trend: sqrt(mean((x[t + 1] - x[t])^2) / 2)."""
        squares = [(b - a) ** 2 for a, b in pairwise(self.values)]
        return math.sqrt(sum(squares) / (2 * len(squares))) if squares else 0.0

    def rises(self, before: int = 0, after: int = 2) -> bool:
        """Whether one third lies above another by more than two standard errors of their means."""
        if not self.points:
            return False
        a, b = self.third(before), self.third(after)
        return b.mean - a.mean > 2 * self.noise * math.sqrt(1 / len(a) + 1 / len(b))


@dataclass
class Record:
    """The files of a run, and facts that several rules need. ``record[metric]`` is a Series."""

    folder: Path
    config: Config
    rows: Sequence[Mapping[str, float]]
    """One per step, as :func:`gruppo.tracking.files.read_metrics` returns them."""
    samples: Sequence[Mapping[str, Any]] = ()
    events: Sequence[Mapping[str, Any]] = ()
    is_bfloat16: bool = False

    def __post_init__(self) -> None:
        self.metrics: dict[str, Series] = {}  # in the order in which they were first logged
        for name in dict.fromkeys(name for row in self.rows for name in row):
            points = {int(row["step"]): row[name] for row in self.rows if name in row}
            finite = {step: value for step, value in points.items() if math.isfinite(value)}
            self.metrics[name] = Series(name, finite)
        self.steps = max((int(row["step"]) for row in self.rows), default=0)
        self.stage_index = self.stage_at(self.steps)
        self.stage = self.config.plan[self.stage_index]
        self.is_image_run = find_modality(self.config.model).rewards_read_images
        # If groups grow, the reward is that of their first samples: those that grew are not
        # typical.
        self.reward = self["growth/first_reward_mean"] or self["reward/mean"]
        self.low = min(self["reward/min"].values, default=0.0)
        self.high = max(self["reward/max"].values, default=1.0)
        size = self.high - self.low
        self.reward_level = (self.reward.last - self.low) / size if size > 0 else math.nan
        """Reward of the last third, from 0 at the lowest of any row to 1 at the highest."""
        self.is_stuck = (
            len(self.reward) >= 3
            and not self.reward_level >= NEAR_TOP
            and not self.reward.rises(1, 2)
        )

    def __getitem__(self, name: str) -> Series:
        """A metric; empty if it was never logged."""
        return self.metrics.get(name, Series(name))

    def stage_at(self, step: int) -> int:
        """Index in the config of the stage that a step belongs to."""
        numbers = [n for at, n in self["stage/number"].points.items() if at <= step]
        return min(int(numbers[-1]) - 1, len(self.config.plan) - 1) if numbers else 0

    def option(self, field_name: str, index: int | None = None) -> str:
        """Command-line option of a field of a stage, by default the current one."""
        path = stage_path(self.config, self.stage_index if index is None else index)
        return f"--{path}.{field_name}".replace("_", "-")


def read(folder: Path, *, trust_run: bool = False) -> Record:
    """Read a run's folder. It needs a config and metrics; other files may be missing or damaged."""
    check_is_run(folder)
    path = folder / "metrics.jsonl"
    try:
        rows = [{name: float(v) for name, v in row.items()} for row in read_metrics(folder)]
        rows = [row | {"step": int(row["step"])} for row in rows]
    except (ValueError, TypeError, OverflowError) as error:
        problem = f"{path} has a value that is not a number ({error}). Delete that line."
        raise GruppoError(problem) from None
    if not any(row["step"] > 0 for row in rows):
        raise GruppoError(f"""the run {folder} has logged no step: {path} has none. Wait until a
            step is complete.""")
    config = serialization.load(folder / "config.json")
    code = trust.imports_of_run(serialization.to_dict(config.without_servers), folder)
    trust.check(folder, code, trust_run=trust_run, trust_remote_code=True)  # it opens no model
    manifest = next(iter(_objects(folder / "manifest.json")), {})
    is_bfloat16 = manifest.get("compute_dtype", config.compute) in ("bfloat16", "auto")
    samples, events = _objects(folder / "samples.jsonl"), _objects(folder / EVENTS)
    return Record(folder, config, rows, samples, events, is_bfloat16)


def _objects(path: Path) -> list[Mapping[str, Any]]:
    """Objects of a JSON file or of its lines, without those that cannot be parsed."""
    objects: list[Any] = []
    for text in json_lines(path) if path.is_file() else ():
        with suppress(ValueError):
            objects.append(parse_json(text))
    return [value for value in objects if isinstance(value, Mapping)]
