"""What is asked for with each image of a folder: captions from a table or from files beside them, or classes."""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gruppo.data.errors import nearest
from gruppo.data.jsonl import read_jsonl
from gruppo.types import DataError

log = logging.getLogger("gruppo")

KINDS = (".png", ".jpg", ".jpeg", ".webp")
TABLES = ("captions.jsonl", "metadata.jsonl", "metadata.csv")
FILE_COLUMNS, CAPTION_COLUMNS = ("file_name", "file", "image", "path"), ("caption", "text", "prompt")


@dataclass(frozen=True)
class Entry:
    """One image file and what is asked for."""

    file: str
    """Its path below the folder, with /."""
    inputs: str | int
    id: str
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What is held out goes by this: the caption, else the file."""
        return self.inputs if self.inputs and isinstance(self.inputs, str) else self.file


def entries_of(folder: Path) -> list[Entry]:
    """Every image of a folder with what is asked for, by name."""
    if not folder.is_dir():
        beside = [other.name for other in folder.parent.glob("*/")] if folder.parent.is_dir() else []
        raise DataError(f"there is no folder {folder}{nearest(folder.name, beside)}. Check the path.")
    files = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.suffix.lower() in KINDS and path.is_file() and not path.name.startswith(".")
    )
    if not files:
        raise DataError(f"{folder} holds no image; it needs {', '.join(KINDS)} files, there or in its subfolders.")
    table = next((folder / name for name in TABLES if (folder / name).is_file()), None)
    rows = _rows_of(table, folder) if table else {file: row for file in files if (row := _text_beside(folder / file))}
    return _captioned(files, rows, folder) if rows else list(_classes(files))


def _captioned(files: list[str], rows: Mapping[str, dict[str, Any]], folder: Path) -> list[Entry]:
    without = [file for file in files if file not in rows]
    if without:
        log.warning(
            "left out: %d of %d images of %s have no caption, %s first.", len(without), len(files), folder, without[0]
        )
    kept = [file for file in files if file in rows]
    return [Entry(file, rows[file]["caption"], file, {"file": file} | rows[file]) for file in kept]


def _classes(files: list[str]) -> Iterator[Entry]:
    """The folder of a file is its class; with all files in one, there are no classes."""
    names = sorted({file.rpartition("/")[0] for file in files})
    for file in files:
        name = file.rpartition("/")[0]
        if len(names) == 1:
            yield Entry(file, "", file, {"file": file})
        else:
            label = names.index(name)
            yield Entry(file, label, name or ".", {"file": file, "label": label, "class": name})


def _text_beside(image: Path) -> dict[str, Any] | None:
    path = image.with_suffix(".txt")
    if not path.is_file():
        return None
    try:
        text = path.read_text(encoding="utf-8-sig").strip()
    except UnicodeDecodeError:
        raise DataError(f"the caption {path} is not UTF-8; save the file as UTF-8.") from None
    return {"caption": text} if text else None


def _rows_of(table: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """By file: the caption under that name, and every further column."""
    rows = _csv(table) if table.suffix == ".csv" else read_jsonl(table)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    file_column, caption_column = (
        _column(columns, names, what, table) for names, what in ((FILE_COLUMNS, "file"), (CAPTION_COLUMNS, "caption"))
    )
    found: dict[str, dict[str, Any]] = {}
    for number, row in enumerate(rows, start=1):
        file, caption = row.get(file_column), row.get(caption_column)
        where = f"row {number} of {table}"
        if not isinstance(file, str) or not (folder / file).is_file():
            raise DataError(f"{where} names the image {file!r}, which is not there. Check the column {file_column!r}.")
        if caption is not None and not isinstance(caption, str):
            raise DataError(f"the caption in {where} is of type {type(caption).__name__}; it needs a text.")
        if caption and caption.strip():
            rest = {column: row.get(column) for column in columns if column != file_column}
            found[Path(file).as_posix()] = rest | {"caption": caption.strip()}
    if not found:
        raise DataError(f"{table} holds no caption; it needs a text in the column {caption_column!r}.")
    return found


def _column(columns: list[str], names: tuple[str, ...], what: str, table: Path) -> str:
    name = next((name for name in names if name in columns), None)
    if name is None:
        raise DataError(
            f"{table} has the columns {', '.join(map(repr, columns)) or 'none'}; the {what} is looked for in "
            f"{', '.join(names)}. Name one of its columns so."
        )
    return name


def _csv(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as problem:
        raise DataError(f"{path} cannot be read ({problem}); it needs comma-separated values in UTF-8.") from problem
