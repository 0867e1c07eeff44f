"""Numbers, durations and arbitrary values as one line of text for a terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from gruppo.loading import visible

ARRAYS = (Tensor, np.ndarray)


def number(value: float | None) -> str:
    """At most eight characters: 0.236, 0.0038, 4.8e-05, 412, 18 300; "-" for NaN and None."""
    if value is None or math.isnan(value):
        return "-"
    if 1000 <= abs(value) < 1e6:  # where .3g alone would write 1.83e+04
        return f"{float(f'{value:.3g}'):,.0f}".replace(",", " ")
    if 0 < abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:.2g}" if abs(value) < 0.1 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """1:42 or 2:05:09; hours are not turned into days."""
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def shorten(text: str, width: int) -> str:
    """At most ``width`` characters. The middle is cut out: prompts and answers say most at their
    ends."""
    tail = (width - 1) // 3
    return text if len(text) <= width else f"{text[: width - 1 - tail]}…{text[-tail:]}"


def shape_text(value: Tensor | np.ndarray) -> str:
    """Type and shape, such as float32 [3, 64, 64]."""
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def as_text(value: Any) -> str:
    """A prompt, a completion or any other object on one line.

    Of the messages of a prompt the last; of a conversation all, with those of the environment in
    brackets, and tool calls as add({"a": 1}). Of an array its shape, of bytes their number, of any
    other object its ``str``.
    """
    if isinstance(value, ARRAYS):
        return shape_text(value)
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    messages = value if isinstance(value, list | tuple) else ()
    if messages and isinstance(messages[-1], Mapping) and "content" in messages[-1]:
        is_completion = messages[0].get("role") == "assistant"
        value = " ".join(map(_message, messages)) if is_completion else messages[-1]["content"]
    return visible(str(value))


def _message(message: Mapping[str, Any]) -> str:
    """A message of a conversation, in brackets if it is the environment's."""
    if message.get("role") != "assistant":
        return f"[{message['content']}]"
    words = [str(message["content"])]
    for call in message.get("tool_calls") or ():
        own = call.get("function", call)
        words.append(f"{own.get('name')}({json.dumps(own.get('arguments'), ensure_ascii=False)})")
    return " ".join(filter(None, words))
