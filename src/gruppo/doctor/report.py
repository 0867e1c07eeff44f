"""The report of ``gruppo doctor``, for a terminal or as JSON."""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gruppo.doctor.record import Record, Series
from gruppo.doctor.rules import RULES
from gruppo.loading import command_name, counted, visible
from gruppo.tracking.formatting import number


@dataclass(frozen=True)
class Finding:
    """What a rule found.

    ``measured`` has the mean of each metric in the first and last third of its steps, ``changes``
    the options to change, each with the reason for its value.
    """

    rule: str
    title: str
    measured: Sequence[Mapping[str, Any]]
    meaning: str
    changes: Mapping[str, str]


@dataclass(frozen=True)
class Report:
    """The findings of a run, and the rules that could not be checked with the reason."""

    run: Record
    findings: Sequence[Finding]
    skipped: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        return {
            "run": str(self.run.folder),
            "steps": self.run.steps,
            "findings": [vars(finding) for finding in self.findings],
            "checked": [rule.name for rule in RULES if rule.name not in self.skipped],
            "skipped": dict(self.skipped),
        }


def diagnose(run: Record) -> Report:
    """Check every rule whose metrics were logged."""
    findings = list[Finding]()
    skipped = dict[str, str]()
    for rule in RULES:
        needed = rule.metrics[0].rstrip("/")
        names = [name for name in run.metrics if f"{name}/".startswith(f"{needed}/")]
        steps = max((len(run[name]) for name in names), default=0)
        if not steps:
            skipped[rule.name] = f"no {needed} was logged"
        elif steps < rule.min_steps:
            logged = f"{needed} was logged in {counted(steps, 'step')}"
            skipped[rule.name] = f"{logged}; {rule.min_steps} are needed"
        elif found := rule.check(run):
            every = [run[name] for name in dict.fromkeys([*names, *rule.metrics[1:]])]
            measured = [_measured(series) for series in every if len(series)]
            findings.append(Finding(rule.name, rule.title, measured, *found))
    return Report(run, findings, skipped)


def _measured(series: Series) -> dict[str, Any]:
    thirds = series.third(0), series.third(2)
    steps = [[min(third.points), max(third.points)] for third in thirds]
    return {"metric": series.name, "means": [third.mean for third in thirds], "steps": steps}


def print_report(report: Report, *, is_json: bool) -> None:
    """Print the report; JSON on one line for other programs."""
    text = json.dumps(report.to_dict(), allow_nan=False) if is_json else render(report)
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


def render(report: Report) -> str:
    """The findings with measurements, meaning and changes, and the rules that were skipped."""
    run, count = report.run, len(report.findings)
    found = f"{counted(count, 'problem') if count else 'no problems'} found"
    checked = f"by {len(RULES) - len(report.skipped)} of {len(RULES)} rules"
    lines = [f"{run.folder}: {counted(run.steps, 'step')}, {found} {checked}"]
    for i, finding in enumerate(report.findings, start=1):
        lines += ["", f"{i}. {finding.title} ({finding.rule})", _wrapped(finding.meaning)]
        for metric in finding.measured:
            pairs = zip(metric["means"], metric["steps"], strict=True)
            texts = [f"{number(mean)} (steps {a} to {b})" for mean, (a, b) in pairs]
            lines.append(f"   {visible(metric['metric'])}: {', then '.join(texts)}")
        lines += [f"   Try {change}  # {why}" for change, why in finding.changes.items()]
    if report.skipped:
        reasons = ", ".join(f"{name} ({reason})" for name, reason in report.skipped.items())
        lines += ["", _wrapped(f"Not checked: {reasons}.")]
    changes = [change for finding in report.findings for change in finding.changes]
    if changes:
        command = f"{command_name()} train {shlex.quote(str(run.folder / 'config.json'))}"
        lines += ["", f"Try one change at a time: {command} {changes[0]}"]
    return "\n".join(lines)


def _wrapped(text: str) -> str:
    return textwrap.fill(visible(text), 100, initial_indent="   ", subsequent_indent="   ")
