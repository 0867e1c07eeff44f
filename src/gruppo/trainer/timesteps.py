"""What is said of each denoising step K, counted from 0: ``timestep/NAME/K``, over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gruppo import distributed as dist
from gruppo.core.groups import group_std
from gruppo.core.kl import masked_gaussian_kl
from gruppo.core.loss import LossInputs
from gruppo.modalities.diffusion import DiffusionSampling
from gruppo.rewards.scoring import Scores
from gruppo.trainer.memory import budget_for
from gruppo.trainer.run import Run
from gruppo.types import Likelihood, MicroBatch, Prompt, Request, Rollouts, Stat

OF_UPDATES = {
    "trained": "sum:{}_count",
    "advantage_abs": "mean:{}_mean",
    "ratio_abs": "mean:{}_nats",
    "ref": "mean:kl_{}_nats",
}
"""Statistics of an update, and the metrics that they give."""


def names(run: Run, rollouts: Rollouts) -> list[str]:
    """Of the statistics that ``of_piece`` gives, the same on all ranks."""
    if not has_timesteps(run, rollouts):
        return []
    told = [name for name in OF_UPDATES if name != "ref" or run.reference is not None]
    return [f"timestep/{name}/{step}" for name in told for step in range(rollouts.mask.shape[1])]


def has_timesteps(run: Run, rollouts: Rollouts) -> bool:
    return isinstance(run.sampling, DiffusionSampling) and rollouts.mask.shape[1] > 1


def of_micro_batch(micro_batch: MicroBatch, likelihood: Likelihood, inputs: LossInputs) -> dict[str, Stat]:
    """Statistics of the kept actions of one piece, before its update, by denoising step."""
    logprobs, loss_mask = likelihood.logprobs.detach(), inputs.loss_mask
    old = logprobs if inputs.old_logprobs is None else inputs.old_logprobs
    numbers: dict[str, Tensor] = {
        "trained": loss_mask.double(),
        "advantage_abs": inputs.advantages.abs(),
        "ratio_abs": (logprobs - old).abs(),
    }
    ref = None if inputs.ref is None else inputs.ref.gaussian
    if ref is not None and likelihood.gaussian is not None:
        with torch.no_grad():
            numbers["ref"] = masked_gaussian_kl(likelihood.gaussian, ref, loss_mask)
    first = micro_batch.cols.start or 0
    return {
        f"timestep/{name}/{first + column}": Stat.of(x[:, column], loss_mask[:, column])
        for name, x in numbers.items()
        for column in range(loss_mask.shape[1])
    }


def metrics_of(stats: Mapping[str, Stat]) -> dict[str, float]:
    """``timestep/ref_nats/3`` and the like; only of steps that were learned from."""
    found = {}
    for name, stat in stats.items():
        if name.startswith("timestep/") and stat.count:
            _, kind, step = name.split("/")
            what, form = OF_UPDATES[kind].split(":")
            found[f"timestep/{form.format(kind)}/{step}"] = float(getattr(stat, what))
    return found


def spread_of_branches(run: Run, rollouts: Rollouts, scores: Scores) -> dict[str, Stat]:
    """Spread of rewards in groups whose samples part at step K alone: how much the noise of that step decides."""
    if not isinstance(run.sampling, DiffusionSampling) or run.sampling.noise != "branched":
        return {}
    spread = group_std(scores.rewards, rollouts.group_ids)
    chosen = torch.zeros(len(rollouts.prompts), rollouts.mask.shape[1])
    parts_at = chosen.index_add(0, rollouts.group_ids, rollouts.mask.float()) > 0  # [P, T]; a row that failed has none
    return {
        f"timestep/reward_std_within_group/{step}": Stat.of(spread, parts_at[:, step] & spread.isfinite())
        for step in range(rollouts.mask.shape[1] - 1)
    }


@torch.no_grad()
def rewards_along(run: Run, prompts: Sequence[Prompt]) -> dict[str, float]:
    """``timestep/reward/K``: mean reward of the picture that the network expects at each step, as training samples."""
    sampling = run.sampling
    most = run.config.evaluation.along_steps
    if not isinstance(sampling, DiffusionSampling) or not run.rewards.names or not most:
        return {}
    mine = list(prompts)[:most][dist.rank() :: dist.world_size()]
    stats = {f"timestep/reward/{step}": Stat() for step in range(sampling.steps)}
    if mine:
        every = replace(sampling, noise="independent", train_from=0, train_to=0, train_fraction=1.0)
        rollouts = run.engine.generate([Request(prompt, 1) for prompt in mine], every, seed=run.config.seed)
        expected: list[Iterable[Any]] = [*_expected(run, rollouts), rollouts.completions]
        for step, outputs in enumerate(expected):
            scores = run.rewards.score(
                replace(rollouts, completions=tuple(outputs)),
                step=run.step,
                max_steps=run.config.steps,
                is_evaluation=True,
            )
            stats[f"timestep/reward/{step}"] = Stat.of(scores.rewards, scores.rewards.isfinite())
    return {name: stat.mean for name, stat in dist.merge_stats(stats).items()}


def _expected(run: Run, rollouts: Rollouts) -> Iterable[Tensor]:
    """The network's picture [B, C, H, W] at each step that has noise."""
    steps = rollouts.mask.shape[1] - 1
    states = torch.zeros(len(rollouts), steps, *rollouts.actions.shape[2:])
    for micro_batch in run.policy.micro_batches(rollouts, rollouts.mask, budget_for(run, 0)):
        output = run.policy.likelihood(rollouts, micro_batch, outputs=("output",)).output.float().cpu()  # [b, t, *E]
        columns = torch.arange(micro_batch.cols.start or 0, min(micro_batch.cols.stop, steps))
        states[micro_batch.rows[:, None], columns[None]] = output[:, : len(columns)]
    return (run.policy.denoiser.codec.decode(states[:, step]) for step in range(steps))
