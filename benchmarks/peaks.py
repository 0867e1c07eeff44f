"""What this machine can do at best: products at given shapes, and reading and copying memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.flops import KINDS, Shape

SECONDS = 0.15
"""Given to each measurement."""
SQUARE = 2048
BUFFER_BYTES = 2**29
"""Read or copied: far more than any cache."""
HEAD_CHUNKS = (128, 512, 2048)
"""Tokens of a head's product: what is fastest depends on the cache, and an implementation may
choose."""


def best_seconds(call: Callable[[], object]) -> float:
    """The shortest of as many calls as fit, three at least: what else a machine does only makes
    them longer."""
    call()
    best, began, calls = float("inf"), time.perf_counter(), 0
    while calls < 3 or time.perf_counter() - began < SECONDS:
        before = time.perf_counter()
        call()
        _wait()
        best, calls = min(best, time.perf_counter() - before), calls + 1
    return best


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def product_rate(rows: int, inputs: int, outputs: int, kind: str, dtype: torch.dtype) -> float:
    """Operations a second of x W^T, of the gradient of x, or of that of W, into memory that is
    already there."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(rows, inputs, dtype=dtype, device=device)
    weight = torch.randn(outputs, inputs, dtype=dtype, device=device)
    grad = torch.randn(rows, outputs, dtype=dtype, device=device)
    calls: dict[str, Callable[[], Tensor]] = {
        "forward": lambda: torch.mm(x, weight.t(), out=grad),
        "dgrad": lambda: torch.mm(grad, weight, out=x),
        "wgrad": lambda: torch.mm(grad.t(), x, out=weight),
    }
    return 2.0 * rows * inputs * outputs / best_seconds(calls[kind])


def packed_rate(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> float:
    """The forward with the weight in oneDNN's own layout, which few rows gain from; 0 where there
    is none."""
    reorder = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
    if reorder is None or torch.cuda.is_available():
        return 0.0
    x, weight = torch.randn(rows, inputs, dtype=dtype), torch.randn(outputs, inputs, dtype=dtype)
    try:
        packed = reorder(weight, rows)
        call = lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")  # noqa: E731
        return 2.0 * rows * inputs * outputs / best_seconds(call)
    except RuntimeError:
        return 0.0


def update_rates(shape: Shape, tokens: int, scored: int, dtype: torch.dtype) -> dict[str, float]:
    """Of ``flops.products``: at ``tokens`` a forward, the head at the fastest of its chunks for
    each kind."""
    chunks = sorted({min(chunk, scored) for chunk in HEAD_CHUNKS})
    rates = {}
    for kind in KINDS:
        for name, (inputs, outputs) in shape.linears.items():
            rates[f"{name} {kind}"] = product_rate(tokens, inputs, outputs, kind, dtype)
        rates[f"head {kind}"] = max(
            product_rate(chunk, shape.hidden, shape.vocabulary, kind, dtype) for chunk in chunks
        )
    return rates


def forward_rates(shape: Shape, rows: int, dtype: torch.dtype) -> dict[str, float]:
    """Of the layers' products and the head's at ``rows``, in the faster layout of the weight."""
    shapes = {**shape.linears, "head": (shape.hidden, shape.vocabulary)}
    return {
        name: max(product_rate(rows, *sizes, "forward", dtype), packed_rate(rows, *sizes, dtype))
        for name, sizes in shapes.items()
    }


def square_rate(dtype: torch.dtype) -> float:
    return product_rate(SQUARE, SQUARE, SQUARE, "forward", dtype)


def memory_rates() -> dict[str, float]:
    """Bytes a second: read by a reduction, read and written by a copy, and by a sum in place, as an
    optimiser does."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = torch.ones(BUFFER_BYTES // 4, device=device)
    target = torch.empty_like(source)
    reads: Sequence[Callable[[], object]] = (source.sum, source.max, lambda: source @ source)
    return {
        "read": source.nbytes / min(best_seconds(read) for read in reads),
        "copy": 2 * source.nbytes / best_seconds(lambda: target.copy_(source)),
        "in place": 3 * source.nbytes / best_seconds(lambda: target.add_(source)),
    }
