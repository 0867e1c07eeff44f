"""Plain data, tensors and arrays as JSON and raw buffers, between two processes. Nothing is
pickled."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

_PLAIN = frozenset({type(None), bool, int, float, str})
_CONTAINERS = {kind.__name__: kind for kind in (tuple, set, frozenset, dict)}


class NotEncodable(Exception):
    """A value that JSON and buffers cannot hold without changing it."""


def encode(value: Any, buffers: list[bytes]) -> Any:
    """Convert to JSON that keeps tuples and keys of any type; append the bytes of tensors and
    arrays to ``buffers``."""
    kind = type(value)  # not isinstance: an enum of numbers would come back as a number
    if kind in _PLAIN:
        return value
    if kind is list:
        is_plain = _PLAIN.issuperset(map(type, value))
        return value if is_plain else [encode(part, buffers) for part in value]
    if kind is dict and "$" not in value and all(type(key) is str for key in value):
        return {key: encode(part, buffers) for key, part in value.items()}
    if kind in _CONTAINERS.values():
        parts = value.items() if kind is dict else value
        return {"$": kind.__name__, "of": [encode(part, buffers) for part in parts]}
    if kind is bytes:
        buffers.append(value)
        return {"$": "bytes"}
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        buffers.append(flat.view(torch.uint8).numpy().tobytes())  # numpy has no bfloat16
        dtype = str(value.dtype).removeprefix("torch.")
        return {"$": "tensor", "dtype": dtype, "shape": list(value.shape)}
    kinds = () if numpy is None else (numpy.ndarray, numpy.generic)
    if isinstance(value, kinds) and value.dtype.kind in "biufc":
        buffers.append(value.tobytes())
        shape = list(value.shape) if kind.__name__ == "ndarray" else None  # None: a scalar
        return {"$": "array", "dtype": value.dtype.str, "shape": shape}
    raise NotEncodable(f"{kind.__module__}.{kind.__qualname__}")


def decode(value: Any, buffers: Iterable[bytes]) -> Any:
    """Invert ``encode``; ``buffers`` are used up in the order in which they were added."""
    buffers = iter(buffers)
    if isinstance(value, list):
        return [decode(part, buffers) for part in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("$")
    if kind is None:
        return {key: decode(part, buffers) for key, part in value.items()}
    if kind == "bytes":
        return next(buffers)
    if kind == "tensor":
        import torch

        dtype = getattr(torch, value["dtype"])
        data = bytearray(next(buffers))  # a tensor over bytes could not be written to
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape(value["shape"])
    if kind == "array":
        import numpy

        array = numpy.frombuffer(bytearray(next(buffers)), dtype=value["dtype"])
        return array[0] if value["shape"] is None else array.reshape(value["shape"])
    return _CONTAINERS[kind](decode(value["of"], buffers))
