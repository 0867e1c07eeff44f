"""Evaluation: greedy completions of held-out prompts, scored."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gruppo import distributed as dist
from gruppo.environments import completion_lengths, environment_failures
from gruppo.protocols import DescriptionMixin, peek
from gruppo.rewards.scoring import Scores
from gruppo.seeds import seed_at
from gruppo.tracking.report import Z_95, wilson_interval
from gruppo.trainer.run import Run, reduced
from gruppo.types import Prompt, Request, Rollouts, Stat

log = logging.getLogger("gruppo")


@dataclass(frozen=True)
class Evaluated:
    """Mean of the total reward with its 95% interval, and of each reward."""

    step: int
    prompts: int
    scored: int
    mean: float
    low: float
    high: float
    parts: dict[str, float]

    def metrics(self) -> dict[str, float]:
        return {
            "eval/reward_mean": self.mean,
            **{f"eval/{name}": value for name, value in self.parts.items()},
        }


def held_out(run: Run, count: int) -> list[Prompt]:
    """Return at most ``count`` evaluation prompts, the same at every evaluation of a run."""
    prompts = (run.validation or run.source).held_out(count) if count else []
    if (
        not prompts and count and run.validation is not None
    ):  # a source of the user's own, without a split
        prompts = peek(run.validation, count)
    return [prompt for prompt in prompts if run.policy.check_prompt(prompt, run.sampling) is None]


def evaluate(
    run: Run, prompts: Sequence[Prompt], *, generate: Callable[..., Rollouts] | None = None
) -> tuple[Evaluated, list[dict[str, Any]]]:
    """Sample and score one greedy completion per prompt; return the result over all ranks and this
    rank's samples.

    With ``evaluation.samples`` = k > 0, also sample k completions per prompt as in training:

        mean@k = mean over prompts and samples of the reward
        pass@k = mean over prompts of the largest reward of its k samples

    which for rewards of 0 and 1 is the share of prompts that one of k samples solves.

    ``generate``: a policy's ``sample``, greedy only; by default the run's engine.
    """
    count = run.config.evaluation.samples if generate is None and run.rewards.names else 0
    generate = generate or run.engine.generate
    mine = list(prompts)[
        dist.rank() :: dist.world_size()
    ]  # fewer prompts than ranks leave some without any
    sampling = run.sampling.greedy()
    stats = {"": Stat(), **{name: Stat() for name in run.rewards.names}}
    own: dict[str, Stat] = {}
    rows: list[dict[str, Any]] = []
    if mine:
        rollouts = generate([Request(p, 1) for p in mine], sampling, seed=run.config.seed)
        scores = Scores(
            torch.full((len(mine),), torch.nan), {}
        )  # without rewards, images are still shown
        if run.rewards.names:
            scores = run.rewards.score(rollouts, run.trainer_state, is_evaluation=True)
            if failed := environment_failures(rollouts):
                values = (len(failed), len(mine), next(iter(failed.values())))
                log.warning(
                    "held out: the environment failed in %d of %d conversations: %s", *values
                )
            stats[""] = Stat.of(scores.rewards, scores.rewards.isfinite())
            stats |= {name: Stat.of(part, part.isfinite()) for name, part in scores.parts.items()}
            own = run.statistics.batch_stats(rollouts, scores.rewards, sampling, is_evaluation=True)
        rows = sample_rows(run.display, rollouts, scores, range(len(rollouts)), is_held_out=True)
    if count:
        stats |= {name: Stat() for name in (f"mean@{count}", f"pass@{count}")}
    if count and mine:
        # random numbers of its own: a training prompt may have the same draw
        seed = seed_at(run.config.seed, "evaluation")
        rollouts = generate([Request(p, count) for p in mine], run.sampling, seed=seed)
        rewards = run.rewards.score(rollouts, run.trainer_state, is_evaluation=True).rewards
        # -inf stays where no sample of a prompt was scored: it is in no mean
        filled, group_ids = rewards.nan_to_num(nan=-torch.inf), rollouts.group_ids.cpu()
        best = torch.full((len(mine),), -torch.inf).scatter_reduce(0, group_ids, filled, "amax")
        stats[f"mean@{count}"] = Stat.of(rewards, rewards.isfinite())
        stats[f"pass@{count}"] = Stat.of(best, best.isfinite())
    stats = dist.merge_stats(stats)
    total = stats.pop("")
    # 95% interval: Wilson's for a share of successes, else the normal one. A restored image that is
    # scored against the reference is exactly 0 at first, which is no share.
    is_share = (
        total.min >= 0 and total.max <= 1 and abs(total.sum - total.sum_sq) < 1e-9 * total.count
    )
    half = Z_95 * total.std / math.sqrt(max(total.count - 1, 1))
    low, high = total.mean - half, total.mean + half
    is_relative = (
        run.policy.modality.rewards_read_reference and "reference" in run.rewards.requested_columns
    )
    if total.count and is_share and not is_relative:
        low, high = wilson_interval(total.sum, total.count)
    parts = {name: stat.mean for name, stat in stats.items()}
    parts |= {
        name: value for name, value in reduced(dist.merge_stats(own)).items() if name not in parts
    }
    return Evaluated(
        run.state.step, len(prompts), int(total.count), total.mean, low, high, parts
    ), rows


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
    rendered = {
        row: rollouts.completions[row] if display is None else display.render(rollouts, row)
        for row in rows
    }
    has_images = any(isinstance(sample, Tensor) for sample in rendered.values())
    tokens, prompts = (
        completion_lengths(rollouts),
        [rollouts.prompts[group].inputs for group in rollouts.group_ids],
    )
    inputs = rollouts.per_row.get("inputs", prompts)
    return [
        {
            **(
                {"group": int(rollouts.group_ids[row]), "held_out": is_held_out}
                if has_images
                else {}
            ),
            "prompt": inputs[row],
            "completion": rendered[row],
            "reward": float(scores.rewards[row]),
            "parts": {name: float(part[row]) for name, part in scores.parts.items()},
            **(
                {"extra": {name: values[row] for name, values in scores.extras.items()}}
                if scores.extras
                else {}
            ),
            "target": rollouts.prompts[int(rollouts.group_ids[row])].target,
            "finish": rollouts.finish[row],
            "tokens": int(tokens[row]),
        }
        for row in rows
    ]
