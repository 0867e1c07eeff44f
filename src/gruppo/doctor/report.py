"""What was found, for a terminal or as JSON."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gruppo.config.schema import IN_MEMORY
from gruppo.doctor.finding import Finding, Measured, examine
from gruppo.doctor.record import Record, Span, read
from gruppo.doctor.symptoms import SYMPTOMS
from gruppo.loading import program
from gruppo.tracking.formatting import number, visible


@dataclass(frozen=True)
class Report:
    """A run, what ails it, and what could not be looked for."""

    run: Record
    findings: Sequence[Finding]
    missing: Mapping[str, str]
    """Symptoms that could not be looked for, and why."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "run": str(self.run.folder),
            "steps": self.run.steps,
            "findings": [finding.to_dict() for finding in self.findings],
            "looked_for": [s.name for s in SYMPTOMS if s.name not in self.missing],
            "not_looked_for": dict(self.missing),
        }


def diagnose(folder: Path) -> Report:
    """Look for every symptom in a run's folder."""
    run = read(folder)
    return Report(run, *examine(run, SYMPTOMS))


def say(report: Report, *, is_json: bool) -> None:
    """Print it; JSON on one line for another program."""
    if is_json:
        print(json.dumps(report.to_dict(), allow_nan=False))
        return
    console = Console()
    with console.capture() as said:  # printed by itself, rich would end the process where a reader has left
        console.print(shown(report))
        console.print(how_to_try(report), soft_wrap=True)  # a command that is broken in two cannot be copied
    text = re.sub(" +$", "", said.get(), flags=re.MULTILINE)
    print(text.encode(console.encoding, "backslashreplace").decode(console.encoding), end="")


def shown(report: Report) -> RenderableType:
    """The report for a terminal or a log."""
    run, count = report.run, len(report.findings)
    looked = len(SYMPTOMS) - len(report.missing)
    found = "no symptom" if not count else "1 symptom" if count == 1 else f"{count} symptoms"
    head = Text.assemble((str(run.folder), "bold"), f": {run.steps} steps, ", (found, "yellow" if count else "green"))
    head.append(f" of {looked} that its metrics can show")
    parts: list[RenderableType] = [head]
    parts += [_finding(place, finding) for place, finding in enumerate(report.findings, start=1)]
    return Group(*parts, *_missing(report.missing))


def _finding(place: int, finding: Finding) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in (
        ("measured", _measured(finding.measured)),
        ("means", Text(visible(finding.meaning))),
        ("change", _changes(finding)),
    ):
        if value is not None:
            table.add_row(f"   {name}", value)
    title = Text.assemble(f"{place}. ", (finding.title, "bold yellow"), (f"  {finding.name}", "dim"))
    return Padding(Group(title, table), (1, 0, 0, 0), expand=False)


def _measured(measured: Sequence[Measured]) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for m in measured:
        grid.add_row(Text(visible(m.metric)), Text(", then ".join(map(_span, m.spans))))
    return grid


def _span(span: Span) -> str:
    where = f"step {span.first}" if span.first == span.last else f"steps {span.first} to {span.last}"
    return f"{number(span.mean)} ({where})"


def _changes(finding: Finding) -> RenderableType | None:
    if not finding.changes:
        return None
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(style="dim")
    for change in finding.changes:
        grid.add_row(Text(str(change), "bold"), Text(change.why))
    return grid


def _missing(missing: Mapping[str, str]) -> list[RenderableType]:
    """One line of what the run has no part of, and one of what its few steps cannot show."""
    absent = [name for name, why in missing.items() if why.startswith("no ")]
    short = [f"{name} ({why})" for name, why in missing.items() if name not in absent]
    lines = [f"Not looked for, as the run logged nothing of it: {', '.join(absent)}."] if absent else []
    lines += [f"Too early to tell: {'; '.join(short)}."] if short else []
    return [Padding(Text(line, "dim"), (1, 0, 0, 0), expand=False) for line in lines]


def how_to_try(report: Report) -> Text:
    """The command that tries the first change of the first finding; nothing where there is none."""
    changes = [change for finding in report.findings for change in finding.changes]
    if not changes:
        return Text()
    first, config = changes[0], report.run.config
    if IN_MEMORY in (config.model, config.data, *config.reward, config.environment.reply):
        leaves = (f"{_leaf(option)}={_literal(value)}" for option, value in first.settings)
        return Text(f"\nOne thing at a time. This run was started in Python: gruppo.train(..., {', '.join(leaves)})")
    path = shlex.quote(str(report.run.folder / "config.json"))
    words = " ".join(map(shlex.quote, str(first).split()))
    return Text(f"\nOne thing at a time: {program()} train {path} {words}")


def _leaf(option: str) -> str:
    """An option as ``gruppo.train`` takes it."""
    return option.removeprefix("--").replace(".", "__").replace("-", "_")


def _literal(value: str) -> str:
    """A value of the command line as Python has it."""
    words = value.split()
    try:
        numbers = [str(float(word)) if "." in word or "e" in word else str(int(word)) for word in words]
    except ValueError:
        return value if value in ("True", "False", "None") else repr(value)
    return numbers[0] if len(numbers) == 1 else f"({', '.join(numbers)})"
