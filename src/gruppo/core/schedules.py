"""Step to value."""

from __future__ import annotations

import math
from typing import Literal

Decay = Literal["constant", "linear", "cosine"]


def warmup_decay(step: int, *, peak: float, warmup: int, total: int, decay: Decay, final_frac: float = 0.0) -> float:
    """The value at step 0, 1, ..., total - 1.

    Rises linearly over ``warmup`` steps, peak (step + 1) / warmup, so that the first step already learns; then stays,
    or falls to ``final_frac * peak`` along a line or a half cosine, which the step after the last would reach.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if decay == "constant":
        return peak
    done = min((step - warmup) / max(total - warmup, 1), 1.0)
    left = 1 - done if decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return peak * (final_frac + (1 - final_frac) * left)
