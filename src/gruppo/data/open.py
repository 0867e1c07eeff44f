"""One door to every kind of data."""

from __future__ import annotations

import os
import re
from collections.abc import Sized
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from gruppo.data.arithmetic import Arithmetic
from gruppo.data.curriculum import Curriculum
from gruppo.data.digits import digits
from gruppo.data.errors import nearest
from gruppo.data.gym import ReasoningGym
from gruppo.data.hub import FILE_KINDS, read_dataset
from gruppo.data.images import ImageFolder
from gruppo.data.jsonl import read_jsonl
from gruppo.data.lines import open_lines
from gruppo.data.restoration import open_pairs
from gruppo.data.rows import RowSource
from gruppo.protocols import PromptSource
from gruppo.types import DataError

FORMS = (
    "Data is one of: arithmetic or arithmetic:LOW:HIGH; reasoning_gym:TASK; digits; images:FOLDER or "
    "images:FOLDER:SIZE; photos:noise=25; degrade:FOLDER:blur=1-2,noise=10-50; pairs:DEGRADED:CLEAN; "
    "lines:blur=0.5-2,noise=10-40; the path of a .jsonl, .parquet, .csv or .json file or of a data set folder; a hub "
    "name OWNER/NAME, OWNER/NAME:SPLIT or OWNER/NAME:CONFIG:SPLIT; in Python also a list of texts or dicts, a Hugging "
    "Face Dataset, or an object with take, state_dict and load_state_dict."
)


KNOWN = ("arithmetic", "reasoning_gym", "digits", "images", "photos", "degrade", "pairs", "lines")


@runtime_checkable
class Source(PromptSource, Protocol):
    """A prompt source of the user's own."""


@runtime_checkable
class Table(Protocol):
    """A Hugging Face data set, recognised without importing the package."""

    @property
    def column_names(self) -> Any: ...

    def __iter__(self) -> Any: ...


def open_source(
    data: Any,
    *,
    seed: int,
    prompt_column: str = "prompt",
    target_column: str | None = None,
    held_out_fraction: float = 0.1,
    difficulty_column: str = "",
) -> PromptSource:
    """The prompt source that ``data`` names or is; one that is a source already comes back unchanged.

    With ``difficulty_column``, in a ``Curriculum``.
    """
    source = _opened(
        data,
        seed=seed,
        prompt_column=prompt_column,
        target_column=target_column,
        held_out_fraction=held_out_fraction,
    )
    return Curriculum(source, difficulty_column) if difficulty_column else source


def _opened(
    data: Any, *, seed: int, prompt_column: str, target_column: str | None, held_out_fraction: float
) -> PromptSource:
    if isinstance(data, Source) and not isinstance(data, Table):
        return data
    if isinstance(data, str) and (procedural := _procedural(data, seed, held_out_fraction)) is not None:
        return procedural
    rows, name = _named_rows(data) if isinstance(data, str | os.PathLike) else _given_rows(data, prompt_column)
    return RowSource(
        rows,
        seed=seed,
        prompt_column=prompt_column,
        target_column=target_column,
        held_out_fraction=held_out_fraction,
        name=name,
    )


def _procedural(data: str, seed: int, held_out_fraction: float) -> PromptSource | None:
    if (pairs := open_pairs(data, seed=seed, held_out_fraction=held_out_fraction)) is not None:
        return pairs
    if (lines := open_lines(data, seed=seed, held_out_fraction=held_out_fraction)) is not None:
        return lines
    kind, _, rest = data.partition(":")
    if kind == "reasoning_gym" and rest:
        return ReasoningGym(rest, seed=seed, held_out_fraction=held_out_fraction)
    if data == "digits":
        return digits(seed=seed, held_out_fraction=held_out_fraction)
    if kind == "images" and rest:
        folder, _, size = rest.rpartition(":") if re.search(r":\d+$", rest) else (rest, "", "")
        if size and int(size) < 1:
            raise DataError(f"data={data!r}: pictures of {size} pixels are none. Write images:{folder}:64.")
        return ImageFolder(folder, seed=seed, size=int(size) if size else None, held_out_fraction=held_out_fraction)
    if kind != "arithmetic":
        return None
    match = re.fullmatch(r"(-?\d+):(-?\d+)(:natural)?", rest or "0:20")
    if match is None:
        raise DataError(
            f"the range of {data!r} is not understood; it needs two whole numbers, as in arithmetic:0:99, or "
            "arithmetic:0:99:natural for differences of 0 and above."
        )
    low, high, is_natural = int(match[1]), int(match[2]), match[3] is not None
    return Arithmetic(low, high, seed=seed, held_out_fraction=held_out_fraction, allow_negative=not is_natural)


def _named_rows(data: str | os.PathLike[str]) -> tuple[list[Any], str]:
    path = Path(data)
    if path.suffix == ".jsonl":
        return read_jsonl(path), str(path)
    if str(data) and (path.exists() or path.suffix in FILE_KINDS):
        return read_dataset(path), str(path)
    hub_name = re.fullmatch(r"([\w.-]+/[\w.-]+)(?::(?:([^:\[\]]+):)?(.+))?", str(data))
    if hub_name is None:
        near = nearest(str(data), KNOWN)
        raise DataError(f"data={str(data)!r} is no file, folder or known name{near}. {FORMS}")
    return read_dataset(hub_name[1], hub_name[2], hub_name[3] or "train"), str(data)


def _given_rows(data: Any, prompt_column: str) -> tuple[list[Any], str]:
    if isinstance(data, Table) and not isinstance(data, dict) and isinstance(data, Sized):
        return list(data), "the data set"
    if isinstance(data, Table):
        raise DataError(
            f"a {type(data).__name__} has several splits or no known length; it needs one split that fits in memory, "
            'such as data["train"] or datasets.Dataset.from_list(list(data.take(10000))).'
        )
    if isinstance(data, list | tuple):
        return [{prompt_column: row} if isinstance(row, str | list) else row for row in data], "the list"
    raise DataError(f"data is of type {type(data).__name__}, which cannot be read. {FORMS}")
