"""A run's folder as the rules read it: metrics by name, config, samples, evaluations and log."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from gruppo.config import serialization
from gruppo.config.schema import Config, Stage
from gruppo.config.stages import stage_path
from gruppo.modalities import find_modality
from gruppo.tracking.files import read_metrics
from gruppo.types import GruppoError

SIGNIFICANT = 2.0
"""Standard errors beyond which a difference between two spans of steps is more than noise."""
NEAR_TOP = 0.9
"""Fraction of the way from the lowest reward to the highest, above which there is no room to improve."""


@dataclass(frozen=True)
class Span:
    """Mean of a metric over ``count`` logged steps, from ``first`` to ``last``."""

    mean: float
    first: int
    last: int
    count: int


EMPTY = Span(math.nan, 0, 0, 0)
"""Of a metric that was never logged. Comparisons with NaN are false, so no rule fires on it."""


@dataclass(frozen=True)
class Series:
    """A metric in the steps where it was logged and finite."""

    name: str
    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.values)

    def span(self, start: int | None = None, stop: int | None = None) -> Span:
        """Mean of ``values[start:stop]``; by default of all."""
        steps, values = self.steps[start:stop], self.values[start:stop]
        return Span(sum(values) / len(values), steps[0], steps[-1], len(values)) if values else EMPTY

    def at(self, index: int) -> Span:
        return self.span(index, index + 1 or None)

    def third(self, number: int) -> Span:
        """The first (0), middle (1) or last (2) third of the logged values; the middle one has the remainder."""
        n, size = len(self), max(len(self) // 3, 1)
        return self.span(*((0, size), (min(size, n - 1), max(n - size, size + 1)), (n - size, n))[number])

    @property
    def last_mean(self) -> float:
        """Mean of the last third."""
        return self.third(2).mean

    @property
    def noise(self) -> float:
        """Standard deviation from step to step, without the trend: sqrt(mean((x[t + 1] - x[t])^2) / 2)."""
        differences = [b - a for a, b in zip(self.values, self.values[1:], strict=False)]
        return math.sqrt(sum(d**2 for d in differences) / (2 * len(differences))) if differences else 0.0

    def rises(self, before: int = 0, after: int = 2) -> bool:
        """Whether one third lies above another by more than the noise of their means."""
        a, b = self.third(before), self.third(after)
        if not a.count or not b.count:
            return False
        return b.mean - a.mean > SIGNIFICANT * self.noise * math.sqrt(1 / a.count + 1 / b.count)


@dataclass(frozen=True)
class Record:
    """The files of a run. ``record[metric]`` is a :class:`Series`, empty if the metric was never logged."""

    folder: Path
    config: Config
    rows: Sequence[Mapping[str, float]]
    """One per step, as :func:`gruppo.tracking.files.read_metrics` returns them."""
    samples: Sequence[Mapping[str, Any]] = ()
    evaluations: Sequence[Mapping[str, Any]] = ()
    manifest: Mapping[str, Any] = field(default_factory=dict)
    log: str = ""
    stage_index: int | None = None
    """Stage of the config that remedies change; None for the stage of the last step."""

    def __getitem__(self, name: str) -> Series:
        pairs = [(int(row["step"]), row[name]) for row in self.rows if math.isfinite(row.get(name, math.nan))]
        return Series(name, tuple(step for step, _ in pairs), tuple(value for _, value in pairs))

    @cached_property
    def names(self) -> list[str]:
        """All metrics, in the order in which they were first logged."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def named(self, pattern: str) -> list[tuple[str, str]]:
        """Metrics that match a pattern as a whole, each with the text of the pattern's group."""
        return [(name, match[1]) for name in self.names if (match := re.fullmatch(pattern, name))]

    @property
    def steps(self) -> int:
        """Completed steps."""
        return max((int(row["step"]) for row in self.rows), default=0)

    def stage_at(self, step: int) -> int:
        """Index in the config of the stage that a step belongs to."""
        numbers = self["stage/number"]
        so_far = [number for at, number in zip(numbers.steps, numbers.values, strict=True) if at <= step]
        return min(int(so_far[-1]) - 1, len(self.config.plan) - 1) if so_far else 0

    @cached_property
    def current_stage(self) -> int:
        return self.stage_at(self.steps) if self.stage_index is None else self.stage_index

    @property
    def stage(self) -> Stage:
        return self.config.plan[self.current_stage]

    def option(self, field_name: str) -> str:
        """Command-line option of a field of the current stage."""
        return f"--{stage_path(self.config, self.current_stage)}.{field_name}".replace("_", "-")

    @property
    def is_bfloat16(self) -> bool:
        return str(self.manifest.get("compute_dtype", self.config.compute)) in ("bfloat16", "auto")

    @cached_property
    def is_image_run(self) -> bool:
        """Whether completions are images: from the metrics, the samples, or the model that the config names."""
        has_timesteps = any(name.startswith("timestep/") for name in self.names)
        has_sheets = any(isinstance(row.get("completion"), Mapping) for row in self.samples)
        return has_timesteps or has_sheets or find_modality(self.config.model).rewards_read_images

    # --- the reward, which decides how other metrics are read ---

    @cached_property
    def reward(self) -> Series:
        """Mean reward. Where groups grow, of their first samples: groups that grew have rewards of middling size."""
        first = self["growth/first_reward_mean"]
        return first if len(first) else self["reward/mean"]

    @cached_property
    def changes_difficulty(self) -> bool:
        """Whether prompts become harder during the run, so that a constant reward is progress."""
        difficulty = [stage.difficulty for stage in self.config.plan]
        return len(set(difficulty)) > 1 or any(isinstance(value, str) for value in difficulty)

    @cached_property
    def reward_level(self) -> float:
        """Reward of the last third, from 0 at the lowest reward of any row to 1 at the highest; NaN if all agree."""
        low, high = min(self["reward/min"].values, default=math.nan), max(self["reward/max"].values, default=math.nan)
        return (self.reward.last_mean - low) / (high - low) if high > low and len(self.reward) else math.nan

    @cached_property
    def is_stuck(self) -> bool:
        """Whether the reward has room to improve and does not, from the middle third of the steps to the last."""
        if len(self.reward) < 3 or self.changes_difficulty or self.reward_level >= NEAR_TOP:
            return False
        return not self.reward.rises(1, 2)

    @cached_property
    def evaluation_noise(self) -> float:
        """Half of the widest 95% interval of an evaluation; if unknown, a twentieth of the range of rewards."""
        ends = [(e.get("low"), e.get("high")) for e in self.evaluations]
        halves = [(b - a) / 2 for a, b in ends if isinstance(a, int | float) and isinstance(b, int | float) and b > a]
        low, high = min(self["reward/min"].values, default=0.0), max(self["reward/max"].values, default=1.0)
        return max(halves, default=0.05 * (high - low) or 0.05)


