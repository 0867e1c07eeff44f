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
    lengths = completion_lengths(rollouts)
    samples = []
    for row in rows:
        group = int(rollouts.group_ids[row])
        prompt = rollouts.prompts[group]
        completion = rollouts.completions[row]
        if display is not None:
            completion = display.render(rollouts, row)
        sample: dict[str, Any] = {}
        if isinstance(completion, Tensor):
            sample = {"group": group, "held_out": is_held_out}
        sample |= {
            "prompt": rollouts.per_row["inputs"][row]
            if "inputs" in rollouts.per_row
            else prompt.inputs,
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
    for failure in scores.failures:
        reason = {"reward": failure.reward, "kind": failure.kind, "message": failure.message}
        failures.setdefault(failure.row, []).append(reason)
    return failures


def all_completions(run: Run, collected: Collected) -> list[dict[str, Any]]:
    """Return rows of all ranks for completions/, each with its group in the step; a collective,
    empty if they are not kept."""
    sampled = collected.sampled
    if sampled is None or run.config.saving.completions == "shown":
        return []
    failures, groups = failures_of(sampled.scores), sampled.rollouts.group_ids.tolist()
    advantages = learned_advantages(collected)
    rows = sample_rows(None, sampled.rollouts, sampled.scores, range(len(groups)))
    for number, row in enumerate(rows):
        reasons = [": ".join(failure.values()) for failure in failures.get(number, ())]
        # failures as a string in each row: Arrow wants one type per column
        row |= {"group": groups[number], "failures": "; ".join(reasons)}
        row["advantage"] = float(advantages[number])
    gathered: list[dict[str, Any]] = []
    first = 0
    for part in dist.all_gather(json.dumps(to_json(rows)).encode()):
        own = json.loads(part)
        gathered += [row | {"group": first + row["group"]} for row in own]
        first += 1 + max((row["group"] for row in own), default=-1)
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
    rows = sample_rows(run.display, rollouts, scores, failed)
    for number, row in zip(failed, rows, strict=True):
        row["failures"] = failures[number]
    if every and (run.state.step - 1) % every == 0:
        chosen = run.display.rows_to_show(rollouts.group_ids, scores.rewards)
        rows += sample_rows(run.display, rollouts, scores, chosen)
    for tracker in run.trackers if rows else ():
        tracker.log_samples(run.state.step, rows)
