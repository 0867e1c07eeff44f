"""What is said of each pass over a batch: how the policy moves away from the one that drew it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gruppo.config.schema import OptimConfig
from gruppo.trainer.run import flatten
from gruppo.types import Stat

_METRICS = {
    "ratio": ("mean:ratio_mean", "max:ratio_max"),
    "clip": ("mean:clip_frac",),
    "kl/old_nats": ("mean:kl_old_nats",),
    "kl/old_k3_nats": ("mean:kl_old_k3_nats",),
    "update/taken": ("sum:updates_count",),
}


def epoch_metrics(optim: OptimConfig, epochs: Sequence[Mapping[str, Stat]], done: int) -> dict[str, float]:
    """``epoch/N/...`` of each epoch that was begun, over its minibatches; none where there is one epoch alone.

    ``epochs``: the statistics of each, empty where it was not begun. ``done``: minibatches before ``stop_kl`` ended
    the batch; the one that it stopped at was evaluated, so it is in its epoch's statistics, and took no update.
    """
    metrics: dict[str, float] = {}
    if optim.epochs > 1:
        for number, stats in enumerate(filter(None, epochs), start=1):
            said = flatten({"update/taken": Stat()} | _with_clip(stats), _METRICS)
            metrics |= {f"epoch/{number}/{name}": value for name, value in said.items()}
    if optim.epochs > 1 or optim.stop_kl:
        metrics["update/epochs_count"] = done / optim.minibatches
    return metrics


def _with_clip(stats: Mapping[str, Stat]) -> dict[str, Stat]:
    """The actions that are clipped on either side; no action is on both."""
    ends = [stats[name] for name in ("clip/high_frac", "clip/low_frac") if name in stats]
    clip = {"clip": Stat(ends[0].count, sum(end.sum for end in ends))} if ends else {}
    return {**stats, **clip}
