"""Share of the weights that an update changes. Changes below half the gap between two numbers are rounded away.

In bfloat16 that gap is 1/256 of a weight: at a learning rate of 1e-6, most weights keep every bit.
"""

from __future__ import annotations

import logging

import torch

from gruppo.engines.local import spread_sample
from gruppo.trainer.run import Run
from gruppo.types import Stat

log = logging.getLogger("gruppo")

EVERY = 50
"""Steps between measurements."""
LEAST = 0.05
"""Share of changed weights below which there is a warning."""


class Moved:
    """Sample of the weights that have a gradient and a learning rate, from before an update."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        trained = [p for group in optimizer.param_groups if group["lr"] > 0 for p in group["params"]]
        self._parameters = [parameter for parameter in trained if parameter.grad is not None]
        # Only weights with a gradient: most embeddings of a batch have none, and rightly stay.
        self._moves = [spread_sample(parameter.grad) != 0 for parameter in self._parameters]
        self._before = [spread_sample(parameter).clone() for parameter in self._parameters]

    def stat(self) -> Stat:
        """Return 1 for each weight that has changed, 0 for each that has not."""
        sampled = zip(self._parameters, self._before, self._moves, strict=True)
        differs = [(spread_sample(parameter) != before)[moves] for parameter, before, moves in sampled]
        return Stat.of(torch.cat(differs).double()) if differs else Stat()


def warn_if_still(run: Run, changed: Stat) -> None:
    if changed.count and changed.mean < LEAST:
        dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in run.parameters})
        log.warning(
            "step %d: an update changed %.1f%% of the weights that have a gradient; at --optim.lr %g the rest is lost "
            "in rounding to %s. Raise it, or hold the weights in float32.",
            run.state.step,
            100 * changed.mean,
            run.config.optim.lr,
            " and ".join(dtypes),
        )
