"""Numbers, spans of time, trends and foreign texts as a terminal can show them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.cells import cell_len, set_cell_size
from torch import Tensor

BLOCKS = "▁▂▃▄▅▆▇█"


def number(value: float | None) -> str:
    """At most eight characters for what a run logs: 0.236, 0.0038, 4.8e-05, 412, 18 300; "-" for NaN and None."""
    if value is None or math.isnan(value):
        return "-"
    if 1000 <= abs(value) < 1e6:
        return f"{float(f'{value:.3g}'):,.0f}".replace(",", " ")
    if 0 < abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:.2g}" if abs(value) < 0.1 else f"{value:.3g}"


def percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.3g}%"


def span(seconds: float) -> str:
    """1:42 or 2:05:09."""
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def trend(values: Sequence[float], width: int) -> str:
    """The last ``width`` values as block characters, scaled to their own range; a gap where a value is not finite."""
    last = list(values)[-width:] if width > 0 else []
    finite = [value for value in last if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] if math.isfinite(value) else " " for value in last)


def visible(text: str) -> str:
    """The text on one line: control and invisible characters are written as escapes such as ``\\n`` and ``\\x1b``."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shorten(text: str, width: int) -> str:
    """At most ``width`` columns; the middle gives way, because the ends of prompts and answers say most."""
    if cell_len(text) <= width:
        return text
    tail = (width - 1) // 3
    return set_cell_size(text, width - 1 - tail).rstrip() + "…" + set_cell_size(text[::-1], tail).rstrip()[::-1]


def is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def described(value: Tensor | np.ndarray) -> str:
    """Type and shape: float32 [3, 64, 64]."""
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def shown(value: Any) -> str:
    """A prompt or an answer in words: the last message of a prompt, all that was said in answer to it, an environment's
    words in brackets; the shape of an array, else its text."""
    if is_array(value):
        return described(value)
    if isinstance(value, list | tuple) and value and isinstance(value[-1], Mapping) and "content" in value[-1]:
        is_answer = value[0].get("role") == "assistant"
        said = [(message.get("role"), str(message.get("content"))) for message in (value if is_answer else value[-1:])]
        value = " ".join(f"[{text}]" if is_answer and role != "assistant" else text for role, text in said)
    return visible(str(value))
