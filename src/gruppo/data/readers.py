"""Rows from JSON Lines files and from Hugging Face data sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gruppo.data.source import nearest
from gruppo.loading import import_extra
from gruppo.types import DataError

FILE_KINDS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """One row per line, each a JSON object, UTF-8. Blank lines are skipped."""
    path = Path(path)
    try:
        # bytes: splitting text would also cut at the Unicode line separators that JSON strings may hold
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except FileNotFoundError:
        siblings = path.parent.glob("*.jsonl") if path.parent.is_dir() else ()
        raise DataError(
            f"there is no file {path}{nearest(path.name, [other.name for other in siblings])}. Check the path."
        ) from None
    except OSError as problem:
        raise DataError(f"{path} cannot be read: {problem.strerror}. It needs a readable JSON Lines file.") from problem
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError:
            raise DataError(f"{where} is not UTF-8; save the file as UTF-8.") from None
        except (json.JSONDecodeError, RecursionError) as problem:
            raise DataError(f"{where} is not JSON ({problem}); it needs one JSON object per line.") from None
        if not isinstance(row, dict):
            raise DataError(f'{where} is a {type(row).__name__}; it needs an object such as {{"prompt": ...}}.')
        rows.append(row)
    if not rows:
        raise DataError(f'{path} is empty; it needs one JSON object per line, such as {{"prompt": "What is 2 + 2?"}}.')
    return rows


def read_dataset(name: str | Path, config: str | None = None, split: str = "train") -> list[dict[str, Any]]:
    """All rows of one split.

    ``name``: a hub name, a folder (written by ``save_to_disk``, or with data files), or a parquet, CSV or JSON file.
    """
    datasets = import_extra("datasets", "data", f"reading {name}")
    path = Path(name)
    if path.suffix in FILE_KINDS and not path.is_file():
        raise DataError(f"there is no file {path}. Check the path.")
    if path.is_file() and path.suffix not in FILE_KINDS:
        raise DataError(f"{path} has an unknown file type; it needs one of {', '.join(FILE_KINDS)}.")
    try:
        if path.is_file():
            files = {split.partition("[")[0]: str(path)}
            return list(datasets.load_dataset(FILE_KINDS[path.suffix], data_files=files, split=split))
        if not (path / "state.json").is_file() and not (path / "dataset_dict.json").is_file():
            return list(datasets.load_dataset(str(name), config, split=split))
        saved = datasets.load_from_disk(str(path))  # one data set, or a dict of splits
        if isinstance(saved, dict) and split not in saved:
            raise DataError(f"{path} has no split {split!r}; its splits are {', '.join(saved)}.")
        return list(saved[split] if isinstance(saved, dict) else saved)
    except DataError:
        raise
    except Exception as problem:  # datasets raises a dozen kinds, its own and those of pyarrow, fsspec and httpx
        message = " ".join(str(problem).splitlines()[:2]) or "no message"  # the second lists the configurations
        raise DataError(
            f"split {split!r} of {name} cannot be read ({type(problem).__name__}: {message}). "
            "It needs a data set of the Hugging Face hub that this machine can reach, or a local folder or file; "
            "check the name, the configuration (OWNER/NAME:CONFIG:SPLIT), the split and the network."
        ) from problem
