"""Rules, read from ``rules.toml``, and their findings with proposed changes of the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gruppo.doctor.record import Series, Span

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
class Rule:
    """A known problem. The fields are explained in ``rules.toml``."""

    name: str
    title: str
    reads: Sequence[str]
    meaning: str | Mapping[str, str]
    min_steps: int = 1
    shows: Sequence[str] = ()


@dataclass(frozen=True)
class Match:
    """A rule that applies to a run: the changes to try, the first one first, and what the rule's text needs."""

    rule: str
    changes: Sequence[Change] = ()
    case: str = ""
    """Key of the meaning, if the rule has several."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values in the text of the meaning, beside the run."""
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
