"""Rules, their findings, and proposed changes of the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
class Finding:
    """What a rule found. The first of the ``changes`` is the one to try first."""

    measured: Sequence[tuple[str, Sequence[Span]]]
    """Metrics, each with its mean over one or more spans of steps."""
    meaning: str
    changes: Sequence[Change] = ()
    rule: str = ""
    title: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "title": self.title,
            "measured": [
                {"metric": metric, "mean": span.mean, "steps": [span.first, span.last]}
                for metric, spans in self.measured
                for span in spans
                if span.count
            ],
            "meaning": self.meaning,
            "changes": [{"options": dict(change.settings), "why": change.why} for change in self.changes],
        }


@dataclass(frozen=True)
class Rule:
    """A known problem: the metrics that show it, and the check that reads them."""

    name: str
    title: str
    check: Callable[[Record], Finding | None]
    reads: tuple[str, ...] = ()
    """Metrics without which the rule cannot be checked; a name that ends with / is a prefix."""
    min_steps: int = 1
    """Steps in which the first metric has to be logged."""
    is_first: bool = False
    """Reported before other rules, because it makes other metrics unreliable."""

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
        finding = self.check(run)
        return finding and replace(finding, rule=self.name, title=self.title)


def measured(*items: Series | tuple[Any, ...]) -> list[tuple[str, Sequence[Span]]]:
    """Evidence of a finding: a series stands for its first and last third, a tuple for a series and its spans.

    A series that was never logged is left out.
    """
    pairs = [(i, (i.third(0), i.third(2))) if isinstance(i, Series) else (i[0], i[1:]) for i in items]
    return [(series.name, spans) for series, spans in pairs if len(series)]
