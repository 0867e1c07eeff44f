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


def adaptive_coef(coef: float, kl: float, *, target: float, horizon: float, n: float) -> float:
    """The KL coefficient after a step that drew ``n`` samples at a KL of ``kl`` nats.

    coef (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon): it grows while the KL is above its target, by at most a
    fifth in ``horizon`` samples. Ziegler et al. 2019 (arXiv 1909.08593), section 2.2. A step of more samples than the
    horizon counts as one horizon: beyond five the coefficient would turn negative. A KL that is not finite, as of a
    step that learned from nothing, leaves it.
    """
    if not math.isfinite(kl):
        return coef
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * min(n / horizon, 1.0))
