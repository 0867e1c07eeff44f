"""A run's folder as the rules read it: metrics by name, config, samples, evaluations and log."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gruppo import trust
from gruppo.config import serialization
from gruppo.config.schema import Config
from gruppo.config.stages import stage_path
from gruppo.integrity import json_lines, parse_json, read_json
from gruppo.modalities import find_modality
from gruppo.tracking.files import read_metrics
from gruppo.trainer.run_dir import check_is_run
from gruppo.types import GruppoError

TREND_STEPS = 9
"""Steps that a trend needs: three in each third."""
NEAR_TOP = 0.9
"""Fraction of the way from the lowest reward to the highest, above which there is no room to improve."""


@dataclass(frozen=True)
class Span:
    """Mean of a metric over ``count`` logged steps, from ``first`` to ``last``."""

    mean: float
    first: int
    last: int
    count: int


@dataclass(frozen=True)
class Series:
    """A metric in the steps where it was logged and finite."""

    name: str
    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.values)

    def items(self) -> zip[tuple[int, float]]:
        return zip(self.steps, self.values, strict=True)

    def span(self, start: int | None = None, stop: int | None = None) -> Span:
        """Mean of ``values[start:stop]``, by default of all. NaN without values, so that no comparison is true."""
        steps, values = self.steps[start:stop], self.values[start:stop]
        return (
            Span(sum(values) / len(values), steps[0], steps[-1], len(values))
            if values
            else Span(math.nan, 0, 0, 0)
        )

    def at(self, index: int) -> Span:
        return self.span(index, index + 1 or None)

    def third(self, number: int) -> Span:
        """The first (0), middle (1) or last (2) third of the logged values; the middle one has the remainder."""
        n, size = len(self), max(len(self) // 3, 1)
        return self.span(
            *((0, size), (min(size, n - 1), max(n - size, size + 1)), (n - size, n))[number]
        )

    @property
    def last_mean(self) -> float:
        """Mean of the last third."""
        return self.third(2).mean

    @property
    def noise(self) -> float:
        """Standard deviation from step to step, without the trend: sqrt(mean((x[t + 1] - x[t])^2) / 2)."""
        differences = [b - a for a, b in zip(self.values, self.values[1:], strict=False)]
        return (
            math.sqrt(sum(d**2 for d in differences) / (2 * len(differences)))
            if differences
            else 0.0
        )

    def rises(self, before: int = 0, after: int = 2) -> bool:
        """Whether one third lies above another by more than two standard errors of their means."""
        a, b = self.third(before), self.third(after)
        return len(self) > 0 and b.mean - a.mean > 2 * self.noise * math.sqrt(
            1 / a.count + 1 / b.count
        )


@dataclass
class Record:
    """The files of a run, and facts that several rules need. ``record[metric]`` is a :class:`Series`."""

    folder: Path
    config: Config
    rows: Sequence[Mapping[str, float]]
    """One per step, as :func:`gruppo.tracking.files.read_metrics` returns them."""
    samples: Sequence[Mapping[str, Any]] = ()
    evaluations: Sequence[Mapping[str, Any]] = ()
    manifest: Mapping[str, Any] = field(default_factory=dict)
    log: str = ""
    stage_index: int = -1
    """Stage of the config that remedies change; by default the stage of the last step."""

    def __post_init__(self) -> None:
        config = self.config
        self.metrics: dict[str, Series] = {}  # in the order in which they were first logged
        for name in dict.fromkeys(name for row in self.rows for name in row):
            logged = [
                (int(row["step"]), row[name])
                for row in self.rows
                if math.isfinite(row.get(name, math.nan))
            ]
            steps, values = zip(*logged, strict=True) if logged else ((), ())
            self.metrics[name] = Series(name, steps, values)
        self.steps = max((int(row["step"]) for row in self.rows), default=0)
        self.is_complete = (self.folder / "final").is_dir()
        """Whether the run has ended and written its model."""
        self.stage_index = self.stage_at(self.steps) if self.stage_index < 0 else self.stage_index
        self.stage = config.plan[self.stage_index]
        self.is_bfloat16 = str(self.manifest.get("compute_dtype", config.compute)) in (
            "bfloat16",
            "auto",
        )
        # Whether completions are images: from the metrics, the samples, or the model that the config names.
        has_timesteps = any(name.startswith("timestep/") for name in self.metrics)
        has_sheets = any(isinstance(row.get("completion"), Mapping) for row in self.samples)
        self.is_image_run = (
            has_timesteps or has_sheets or find_modality(config.model).rewards_read_images
        )

        # Where groups grow, the reward is that of their first samples: groups that grew have rewards of middling size.
        self.reward = self["growth/first_reward_mean"] or self["reward/mean"]
        low, high = (
            min(self["reward/min"].values, default=math.nan),
            max(self["reward/max"].values, default=math.nan),
        )
        self.reward_level = (self.reward.last_mean - low) / (high - low) if high > low else math.nan
        """Reward of the last third, from 0 at the lowest reward of any row to 1 at the highest; NaN if all agree."""
        difficulties = {stage.difficulty for stage in config.plan}
        self.changes_difficulty = len(difficulties) > 1 or any(
            isinstance(value, str) for value in difficulties
        )
        """Whether prompts become harder during the run, so that a constant reward is progress."""
        can_rise = (
            len(self.reward) >= 3
            and not self.changes_difficulty
            and not self.reward_level >= NEAR_TOP
        )
        self.is_stuck = can_rise and not self.reward.rises(1, 2)
        names = [name for _, name in self.named(r"reward/(.+)/std_within_group")]
        weights = zip(names, config.scoring.weights or (1.0,) * len(names), strict=False)
        self.reward_weights = {name: weight for name, weight in weights if weight}
        """Weights of the reward functions by name, without those of weight 0."""
        # Half of the widest 95% interval of an evaluation; if unknown, a twentieth of the range of rewards.
        ends = [(e.get("low"), e.get("high")) for e in self.evaluations]
        halves = [
            (b - a) / 2
            for a, b in ends
            if isinstance(a, int | float) and isinstance(b, int | float) and b > a
        ]
        low, high = (
            min(self["reward/min"].values, default=0.0),
            max(self["reward/max"].values, default=1.0),
        )
        self.evaluation_noise = max(halves, default=0.05 * (high - low) or 0.05)

    def __getitem__(self, name: str) -> Series:
        """A metric; empty if it was never logged."""
        return self.metrics.get(name, Series(name))

    def named(self, pattern: str) -> list[tuple[str, str]]:
        """Metrics that match a pattern as a whole, each with the text of the pattern's group."""
        return [(name, match[1]) for name in self.metrics if (match := re.fullmatch(pattern, name))]

    def stage_at(self, step: int) -> int:
        """Index in the config of the stage that a step belongs to."""
        so_far = [number for at, number in self["stage/number"].items() if at <= step]
        return min(int(so_far[-1]) - 1, len(self.config.plan) - 1) if so_far else 0

    def option(self, field_name: str) -> str:
        """Command-line option of a field of the current stage."""
        return f"--{stage_path(self.config, self.stage_index)}.{field_name}".replace("_", "-")


