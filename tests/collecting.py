"""A step's data with its metrics, as the loop makes them."""

from types import SimpleNamespace
from typing import Any

from gruppo.trainer import collect as collecting
from gruppo.trainer.metrics import collected_metrics
from gruppo.trainer.recorder import Recorder


def collect(run: Any, step_params: Any) -> Any:
    run.recorder = Recorder()
    collected = collecting.collect(run, step_params)
    metrics = collected_metrics(run, collected) | run.recorder.metrics
    return SimpleNamespace(
        batch=collected.batch,
        sampled=collected.sampled,
        rollouts=collected.rollouts,
        scores=collected.scores,
        metrics=metrics,
    )
