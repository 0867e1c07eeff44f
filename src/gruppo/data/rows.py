"""Rows with a prompt column, from JSON Lines files, Hugging Face data sets or Python lists, as a
prompt source."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gruppo.data.source import IndexedSource, prompt_key, split_by_hash
from gruppo.integrity import MAX_BYTES, open_file, parse_json
from gruppo.loading import did_you_mean, import_extra
from gruppo.types import DataError, Prompt

FILE_KINDS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}
TARGET_COLUMNS = ("answer", "target", "solution", "label")
AS_TEXT = re.compile(r"\s*(?:array\()?\[?\s*\{\s*['\"](?:role|content)['\"]\s*:")
"""Start of a conversation that was converted to a string, by str, json.dumps or a NumPy array's
repr."""
HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?::(?:([^:\[\]]+):)?(.+))?")
MESSAGES = 'it needs a string or a list of {"role": ..., "content": ...} messages, strings both.'


def row_source(
    rows: Sequence[Mapping[str, Any]],
    *,
    seed: int,
    prompt_column: str = "prompt",
    target_column: str | None = None,
    held_out_fraction: float = 0.1,
    name: str = "the data",
) -> IndexedSource:
    """Stream of the rows, each once per epoch.

    ``target_column`` defaults to the first of answer, target, solution and label that exists.
    ``meta`` holds every column, those of prompt and target included, so that reward functions find
    them under the names of the data set. The held-out split goes by the content of the prompt, so
    duplicates fall on one side.
    """
    columns = _columns(rows, name, filter(None, (prompt_column, target_column)))
    target_column = target_column or next((c for c in TARGET_COLUMNS if c in columns), None)
    inputs = [
        checked_inputs(row.get(prompt_column), f"row {n} of {name}")
        for n, row in enumerate(rows, start=1)
    ]

    def prompt_at(index: int, draw: int) -> Prompt:
        row = rows[index]
        meta = {column: row.get(column) for column in columns}
        # copied twice: a reward that edits its column must edit neither the prompt nor the data
        meta[prompt_column] = copy.deepcopy(inputs[index])
        target = None if target_column is None else row.get(target_column)
        prompt_id = index if row.get("id") is None else row["id"]
        return Prompt(str(prompt_id), copy.deepcopy(inputs[index]), target, meta, draw)

    train, held_out = split_by_hash([prompt_key(x) for x in inputs], held_out_fraction, name)
    digest = hashlib.sha256(json.dumps([prompt_column, held_out]).encode())
    for row in rows:
        digest.update(json.dumps(row, default=_described).encode() + b"\n")
    source = IndexedSource(name, seed, train, held_out, prompt_at, columns, digest.hexdigest())
    source.all_items = range(len(rows))
    return source


def _columns(rows: Sequence[Any], name: str, required: Iterable[str]) -> tuple[str, ...]:
    """The columns of all rows; an error for rows that are not dicts, and required columns that none
    has."""
    if not rows:
        raise DataError(f"{name} has no rows; it needs at least one prompt to learn from.")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise DataError(
                f"row {number} of {name} is of type {type(row).__name__}; it needs a dict of "
                f"columns."
            )
    columns = tuple(dict.fromkeys(column for row in rows for column in row))
    for column in required:
        if column not in columns:
            raise DataError(
                f"{name} has no column {column!r}; its columns are {', '.join(map(repr, columns))}",
                advice=f"""Name the right one with $prompts.column or
                    $prompts.target_column.{did_you_mean(column, columns)}""",
            )
    return columns


def _described(value: object) -> str:
    # some objects print their memory address, which differs from process to process
    return f"{type(value).__name__}:{re.sub(r' at 0x[0-9a-fA-F]+', '', str(value))}"


def checked_inputs(inputs: Any, where: str) -> str | list[dict[str, Any]]:
    """The prompt, a string or messages; an error for anything else, which names the row by
    ``where``."""
    prompt = f"the prompt in {where}"
    if isinstance(inputs, str) and inputs:
        if AS_TEXT.match(inputs):
            raise DataError(f"""{prompt} is a conversation that was converted to a string,
                {inputs[:24]!r}...; {MESSAGES} Convert the column back (ast.literal_eval, or
                json.loads for JSON) and save it as JSON Lines or Parquet; CSV holds no lists.""")
        return whole_text(inputs, prompt)
    if not isinstance(inputs, list) or not inputs:
        kind = f"of type {type(inputs).__name__}" if inputs else "missing or empty"
        raise DataError(f"{prompt} is {kind}; {MESSAGES}")
    messages = []
    for number, message in enumerate(inputs, start=1):
        place = f"message {number} of {prompt}"
        if not isinstance(message, Mapping):
            raise DataError(f"{place} is of type {type(message).__name__}; {MESSAGES}")
        # Arrow gives each message the fields of all, and templates take a field that is there for
        # one that is used
        fields = {key: value for key, value in message.items() if value is not None}
        if fields.get("tool_calls"):
            fields.setdefault("content", "")
        if not all(isinstance(fields.get(key), str) for key in ("role", "content")):
            found = ", ".join(f"{key} ({type(value).__name__})" for key, value in message.items())
            raise DataError(f"{place} has {found or 'no fields'}; {MESSAGES}")
        whole_text(fields["content"], place)
        messages.append(fields)
    return messages


def whole_text(text: str, place: str) -> str:
    """The text; DataError for half a surrogate pair: a valid JSON string that no tokenizer
    accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise DataError(f"""{place} has half a character (\\u{ord(text[problem.start]):04x}) at
            position {problem.start}; it needs whole Unicode characters. Remove it.""") from None
    return text


