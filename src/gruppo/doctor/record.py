"""A run's folder as the symptoms read it: columns of metrics, the config, and what else says something."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gruppo.config import serialization
from gruppo.config.schema import Config, Stage
from gruppo.config.stages import where_of
from gruppo.tracking.files import read_metrics
from gruppo.trainer.models import kind_of
from gruppo.types import GruppoError

SURE = 2.0
"""Standard errors beyond which a difference between two spans of steps is more than noise."""
AT_THE_TOP = 0.9
"""From here on, of the way from the lowest reward ever given to the highest, there is no room to rise."""


@dataclass(frozen=True)
class Span:
    """The mean of a metric over some steps, from ``first`` to ``last``."""

    mean: float
    first: int
    last: int
    count: int


NOTHING = Span(math.nan, 0, 0, 0)


@dataclass(frozen=True)
class Series:
    """A metric where it was logged and finite."""

    name: str
    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.values)

    def third(self, number: int) -> Span:
        """The first (0), the middle (1) or the last (2) third of what was logged; the middle has what is left over."""
        size = max(len(self) // 3, 1)
        start, stop = ((0, size), (size, max(len(self) - size, size)), (len(self) - size, len(self)))[number]
        return self.between(start, max(stop, start + 1))

    def between(self, start: int, stop: int) -> Span:
        """Over the values from place ``start`` to before ``stop``."""
        values, steps = self.values[start:stop], self.steps[start:stop]
        return Span(sum(values) / len(values), steps[0], steps[-1], len(values)) if values else self.whole()

    def at(self, place: int) -> Span:
        """One value."""
        return Span(self.values[place], self.steps[place], self.steps[place], 1)

    def whole(self) -> Span:
        """Over all; NaN of a metric that was never logged, which is above and below nothing."""
        return Span(sum(self.values) / len(self), self.steps[0], self.steps[-1], len(self)) if len(self) else NOTHING

    @property
    def noise(self) -> float:
        """Deviation from step to step that is no trend: sqrt(mean of squared differences of neighbours / 2)."""
        pairs = list(zip(self.values[1:], self.values, strict=False))
        return math.sqrt(sum((b - a) ** 2 for a, b in pairs) / (2 * len(pairs))) if pairs else 0.0

    def rises(self, before: Span, after: Span) -> bool:
        """Whether ``after`` is above ``before`` by more than noise."""
        if not before.count or not after.count:
            return False
        return after.mean - before.mean > SURE * self.noise * math.sqrt(1 / before.count + 1 / after.count)


@dataclass(frozen=True)
class Record:
    """What a run left."""

    folder: Path
    config: Config
    rows: Sequence[Mapping[str, float]]
    """One a step, as :func:`gruppo.tracking.files.read_metrics` gives them."""
    samples: Sequence[Mapping[str, Any]] = ()
    evaluations: Sequence[Mapping[str, Any]] = ()
    manifest: Mapping[str, Any] = field(default_factory=dict)
    log: str = ""
    stage_place: int | None = None
    """Which of the config's stages remedies are for; None for the one that the run was in at last."""

    def __getitem__(self, name: str) -> Series:
        """A metric; of one that was never logged, an empty series."""
        pairs = [(int(row["step"]), row[name]) for row in self.rows if math.isfinite(row.get(name, math.nan))]
        return Series(name, tuple(step for step, _ in pairs), tuple(value for _, value in pairs))

    @cached_property
    def names(self) -> list[str]:
        """Of all metrics, in the order in which they were first logged."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def named(self, pattern: str) -> list[tuple[str, str]]:
        """Metrics whose whole name matches, each with what the pattern's group stands for."""
        return [(name, found[1]) for name in self.names if (found := re.fullmatch(pattern, name))]

    def total(self, name: str) -> float:
        return sum(self[name].values)

    @property
    def steps(self) -> int:
        """Complete steps; the evaluation before the first is none."""
        return max((int(row["step"]) for row in self.rows), default=0)

    # --- the config, where it is in force ---

    @cached_property
    def place(self) -> int:
        """Which of the config's stages counts, from 0."""
        return self.stage_at(self.steps) if self.stage_place is None else self.stage_place

    def stage_at(self, step: int) -> int:
        numbers = self["stage/number"]
        so_far = [number for at, number in zip(numbers.steps, numbers.values, strict=True) if at <= step]
        return min(int(so_far[-1]) - 1, len(self.config.plan) - 1) if so_far else 0

    def during(self, step: int) -> Record:
        """The same record, with remedies for the stage of a step."""
        return replace(self, stage_place=self.stage_at(step))

    @property
    def stage(self) -> Stage:
        return self.config.plan[self.place]

    def option(self, field_name: str) -> str:
        """A field of the stage as it is typed in the shell."""
        return f"--{where_of(self.config, self.place)}.{field_name}".replace("_", "-")

    def steps_of(self, place: int) -> list[int]:
        """The steps that were taken in a stage."""
        if len(self.config.plan) == 1:
            return [int(row["step"]) for row in self.rows if row["step"] > 0]
        numbers = self["stage/number"]
        return [step for step, number in zip(numbers.steps, numbers.values, strict=True) if number == place + 1]

    @property
    def is_bfloat16(self) -> bool:
        return str(self.manifest.get("compute_dtype", self.config.compute)) in ("bfloat16", "auto")

    @cached_property
    def draws_pictures(self) -> bool:
        """Whether answers are images: of a model of them, or of several denoising steps, or in samples that name a
        sheet."""
        has_timesteps = any(name.startswith("timestep/") for name in self.names)
        has_sheets = any(isinstance(row.get("completion"), Mapping) for row in self.samples)
        return has_timesteps or has_sheets or kind_of(self.config) != "text"

    # --- the reward, which tells much of what else is measured apart ---

    @cached_property
    def reward(self) -> Series:
        """Of the first samples where groups grow: the rows of those that grew are in the middle."""
        first = self["growth/first_reward_mean"]
        return first if len(first) else self["reward/mean"]

    @cached_property
    def changes_difficulty(self) -> bool:
        """Whether prompts become harder on the way: a reward that stays is then no standstill."""
        given = [stage.difficulty for stage in self.config.plan]
        return len(set(given)) > 1 or any(isinstance(difficulty, str) for difficulty in given)

    @cached_property
    def way_up(self) -> float:
        """Where the reward is at last, from 0 at the lowest that any row was given to 1 at the highest; NaN where all
        were given the same."""
        low, high = min(self["reward/min"].values, default=math.nan), max(self["reward/max"].values, default=math.nan)
        return (self.reward.third(2).mean - low) / (high - low) if high > low and len(self.reward) else math.nan

    @cached_property
    def is_stuck(self) -> bool:
        """Whether the reward no longer rises, from the middle third of the steps to the last, and has room to."""
        if len(self.reward) < 3 or self.changes_difficulty or self.way_up >= AT_THE_TOP:
            return False
        return not self.reward.rises(self.reward.third(1), self.reward.third(2))

    @cached_property
    def noise_of_evaluations(self) -> float:
        """Half of the widest 95% interval of an evaluation; where none is known, a twentieth of the rewards' range."""
        ends = [(e.get("low"), e.get("high")) for e in self.evaluations]
        halves = [(b - a) / 2 for a, b in ends if isinstance(a, int | float) and isinstance(b, int | float) and b > a]
        low, high = min(self["reward/min"].values, default=0.0), max(self["reward/max"].values, default=1.0)
        return max(halves, default=0.05 * (high - low) or 0.05)

    @property
    def rows_a_step(self) -> float:
        """Sampled rows, from the sizes of the groups that were logged; else what the config asks for."""
        sizes = self.named(r"group/size_(\d+)_count")
        rows, sampled = sum(int(size) * self.total(name) for name, size in sizes), len(self["reward/unscored_count"])
        rollout = self.config.rollout
        return rows / sampled if rows and sampled else float(rollout.prompts * rollout.group_size)


