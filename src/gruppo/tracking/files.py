"""The always-on record of a run: metrics as JSON lines and CSV, samples as JSON lines.

``metrics.jsonl`` is the record and ``metrics.csv`` a copy of it for spreadsheets, made again whenever the two could
differ. Every line is flushed when it is written, so a killed run loses at most the line that it was writing.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TextIO

from gruppo.tracking.formatting import described, is_array
from gruppo.tracking.sheets import LONGEST_ARRAY, Sheets
from gruppo.tracking.writing import replace_text, writing
from gruppo.types import GruppoError

Row = dict[str, Any]


class JsonLines:
    """A file of one JSON object per line, each with a ``step``. A line torn by a crash is dropped when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _open_to_append(path)
        if not _is_whole(path):
            self.rewrite(self.rows())

    def rows(self) -> list[Row]:
        return read_lines(self.path)

    def append(self, rows: Sequence[Row]) -> None:
        with writing(self.path):
            self._file.write("".join(map(_line, rows)))
            self._file.flush()

    def rewrite(self, rows: Sequence[Row]) -> None:
        """Replace the whole file; it holds either the old rows or the new ones, whenever the machine stops."""
        self.close()
        replace_text(self.path, "".join(map(_line, rows)))
        with writing(self.path):
            self._file = _open_to_append(self.path)

    def cut(self, step: int) -> None:
        """Forget what was written after ``step``."""
        rows = self.rows()
        kept = [row for row in rows if row["step"] <= step]
        if len(kept) < len(rows):
            self.rewrite(kept)

    def close(self) -> None:
        with writing(self.path):
            self._file.close()


class MetricsFile:
    """``metrics.jsonl``, one object per step, and ``metrics.csv`` always in step with it.

    NaN is null in the JSON and ``nan`` in the CSV, where an empty cell says that the step did not log the metric.
    Logging a step again adds to its row. :func:`read_metrics` gives back what was logged, to the bit.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self._lines = JsonLines(Path(run_dir) / "metrics.jsonl")
        self._csv = self._lines.path.with_suffix(".csv")
        self._last: Row = {}
        self._columns: list[str] = []
        self._copy_to_csv()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row: Row = {"step": step, **{name: _scalar(value) for name, value in metrics.items()}}
        if step < self._last.get("step", step):
            raise ValueError(f"step {step} was logged after step {self._last['step']}; call cut({step - 1}) first.")
        if step == self._last.get("step"):
            self._lines.rewrite([*self._lines.rows()[:-1], self._last | row])
            return self._copy_to_csv()
        self._lines.append([row])
        if not row.keys() <= set(self._columns):
            return self._copy_to_csv()
        self._last = row
        with writing(self._csv), self._csv.open("a", encoding="utf-8", newline="") as file:
            file.write(_csv_text(self._columns, [row]))

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Samples have a file of their own."""

    def cut(self, step: int) -> None:
        """Keep the steps up to ``step``: what a resumed run does before it goes on."""
        self._lines.cut(step)
        self._copy_to_csv()

    def close(self) -> None:
        self._lines.close()

    def _copy_to_csv(self) -> None:
        rows = self._lines.rows()
        self._last = rows[-1] if rows else {}
        self._columns = list(dict.fromkeys(["step", *(name for row in rows for name in row)]))
        header = {name: name for name in self._columns}
        replace_text(self._csv, _csv_text(self._columns, [header, *rows]))


class SamplesFile:
    """``samples.jsonl``: what was asked, what the policy answered and how it was rewarded.

    Pictures are on PNG sheets in ``images/``, and their rows say where. Rows of an evaluation have ``held_out``.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self._lines = JsonLines(Path(run_dir) / "samples.jsonl")
        self._sheets = Sheets(run_dir)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics have a file of their own."""

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        placed = self._sheets.place(step, rows)
        self._lines.append([{"step": step} | _plain(row) for row in placed])
        if any(row.get("held_out") for row in rows):
            self._sheets.before_and_after(self._lines.rows())

    def cut(self, step: int) -> None:
        """Keep the steps up to ``step``, and their sheets: what a resumed run does before it goes on."""
        self._lines.cut(step)
        self._sheets.cut(step)
        self._sheets.before_and_after(self._lines.rows())

    def close(self) -> None:
        self._lines.close()


def read_metrics(run_dir: str | Path) -> list[dict[str, float]]:
    """One mapping per logged step, with null read as NaN. A torn last line is left out; no file is an empty list."""
    path = Path(run_dir) / "metrics.jsonl"
    return [
        {name: _number(value) for name, value in row.items()} for row in (read_lines(path) if path.exists() else [])
    ]


def _open_to_append(path: Path) -> TextIO:
    # What UTF-8 cannot hold (half of a surrogate pair) becomes \\udc80, which is how JSON writes it.
    return path.open("a", encoding="utf-8", errors="backslashreplace", newline="\n")


def _is_whole(path: Path) -> bool:
    data = path.read_bytes()
    return not data or (data.endswith(b"\n") and _parsed(data.splitlines()[-1]) is not None)


def _parsed(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:  # not JSON, or not UTF-8
        return None
    return row if isinstance(row, dict) and "step" in row else None


def read_lines(path: Path) -> list[Row]:
    """The rows of a file of JSON lines; a torn last line is left out."""
    lines = path.read_bytes().split(b"\n")
    rows = [_parsed(line) for line in lines if line.strip()]
    for number, row in enumerate(rows[:-1], start=1):
        if row is None:
            raise GruppoError(
                f"{path}, line {number} is no JSON object with a step; each line needs one. "
                "Delete that line, or move the file away."
            )
    return [row for row in rows if row is not None]


def _line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """What JSON can hold: NaN becomes null, an infinity the text "inf" or "-inf", what is not data its text.

    Of an array that is longer than ``LONGEST_ARRAY`` only the shape.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if is_array(value):
        return _plain(value.tolist()) if math.prod(value.shape) <= LONGEST_ARRAY else described(value)
    if isinstance(value, Integral):
        return int(value)
    return _finite(float(value)) if isinstance(value, Real) else str(value)


def _scalar(value: Any) -> float | str | None:
    """A metric as JSON holds it; one-element tensors are read too."""
    return int(value) if isinstance(value, Integral) else _finite(float(value))


def _finite(value: float) -> float | str | None:
    return value if math.isfinite(value) else None if math.isnan(value) else str(value)


def _number(value: float | str | None) -> float:
    """The inverse of ``_finite``."""
    return math.nan if value is None else float(value) if isinstance(value, str) else value


def _text(row: Row, name: str) -> str:
    value = row.get(name, "")
    return "nan" if value is None else str(value)


def _csv_text(columns: Sequence[str], rows: Sequence[Row]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([_text(row, name) for name in columns] for row in rows)
    return text.getvalue()
