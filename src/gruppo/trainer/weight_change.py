"""Whether updates change the weights: steps without a gradient, and changes that are lost in
rounding.

A change below half the gap between two numbers is rounded away.

In bfloat16 that gap is 1/256 of a weight: at a learning rate of 1e-6, most weights keep every bit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path

import torch

from gruppo.engines.local import spread_sample
from gruppo.loading import command_name
from gruppo.tracking.files import append_lines
from gruppo.trainer.run import Run
from gruppo.types import Rollouts, Stat

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


class Moved:
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


def warn_if_idle(
    run: Run, metrics: Mapping[str, float], folder: Path, rollouts: Rollouts | None = None
) -> None:
    """Count steps without a gradient, or with one of regularizers alone; name the reason after
    three of them."""
    norms = [metrics[name] for name in NORMS if name in metrics]
    state, size = run.state, metrics.get("advantage/mean_abs")
    # a KL or entropy term has a gradient where no row has an advantage; a critic and demonstrations
    # do learn
    is_flat = (
        size is not None
        and not size > 0
        and not {"grad/critic_norm", "sup/loss_nats"} & metrics.keys()
    )
    state.idle_steps = state.idle_steps + 1 if norms and (is_flat or not any(norms)) else 0
    if state.idle_steps not in IDLE:
        return
    # whether this rank's groups repeat one sequence of actions; not if each group has a single row
    is_repeated = False
    if rollouts is not None:
        groups, mask, actions = rollouts.group_ids.tolist(), rollouts.mask, rollouts.actions
        first = {group: row for row, group in reversed([*enumerate(groups)])}
        firsts = torch.tensor([first[group] for group in groups], dtype=torch.long)
        chosen = (mask | mask[firsts]).reshape(*mask.shape, *[1] * (actions.dim() - 2))
        is_equal = (
            torch.equal(mask, mask[firsts]) and not ((actions != actions[firsts]) & chosen).any()
        )
        is_repeated = len(first) < len(groups) and is_equal
    reason = (
        f"--optim.lr {run.config.optim.lr:g} may have ruined the weights, which give a "
        f"gradient of exactly 0"
    )
    if size is None:
        reason = "the demonstrations give a gradient of exactly 0"
    elif math.isnan(metrics.get("reward/mean", math.nan)):
        reason = "no completion was scored"
    elif run.config.objective.mask_truncated and metrics.get("finish/truncated_frac") == 1:
        reason = (
            "all completions were truncated, which --objective.mask-truncated leaves out of "
            "the loss"
        )
    elif is_repeated:
        mean, lr = metrics["reward/mean"], run.config.optim.lr
        reason = f"""the completions of each group are identical (mean reward {mean:.3g}): the policy has no entropy
            left, which a large learning rate causes (--optim.lr is {lr:g}), or the temperature is too low"""
        reason = " ".join(reason.split())
    elif not size > 0:
        reason = f"the rewards of each group are equal (mean {metrics['reward/mean']:.3g})"
    event = {"step": state.step, "event": "nothing learned", "is_repeated": is_repeated}
    append_lines(folder / EVENTS, [event])
    values = (state.step, state.idle_steps, reason, command_name(), folder)
    log.warning(
        "step %d: nothing was learned in the last %d steps: %s. %s doctor %s says what to change.",
        *values,
    )
