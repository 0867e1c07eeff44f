"""``report.html``: evaluations, pictures, last samples and curves of a run on one page, which reads its PNG files."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gruppo.tracking.files import read_lines
from gruppo.tracking.formatting import number, shown
from gruppo.tracking.sheets import BEFORE_AFTER, FOLDER
from gruppo.tracking.writing import replace_text

Row = Mapping[str, Any]

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; background: #fff; max-width: 1180px; margin: 2em auto;
       padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin: 2em 0 .5em }
table { border-collapse: collapse } th { text-align: left; font-weight: normal; color: #6f6f6f }
td, th { padding: .25em 1.2em .25em 0; vertical-align: top; border-bottom: 1px solid #ddd; white-space: pre-wrap;
         overflow-wrap: anywhere }
td.number { text-align: right; white-space: nowrap }
figure { margin: 1em 0 } figcaption { color: #6f6f6f } img { max-width: 100%; height: auto }
"""
ENTRIES = ("prompt", "completion", "target")
LONGEST_TEXT, MOST_SAMPLES = 2000, 12


def write_page(run_dir: str | Path) -> Path | None:
    """Write the page, with no link to anything outside the run's folder; None where there is nothing to show.

    ``plot_run`` comes first: the page shows the curves that are there.
    """
    run_dir = Path(run_dir)
    title = html.escape(run_dir.absolute().name)
    parts = [*_evaluations(run_dir), *_pictures(run_dir), *_texts(run_dir), *_curves(run_dir)]
    if not parts:
        return None
    head = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n<style>{STYLE}</style>'
    )
    path = run_dir / "report.html"
    replace_text(path, "\n".join([head, f"</head><body>\n<h1>{title}</h1>", *parts, "</body></html>\n"]))
    return path


def sheets_of(run_dir: Path) -> list[Path]:
    """The first sheet of samples, the middle one and the last, as far as they differ."""
    found = sorted((run_dir / FOLDER).glob("step_*.png"), key=lambda path: (len(path.name), path.name))
    chosen = [found[place] for place in (0, len(found) // 2, -1)] if found else []
    return list(dict.fromkeys(chosen))


def _evaluations(run_dir: Path) -> Iterator[str]:
    """The mean reward of each evaluation, with its interval and its parts."""
    try:
        done = json.loads((run_dir / "evaluations.json").read_text(encoding="utf-8"))
        names = list(dict.fromkeys(name for each in done for name in each["parts"])) if done else []
        names = names if len(names) > 1 else []
        rows = [
            [str(each["step"]), number(each["mean"]), f"{number(each['low'])} to {number(each['high'])}"]
            + [number(each["parts"].get(name)) for name in names]
            for each in done
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    if rows:
        yield "<h2>Held-out prompts</h2>"
        yield _table(["step", "mean reward", "95% interval", *names], rows, numbers=range(3 + len(names)))


def _pictures(run_dir: Path) -> Iterator[str]:
    compared = run_dir / FOLDER / BEFORE_AFTER
    if compared.exists():
        yield "<h2>Before and after</h2>"
        yield _figure(run_dir, compared)
    sheets = sheets_of(run_dir)
    if sheets:
        count = len(list((run_dir / FOLDER).glob("step_*.png")))
        yield "<h2>Samples while training</h2>"
        yield f"<p>{len(sheets)} of {count} sheets; all are in {FOLDER}/.</p>" if len(sheets) < count else ""
        yield from (_figure(run_dir, sheet) for sheet in sheets)


def _texts(run_dir: Path) -> Iterator[str]:
    """The last samples that are texts."""
    path = run_dir / "samples.jsonl"
    rows = read_lines(path) if path.exists() else []
    rows = [row for row in rows if isinstance(row.get("completion"), str | list) and "failures" not in row]
    rows = [row for row in rows if row["step"] == rows[-1]["step"]][:MOST_SAMPLES]
    if rows:
        yield f"<h2>Samples of step {rows[0]['step']}</h2>"
        cells = [[_reward(row), *(shown(row.get(name, ""))[:LONGEST_TEXT] for name in ENTRIES)] for row in rows]
        yield _table(["reward", *ENTRIES], cells, numbers=range(1))


def _reward(row: Row) -> str:
    reward = row.get("reward")
    return reward if isinstance(reward, str) else number(reward)


def _curves(run_dir: Path) -> Iterator[str]:
    overview = run_dir / "plots" / "overview.png"
    if overview.exists():
        yield "<h2>Curves</h2>"
        yield _figure(run_dir, overview)


def _figure(run_dir: Path, path: Path) -> str:
    name = path.relative_to(run_dir).as_posix()
    picture = f'<a href="{quote(name)}"><img src="{quote(name)}" alt=""></a>'
    return f"<figure>{picture}<figcaption>{html.escape(name)}</figcaption></figure>"


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: range) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    body = ["".join(_cell(text, n in numbers) for n, text in enumerate(row)) for row in rows]
    return "\n".join([f"<table><tr>{head}</tr>", *(f"<tr>{row}</tr>" for row in body), "</table>"])


def _cell(text: str, is_number: bool) -> str:
    return f"<td{' class=number' if is_number else ''}>{html.escape(text)}</td>"
