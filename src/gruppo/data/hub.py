"""Rows from a Hugging Face data set: a hub name, or a local folder or file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gruppo.loading import import_extra
from gruppo.types import DataError

FILE_KINDS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}


def read_dataset(name: str | Path, config: str | None = None, split: str = "train") -> list[dict[str, Any]]:
    """All rows of one split.

    ``name``: a hub name, a folder (written by ``save_to_disk``, or of data files), or a parquet, CSV or JSON file.
    """
    datasets = import_extra("datasets", "data", f"reading {name}")
    path = Path(name)
    if path.suffix in FILE_KINDS and not path.is_file():
        raise DataError(f"there is no file {path}. Check the path.")
    try:
        return list(_load(datasets, path, str(name), config, split))
    except DataError:
        raise
    except Exception as problem:  # datasets raises a dozen kinds, its own and those of pyarrow, fsspec and httpx
        message = " ".join(str(problem).splitlines()[:2]) or "no message"  # the second lists the configurations
        raise DataError(
            f"split {split!r} of {name} cannot be read ({type(problem).__name__}: {message}). "
            "It needs a data set of the Hugging Face hub that this machine can reach, or a local folder or file; "
            "check the name, the configuration (OWNER/NAME:CONFIG:SPLIT), the split and the network."
        ) from problem


def _load(datasets: Any, path: Path, name: str, config: str | None, split: str) -> Any:
    if path.is_file():
        if path.suffix not in FILE_KINDS:
            raise DataError(f"{path} is of no known kind; it needs one of {', '.join(FILE_KINDS)}.")
        files = {split.partition("[")[0]: str(path)}
        return datasets.load_dataset(FILE_KINDS[path.suffix], data_files=files, split=split)
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return _saved(datasets.load_from_disk(str(path)), path, split)
    return datasets.load_dataset(name, config, split=split)


def _saved(loaded: Any, path: Path, split: str) -> Any:
    """What ``save_to_disk`` wrote: one data set, or a dict of splits."""
    if not isinstance(loaded, dict):
        return loaded
    if split not in loaded:
        raise DataError(f"{path} has no split {split!r}; its splits are {', '.join(loaded)}.")
    return loaded[split]
