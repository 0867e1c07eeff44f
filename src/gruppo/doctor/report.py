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
from rich.table import Table
from rich.text import Text

from gruppo.config.schema import IN_MEMORY
from gruppo.doctor import optimizer_rules, policy_rules, reward_rules
from gruppo.doctor.findings import Finding, Rule
from gruppo.doctor.record import Record, read
from gruppo.loading import command_name
from gruppo.tracking.formatting import number, visible

_TABLE = tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))
_CHECKS = vars(policy_rules) | vars(reward_rules) | vars(optimizer_rules)
RULES: Sequence[Rule] = [Rule(n, _CHECKS[f"check_{n.replace('-', '_')}"], **fields) for n, fields in _TABLE.items()]
"""All rules, in the order of the report."""


@dataclass(frozen=True)
class Report:
    """The findings of a run."""

    run: Record
    findings: Sequence[Finding]
    skipped: Mapping[str, str]
    """Rules that could not be checked, and why."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "run": str(self.run.folder),
            "steps": self.run.steps,
            "findings": [finding.to_dict() for finding in self.findings],
            "checked": [rule.name for rule in RULES if rule.name not in self.skipped],
            "skipped": dict(self.skipped),
        }


def examine(run: Record) -> Report:
    """Check every rule whose metrics were logged."""
    skipped = {rule.name: reason for rule in RULES if (reason := rule.skip_reason(run))}
    findings = [rule.find(run) for rule in RULES if rule.name not in skipped]
    return Report(run, [finding for finding in findings if finding is not None], skipped)


def diagnose(folder: Path) -> Report:
    """Check every rule on a run's folder."""
    return examine(read(folder))


def print_report(report: Report, *, is_json: bool) -> None:
    """Print the report; JSON on one line for other programs."""
    if is_json:
        print(json.dumps(report.to_dict(), allow_nan=False))
        return
    console = Console()
    with console.capture() as capture:  # rich itself would exit where the reader has closed the pipe
        console.print(render(report))
        console.print(suggestion(report), soft_wrap=True)  # a command that is broken in two cannot be copied
    text = re.sub(" +$", "", capture.get(), flags=re.MULTILINE)
    print(text.encode(console.encoding, "backslashreplace").decode(console.encoding), end="")


def render(report: Report) -> RenderableType:
    """The findings, each with its measurements, meaning and changes, and the rules that were skipped."""
    run, count = report.run, len(report.findings)
    found = {0: "no problems found", 1: "1 problem found"}.get(count, f"{count} problems found")
    head = Text.assemble((str(run.folder), "bold"), f": {run.steps} steps, ", (found, "yellow" if count else "green"))
    parts: list[RenderableType] = [head.append(f" by {len(RULES) - len(report.skipped)} of {len(RULES)} rules")]
    for i, finding in enumerate(report.findings, start=1):
        title = Text.assemble(f"{i}. ", (finding.title, "bold yellow"), (f"  {finding.rule}", "dim"))
        evidence = _grid([(Text(visible(name)), Text(", then ".join(map(_mean, s)))) for name, s in finding.measured])
        rows: list[Sequence[RenderableType]] = [
            (Text("   measured", "dim"), evidence),
            (Text("   meaning", "dim"), Text(visible(finding.meaning))),
        ]
        if finding.changes:
            changes = [(Text(str(change), "bold"), Text(change.why, "dim")) for change in finding.changes]
            rows.append((Text("   try", "dim"), _grid(changes)))
        parts.append(Padding(Group(title, _grid(rows)), (1, 0, 0, 0), expand=False))
    absent = [name for name, reason in report.skipped.items() if reason.startswith("no ")]
    early = [f"{name} ({reason})" for name, reason in report.skipped.items() if name not in absent]
    lines = [f"Not checked, because the metrics were not logged: {', '.join(absent)}."] if absent else []
    lines += [f"Too early to tell: {'; '.join(early)}."] if early else []
    return Group(*parts, *(Padding(Text(line, "dim"), (1, 0, 0, 0), expand=False) for line in lines))


def suggestion(report: Report) -> Text:
    """The command that tries the first change; empty if there is none."""
    change = next((change for finding in report.findings for change in finding.changes), None)
    if change is None:
        return Text()
    config, advice = report.run.config, "\nTry one change at a time"
    if IN_MEMORY not in (config.model, config.data, *config.reward, config.environment.reply):
        path = shlex.quote(str(report.run.folder / "config.json"))
        return Text(f"{advice}: {command_name()} train {path} {' '.join(map(shlex.quote, str(change).split()))}")
    # The run was started from Python, with objects that the command line cannot name.
    arguments = []
    for option, value in change.settings.items():
        words = [word if re.fullmatch(r"True|False|None|[-+.\de]+", word) else repr(word) for word in value.split()]
        text = words[0] if len(words) == 1 else f"({', '.join(words)})"
        arguments.append(f"{option.removeprefix('--').replace('.', '__').replace('-', '_')}={text}")
    return Text(f"{advice}. The run was started from Python: gruppo.train(..., {', '.join(arguments)})")


def _grid(rows: Sequence[Sequence[RenderableType]]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for row in rows:
        grid.add_row(*row)
    return grid


def _mean(span: Any) -> str:
    steps = f"step {span.first}" if span.first == span.last else f"steps {span.first} to {span.last}"
    return f"{number(span.mean)} ({steps})"
