"""Rows with a prompt column, from JSON Lines files, Hugging Face data sets or Python lists, as a prompt source."""

from __future__ import annotations

import ast
import copy
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gruppo.data.source import IndexedSource, nearest, prompt_key, split_by_hash
from gruppo.integrity import MAX_BYTES, open_file, parse_json
from gruppo.loading import import_extra
from gruppo.types import DataError, Prompt

FILE_KINDS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}
TARGET_COLUMNS = ("answer", "target", "solution", "label")
PROMPT_LIKE = ("question", "problem", "instruction", "query", "text", "input", "messages")
AS_TEXT = re.compile(
    r"\s*(?:(?:array|list)\()?\s*(?P<messages>[\[{].*[\]}])\s*(?:,\s*dtype=\w+\s*)?\)?\s*",
    re.DOTALL,
)
"""A text that may be a conversation converted to a string, by str, json.dumps or a NumPy array's repr."""
MESSAGES = 'it needs a text or a list of {"role": ..., "content": ...} messages with texts in both.'


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

    ``target_column`` defaults to the first of answer, target, solution and label that exists. ``meta`` holds every
    column, those of prompt and target included, so that reward functions find them under the names of the data set.
    The held-out split goes by the content of the prompt, so duplicates fall on one side.
    """
    if not rows:
        raise DataError(f"{name} has no rows; it needs at least one prompt to learn from.")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise DataError(
                f"row {number} of {name} is of type {type(row).__name__}; it needs a dict of columns."
            )
    columns = tuple(dict.fromkeys(column for row in rows for column in row))
    for column in (prompt_column, target_column):
        if column is not None and column not in columns:
            usual = next(
                (
                    f"; the nearest is {c!r}"
                    for c in PROMPT_LIKE
                    if c in columns and column == "prompt"
                ),
                "",
            )
            raise DataError(
                f"{name} has no column {column!r}; its columns are {', '.join(map(repr, columns))}{nearest(column, columns) or usual}",
                advice="Name the right one with $prompts.column or $prompts.target_column",
            )
    target_column = target_column or next((c for c in TARGET_COLUMNS if c in columns), None)
    inputs = [
        checked_inputs(row.get(prompt_column), f"row {n} of {name}")
        for n, row in enumerate(rows, start=1)
    ]

    def prompt_at(index: int, draw: int) -> Prompt:
        row, meta = rows[index], {column: rows[index].get(column) for column in columns}
        # copied twice: a reward that edits its column must edit neither the prompt nor the data
        meta[prompt_column] = copy.deepcopy(inputs[index])
        target = None if target_column is None else row.get(target_column)
        prompt_id = index if row.get("id") is None else row["id"]
        return Prompt(str(prompt_id), copy.deepcopy(inputs[index]), target, meta, draw)

    train, held_out = split_by_hash([prompt_key(x) for x in inputs], held_out_fraction, name)
    digest = hashlib.sha256()
    for row in rows:
        # some objects print their memory address, which differs from process to process
        text = json.dumps(
            row, default=lambda x: f"{type(x).__name__}:{re.sub(r' at 0x[0-9a-fA-F]+', '', str(x))}"
        )
        digest.update(text.encode() + b"\n")
    identity, items = (
        {"prompt_column": prompt_column, "held_out_rows": len(held_out)},
        range(len(rows)),
    )
    return IndexedSource(
        name,
        seed,
        train,
        held_out,
        prompt_at,
        columns,
        digest.hexdigest(),
        identity,
        all_items=items,
    )


def is_stringified(text: str) -> bool:
    """Whether a text as a whole is a conversation that was converted to a string."""
    if (match := AS_TEXT.fullmatch(text)) is None:
        return False
    for read in (parse_json, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            value = read(match["messages"])
            messages = value if isinstance(value, list | tuple) else [value]
            return bool(messages) and all(
                isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages
            )
    return False


def checked_inputs(inputs: Any, where: str) -> str | list[dict[str, Any]]:
    """The prompt, a text or messages; an error for anything else, which names the row by ``where``."""
    if isinstance(inputs, str) and is_stringified(inputs):
        raise DataError(f"""the prompt in {where} is a conversation that was converted to a string, {inputs[:24]!r}...;
            it needs the list of messages. Convert the column back (ast.literal_eval, or json.loads for JSON) and save
            it as JSON Lines or Parquet; CSV holds no lists.""")
    if isinstance(inputs, str) and inputs:
        texts = {f"the prompt in {where}": inputs}
    elif not isinstance(inputs, list) or not inputs:
        problem = (
            "missing"
            if inputs is None
            else "empty"
            if inputs in ("", [])
            else f"of type {type(inputs).__name__}"
        )
        raise DataError(f"the prompt in {where} is {problem}; {MESSAGES}")
    else:
        texts = {}
        # Arrow gives each message the fields of all, and templates take a field that is there for one that is used
        inputs = list(inputs)
        for number, message in enumerate(inputs, 1):
            place = f"message {number} of the prompt in {where}"
            if not isinstance(message, Mapping):
                raise DataError(f"{place} is of type {type(message).__name__}; {MESSAGES}")
            message = {
                k: v for k, v in message.items() if v is not None or k in ("role", "content")
            }
            if message.get("tool_calls") and message.get("content") is None:
                message["content"] = ""
            inputs[number - 1] = message
            if not all(isinstance(message.get(key), str) for key in ("role", "content")):
                fields = (
                    ", ".join(f"{key} ({type(value).__name__})" for key, value in message.items())
                    or "no fields"
                )
                raise DataError(f"{place} has {fields}; {MESSAGES}")
            texts[place] = message["content"]
    for place, text in texts.items():
        try:
            text.encode()
        except (
            UnicodeEncodeError
        ) as problem:  # half a surrogate pair: a valid JSON string that no tokenizer accepts
            half = (
                f"half a character (\\u{ord(text[problem.start]):04x}) at position {problem.start}"
            )
            raise DataError(
                f"{place} has {half}; it needs whole Unicode characters. Remove it."
            ) from None
    return inputs


# --- readers ----------------------------------------------------------------------------------------------------------


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """One row per line, each a JSON object, UTF-8. Blank lines are skipped."""
    path = Path(path)
    try:
        # bytes: splitting text would also cut at the Unicode line separators that JSON strings may hold
        with open_file(path) as file:
            lines = [*iter(lambda: file.readline(MAX_BYTES + 1), b"")]
    except FileNotFoundError:
        hint = nearest(
            path.name, [other.name for other in path.parent.glob("*.jsonl")]
        )  # none without the folder
        raise DataError(f"there is no file {path}{hint}. Check the path.") from None
    except OSError as problem:
        raise DataError(
            f"{path} cannot be read: {problem.strerror}. It needs a readable JSON Lines file."
        ) from problem
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            row = parse_json(line.decode("utf-8-sig" if number == 1 else "utf-8"))
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
        rows.append(row)
    if not rows:
        raise DataError(
            f'{path} is empty; it needs one JSON object per line, such as {{"prompt": "What is 2 + 2?"}}.'
        )
    return rows


def read_dataset(
    name: str | Path, config: str | None = None, split: str = "train"
) -> list[dict[str, Any]]:
    """All rows of one split.

    ``name``: a hub name, a folder (written by ``save_to_disk``, or with data files), or a parquet, CSV or JSON file.
    """
    datasets = import_extra("datasets", "data", f"reading {name}")
    path = Path(name)
    if path.suffix in FILE_KINDS and not path.is_file():
        raise DataError(f"there is no file {path}. Check the path.")
    if path.is_file() and path.suffix not in FILE_KINDS:
        raise DataError(
            f"{path} has an unknown file type; it needs one of {', '.join(FILE_KINDS)}."
        )
    try:
        if path.is_file():
            files = {split.partition("[")[0]: str(path)}
            return list(
                datasets.load_dataset(FILE_KINDS[path.suffix], data_files=files, split=split)
            )
        if not (path / "state.json").is_file() and not (path / "dataset_dict.json").is_file():
            return list(datasets.load_dataset(str(name), config, split=split))
        saved = datasets.load_from_disk(str(path))  # one data set, or a dict of splits
        if isinstance(saved, dict) and split not in saved:
            raise DataError(f"{path} has no split {split!r}; its splits are {', '.join(saved)}.")
        return list(saved[split] if isinstance(saved, dict) else saved)
    except DataError:
        raise
    except (
        Exception
    ) as problem:  # datasets raises a dozen kinds, its own and those of pyarrow, fsspec and httpx
        message = (
            " ".join(str(problem).splitlines()[:2]) or "no message"
        )  # the second lists the configurations
        raise DataError(f"""split {split!r} of {name} cannot be read ({type(problem).__name__}: {message}). It needs a
            data set of the Hugging Face hub that this machine can reach, or a local folder or file; check the name, the
            configuration (OWNER/NAME:CONFIG:SPLIT), the split and the network.""") from problem