# --- readers --------------------------------------------------------------------------------------


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """One row per line, each a JSON object, UTF-8. Blank lines are skipped."""
    path = Path(path)
    try:
        # bytes: splitting text would also cut at the Unicode line separators that JSON strings may
        # hold
        with open_file(path) as file:
            lines = [*iter(lambda: file.readline(MAX_BYTES + 1), b"")]
    except FileNotFoundError:
        others = [other.name for other in path.parent.glob("*.jsonl")]
        raise DataError(f"there is no file {path}.{did_you_mean(path.name, others)}") from None
    except OSError as problem:
        raise DataError(
            f"{path} cannot be read: {problem.strerror}. It needs a readable JSON Lines file."
        ) from problem
    rows = [
        _row_of(line.removeprefix(b"\xef\xbb\xbf"), f"line {number} of {path}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not rows:
        raise DataError(
            f"{path} is empty; it needs one JSON object per line, such as "
            f'{{"prompt": "What is 2 + 2?"}}.'
        )
    return rows


def _row_of(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = parse_json(line.decode())
    except UnicodeDecodeError:
        raise DataError(f"{where} is not UTF-8; save the file as UTF-8.") from None
    except ValueError as problem:
        raise DataError(
            f"{where} is not JSON ({problem}); it needs one JSON object per line."
        ) from None
    if not isinstance(row, dict):
        raise DataError(
            f'{where} is a {type(row).__name__}; it needs an object such as {{"prompt": ...}}.'
        )
    return row


def read_rows(data: str | os.PathLike[str]) -> list[dict[str, Any]] | None:
    """Rows of a file, a folder, or OWNER/NAME, OWNER/NAME:SPLIT, OWNER/NAME:CONFIG:SPLIT; None for
    another string."""
    path = Path(data)
    if path.suffix == ".jsonl":  # read by us: errors name the line, and no extra is needed
        return read_jsonl(path)
    if path.suffix in FILE_KINDS or (str(data) and path.exists()):
        return read_dataset(path)
    hub_name = HUB_NAME.fullmatch(str(data))
    return hub_name and read_dataset(hub_name[1], hub_name[2], hub_name[3] or "train")


def read_dataset(
    name: str | Path, config: str | None = None, split: str = "train"
) -> list[dict[str, Any]]:
    """All rows of one split.

    ``name``: a hub name, a folder (written by ``save_to_disk``, or with data files), or a parquet,
    CSV or JSON file.
    """
    datasets = import_extra("datasets", "data", f"reading {name}")
    path = Path(name)
    kind = FILE_KINDS.get(path.suffix)
    if kind and not path.is_file():
        raise DataError(f"there is no file {path}. Check the path.")
    if path.is_file() and not kind:
        raise DataError(f"{path} has an unknown file type; it needs {', '.join(FILE_KINDS)}.")
    try:
        if kind:
            files = {split.partition("[")[0]: str(path)}
            return list(datasets.load_dataset(kind, data_files=files, split=split))
        if any((path / file).is_file() for file in ("state.json", "dataset_dict.json")):
            saved = datasets.load_from_disk(str(path))
            return list(saved[split] if isinstance(saved, dict) else saved)
        return list(datasets.load_dataset(str(name), config, split=split))
    except Exception as problem:  # those of datasets, pyarrow, fsspec and httpx
        # the second line lists the configurations
        message = " ".join(str(problem).splitlines()[:2]) or "no message"
        raise DataError(f"""split {split!r} of {name} cannot be read ({type(problem).__name__}:
            {message}). It needs a data set of the Hugging Face hub that this machine can reach, or
            a local folder or file; check the name, the configuration (OWNER/NAME:CONFIG:SPLIT), the
            split and the network.""") from problem
