"""Whether updates change the weights: steps without a gradient, and changes that are lost in
rounding.

A change below half the gap between two numbers is rounded away.

In bfloat16 that gap is 1/256 of a weight: at a learning rate of 1e-6, most weights keep every bit.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from gruppo.engines.local import spread_sample
from gruppo.loading import command_name
from gruppo.tracking.files import append_lines
from gruppo.trainer.run import Run
from gruppo.types import Stat

log = logging.getLogger("gruppo")

EVERY = 50
"""Steps between measurements."""
LEAST = 0.05
"""Share of changed weights below which there is a warning."""
IDLE = (3, 30, 300, 3000)
"""Consecutive steps without a gradient at which there is a warning."""
EVENTS = "events.jsonl"
"""File of a run's events, which the doctor reads."""
NORMS = ("grad/norm", "grad/critic_norm", "grad/action_norm")


class WeightChange:
    """Sample of the weights that have a gradient and a learning rate, from before an update."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        trained = [
            p for group in optimizer.param_groups if group["lr"] > 0 for p in group["params"]
        ]
        self._parameters = [parameter for parameter in trained if parameter.grad is not None]
        # Only weights with a gradient: most embeddings of a batch have none, and rightly stay.
        self._moves = [spread_sample(parameter.grad) != 0 for parameter in self._parameters]
        self._before = [spread_sample(parameter).clone() for parameter in self._parameters]

    def stat(self) -> Stat:
        """Return 1 for each weight that has changed, 0 for each that has not."""
        sampled = zip(self._parameters, self._before, self._moves, strict=True)
        differs = [
            (spread_sample(parameter) != before)[moves] for parameter, before, moves in sampled
        ]
        return Stat.of(torch.cat(differs).double()) if differs else Stat()


def warn_if_lost(run: Run, changed: Stat) -> None:
    """Warn if an update changed few of the weights that have a gradient."""
    dtype = str(run.parameters[0].dtype).removeprefix("torch.")
    if changed.count and changed.mean < LEAST:
        log.warning(
            "step %d: an update changed %.1f%% of the weights that have a gradient; at --optim.lr "
            "%g the rest is lost in rounding to %s. Raise it, or hold the weights in float32.",
            *(run.state.step, 100 * changed.mean, run.config.optim.lr, dtype),
        )


def warn_if_idle(run: Run, metrics: Mapping[str, float], folder: Path) -> None:
    """Count steps without a gradient, or with one of regularizers alone; warn after three of
    them."""
    norms = [metrics[name] for name in NORMS if name in metrics]
    state, size = run.state, metrics.get("advantage/mean_abs")
    # a KL or entropy term has a gradient where no row has an advantage; a critic and demonstrations
    # do learn
    learns_otherwise = {"grad/critic_norm", "sup/loss_nats"} & metrics.keys()
    is_flat = size is not None and not size > 0 and not learns_otherwise
    state.idle_steps = state.idle_steps + 1 if norms and (is_flat or not any(norms)) else 0
    if state.idle_steps in IDLE:
        append_lines(folder / EVENTS, [{"step": state.step, "event": "nothing learned"}])
        text = "step %d: nothing was learned in the last %d steps. %s doctor %s says why."
        log.warning(text, state.step, state.idle_steps, command_name(), folder)
