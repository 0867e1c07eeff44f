"""Opens data of every kind as a prompt source."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from gruppo.data.arithmetic import arithmetic
from gruppo.data.degrade import parse_data_options
from gruppo.data.digits import labelled_images, load_digits
from gruppo.data.images import image_folder
from gruppo.data.lines import text_lines
from gruppo.data.reasoning_gym import reasoning_gym
from gruppo.data.restoration import open_pairs
from gruppo.data.rows import FILE_KINDS, read_dataset, read_jsonl, row_source
from gruppo.data.source import Curriculum, IndexedSource, SourceWrapper, nearest
from gruppo.loading import load_object
from gruppo.tasksets import is_taskset, rows_of_taskset
from gruppo.types import DataError

FORMS = (
    "Data is one of: file.py:function; arithmetic or arithmetic:LOW:HIGH; reasoning_gym:TASK; verifiers:NAME or "
    "verifiers:NAME:key=value; digits; images:FOLDER or "
    "images:FOLDER:SIZE; photos:noise=25; degrade:FOLDER:blur=1-2,noise=10-50; pairs:DEGRADED:CLEAN; "
    "lines:blur=0.5-2,noise=10-40; the path of a .jsonl, .parquet, .csv or .json file or of a data set folder; a hub "
    "name OWNER/NAME, OWNER/NAME:SPLIT or OWNER/NAME:CONFIG:SPLIT; in Python also a list of texts or dicts, a Hugging "
    "Face Dataset, or an object with take, state_dict and load_state_dict."
)
LINES = "lines:blur=0.5-2,noise=10-40. Options include count=4000, clean=no, set=1, height=24 and width=128"
KINDS = (
    "arithmetic",
    "reasoning_gym",
    "verifiers",
    "digits",
    "images",
    "photos",
    "degrade",
    "pairs",
    "lines",
)


def is_function_name(data: str) -> bool:
    """Whether data names a function, file.py:function, that returns a source or rows."""
    return data.rpartition(":")[0].endswith(".py")  # images:FOLDER:64 has a colon and slashes too


def is_custom_source(data: Any) -> bool:
    """Whether data is an object with the required members of ``gruppo.protocols.PromptSource``."""
    return all(
        callable(getattr(data, member, None))
        for member in ("take", "state_dict", "load_state_dict")
    )


def open_source(
    data: Any,
    *,
    seed: int,
    prompt_column: str = "prompt",
    target_column: str | None = None,
    held_out_fraction: float = 0.1,
    difficulty_column: str = "",
) -> Any:
    """The prompt source named by ``data``, or made of it.

    A user's own source comes back in a ``SourceWrapper``, with neutral values for the optional members that it lacks.
    ``difficulty_column`` puts the source in a ``Curriculum``.
    """
    options: dict[str, Any] = {"seed": seed, "held_out_fraction": held_out_fraction}
    if isinstance(data, str) and is_function_name(data):
        data = load_object(data)()
    source: Any = None
    kind, _, rest = data.partition(":") if isinstance(data, str) else ("", "", "")
    if isinstance(data, IndexedSource | SourceWrapper):
        source = data
    elif is_custom_source(data) and not hasattr(data, "column_names"):  # as an IterableDataset has
        source = SourceWrapper(data)
    elif kind == "reasoning_gym" and rest:
        source = reasoning_gym(rest, **options)
    elif kind == "digits" and data == kind:
        source = labelled_images(*load_digits(), name=data, **options)
    elif kind == "images" and rest:
        folder, _, size = rest.rpartition(":") if re.search(r":\d+$", rest) else (rest, "", "")
        if size and int(size) < 1:
            raise DataError(
                f"data={data!r}: images of {size} pixels are empty. Write images:{folder}:64."
            )
        source = image_folder(folder, size=int(size) if size else None, **options)
    elif kind == "arithmetic":
        if (match := re.fullmatch(r"(-?\d+):(-?\d+)(:natural)?", rest or "0:20")) is None:
            need = "two integers, as in arithmetic:0:99, or arithmetic:0:99:natural for differences of 0 and above"
            raise DataError(f"cannot read the range of {data!r}; it needs {need}.")
        source = arithmetic(
            int(match[1]), int(match[2]), allow_negative=match[3] is None, **options
        )
    elif kind == "lines":
        degradation, settings = parse_data_options(
            rest, data, ("count", "set", "height", "width"), ("clean",), LINES
        )
        if degradation is None:
            raise DataError(f"data={data!r} does not say how lines are degraded; write {LINES}.")
        number = settings.pop("set", 0)
        source = text_lines(degradation, name=data, number=number, **settings, **options)
    elif isinstance(data, str):
        source = open_pairs(data, **options)  # None for the names of rows
    if source is None:
        rows, options["name"] = _rows_of(data, prompt_column)
        source = row_source(
            rows, prompt_column=prompt_column, target_column=target_column, **options
        )
    return Curriculum(source, difficulty_column) if difficulty_column else source


def _rows_of(data: Any, prompt_column: str) -> tuple[list[Any], str]:
    """Rows of a file, a folder, a data set of the hub or a Python object, and their name in errors."""
    if isinstance(data, str) and is_taskset(data):
        return rows_of_taskset(data.removeprefix("verifiers:")), data
    if isinstance(data, str | os.PathLike):
        path = Path(data)
        if (
            path.suffix == ".jsonl"
        ):  # read by us: errors name the line, and the extra "data" is not needed
            return read_jsonl(path), str(path)
        if str(data) and (path.exists() or path.suffix in FILE_KINDS):
            return read_dataset(path), str(path)
        if (
            hub_name := re.fullmatch(r"([\w.-]+/[\w.-]+)(?::(?:([^:\[\]]+):)?(.+))?", str(data))
        ) is None:
            raise DataError(
                f"data={str(data)!r} is no file, folder or known name{nearest(str(data), KINDS)}. {FORMS}"
            )
        return read_dataset(hub_name[1], hub_name[2], hub_name[3] or "train"), str(data)
    if hasattr(
        data, "column_names"
    ):  # a Hugging Face data set, recognized without importing the package
        if hasattr(data, "__len__") and not isinstance(data, dict):
            return list(data), "the data set"
        need = 'one split that fits in memory, such as data["train"] or Dataset.from_list(list(data.take(10000)))'
        raise DataError(
            f"a {type(data).__name__} has several splits or no known length; it needs {need}."
        )
    if isinstance(data, list | tuple):
        return [
            {prompt_column: row} if isinstance(row, str | list) else row for row in data
        ], "the list"
    raise DataError(f"data is of type {type(data).__name__}, which cannot be read. {FORMS}")
