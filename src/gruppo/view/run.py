"""What the page shows of a run's folder, which may be incomplete, damaged, or still be written
to."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from gruppo.doctor import record
from gruppo.doctor.report import diagnose
from gruppo.integrity import check_links, open_file, read_json
from gruppo.loading import describe_error
from gruppo.tracking.files import completion_files, read_completions, read_metrics, step_of, to_json
from gruppo.tracking.images import PNG
from gruppo.tracking.panels import panels_of, stage_starts
from gruppo.tracking.samples import FOLDER
from gruppo.trainer.run_dir import check_is_run
from gruppo.types import GruppoError

CHUNK_BYTES = 4 << 20
"""Bytes of completions that are sent at once, in whole steps."""
WATCHED = (
    "config.json",
    "metrics.jsonl",
    "manifest.json",
    "samples.jsonl",
    "evaluations.json",
    "final",
)
"""Files whose changes change what is shown."""
DESCRIBE_FRAC = 0.05
"""Largest share of the time that is spent on describing a run while it trains on the same
machine."""
NEWEST = 10**15
"""A step after all others."""
_STEP = re.compile(rb'\{"step": ?(\d{1,15})\b')
_SHEET = re.compile(r"(step|eval)_\d+\.png")


class RunView:
    """A run's folder for the page. Nothing in the folder is changed, and no code that it names is
    imported."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self._lock, self._not_before = Lock(), 0.0
        self._stamp: tuple[tuple[int, int, int], ...] = ()
        self._state: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        """All but metrics and completions. ``version`` changes with it."""
        with self._lock:  # requests come in threads of their own
            paths = [self.path / name for name in WATCHED] + self.files()[-1:]
            stamp = tuple(map(_stamp, paths))
            began = time.monotonic()
            if not self._state or (stamp != self._stamp and began >= self._not_before):
                self._stamp, self._state = stamp, {"version": hash(stamp), **self._describe()}
                self._not_before = began + (time.monotonic() - began) / DESCRIBE_FRAC
            return self._state

    def _describe(self) -> dict[str, Any]:
        notices = list[str]()
        contents = {
            "config": self._content("config.json", {}, notices),
            "manifest": self._content("manifest.json", {}, notices),
            "evaluations": self._content("evaluations.json", [], notices),
        }
        rows, doctor = self._diagnosed(notices)
        files, sources = self.files(), list[str]()
        if not (self.path / "config.json").is_file():
            notices.append("The folder has no config.json: it is incomplete, or not of a run.")
        if not rows:
            notices.append("No step has been logged yet.")
        elif not files:
            notices.append("completions/ is empty, so only samples of the run are listed.")
        sources = [source for source in ("completions", "samples") if self.files(source)]
        sheets = [path.name for path in (self.path / FOLDER).glob("*.png")]
        panels = [vars(panel) | {"points": panel.points} for panel in panels_of(rows)]
        return contents | {
            "name": self.name,
            "path": str(self.path.absolute()),
            "last": max((row["step"] for row in rows), default=0),
            "written": max(_stamp(self.path / name)[0] for name in WATCHED[:2]) / 1e9,
            "is_complete": (self.path / "final").is_dir(),
            "sources": sources,
            # steps may have more digits than six
            "sheets": sorted(filter(_SHEET.fullmatch, sheets), key=lambda name: (len(name), name)),
            "starts": list(stage_starts(self.path, rows).items()),
            "panels": panels,
            "doctor": to_json(doctor),
            "notices": notices,
        }

    def _content(self, name: str, default: Any, notices: list[str]) -> Any:
        """A JSON file, or the default and a notice where it is damaged."""
        path = self.path / name
        try:
            content = to_json(read_json(path)) if path.exists() else default
            if type(content) is type(default):
                return content
            notices.append(f"{name} holds a {type(content).__name__}.")
        except (OSError, ValueError) as error:
            notices.append(f"{name} cannot be read: {error}.")
        return default

    def _diagnosed(self, notices: list[str]) -> tuple[Any, dict[str, Any]]:
        """Metrics by step, and the doctor's findings."""
        rows: Any = []
        try:
            rows = read_metrics(self.path)
            return rows, diagnose(record.read(self.path)).to_dict()
        except Exception as error:  # a damaged or older folder; the rest of the page is shown
            problem = describe_error(error)[0]
            notices += [] if rows else [problem]
            return rows, {"error": problem}

    def metrics(self, version: str = "", start: int = 0) -> tuple[bytes, str]:
        """Lines of metrics.jsonl from byte ``start``, and the file's version; all of them if it was
        replaced."""
        path = self.path / "metrics.jsonl"
        try:
            with open_file(path) as file:
                now = str(_stamp(file.fileno())[2])
                file.seek(start if now == version else 0)
                return file.read(), now
        except OSError:
            return b"", ""

    def files(self, source: str = "completions") -> list[Path]:
        """Files of rows in the order of their steps."""
        if source == "samples":
            path = self.path / "samples.jsonl"
            return [path] if _stamp(path)[1] else []
        return completion_files(self.path / "completions")

    def rows(self, source: str, before: int) -> tuple[bytes, int | None]:
        """JSON lines of whole steps before ``before``, and the first of these steps; None if there
        is none.

        They are the newest that ``CHUNK_BYTES`` holds, and at least one.
        """
        parts, size = list[bytes](), 0
        first: int | None = None
        for path in reversed(self.files(source)):
            if step_of(path) >= before:
                continue
            for step, text in reversed(_steps(path, _stamp(path))):
                if step >= before:
                    continue
                if first is not None and size + len(text) > CHUNK_BYTES:
                    return b"".join(reversed(parts)), first
                parts.append(text)
                first, size = step, size + len(text)
        return b"".join(reversed(parts)), first

    def image(self, name: str) -> bytes:
        """A sheet of images; GruppoError if there is none of this name in the folder, or if it is
        no PNG."""
        path = self.path / FOLDER / name
        if _SHEET.fullmatch(name) and path.is_file():  # the name comes from the browser
            data = path.read_bytes()
            if data.startswith(PNG):
                return data
        raise GruppoError(f"{self.name} has no image {name}.")