# --- reading ----------------------------------------------------------------------------------------------------------


def read(folder: Path) -> Record:
    """The record of a run. A folder that is none, without metrics, or with a damaged line is refused in one line."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise GruppoError(f"the run folder {folder} {what}. Give the folder of a run, such as runs/arithmetic-...")
    if not (folder / "config.json").is_file():
        raise GruppoError(f"the run folder {folder} has no config.json. Give the folder of a run.")
    rows = _metrics(folder)
    if not any(row["step"] > 0 for row in rows):
        raise GruppoError(
            f"the run {folder} has logged no step: {folder / 'metrics.jsonl'} {'is empty' if not rows else 'ends at 0'}"
            ". Ask again when a step is complete."
        )
    return Record(
        folder,
        serialization.load(folder / "config.json"),
        rows,
        samples=_objects(folder / "samples.jsonl"),
        evaluations=[e for e in _json(folder / "evaluations.json", list) if isinstance(e, Mapping)],
        manifest=_json(folder / "manifest.json", dict),
        log=_text(folder / "log.txt"),
    )


def _metrics(folder: Path) -> list[dict[str, float]]:
    where = folder / "metrics.jsonl"
    if where.exists() and not where.is_file():
        raise GruppoError(f"{where} is no file; the metrics of a run are needed.")
    try:
        rows = read_metrics(folder)
    except (ValueError, TypeError) as error:  # a value that is neither a number nor "inf"
        raise GruppoError(f"{where} has a value that is no number ({error}). Delete that line.") from None
    for number, row in enumerate(rows, start=1):
        wrong = [name for name, value in row.items() if not isinstance(value, int | float)]
        if wrong or not math.isfinite(row["step"]):
            raise GruppoError(f"{where}, line {number}: {(wrong or ['step'])[0]} is no number. Delete that line.")
    return rows


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""  # it only says more; metrics and config are enough


def _json(path: Path, kind: type) -> Any:
    try:
        value = json.loads(_text(path))
    except ValueError:
        return kind()
    return value if isinstance(value, kind) else kind()


def _objects(path: Path) -> list[Mapping[str, Any]]:
    """The lines that hold an object; others are passed over."""
    found = []
    for line in _text(path).splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, Mapping):
            found.append(row)
    return found
