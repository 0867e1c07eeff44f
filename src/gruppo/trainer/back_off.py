"""Back-off: return to the best weights, with a lower learning rate, where a watched metric has
fallen."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from gruppo import distributed as dist
from gruppo.trainer import checkpoint
from gruppo.trainer.run import Run
from gruppo.trainer.run_dir import RunFolder, sharded_tensors
from gruppo.trainer.stages import agreed
from gruppo.types import GruppoError

log = logging.getLogger("gruppo")
LR_FACTOR = 0.5
"""Factor of the learning rate at each return."""


def watch(run: Run, folder: RunFolder, metrics: Mapping[str, float]) -> None:
    """Keep the weights where the metric is the best so far; return to the best where it has fallen
    by ``drop``.

    The optimizer's state returns with the weights; the step, the prompts and the stage go on.
    """
    config, state, best = run.config.back_off, run.state, run.state.best
    if not config.metric or (value := agreed(metrics, config.metric)) is None:
        return
    if best is None or value > best["value"]:
        state.best = {"step": state.step, "value": value}
        folder.finish_saving()
        with dist.fail_together():
            folder.save(run)
        return
    if value >= best["value"] - config.drop:
        return
    folder.finish_saving()
    try:
        with dist.fail_together():
            saved = checkpoint.load(
                folder.best / checkpoint.name_of(int(best["step"])), sharded_tensors(run)
            )
    except GruppoError as error:
        log.warning(
            "step %d: %s is %.4g, was %.4g, but %s",
            state.step,
            config.metric,
            value,
            best["value"],
            error,
        )
        return
    folder.return_to(run, saved)
    state.best = {**best, "returned_at": state.step}
    run.stage_schedule.lr_scale *= LR_FACTOR
    state.version += 1
    run.engine.sync(run.policy, state.version)
    state.totals["back_offs"] = state.totals.get("back_offs", 0.0) + 1
    text = (
        "step %d: %s fell to %.4g from %.4g; back to the weights of step %d, with %g of the "
        "learning rate."
    )
    log.warning(
        text,
        state.step,
        config.metric,
        value,
        best["value"],
        best["step"],
        run.stage_schedule.lr_scale,
    )
    run.log({"back_off/returns_count": state.totals["back_offs"]})
