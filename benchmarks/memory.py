"""Memory of a process as the benchmarks count it: the most it ever held, less what it held after
its imports."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path

GB = 1e9
STATE_BYTES = 16
"""Of one parameter: a float32 weight, its gradient and Adam's two moments."""


def begin() -> int:
    """Bytes held now. Forgets the highest mark so far, where the system lets a process do so."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return held()


def held() -> int:
    """Bytes resident now; where the system does not tell, the most so far."""
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[1]) * resource.getpagesize() if file.is_file() else peak()


def peak() -> int:
    """The most bytes resident since ``begin``, or since the process began."""
    file = Path("/proc/self/status")
    lines = file.read_text().splitlines() if file.is_file() else []
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def most(after_imports: int) -> int:
    """Bytes that came to be needed beyond the imports; where there is a GPU, of its memory."""
    import torch

    return (
        torch.cuda.max_memory_allocated() if torch.cuda.is_available() else peak() - after_imports
    )


def above_state(peak_bytes: float, parameters: int) -> float:
    """What a step needs beside the weights, their gradients and the optimiser's moments, all in
    float32."""
    return peak_bytes - STATE_BYTES * parameters