def open_runs(folders: Sequence[str]) -> list[RunView]:
    """Views of run folders, each named by its folder, or by its path where two folders have one
    name."""
    paths = [Path(folder) for folder in folders]
    if not paths:
        raise GruppoError("no run was given. Give one or more folders, such as runs/arithmetic-...")
    for path in paths:
        if not (path / "metrics.jsonl").is_file():  # half a run has something to show
            check_is_run(path)
        check_links(path)
    names = [path.absolute().name for path in paths]
    names = [
        name if names.count(name) == 1 else str(path)
        for path, name in zip(paths, names, strict=True)
    ]
    return list(map(RunView, paths, names))


def _stamp(path: Path | int) -> tuple[int, int, int]:
    """Time of the last change, size, and identity of a file; zeros if there is none."""
    try:
        status = os.stat(path)  # of a path or of an open file
        return status.st_mtime_ns, status.st_size, status.st_ino
    except OSError:
        return 0, 0, 0


@lru_cache(maxsize=4)
def _steps(path: Path, stamp: tuple[int, int, int]) -> list[tuple[int, bytes]]:
    """The lines of each step in a file, in order; lines that do not begin with a step are left
    out."""
    try:
        if path.suffix == ".gz":
            lines = read_completions(path)
        else:
            lines = path.read_bytes().splitlines(keepends=True)
    except OSError:
        return []
    by_step: dict[int, list[bytes]] = {}
    for line in lines:
        if match := _STEP.match(line):
            by_step.setdefault(int(match[1]), []).append(line)
    return [(step, b"".join(by_step[step])) for step in sorted(by_step)]
