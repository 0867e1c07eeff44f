"""Rules, read from ``rules.toml``, and their findings with proposed changes of the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gruppo.doctor.record import Record, Series, Span

TREND_STEPS = 9
"""Steps that a trend needs: three in each third."""


@dataclass(frozen=True)
class Change:
    """Options of the command line with their new values, and the reason for those values."""

    settings: Mapping[str, str]
    why: str

    def __str__(self) -> str:
        return " ".join(f"{option} {value}" for option, value in self.settings.items())


@dataclass(frozen=True)
class Match:
    """What a check found: the changes to try, the first one first, and what the rule's text needs."""

    changes: Sequence[Change] = ()
    case: str = ""
    """Key of the meaning, if the rule has several."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values in the text of the meaning."""
    evidence: Sequence[tuple[Series, Sequence[Span]]] = ()
    """Shown before the metrics of the rule: a series, and the spans of steps over which its means are given."""


@dataclass(frozen=True)
class Finding:
    """What a rule found, ready to be printed."""

    rule: str
    title: str
    measured: Sequence[tuple[str, Sequence[Span]]]
    meaning: str
    changes: Sequence[Change] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "title": self.title,
            "measured": [
                {"metric": metric, "mean": span.mean, "steps": [span.first, span.last]}
                for metric, spans in self.measured
                for span in spans
            ],
            "meaning": self.meaning,
            "changes": [{"options": dict(change.settings), "why": change.why} for change in self.changes],
        }


@dataclass(frozen=True)
class Rule:
    """A known problem. The fields are explained in ``rules.toml``."""

    name: str
    check: Callable[[Record], Match | None]
    title: str
    reads: Sequence[str]
    meaning: str | Mapping[str, str]
    min_steps: int = 1
    shows: Sequence[str] = ()

    def skip_reason(self, run: Record) -> str:
        """Why the run cannot be checked; empty if it can."""
        for name in self.reads:
            names = [metric for metric in run.names if metric.startswith(name)] if name.endswith("/") else [name]
            steps = max((len(run[metric]) for metric in names), default=0)
            if not steps:
                return f"no {name.rstrip('/')} was logged"
            if name == self.reads[0] and steps < self.min_steps:
                return f"{name.rstrip('/')} was logged in {steps} steps; {self.min_steps} are needed"
        return ""

    def find(self, run: Record) -> Finding | None:
        if (match := self.check(run)) is None:
            return None
        text = self.meaning if isinstance(self.meaning, str) else self.meaning[match.case]
        shown = [run.reward if name == "reward" else run[name] for name in self.shows]
        evidence = [*match.evidence, *((series, (series.third(0), series.third(2))) for series in shown)]
        measured = [(series.name, spans) for series, spans in evidence if len(series)]  # the others were never logged
        return Finding(self.name, self.title, measured, text.format(**match.values), match.changes)
