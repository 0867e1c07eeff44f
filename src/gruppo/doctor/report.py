"""The report of ``gruppo doctor``, for a terminal or as JSON."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from gruppo.config.schema import IN_MEMORY
from gruppo.doctor import optimizer_rules, policy_rules, reward_rules
from gruppo.doctor.record import Record, Span
from gruppo.doctor.remedies import Change
from gruppo.loading import command_name, counted, visible
from gruppo.tracking.formatting import number


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
class Finding:
    """What a rule found, ready to be printed."""

    rule: str
    title: str
    measured: Sequence[tuple[str, Sequence[Span]]]
    meaning: str
    changes: Sequence[Change] = ()


_TABLE = tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))
RULES = [Rule(name, **fields) for name, fields in _TABLE.items()]
"""All rules, in the order of the report; what blocks learning comes first."""
_MODULES = vars(policy_rules) | vars(reward_rules) | vars(optimizer_rules)
CHECKS = [value for name, value in _MODULES.items() if name.startswith("check_")]


@dataclass(frozen=True)
class Report:
    """The findings of a run."""

    run: Record
    findings: Sequence[Finding]
    skipped: Mapping[str, str]
    """Rules that could not be checked, and why."""

    def to_dict(self) -> dict[str, Any]:
        findings = []
        for finding in self.findings:
            spans = [(metric, span) for metric, spans in finding.measured for span in spans]
            measured = [
                {"metric": metric, "mean": s.mean, "steps": [s.first, s.last]}
                for metric, s in spans
            ]
            changes = [
                {"options": dict(change.settings), "why": change.why} for change in finding.changes
            ]
            findings.append(vars(finding) | {"measured": measured, "changes": changes})
        checked = [rule.name for rule in RULES if rule.name not in self.skipped]
        run = {
            "run": str(self.run.folder),
            "steps": self.run.steps,
            "is_complete": self.run.is_complete,
        }
        return run | {"findings": findings, "checked": checked, "skipped": dict(self.skipped)}


def diagnose(run: Record) -> Report:
    """Check every rule whose metrics were logged."""
    skipped, findings = dict[str, str](), list[Finding]()
    matches = {match.rule: match for check in CHECKS for match in check(run)}
    for rule in RULES:
        for i, name in enumerate(rule.reads):
            names = (
                [metric for metric in run.metrics if metric.startswith(name)]
                if name.endswith("/")
                else [name]
            )
            steps, least = (
                max((len(run[metric]) for metric in names), default=0),
                1 if i else rule.min_steps,
            )
            if steps < least and rule.name not in skipped:
                short = (
                    f"{name.rstrip('/')} was logged in {counted(steps, 'step')}; {least} are needed"
                )
                skipped[rule.name] = short if steps else f"no {name.rstrip('/')} was logged"
        if rule.name not in matches or rule.name in skipped:
            continue
        match = matches[rule.name]
        text = rule.meaning if isinstance(rule.meaning, str) else rule.meaning[match.case]
        shown = [run.reward if name == "reward" else run[name] for name in rule.shows]
        evidence = [
            *match.evidence,
            *((series, (series.third(0), series.third(2))) for series in shown),
        ]
        measured = [
            (series.name, spans) for series, spans in evidence if len(series)
        ]  # the others were never logged
        findings.append(
            Finding(
                rule.name, rule.title, measured, text.format(run=run, **match.values), match.changes
            )
        )
    return Report(
        run, sorted(findings, key=lambda finding: not matches[finding.rule].blocks), skipped
    )


def print_report(report: Report, *, is_json: bool) -> None:
    """Print the report; JSON on one line for other programs."""
    if is_json:
        print(json.dumps(report.to_dict(), allow_nan=False))
        return
    console = Console()
    with (
        console.capture() as capture
    ):  # rich itself would exit where the reader has closed the pipe
        console.print(render(report))
        console.print(
            suggestion(report), soft_wrap=True
        )  # a command that is broken in two cannot be copied
    text = re.sub(" +$", "", capture.get(), flags=re.MULTILINE)
    print(text.encode(console.encoding, "backslashreplace").decode(console.encoding), end="")


def render(report: Report) -> RenderableType:
    """The findings, each with its measurements, meaning and changes, and the rules that were skipped."""
    run, count = report.run, len(report.findings)
    found = f"{counted(count, 'problem') if count else 'no problems'} found"
    head = Text.assemble((str(run.folder), "bold"), f": {counted(run.steps, 'step')}, ")
    head.append(found, "yellow" if count else "green")
    parts: list[RenderableType] = [
        head.append(f" by {len(RULES) - len(report.skipped)} of {len(RULES)} rules")
    ]
    for i, finding in enumerate(report.findings, start=1):
        title = Text.assemble(
            f"{i}. ", (finding.title, "bold yellow"), (f"  {finding.rule}", "dim")
        )
        evidence = []
        for name, spans in finding.measured:
            steps = [
                f"step {s.first}" if s.first == s.last else f"steps {s.first} to {s.last}"
                for s in spans
            ]
            means = [
                f"{number(span.mean)} ({text})" for span, text in zip(spans, steps, strict=True)
            ]
            evidence.append((Text(visible(name)), Text(", then ".join(means))))
        changes = [
            (Text(str(change), "bold"), Text(change.why, "dim")) for change in finding.changes
        ]
        sections: dict[str, RenderableType] = {
            "measured": _grid(evidence),
            "meaning": Text(visible(finding.meaning)),
        }
        sections |= {"try": _grid(changes)} if changes else {}
        rows = [(Text(f"   {name}", "dim"), part) for name, part in sections.items()]
        parts.append(Padding(Group(title, _grid(rows)), (1, 0, 0, 0), expand=False))
    absent = [name for name, reason in report.skipped.items() if reason.startswith("no ")]
    early = [f"{name} ({reason})" for name, reason in report.skipped.items() if name not in absent]
    lines = (
        [f"Not checked, because the metrics were not logged: {', '.join(absent)}."]
        if absent
        else []
    )
    lines += [f"Too early to tell: {'; '.join(early)}."] if early else []
    if not run.is_complete:
        state = f"{run.steps} of {run.config.steps} steps are logged and there is no final model"
        advice = f"continue with: {command_name()} resume {shlex.quote(str(run.folder))}"
        lines.append(f"The run is incomplete: {state}. If no process is training it, {advice}")
    return Group(
        *parts, *(Padding(Text(line, "dim"), (1, 0, 0, 0), expand=False) for line in lines)
    )


def suggestion(report: Report) -> Text:
    """The command that tries the first change; empty if there is none."""
    if (
        change := next((change for finding in report.findings for change in finding.changes), None)
    ) is None:
        return Text()
    config, advice = report.run.config, "\nTry one change at a time"
    if IN_MEMORY not in (config.model, config.data, *config.reward, *config.environment.names):
        words = [str(report.run.folder / "config.json"), *str(change).split()]
        return Text(f"{advice}: {command_name()} train {shlex.join(words)}")
    # The run was started from Python, with objects that the command line cannot name.
    arguments = []
    for option, value in change.settings.items():
        words = [
            word if re.fullmatch(r"True|False|None|[-+.\de]+", word) else repr(word)
            for word in value.split()
        ]
        text = words[0] if len(words) == 1 else f"({', '.join(words)})"
        arguments.append(f"{option.removeprefix('--').replace('.', '__').replace('-', '_')}={text}")
    return Text(
        f"{advice}. The run was started from Python: gruppo.train(..., {', '.join(arguments)})"
    )


def _grid(rows: Sequence[Sequence[RenderableType]]) -> Table:
    grid = Table.grid(Column(no_wrap=True), Column(), padding=(0, 2, 0, 0))
    for row in rows:
        grid.add_row(*row)
    return grid
