"""Opens data of every kind as a prompt source."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

from gruppo.data.arithmetic import arithmetic
from gruppo.data.digits import labelled_images, load_digits
from gruppo.data.images import image_folder
from gruppo.data.reasoning_gym import reasoning_gym
from gruppo.data.restoration import open_restoration
from gruppo.data.rows import read_rows, row_source
from gruppo.data.source import IndexedSource, SourceWrapper
from gruppo.loading import did_you_mean, load_object
from gruppo.tasksets import is_taskset, rows_of_taskset
from gruppo.types import DataError

FORMS = (
    "Data is one of: file.py:function; arithmetic or arithmetic:LOW:HIGH; reasoning_gym:TASK; "
    "verifiers:NAME or "
    "verifiers:NAME:key=value; digits; images:FOLDER or "
    "images:FOLDER:SIZE; photos:noise=25; degrade:FOLDER:blur=1-2,noise=10-50; "
    "pairs:DEGRADED:CLEAN; "
    "the path of a .jsonl, .parquet, .csv or .json file or of a data "
    "set folder; a hub "
    "name OWNER/NAME, OWNER/NAME:SPLIT or OWNER/NAME:CONFIG:SPLIT; in Python also a list of texts "
    "or dicts, a Hugging "
    "Face Dataset, or an object with take, state_dict and load_state_dict."
)


def open_arithmetic(rest: str, *, name: str, **options: Any) -> IndexedSource:
    """Source of ``arithmetic:LOW:HIGH`` or ``arithmetic:LOW:HIGH:natural``."""
    match = re.fullmatch(r"(-?\d+):(-?\d+)(:natural)?", rest or "0:20")
    if match is None:
        raise DataError(f"""cannot read the range of {name!r}; it needs two integers, as in
            arithmetic:0:99, or arithmetic:0:99:natural for differences of 0 and above.""")
    low, high, natural = match.groups()
    return arithmetic(int(low), int(high), allow_negative=natural is None, **options)


def open_images(rest: str, *, name: str, **options: Any) -> IndexedSource:
    """Source of ``images:FOLDER`` or ``images:FOLDER:SIZE``."""
    match = re.fullmatch(r"(.+?)(?::([1-9]\d*))?", rest)
    if match is None:
        raise DataError(f"cannot read data={name!r}; write images:FOLDER or images:FOLDER:64.")
    folder, size = match.groups()
    return image_folder(folder, size=int(size) if size else None, **options)


OPENERS: dict[str, Callable[..., IndexedSource]] = {
    "arithmetic": open_arithmetic,
    "reasoning_gym": lambda task, *, name, **options: reasoning_gym(task, **options),
    "digits": lambda rest, **options: labelled_images(*load_digits(), **options),
    "images": open_images,
    "photos": open_restoration,
    "degrade": open_restoration,
    "pairs": open_restoration,
}
"""By the word before the colon: called with the rest, ``name`` (the whole), ``seed`` and
``held_out_fraction``."""


def is_function_name(data: str) -> bool:
    """Whether data names a function, file.py:function, that returns a source or rows."""
    return data.rpartition(":")[0].endswith(".py")  # images:FOLDER:64 has a colon and slashes too


def is_custom_source(data: Any) -> bool:
    """Whether data is an object with the required members of ``gruppo.protocols.PromptSource``."""
    members = ("take", "state_dict", "load_state_dict")
    is_dataset = hasattr(data, "column_names")  # Hugging Face's IterableDataset has all of them
    return not is_dataset and all(callable(getattr(data, member, None)) for member in members)


def open_source(
    data: Any,
    *,
    seed: int,
    prompt_column: str = "prompt",
    target_column: str | None = None,
    held_out_fraction: float = 0.1,
) -> Any:
    """The prompt source named by ``data``, or made of it.

    A user's own source comes back in a ``SourceWrapper``, with neutral values for the optional
    members that it lacks.
    """
    if isinstance(data, str) and is_function_name(data):
        data = load_object(data)()
    kind, _, rest = data.partition(":") if isinstance(data, str) else ("", "", "")
    source: Any
    if isinstance(data, IndexedSource | SourceWrapper):
        source = data
    elif is_custom_source(data):
        source = SourceWrapper(data)
    elif kind in OPENERS:
        source = OPENERS[kind](rest, name=data, seed=seed, held_out_fraction=held_out_fraction)
    else:
        source = row_source(
            rows_of(data, prompt_column),
            seed=seed,
            prompt_column=prompt_column,
            target_column=target_column,
            held_out_fraction=held_out_fraction,
            name=str(data) if isinstance(data, str | os.PathLike) else f"the {type(data).__name__}",
        )
    return source


def rows_of(data: Any, prompt_column: str) -> list[Any]:
    """Rows of a taskset, a file, a folder, a data set of the hub, or a Python object."""
    if isinstance(data, str) and is_taskset(data):
        return rows_of_taskset(data.removeprefix("verifiers:"))
    if isinstance(data, str | os.PathLike):
        rows = read_rows(data)
        if rows is None:
            hint = did_you_mean(str(data), OPENERS)
            raise DataError(f"data={str(data)!r} is no file, folder or known name.{hint} {FORMS}")
        return rows
    if hasattr(data, "column_names"):  # a Hugging Face data set, whose package is not imported
        if hasattr(data, "__len__") and not isinstance(data, dict):
            return list(data)
        raise DataError(f"""a {type(data).__name__} has several splits or no known length; it needs
            one split that fits in memory, such as data["train"] or
            Dataset.from_list(list(data.take(10000))).""")
    if isinstance(data, list | tuple):
        return [{prompt_column: row} if isinstance(row, str | list) else row for row in data]
    raise DataError(f"data is of type {type(data).__name__}, which cannot be read. {FORMS}")
