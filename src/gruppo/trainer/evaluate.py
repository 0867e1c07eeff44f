"""Evaluation: greedy completions of held-out prompts, scored."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from gruppo import distributed as dist
from gruppo.core.groups import group_reduce
from gruppo.environments import converse, environment_failures
from gruppo.protocols import ConversationMixin, part, peek
from gruppo.rewards.scoring import Scores
from gruppo.seeds import seed_at
from gruppo.tracking.report import Z_95, wilson_interval
from gruppo.trainer.forward import whole_weights
from gruppo.trainer.recorder import reduced
from gruppo.trainer.run import Run
from gruppo.trainer.samples import sample_rows
from gruppo.types import Prompt, Request, Rollouts, Stat

log = logging.getLogger("gruppo")

TOTAL = ""
"""Key of the statistics of the total reward."""


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
    reference: dict[str, float] = field(default_factory=dict)
    """Metrics of a reference that moves."""

    def metrics(self) -> dict[str, float]:
        parts = {f"eval/{name}": value for name, value in self.parts.items()}
        return {"eval/reward_mean": self.mean, **parts, **self.reference}


def held_out(run: Run, count: int) -> list[Prompt]:
    """Return at most ``count`` evaluation prompts, the same at every evaluation of a run."""
    if not count:
        return []
    prompts = (run.validation or run.source).held_out(count)
    if not prompts and run.validation is not None:  # a source of the user's own, without a split
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
    # fewer prompts than ranks leave some without any
    mine = list(prompts)[dist.rank() :: dist.world_size()]
    stats: dict[str, Stat] = {}
    rows: list[dict[str, Any]] = []
    if mine:
        sampling = run.sampling.greedy()
        rollouts = generate([Request(p, 1) for p in mine], sampling, seed=run.config.seed)
        # without rewards, images are still shown
        scores = Scores(torch.full((len(mine),), torch.nan), {})
        if run.rewards.names:
            scores = run.rewards.score(rollouts, run.trainer_state, is_evaluation=True)
            stats = run.statistics.batch_stats(
                rollouts, scores.rewards, sampling, is_evaluation=True
            )
        if failed := [*environment_failures(rollouts).values()]:
            text = "held out: the environment failed in %d of %d conversations: %s"
            log.warning(text, len(failed), len(rollouts), failed[0])
        stats |= {f"mean:{name}": _finite(part) for name, part in scores.parts.items()}
        stats[TOTAL] = _finite(scores.rewards)
        rows = sample_rows(run.display, rollouts, scores, range(len(rollouts)), is_held_out=True)
    if count and mine:
        # random numbers of its own: a training prompt may have the same draw
        seed = seed_at(run.config.seed, "evaluation")
        rollouts = generate([Request(p, count) for p in mine], run.sampling, seed=seed)
        rewards = run.rewards.score(rollouts, run.trainer_state, is_evaluation=True).rewards
        # NaN stays if no sample of a prompt was scored: it is in no mean
        best = group_reduce(rewards, rollouts.group_ids.cpu(), "amax")
        stats |= {f"mean:mean@{count}": _finite(rewards), f"mean:pass@{count}": _finite(best)}
    stats = dist.merge_stats(stats)
    total = stats.pop(TOTAL, Stat())
    low, high = _interval(total)
    done = Evaluated(
        run.state.step,
        len(prompts),
        int(total.count),
        total.mean,
        low,
        high,
        reduced(stats, keep_empty=True),
    )
    return done, rows


def _finite(x: torch.Tensor) -> Stat:
    return Stat.of(x, x.isfinite())


def evaluate_reference(run: Run) -> dict[str, float]:
    """Return the policy's distance from a reference that moves, and the evaluation of a mixed
    one."""
    reference = run.reference
    if reference is None or not reference.follows_policy:
        return {}
    metrics = {"reference/distance_frac": reference.distance(run.policy)}
    prompts = held_out(run, run.config.reference.watch_prompts)
    if run.config.reference.is_mixed and prompts:
        with reference.active() as policy, whole_weights(policy):
            generate: Any = policy.sample
            if run.environment is not None:
                continued = part(policy, ConversationMixin).continue_rollouts
                generate = partial(
                    converse,
                    generate,
                    continued,
                    run.environment,
                    check_prompt=policy.check_prompt,
                )
            done, _ = evaluate(run, prompts, generate=generate)
            metrics["reference/eval_reward_mean"] = done.mean
    return metrics


def _interval(total: Stat) -> tuple[float, float]:
    """Return the 95% interval of a mean: Wilson's for a share of successes, else the normal one."""
    is_share = total.min >= 0 and total.max <= 1
    is_share = is_share and abs(total.sum - total.sum_sq) < 1e-9 * total.count
    if total.count and is_share:
        return wilson_interval(total.sum, total.count)
    half = Z_95 * total.std / math.sqrt(max(total.count - 1, 1))
    return total.mean - half, total.mean + half