def read(folder: Path, *, trust_run: bool = False) -> Record:
    """Read a run's folder. Without a config or metrics it is refused; other files may be missing or damaged."""
    path, log = folder / "metrics.jsonl", folder / "log.txt"
    check_is_run(folder)
    if path.exists() and not path.is_file():
        raise GruppoError(f"{path} is not a file. Give the folder of a run.")
    try:
        rows = read_metrics(folder)
    except (ValueError, TypeError) as error:  # a text other than "inf"
        raise GruppoError(
            f"{path} has a value that is not a number ({error}). Delete that line."
        ) from None
    for line, row in enumerate(rows, start=1):
        # an integer beyond the largest float raises OverflowError wherever it is used
        is_number = {
            n: isinstance(v, float) or (isinstance(v, int) and abs(v) <= 2**1023)
            for n, v in row.items()
        }
        wrong = [name for name in row if not is_number[name]]
        if wrong or not math.isfinite(row["step"]):
            raise GruppoError(
                f"{path}, line {line}: {(wrong or ['step'])[0]} is not a number. Delete that line."
            )
    if not any(row["step"] > 0 for row in rows):
        problem = "ends at step 0" if rows else "is empty"
        raise GruppoError(
            f"the run {folder} has logged no step: {path} {problem}. Wait until a step is complete."
        )
    files = ("samples.jsonl", "evaluations.json", "manifest.json")
    samples, evaluations, manifest = (_objects(folder / name) for name in files)
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    config = serialization.load(folder / "config.json")
    code = trust.imports_of_run(serialization.to_dict(config.without_servers), folder)
    trust.check(folder, code, trust_run=trust_run, trust_remote_code=True)  # it opens no model
    return Record(folder, config, rows, samples, evaluations, manifest[0] if manifest else {}, text)


def _objects(path: Path) -> list[Mapping[str, Any]]:
    """The objects of a JSON file, of a list in it, or of its lines; what cannot be parsed is left out."""
    objects: list[Any] = []
    if path.is_file() and path.suffix == ".jsonl":
        for line in json_lines(path):
            with suppress(ValueError):
                objects.append(parse_json(line))
    elif path.is_file():
        with suppress(ValueError):
            value = read_json(path)
            objects += value if isinstance(value, list) else [value]
    return [value for value in objects if isinstance(value, Mapping)]
