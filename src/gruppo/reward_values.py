"""What a call of a reward function takes and returns, and its form as JSON and bytes between two processes."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gruppo.timeouts import CallError

_PLAIN = frozenset({type(None), bool, int, float, str})


@dataclass(frozen=True)
class TrainerState:
    """Progress of the run, as TRL's reward functions read it."""

    global_step: int = 0
    max_steps: int = 0
    epoch: float | None = None
    """Passes over the training prompts before this step; None where the data have no end."""


@dataclass
class Answer:
    """Values that one call returned and logged for its rows."""

    size: int | None = None  # None: the number of values is checked elsewhere
    values: Sequence[
        Any
    ] = ()  # for each row a number or None, ``StepScores``, or the error that makes it a failure
    metrics: list[tuple[str, float]] = field(default_factory=list)
    extras: list[tuple[str, Sequence[Any]]] = field(default_factory=list)

    def log_metric(self, name: str, value: float) -> None:
        self.metrics.append((name, float(value)))

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        values = list(values)
        if self.size is not None and len(values) != self.size:
            raise ValueError(
                f"log_extra({column!r}) got {len(values)} values for {self.size} completions"
            )
        self.extras.append((column, values))


def as_list(returned: Any, size: int | None) -> list[Any]:
    """Convert the returned values to a list; ``CallError`` unless there is one per row. None: the rows are unknown."""
    is_array = hasattr(returned, "tolist") and hasattr(returned, "ndim")  # of numpy or torch
    if is_array and returned.ndim != 1:
        raise CallError(
            "count", f"returned shape {tuple(returned.shape)}; it needs one number per completion"
        )
    if not is_array and not isinstance(returned, (list, tuple)):
        got = f"returned {returned!r:.60} ({type(returned).__name__})"
        raise CallError(
            "exception",
            f"{got}; it needs a list of one number per completion",
            type(returned).__name__,
        )
    if size is not None and len(returned) != size:
        raise CallError("count", f"returned {len(returned)} rewards for {size} completions")
    return returned.tolist() if is_array else list(returned)


class NotEncodable(Exception):
    """A value that JSON and bytes cannot hold without changing it."""


def encode(value: Any, buffers: list[bytes]) -> Any:
    """Convert to JSON that keeps tuples and keys of any type, with the bytes of tensors and arrays in ``buffers``."""
    kind = type(value)
    if (
        kind in _PLAIN
    ):  # the type itself: a subclass, such as an enum of numbers, would come back as another
        return value
    if kind is list:
        return (
            value
            if _PLAIN.issuperset(map(type, value))
            else [encode(part, buffers) for part in value]
        )
    if kind is dict and "$" not in value and all(type(key) is str for key in value):
        return {key: encode(part, buffers) for key, part in value.items()}
    if kind in (tuple, set, frozenset, dict):
        parts = value.items() if kind is dict else value
        return {"$": kind.__name__, "of": [encode(part, buffers) for part in parts]}
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if kind is bytes:
        buffers.append(value)
        return {"$": "bytes"}
    if torch is not None and isinstance(value, torch.Tensor):
        # as bytes: numpy has no bfloat16
        buffers.append(
            value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
        return {
            "$": "tensor",
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
        }
    if (
        numpy is not None
        and isinstance(value, (numpy.ndarray, numpy.generic))
        and value.dtype.kind in "biufc"
    ):
        buffers.append(value.tobytes())
        is_scalar = isinstance(value, numpy.generic)
        return {
            "$": "array",
            "dtype": value.dtype.str,
            "shape": list(value.shape),
            "is_scalar": is_scalar,
        }
    raise NotEncodable(f"{kind.__module__}.{kind.__qualname__}")


def decode(value: Any, buffers: Iterable[bytes]) -> Any:
    """Invert ``encode``; ``buffers`` are used up in the order in which they were added."""
    if isinstance(value, list):
        return [decode(part, buffers) for part in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("$")
    if kind is None:
        return {key: decode(part, buffers) for key, part in value.items()}
    if kind == "bytes":
        return next(iter(buffers))
    if kind == "tensor":
        import torch

        # bytearray: a tensor over bytes could not be written to; frombuffer refuses an empty one
        data, dtype = bytearray(next(iter(buffers))), getattr(torch, value["dtype"])
        return (
            torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        ).reshape(value["shape"])
    if kind == "array":
        import numpy

        array = numpy.frombuffer(bytearray(next(iter(buffers))), dtype=value["dtype"]).reshape(
            value["shape"]
        )
        return array[()] if value["is_scalar"] else array
    return {"tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict}[kind](
        decode(value["of"], buffers)
    )


def plain_entry(entry: Any) -> Any:
    """One returned value as JSON: a number, None, a text, a list of them; or the error that it is."""
    if hasattr(entry, "tolist"):
        entry = entry.tolist()
    if isinstance(entry, CallError):
        return {"error": [entry.kind, entry.message, str(entry.identity)]}
    if isinstance(entry, (list, tuple)):
        return [plain_entry(part) for part in entry]
    if (
        isinstance(entry, int) and abs(entry) > 1 << 1023
    ):  # more digits than Python writes; no float32 in any case
        return math.copysign(math.inf, entry)
    if entry is None or isinstance(entry, (bool, int, float, str)):
        return entry
    got = f"returned {entry!r:.60} ({type(entry).__name__})"
    return {"error": ["exception", f"{got}; each entry is a number or None", type(entry).__name__]}
