"""What may stand in a prompt column: a text or a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gruppo.types import DataError

NEEDS = 'it needs a text or a list of {"role": ..., "content": ...} messages with texts in both.'


def checked_inputs(inputs: Any, where: str) -> str | list[dict[str, Any]]:
    """The text, or a copy of the messages. ``where`` names the row in the error for anything else."""
    if isinstance(inputs, str) and inputs:
        _check_text(inputs, f"the prompt in {where}")
        return inputs
    if not isinstance(inputs, list) or not inputs:
        raise DataError(f"the prompt in {where} is {_describe(inputs)}; {NEEDS}")
    return [_checked_message(message, f"message {n} of the prompt in {where}") for n, message in enumerate(inputs, 1)]


def _checked_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise DataError(f"{where} is {_describe(message)}; {NEEDS}")
    if not all(isinstance(message.get(field), str) for field in ("role", "content")):
        fields = ", ".join(f"{key} ({type(value).__name__})" for key, value in message.items()) or "no fields"
        raise DataError(f"{where} has {fields}; {NEEDS}")
    _check_text(message["content"], where)
    return dict(message)


def _check_text(text: str, where: str) -> None:
    """Half of a surrogate pair is a valid JSON string that no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise DataError(
            f"{where} has half a character (\\u{ord(text[problem.start]):04x}) at position {problem.start}; "
            "it needs whole Unicode characters. Remove it from the data."
        ) from None


def _describe(value: Any) -> str:
    if value is None:
        return "missing"
    return "empty" if value in ("", []) else f"of type {type(value).__name__}"
