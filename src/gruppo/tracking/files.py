"""The files of a run that are always written: metrics as JSON lines and CSV, samples as JSON lines.

``metrics.jsonl`` is the record, and ``metrics.csv`` a copy for spreadsheets that is written when
the run ends. Every line is flushed at once, so that a killed run loses at most the line it was
writing.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import logging
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from gruppo.integrity import explained_failures, json_lines, open_file, parse_json, replace_file
from gruppo.protocols import Tracker
from gruppo.tracking.formatting import ARRAYS, as_text, shape_text
from gruppo.types import GruppoError

log = logging.getLogger("gruppo")

MAX_COMPLETIONS_BYTES = 10e9
"""Size of completions/ beyond which only shown samples are kept."""
MAX_TEXT = 1 << 30
"""Bytes of a step of completions; a hostile file may unpack to any number."""
MAX_ARRAY = 16
"""Numbers of an array that are written out; of a larger one only the shape."""


# --- JSON lines -----------------------------------------------------------------------------------


def append_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with (
        explained_failures(path),
        path.open("a", encoding="utf-8", errors="backslashreplace", newline="\n") as file,
    ):
        file.write(_json_text(rows))


def cut_lines(path: Path, step: int | None = None) -> None:
    """Delete the rows after ``step``, and a last line torn by a crash. Without a file, write an
    empty one."""
    replace_file(
        path, _json_text([row for row in read_lines(path) if step is None or row["step"] <= step])
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a file of JSON lines, without a torn last line; none if there is no file."""
    rows, odd = list[dict[str, Any]](), 0
    for number, line in enumerate(json_lines(path) if path.exists() else (), start=1):
        if odd:
            raise GruppoError(f"""{path}, line {odd} is not a JSON object with a step. Delete that
                line, or move the file away.""")
        odd = number  # which the last line may be
        with suppress(ValueError):  # neither JSON nor UTF-8, or beyond its limits
            if isinstance(row := parse_json(line), dict) and "step" in row:
                rows.append(row)
                odd = 0
    return rows


def _json_text(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)


def to_json(value: Any) -> Any:
    """The value as JSON holds it: NaN is null, infinities are strings, a long array is its shape,
    other objects a string."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Mapping):
        return {str(name): to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, ARRAYS):
        return to_json(value.tolist()) if math.prod(value.shape) <= MAX_ARRAY else shape_text(value)
    if isinstance(value, Integral):
        return int(value)
    if not isinstance(value, Real):
        return as_text(value) if isinstance(value, bytes) else str(value)
    if math.isnan(value):
        return None
    return float(value) if math.isfinite(value) else str(float(value))


class CompletionFiles:
    """Every completion of a run, a file for each step: ``completions/step_000001.jsonl.gz``.

    They hold one JSON object per row, as pandas (``read_json(file, lines=True)``) and ``datasets``
    (``load_dataset("json", data_files="completions/*.gz")``) read them. Past ``max_bytes`` in all
    nothing more is written, with one warning.
    """

    def __init__(self, run_dir: Path, max_bytes: float = MAX_COMPLETIONS_BYTES) -> None:
        self.folder, self.max_bytes = run_dir / "completions", max_bytes
        self._size, self._is_full = 0, False

    def cut(self, step: int) -> None:
        """Delete the files after ``step``."""
        for path in completion_files(self.folder):
            if step_of(path) > step:
                path.unlink()
            else:
                self._size += path.stat().st_size

    def append(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if self._is_full or not rows:
            return
        text = _json_text([{"step": step} | to_json(row) for row in rows])
        # half of a surrogate pair becomes "?": Arrow, which datasets uses, refuses a file with one
        data = gzip.compress(text.encode("utf-8", "replace"), mtime=0)
        self._size += len(data)
        if self._size > self.max_bytes:
            self._is_full = True
            text = "completions/ has reached %g GB: from step %d on only shown samples are kept."
            return log.warning(text, self.max_bytes / 1e9, step)
        replace_file(self.folder / f"step_{step:06d}.jsonl.gz", data, is_synced=False)


def completion_files(folder: Path) -> list[Path]:
    """Files of completions in the order of their steps; those of other names are the user's."""
    return sorted(filter(step_of, folder.glob("step_*.jsonl.gz")), key=step_of)


def step_of(path: Path) -> int:
    """The step of a file of completions; 0 for another file."""
    match = re.fullmatch(r"step_(\d{1,15})\.jsonl\.gz", path.name)
    return int(match[1]) if match else 0


def read_completions(path: Path) -> list[bytes]:
    """Lines of a file of completions; none of a damaged one, or beyond ``MAX_TEXT``."""
    member = zlib.decompressobj(wbits=31)  # 31: the format of gzip
    with suppress(zlib.error), open_file(path) as file:
        text = member.decompress(file.read(), MAX_TEXT)
        return text.splitlines(keepends=True) if member.eof else []
    return []


# --- metrics and samples --------------------------------------------------------------------------


class MetricsFile(Tracker):
    """Tracker that writes ``metrics.jsonl``, one object per step, and its copy ``metrics.csv``.

    NaN is null in the JSON and ``nan`` in the CSV, where an empty cell means that the step did not
    log the metric. Logging a step again adds to its row. :func:`read_metrics` returns what was
    logged, to the bit.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path, self._csv = run_dir / "metrics.jsonl", run_dir / "metrics.csv"
        self._last: dict[str, Any] = {}
        self.cut()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row: dict[str, Any] = {"step": step}  # integers stay integers: a count is 3, not 3.0
        for name, value in metrics.items():
            row[name] = int(value) if isinstance(value, Integral) else to_json(float(value))
        if step == self._last.get("step"):
            row = self._last | row
            cut_lines(self._path, step - 1)
        append_lines(self._path, [row])
        self._last = row

    def cut(self, step: int | None = None) -> None:
        """Keep the steps up to ``step``, before a resumed run continues."""
        cut_lines(self._path, step)
        self._last = (read_lines(self._path) or [{}])[-1]

    def close(self) -> None:
        """Write ``metrics.csv``."""
        if not self._path.exists():  # the folder was deleted or moved
            return
        rows = read_lines(self._path)
        text = io.StringIO()
        columns = dict.fromkeys(["step", *(name for row in rows for name in row)])
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({n: "nan" if value is None else value for n, value in row.items()})
        replace_file(self._csv, text.getvalue())


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """One mapping per logged step, with null as NaN; empty if there is no file."""
    rows = read_lines(run_dir / "metrics.jsonl")
    return [
        {name: math.nan if value is None else float(value) for name, value in row.items()}
        for row in rows
    ]
