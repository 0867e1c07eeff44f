"""Numbers, durations, trends and arbitrary values as one line of text for a terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.cells import cell_len, set_cell_size
from torch import Tensor

from gruppo.loading import visible

ARRAYS = (Tensor, np.ndarray)
BLOCKS = "▁▂▃▄▅▆▇█"


def number(value: float | None) -> str:
    """At most eight characters: 0.236, 0.0038, 4.8e-05, 412, 18 300; "-" for NaN and None."""
    if value is None or math.isnan(value):
        return "-"
    if 1000 <= abs(value) < 1e6:
        return f"{float(f'{value:.3g}'):,.0f}".replace(",", " ")
    if 0 < abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:.2g}" if abs(value) < 0.1 else f"{value:.3g}"


def percent(fraction: float) -> str:
    return "-" if math.isnan(fraction) else f"{100 * fraction:.3g}%"


def duration(seconds: float) -> str:
    """1:42 or 2:05:09; hours are not turned into days."""
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def trend(values: Sequence[float], width: int) -> str:
    """The last ``width`` values as block characters, scaled to their range; a gap where a value is not finite."""
    last = list(values)[-width:] if width > 0 else []
    finite = [value for value in last if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] if math.isfinite(value) else " " for value in last)


def shorten(text: str, width: int) -> str:
    """At most ``width`` columns. The middle is cut out: prompts and answers say most at their ends."""
    if cell_len(text) <= width:
        return text
    tail = (width - 1) // 3  # columns, not characters: Chinese characters are two columns wide
    return set_cell_size(text, width - 1 - tail).rstrip() + "…" + set_cell_size(text[::-1], tail).rstrip()[::-1]


def shape_text(value: Tensor | np.ndarray) -> str:
    """Type and shape, such as float32 [3, 64, 64]."""
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _message_text(message: Mapping[str, Any]) -> Any:
    """The content of a message, and its tool calls, such as add({"a": 1})."""
    if not (calls := [call.get("function", call) for call in message.get("tool_calls") or ()]):
        return message["content"]
    texts = [f"{call.get('name')}({json.dumps(call.get('arguments'), ensure_ascii=False)})" for call in calls]
    return " ".join(filter(None, [message["content"], *texts]))


def as_text(value: Any) -> str:
    """A prompt, a completion or any other object on one line.

    Of the messages of a prompt the last; of a conversation all, with those of the environment in brackets. Of an array
    its shape, of bytes their number, of any other object its ``str``.
    """
    if isinstance(value, ARRAYS):
        return shape_text(value)
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, list | tuple) and value and isinstance(value[-1], Mapping) and "content" in value[-1]:
        is_completion = value[0].get("role") == "assistant"
        forms = ["{}" if not is_completion or message.get("role") == "assistant" else "[{}]" for message in value]
        texts = [form.format(_message_text(message)) for form, message in zip(forms, value, strict=True)]
        value = " ".join(texts if is_completion else texts[-1:])
    return visible(str(value))
