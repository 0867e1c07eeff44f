"""What a symptom is, and what is found of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gruppo.doctor.record import Record, Series, Span

LEAST = 9
"""Steps that a trend needs, three in each third."""


@dataclass(frozen=True)
class Measured:
    """Values of one metric, each over a span of steps."""

    metric: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Change:
    """An option of the command line, what to set it to, and why that much. ``more``: what goes with it."""

    option: str
    value: str
    why: str
    more: tuple[tuple[str, str], ...] = ()

    @property
    def settings(self) -> tuple[tuple[str, str], ...]:
        return ((self.option, self.value), *self.more)

    def __str__(self) -> str:
        return " ".join(f"{option} {value}" for option, value in self.settings)


@dataclass(frozen=True)
class Finding:
    """A symptom that was found. ``changes``: the first is the one to try first."""

    measured: tuple[Measured, ...]
    meaning: str
    changes: tuple[Change, ...] = ()
    name: str = ""
    title: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "symptom": self.name,
            "title": self.title,
            "measured": [
                {"metric": m.metric, "mean": span.mean, "steps": [span.first, span.last]}
                for m in self.measured
                for span in m.spans
                if span.count
            ],
            "meaning": self.meaning,
            "changes": [{"options": dict(change.settings), "why": change.why} for change in self.changes],
        }


@dataclass(frozen=True)
class Symptom:
    """Something that may ail a run."""

    name: str
    title: str
    look: Callable[[Record], Finding | None]
    needs: tuple[str, ...] = ()
    """Metrics without which it cannot be looked for; one that ends with / stands for any that begins so."""
    least: int = 1
    """Steps that the first of them needs."""

    def missing(self, run: Record) -> str:
        """Why it cannot be looked for; nothing where it can."""
        for need in self.needs:
            names = [name for name in run.names if name.startswith(need)] if need.endswith("/") else [need]
            most = max((len(run[name]) for name in names), default=0)
            if not most:
                return f"no {need.rstrip('/')} was logged"
            if need == self.needs[0] and most < self.least:
                return f"{need.rstrip('/')} was logged in {most} steps, and it needs {self.least}"
        return ""

    def found(self, run: Record) -> Finding | None:
        finding = self.look(run)
        return finding and replace(finding, name=self.name, title=self.title)


def thirds(series: Series, *numbers: int) -> Measured:
    """The means of some thirds, the first and the last without any."""
    return Measured(series.name, tuple(series.third(number) for number in numbers or (0, 2)))


def whole(series: Series) -> Measured:
    return Measured(series.name, (series.whole(),))


def at(series: Series, *places: int) -> Measured:
    """Single values."""
    return Measured(series.name, tuple(series.at(place) for place in places))


def present(*measured: Measured | Series) -> tuple[Measured, ...]:
    """What was measured; a series as its first and last third, and nothing of one that was never logged."""
    found = [thirds(m) if isinstance(m, Series) and len(m) else m for m in measured]
    return tuple(m for m in found if isinstance(m, Measured))


def examine(run: Record, symptoms: Sequence[Symptom]) -> tuple[list[Finding], dict[str, str]]:
    """What is found, in the order of the symptoms; and of those that cannot be looked for, why."""
    missing = {symptom.name: why for symptom in symptoms if (why := symptom.missing(run))}
    found = [symptom.found(run) for symptom in symptoms if symptom.name not in missing]
    return [finding for finding in found if finding is not None], missing
