"""What a clip of the ratio allows for the joint density of many dimensions, and when it is useless."""

from __future__ import annotations

import math

from gruppo.core.objective import Objective
from gruppo.core.surrogates import MAX_LOG_RATIO
from gruppo.types import GruppoError

ROUNDING_NATS = 3e-5
"""Times sqrt(dims): how far a joint log-ratio is off 0 in float32 at equal weights and a std of 0.02."""


def joint_clip_nats(objective: Objective, dims: int) -> float:
    """Log-ratio of a joint density at which the clip stops it.

    log(1 + clip_high) of the joint ratio; with ``dims`` "mean" the ratio is its dims-th root, which allows dims times
    as much.
    """
    nats = objective.clip_high if objective.clip_unit == "nats" else math.log1p(objective.clip_high)
    return nats * dims if objective.dims == "mean" else nats


def check_trust_region(objective: Objective, dims: int) -> None:
    """Refuse a clip that never takes effect with ``dims`` dimensions per action, or one that rounding alone reaches."""
    if objective.surrogate not in ("clip", "cispo") or dims < 2:
        return
    is_ratio, nats = objective.clip_unit == "ratio", joint_clip_nats(objective, dims)
    least, clip = 10 * ROUNDING_NATS * math.sqrt(dims), f"objective.clip_high={objective.clip_high:g}"
    fitting = math.expm1(1 / dims) if is_ratio else 1 / dims  # one nat of the joint density
    advice = "Set --objective.clip-unit nats --objective.dims sum --objective.clip-low 1 --objective.clip-high 1"
    if objective.dims == "mean" and nats > MAX_LOG_RATIO:
        raise GruppoError(f"""{clip}{"" if is_ratio else " nats"} of a mean over {dims} dimensions lets the joint
            log-ratio of a step reach {nats:.3g} nats: it never clips. At 0.2 the mean allows 12 nats in 64 dimensions,
            143 in 784, 2990 in 16384, 8960 in 49152; at 1e-4, 0.006, 0.08, 1.6 and 4.9. {advice}, or
            --objective.clip-high {fitting:.2g} for the same with the mean.""")
    if nats < least:
        raise GruppoError(f"""{clip} with dims={objective.dims!r} clips a step of {dims} dimensions at {nats:.2g} nats
            of its joint density, a tenth of which is rounding alone; it needs at least {least:.2g}. {advice}.""")
