"""Prompts from rows: a list of dicts with a prompt column."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gruppo.data.source import IndexedSource, nearest, prompt_key, split_by_hash
from gruppo.types import DataError, Prompt

TARGET_COLUMNS = ("answer", "target", "solution", "label")
PROMPT_LIKE = ("question", "problem", "instruction", "query", "text", "input", "messages")
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
            raise DataError(f"row {number} of {name} is of type {type(row).__name__}; it needs a dict of columns.")
    rows = list(rows)
    columns = tuple(dict.fromkeys(column for row in rows for column in row))
    for column in (prompt_column, target_column):
        if column is None or column in columns:
            continue
        hint = nearest(column, columns)
        usual = next((c for c in PROMPT_LIKE if c in columns), None)
        if not hint and column == "prompt" and usual is not None:
            hint = f"; the nearest is {usual!r}"
        raise DataError(
            f"{name} has no column {column!r}; its columns are {', '.join(map(repr, columns))}{hint}. "
            "Name the right one with --prompts.column or --prompts.target-column."
        )
    target_column = target_column or next((c for c in TARGET_COLUMNS if c in columns), None)

    def inputs_of(index: int) -> str | list[dict[str, Any]]:
        return checked_inputs(rows[index].get(prompt_column), f"row {index + 1} of {name}")

    def prompt_at(index: int, draw: int) -> Prompt:
        row = rows[index]
        # inputs_of() copies each time: a reward that edits its column does not edit the prompt
        meta = {column: row.get(column) for column in columns} | {prompt_column: inputs_of(index)}
        target = None if target_column is None else row.get(target_column)
        prompt_id = index if row.get("id") is None else row["id"]
        return Prompt(str(prompt_id), inputs_of(index), target, meta, draw)

    indices = range(len(rows))
    train, held_out = split_by_hash([prompt_key(inputs_of(index)) for index in indices], held_out_fraction, name)
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, default=_stable_text).encode() + b"\n")
    return IndexedSource(
        name,
        seed,
        train,
        lambda: held_out,
        prompt_at,
        columns,
        digest.hexdigest(),
        {"prompt_column": prompt_column, "held_out_rows": len(held_out)},
        all_items=indices,
    )


def checked_inputs(inputs: Any, where: str) -> str | list[dict[str, Any]]:
    """The text, or a copy of the messages. Errors for anything else name the row by ``where``."""
    if isinstance(inputs, str) and inputs:
        texts = {f"the prompt in {where}": inputs}
    elif not isinstance(inputs, list) or not inputs:
        problem = "missing" if inputs is None else "empty" if inputs in ("", []) else f"of type {type(inputs).__name__}"
        raise DataError(f"the prompt in {where} is {problem}; {MESSAGES}")
    else:
        texts = {}
        for number, message in enumerate(inputs, 1):
            place = f"message {number} of the prompt in {where}"
            if not isinstance(message, Mapping):
                raise DataError(f"{place} is of type {type(message).__name__}; {MESSAGES}")
            if not all(isinstance(message.get(key), str) for key in ("role", "content")):
                fields = ", ".join(f"{key} ({type(value).__name__})" for key, value in message.items()) or "no fields"
                raise DataError(f"{place} has {fields}; {MESSAGES}")
            texts[place] = message["content"]
    for place, text in texts.items():
        try:
            text.encode()
        except UnicodeEncodeError as problem:  # half a surrogate pair: a valid JSON string that no tokenizer accepts
            raise DataError(
                f"{place} has half a character (\\u{ord(text[problem.start]):04x}) at position {problem.start}; "
                "it needs whole Unicode characters. Remove it from the data."
            ) from None
    return inputs if isinstance(inputs, str) else [dict(message) for message in inputs]


def _stable_text(value: Any) -> str:
    """Text of a value unknown to JSON, without the memory address that some objects print."""
    return f"{type(value).__name__}:{re.sub(r' at 0x[0-9a-fA-F]+', '', str(value))}"
