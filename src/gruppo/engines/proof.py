"""The proof that a server samples from the published weights: a regression on the log-probs of
fixed probe tokens.

Notation, in nats, for a probe token: ``s`` the server's log-prob, ``n`` and ``p`` the trainer's
under the new and the previous weights, ``d`` the error ``s - n`` of this server at its last check.

    s - p = slope (n - p) + carry d + intercept + noise

A server with the new weights has slope 1, one that kept the previous weights slope 0, whatever the
size of the update. A threshold on ``|s - n|`` would need updates larger than the server's rounding:
0.035 nats on average with bfloat16.

- Errors in variables: noise in ``p`` is on both sides and moves the slope of a stale server from 0
  toward 1/2. The
  trainer therefore scores in float32, with the weights rounded as they are published: then all
  noise is the server's. Measured with SmolLM2-135M, second step: stale 0.39 and new 0.67 from
  bfloat16 log-probs; -0.11 and 0.93 so. Weights that are not rounded are no alternative: of weights
  near a rounding boundary, such as those of a quantized file, the published copy moved 3.8 times as
  far as the master.
- A few tokens hold most of an update (40 of 225 had 97% of the squares), and their noise would
  decide. The instrument
  is n - p clipped at its 90th percentile: the estimate stays consistent, because it depends on the
  trainer alone.
- Rounding is alike from version to version. ``carry`` removes that part, and with it all noise of a
  server that still
  has the previous weights: then ``s - p`` is ``d``, and the interval is 0.
- Noise differs from token to token and is correlated within a row. The standard error is a
  delete-one-row jackknife
  (CR3; MacKinnon, Nielsen and Webb 2023), with the degrees of freedom of the rows that carry the
  slope. Rows must not repeat each other: one sample of each prompt.
- A small update proves nothing by itself. Publishes that are undecided alone are regressed
  together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

Verdict = Literal["proved", "undecided", "refused"]

CONFIDENCE = 0.999
"""Of an interval. A run looks thousands of times, so a refusal is not final: the canary decides,
which is certain."""
TOLERANCE = 0.25
"""Distance of an interval from 1 that does not contradict it. Good servers were measured at slopes
of 0.80 to 1.0, with standard errors of 0.05: rounding follows large changes of a token's log-prob
incompletely."""
CLIPPED = 0.9
"""Quantile of |new - previous| at which the instrument is clipped."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """Log-probs of the probe tokens in nats, after one publish to one server."""

    server: Float[Tensor, "N"]
    new: Float[Tensor, "N"]
    previous: Float[Tensor, "N"]
    row_ids: Int[Tensor, "N"]
    last_error: Float[Tensor, "N"] | None = None
    """``server - new`` at the last check of this server, if there was one."""


@dataclass(frozen=True)
class Slope:
    """Slope of (server - previous) on (new - previous), with its confidence interval."""

    value: float
    low: float
    high: float
    signal_nats: float
    """Root mean square of new - previous, without its mean."""
    error_nats: float
    """Mean of |server - new|."""

    @property
    def verdict(self) -> Verdict:
        """Refused if the interval does not come near 1; proved if it does and lies above 0. NaN is
        refused."""
        if not (self.low <= 1 + TOLERANCE and self.high >= 1 - TOLERANCE):
            return "refused"
        return "proved" if self.low > 0 else "undecided"


def regress(publishes: Sequence[Evidence], confidence: float = CONFIDENCE) -> Slope:
    """Estimate the slope over publishes to the same server, by instrumental variables with a
    jackknife over rows.

    b = (Z'X)^-1 Z'y with X = [n - p, d], Z = [clip(n - p), d] and y = s - p, each centered per
    publish. With b_(g) the slope without row g in all publishes, of G rows: se^2 = (G - 1) / G
    sum_g (b_(g) - mean b_(g))^2. The interval is b +- t se with G_eff - 1 degrees of freedom, where
    G_eff = (sum_g h_g)^2 / sum_g h_g^2 for the row's part h_g of Z'X. It is infinite where nothing
    can be estimated, and NaN where a log-prob is not finite.
    """
    parts = []
    for evidence in publishes:  # centered: each has an intercept of its own
        server, new, previous = (
            x.double() for x in (evidence.server, evidence.new, evidence.previous)
        )
        change, outcome = new - previous, server - previous
        limit = change.abs().quantile(CLIPPED).item()
        last_error = (
            torch.zeros_like(new) if evidence.last_error is None else evidence.last_error.double()
        )
        design, instrument = (
            torch.stack([x, last_error], dim=1) for x in (change, change.clamp(-limit, limit))
        )
        parts.append(
            (
                design - design.mean(dim=0),
                instrument - instrument.mean(dim=0),
                outcome - outcome.mean(),
            )
        )
    design, instrument, outcome = map(torch.cat, zip(*parts, strict=True))  # [M, 2], [M, 2], [M]
    errors = torch.cat([(evidence.server - evidence.new).double().abs() for evidence in publishes])
    row_ids = torch.cat([evidence.row_ids for evidence in publishes]).unique(return_inverse=True)[1]
    rows = int(row_ids.max()) + 1
    if not (design.isfinite().all() and outcome.isfinite().all()):
        return Slope(math.nan, math.nan, math.nan, math.nan, math.nan)
    signal, error_nats = design[:, 0].square().mean().sqrt().item(), errors.mean().item()
    if design[:, 1].abs().max() == 0:  # no last error: one regressor
        design, instrument = design[:, :1], instrument[:, :1]
    width = design.shape[1]
    product = torch.zeros(rows, width, width, dtype=torch.float64)  # [G, k, k]
    product.index_add_(0, row_ids, instrument[:, :, None] * design[:, None, :])
    moment = torch.zeros(rows, width, dtype=torch.float64).index_add_(
        0, row_ids, instrument * outcome[:, None]
    )
    total = product.sum(dim=0)
    shares = product[:, 0, 0]  # [G]
    effective_rows = (shares.sum().square() / shares.square().sum()).nan_to_num(0).item()
    slopes, failed = torch.linalg.solve_ex(total, moment.sum(dim=0))
    without, failed_without = torch.linalg.solve_ex(
        total - product, moment.sum(dim=0) - moment
    )  # [G, k]
    without = without[:, 0]
    if (
        effective_rows <= 1.5
        or failed.any()
        or failed_without.any()
        or not without.isfinite().all()
    ):
        return Slope(math.nan, -math.inf, math.inf, signal, error_nats)
    deviation = ((rows - 1) / rows * (without - without.mean()).square().sum()).sqrt().item()
    half = student_t(confidence, effective_rows - 1) * deviation
    return Slope(
        slopes[0].item(), slopes[0].item() - half, slopes[0].item() + half, signal, error_nats
    )


def student_t(confidence: float, freedom: float) -> float:
    """Return t with P(|T| <= t) = confidence, for any positive number of degrees of freedom.

    With T = sqrt(v) tan(a), the density of the angle a is proportional to cos(a)^(v - 1); summed on
    a grid of pi/2 - a that is finest in the tail. Relative error below 3e-3.
    """
    angles = torch.logspace(-12, 0, 5_001, dtype=torch.float64) * (math.pi / 2)
    tail = torch.cumulative_trapezoid(angles.sin() ** (freedom - 1), angles)
    place = int(torch.searchsorted(tail, (1 - confidence) * tail[-1]))
    return math.sqrt(freedom) / math.tan(angles[place + 1].item())
