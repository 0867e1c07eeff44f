"""Greedy answers to held-out prompts."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from gruppo import distributed as dist
from gruppo.environments import completion_lengths, environment_failures
from gruppo.protocols import Policy
from gruppo.rewards.scoring import Scores
from gruppo.tracking.report import Z_95, wilson_interval
from gruppo.trainer.memory import budget_for
from gruppo.trainer.run import Run, reduced
from gruppo.types import Prompt, Request, Rollouts, Stat

log = logging.getLogger("gruppo")

Generate = Callable[..., Rollouts]
"""An engine's ``generate``, or a policy's ``sample``: who answers."""


@dataclass(frozen=True)
class Evaluated:
    """Mean reward with its 95% interval, by reward and of their sum."""

    step: int
    prompts: int
    scored: int
    mean: float
    low: float
    high: float
    parts: dict[str, float]

    def metrics(self) -> dict[str, float]:
        parts = {f"eval/{name}": value for name, value in self.parts.items()}
        return {"eval/reward_mean": self.mean, **parts}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def held_out(run: Run, count: int) -> list[Prompt]:
    """At most ``count`` evaluation prompts: the same at every evaluation of a run; none where the data keep none."""
    source: Any = run.source
    prompts = source.held_out(count) if count else []
    return [prompt for prompt in prompts if run.policy.check_prompt(prompt, run.sampling) is None]


def evaluate(run: Run, prompts: Sequence[Prompt], *, generate: Generate | None = None) -> Evaluated:
    """Answers at temperature 0, one for each prompt, shared out over ranks."""
    return evaluate_rows(run, prompts, generate=generate)[0]


def evaluate_rows(
    run: Run, prompts: Sequence[Prompt], *, generate: Generate | None = None
) -> tuple[Evaluated, list[dict[str, Any]]]:
    """The evaluation, and this rank's answers: those of the run's engine, or of ``generate``."""
    generate = generate or run.engine.generate
    mine = list(prompts)[dist.rank() :: dist.world_size()]
    sampling = run.sampling.greedy()
    stats = {"": Stat(), **{name: Stat() for name in run.rewards.names}}
    own: dict[str, Stat] = {}
    rows: list[dict[str, Any]] = []
    if mine and not run.rewards.names:  # pictures are to be seen all the same
        rollouts = generate([Request(p, 1) for p in mine], sampling, seed=run.config.seed)
        unscored = Scores(torch.full((len(mine),), torch.nan), {})
        rows = sample_rows(run.policy, rollouts, unscored, range(len(rollouts)), is_held_out=True)
    elif mine:
        rollouts = generate([Request(p, 1) for p in mine], sampling, seed=run.config.seed)
        scores = run.rewards.score(rollouts, step=run.state.step, max_steps=run.config.steps, is_evaluation=True)
        if refused := environment_failures(rollouts):
            why = next(iter(refused.values()))
            log.warning("held out: the environment failed in %d of %d conversations: %s", len(refused), len(mine), why)
        rows = sample_rows(run.policy, rollouts, scores, range(len(rollouts)), is_held_out=True)
        stats[""] = Stat.of(scores.rewards, scores.rewards.isfinite())
        stats |= {name: Stat.of(part, part.isfinite()) for name, part in scores.parts.items()}
        own = run.policy.batch_stats(rollouts, scores.rewards, sampling, is_evaluation=True)
    stats = dist.merge_stats(stats)
    total = stats.pop("")
    # A restored image scored against the reference is exactly 0 at first, which is no share of successes.
    low, high = interval(total, may_be_share=not run.policy.actions_are_positions)
    parts = {name: stat.mean for name, stat in stats.items()}
    parts |= {name: value for name, value in reduced(dist.merge_stats(own)).items() if name not in parts}
    return Evaluated(run.state.step, len(prompts), int(total.count), total.mean, low, high, parts), rows


def evaluate_steps(run: Run, prompts: Sequence[Prompt]) -> dict[str, float]:
    """The policy's metrics of samples of their own, such as rewards along denoising steps."""
    mine = list(prompts)[: run.config.evaluation.along_steps][dist.rank() :: dist.world_size()]
    if not run.rewards.names or not run.config.evaluation.along_steps:
        return {}
    stats: dict[str, Stat] = {}
    if mine:
        stats = run.policy.evaluate_steps(
            mine,
            run.sampling,
            generate=lambda requests, sampling: run.engine.generate(requests, sampling, seed=run.config.seed),
            score=lambda rollouts: (
                run.rewards.score(rollouts, step=run.state.step, max_steps=run.config.steps, is_evaluation=True).rewards
            ),
            budget=budget_for(run, 0),
        )
    return reduced(dist.merge_stats(stats))


def interval(stat: Stat, *, may_be_share: bool = True) -> tuple[float, float]:
    """95% interval of a mean: Wilson's where every value is 0 or 1, the normal one otherwise."""
    if stat.count == 0:
        return float("nan"), float("nan")
    is_share = may_be_share and stat.min >= 0 and stat.max <= 1 and abs(stat.sum - stat.sum_sq) < 1e-9 * stat.count
    if is_share:
        return wilson_interval(stat.sum, stat.count)
    half = Z_95 * stat.std / math.sqrt(max(stat.count - 1, 1))
    return stat.mean - half, stat.mean + half


def sample_rows(
    policy: Policy, rollouts: Rollouts, scores: Scores, rows: Sequence[int], *, is_held_out: bool = False
) -> list[dict[str, Any]]:
    """Rows as people read them, for the screen and samples.jsonl; ``extra`` is what rewards logged with log_extra.

    Of pictures also their group, and whether they are an evaluation's: trackers draw them on sheets.
    """
    shown = {row: policy.render(rollouts, row) for row in rows}
    has_pictures = any(isinstance(sample, Tensor) for sample in shown.values())
    tokens = completion_lengths(rollouts)
    return [
        {
            **({"group": int(rollouts.group_ids[row]), "held_out": is_held_out} if has_pictures else {}),
            "prompt": rollouts.prompts[int(rollouts.group_ids[row])].inputs,
            "completion": shown[row],
            "reward": float(scores.rewards[row]),
            "parts": {name: float(part[row]) for name, part in scores.parts.items()},
            **({"extra": {name: values[row] for name, values in scores.extras.items()}} if scores.extras else {}),
            "target": rollouts.prompts[int(rollouts.group_ids[row])].target,
            "finish": rollouts.finish[row],
            "tokens": int(tokens[row]),
        }
        for row in rows
    ]
