"""Samples of a step or an evaluation, as trackers and the files of a run show them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gruppo import distributed as dist
from gruppo.environments import completion_lengths
from gruppo.protocols import DescriptionMixin
from gruppo.rewards.scoring import Scores
from gruppo.tracking.files import to_json
from gruppo.trainer.collect import Collected
from gruppo.trainer.run import Run
from gruppo.types import Rollouts

FAILURES_KEPT = 20
"""Failed rows of a step that samples.jsonl holds."""


def sample_rows(
    display: DescriptionMixin | None,
    rollouts: Rollouts,
    scores: Scores,
    rows: Sequence[int],
    *,
    is_held_out: bool = False,
) -> list[dict[str, Any]]:
    """Return samples as trackers show them; ``extra`` is what rewards logged with log_extra.

    Images also have their group, and whether they are of an evaluation: trackers draw them on
    sheets. Without a ``display`` completions are not rendered.
    """
    lengths, inputs = completion_lengths(rollouts), rollouts.per_row.get("inputs")
    samples = []
    for row in rows:
        group = int(rollouts.group_ids[row])
        prompt, completion = rollouts.prompts[group], rollouts.completions[row]
        if display is not None:
            completion = display.render(rollouts, row)
        sample: dict[str, Any] = {}
        if isinstance(completion, Tensor):
            sample = {"group": group, "held_out": is_held_out}
        sample |= {
            "prompt": prompt.inputs if inputs is None else inputs[row],
            "completion": completion,
            "reward": float(scores.rewards[row]),
            "parts": {name: float(part[row]) for name, part in scores.parts.items()},
            "target": prompt.target,
            "finish": rollouts.finish[row],
            "tokens": int(lengths[row]),
        }
        if scores.extras:
            sample["extra"] = {name: values[row] for name, values in scores.extras.items()}
        samples.append(sample)
    return samples


def failures_of(scores: Scores) -> dict[int, list[dict[str, str]]]:
    """Return the failures of the rewards, by row."""
    failures: dict[int, list[dict[str, str]]] = {}
    for one in scores.failures:
        reason = {"reward": one.reward, "kind": one.kind, "message": one.message}
        failures.setdefault(one.row, []).append(reason)
    return failures


def all_completions(run: Run, collected: Collected) -> list[dict[str, Any]]:
    """Return rows of all ranks for completions/, each with its group in the step; a collective,
    empty if they are not kept."""
    sampled = collected.sampled
    if sampled is None or run.config.saving.completions == "shown":
        return []
    groups, failures = sampled.rollouts.group_ids.tolist(), failures_of(sampled.scores)
    advantages = learned_advantages(collected)
    rows = sample_rows(None, sampled.rollouts, sampled.scores, range(len(groups)))
    for number, row in enumerate(rows):
        # failures as a string in each row: Arrow wants one type per column
        reasons = [": ".join(failure.values()) for failure in failures.get(number, ())]
        row["group"], row["failures"] = groups[number], "; ".join(reasons)
        row["advantage"] = float(advantages[number])
    gathered: list[dict[str, Any]] = []
    for part in dist.all_gather(json.dumps(to_json(rows)).encode()):
        first = 1 + max((row["group"] for row in gathered), default=-1)
        gathered += [row | {"group": first + row["group"]} for row in json.loads(part)]
    return gathered


def learned_advantages(collected: Collected) -> Tensor:
    """Return the mean advantage over the actions of each sample that are learned from; NaN if there
    is none."""
    batch, sampled = collected.batch, collected.sampled
    assert sampled is not None
    advantages = torch.full((len(sampled.rollouts),), torch.nan)
    total = torch.where(batch.loss_mask, batch.advantages, 0.0).sum(1)
    advantages[sampled.rows] = (total / batch.loss_mask.sum(1)).float().cpu()
    return advantages


def show_samples(run: Run, collected: Collected) -> None:
    """Give samples to the screen and samples.jsonl: some every ``show_samples_every`` steps, and
    those that failed at each step, with the reasons."""
    sampled, every = collected.sampled, run.config.show_samples_every
    if sampled is None or not dist.is_main():
        return
    rollouts, scores = sampled.rollouts, sampled.scores
    failures = failures_of(scores)
    failed = sorted(failures)[:FAILURES_KEPT]
    shown = list(failed)
    if every and (run.state.step - 1) % every == 0:
        shown += run.display.rows_to_show(rollouts.group_ids, scores.rewards)
    rows = sample_rows(run.display, rollouts, scores, shown)
    for number, row in zip(failed, rows, strict=False):
        row["failures"] = failures[number]
    for tracker in run.trackers if rows else ():
        tracker.log_samples(run.state.step, rows)
