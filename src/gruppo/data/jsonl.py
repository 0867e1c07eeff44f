"""Rows from a JSON Lines file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gruppo.data.errors import nearest
from gruppo.types import DataError


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """One row per line, each a JSON object, UTF-8. Blank lines are skipped."""
    path = Path(path)
    rows = [_row(line, number, path) for number, line in enumerate(_lines(path), start=1) if line.strip()]
    if not rows:
        raise DataError(f'{path} is empty; it needs one JSON object per line, such as {{"prompt": "What is 2 + 2?"}}.')
    return rows


def _lines(path: Path) -> list[bytes]:
    try:
        # Bytes: text splitting would also cut at the Unicode line separators that JSON strings may hold.
        return path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except FileNotFoundError:
        raise DataError(f"there is no file {path}{_neighbour(path)}. Check the path.") from None
    except OSError as problem:
        raise DataError(f"{path} cannot be read: {problem.strerror}. It needs a readable JSON Lines file.") from problem


def _neighbour(path: Path) -> str:
    beside = path.parent.glob("*.jsonl") if path.parent.is_dir() else ()
    return nearest(path.name, [other.name for other in beside])


def _row(line: bytes, number: int, path: Path) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise DataError(f"line {number} of {path} is not UTF-8; save the file as UTF-8.") from None
    except (json.JSONDecodeError, RecursionError) as problem:
        raise DataError(
            f"line {number} of {path} is not JSON ({problem}); it needs one JSON object per line."
        ) from None
    if not isinstance(row, dict):
        raise DataError(
            f'line {number} of {path} is a {type(row).__name__}; it needs an object such as {{"prompt": ...}}.'
        )
    return row