def read(folder: Path) -> Record:
    """Read a run's folder. Without a config or metrics it is refused; other files may be missing or damaged."""
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise GruppoError(f"the run folder {folder} {problem}. Give the folder of a run, such as runs/arithmetic-...")
    if not (folder / "config.json").is_file():
        raise GruppoError(f"the run folder {folder} has no config.json. Give the folder of a run.")
    path = folder / "metrics.jsonl"
    if path.exists() and not path.is_file():
        raise GruppoError(f"{path} is not a file. Give the folder of a run.")
    try:
        rows = read_metrics(folder)
    except (ValueError, TypeError) as error:  # a text other than "inf"
        raise GruppoError(f"{path} has a value that is not a number ({error}). Delete that line.") from None
    for line, row in enumerate(rows, start=1):
        wrong = [name for name, value in row.items() if not isinstance(value, int | float)]
        if wrong or not math.isfinite(row["step"]):
            raise GruppoError(f"{path}, line {line}: {(wrong or ['step'])[0]} is not a number. Delete that line.")
    if not any(row["step"] > 0 for row in rows):
        problem = "ends at step 0" if rows else "is empty"
        raise GruppoError(f"the run {folder} has logged no step: {path} {problem}. Wait until a step is complete.")
    evaluations, manifest = _objects(folder / "evaluations.json"), _objects(folder / "manifest.json")
    log = folder / "log.txt"
    return Record(
        folder,
        serialization.load(folder / "config.json"),
        rows,
        samples=_objects(folder / "samples.jsonl"),
        evaluations=evaluations,
        manifest=manifest[0] if manifest else {},
        log=log.read_text(encoding="utf-8", errors="replace") if log.is_file() else "",
    )


def _objects(path: Path) -> list[Mapping[str, Any]]:
    """The objects of a JSON file, of a list in it, or of its lines; what cannot be parsed is left out."""
    found: list[Any] = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    for part in text.splitlines() if path.suffix == ".jsonl" else [text]:
        try:
            value = json.loads(part)
        except ValueError:
            continue
        found += value if isinstance(value, list) else [value]
    return [value for value in found if isinstance(value, Mapping)]
