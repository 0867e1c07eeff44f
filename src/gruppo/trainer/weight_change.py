"""Do the weights move? A change below half the gap between two numbers is rounded away, and the run learns nothing.

In bfloat16 that gap is 1/256 of a weight: at a learning rate of 1e-6, most weights stay what they are to the bit.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from gruppo.trainer.run import Run
from gruppo.types import Stat

log = logging.getLogger("gruppo")

EVERY = 50
"""Steps from one look to the next."""
LOOKED_AT = 256
"""Numbers of each tensor, from all over it."""
LEAST = 0.05
"""Below this share of changed weights there is a warning."""


class Moved:
    """A sample of the weights that have a gradient and a learning rate, as they were before an update."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        trained = [p for group in optimizer.param_groups if group["lr"] > 0 for p in group["params"]]
        self._parameters = [parameter for parameter in trained if parameter.grad is not None]
        self._moves = [some(parameter.grad) != 0 for parameter in self._parameters]
        self._before = [some(parameter).clone() for parameter in self._parameters]

    def stat(self) -> Stat:
        """1 for each that differs now, 0 for each that does not."""
        looks = zip(self._parameters, self._before, self._moves, strict=True)
        differs = [(some(parameter) != before)[moves] for parameter, before, moves in looks]
        return Stat.of(torch.cat(differs).double()) if differs else Stat()


def some(x: Tensor) -> Tensor:
    """About ``LOOKED_AT`` numbers."""
    flat = x.detach().flatten()
    return flat[:: max(1, len(flat) // LOOKED_AT)]


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
