"""Metrics of each denoising step K, counted from 0: ``timestep/NAME/K``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gruppo.core.groups import group_std
from gruppo.core.kl import masked_gaussian_kl
from gruppo.core.loss import LossInputs
from gruppo.modalities.diffusion.sampling import DiffusionSampling
from gruppo.protocols import Policy
from gruppo.types import Likelihood, MicroBatch, Prompt, Request, Rollouts, Stat


def update_stats(
    rollouts: Rollouts, micro_batch: MicroBatch, likelihood: Likelihood, inputs: LossInputs
) -> dict[str, Stat]:
    """Statistics of the actions of one micro-batch before its update, by denoising step."""
    if rollouts.mask.shape[1] == 1:
        return {}
    logprobs, mask = likelihood.logprobs.detach(), inputs.loss_mask
    old = logprobs if inputs.old_logprobs is None else inputs.old_logprobs
    values: dict[str, Tensor] = {
        "sum:timestep/trained_count": mask.double(),
        "mean:timestep/advantage_abs_mean": inputs.advantages.abs(),
        "mean:timestep/ratio_abs_nats": (logprobs - old).abs(),
    }
    ref = None if inputs.ref is None else inputs.ref.gaussian
    if ref is not None and likelihood.gaussian is not None:
        with torch.no_grad():
            values["mean:timestep/kl_ref_nats"] = masked_gaussian_kl(likelihood.gaussian, ref, mask)
    first = micro_batch.cols.start or 0
    return {
        f"{name}/{first + column}": Stat.of(x[:, column], mask[:, column])
        for name, x in values.items()
        for column in range(mask.shape[1])
    }


def branch_stats(rollouts: Rollouts, rewards: Float[Tensor, "B"], sampling: DiffusionSampling) -> dict[str, Stat]:
    """Spread of rewards in groups whose samples part at step K alone: how much the noise of that step decides."""
    if sampling.noise != "branched":
        return {}
    spread = group_std(rewards, rollouts.group_ids)
    chosen = torch.zeros(len(rollouts.prompts), rollouts.mask.shape[1])
    parts_at = chosen.index_add(0, rollouts.group_ids, rollouts.mask.float()) > 0  # [P, T]; a failed row has none
    return {
        f"mean:timestep/reward_std_within_group/{step}": Stat.of(spread, parts_at[:, step] & spread.isfinite())
        for step in range(rollouts.mask.shape[1] - 1)
    }


@torch.no_grad()
def rewards_along_steps(
    policy: Any,
    prompts: Sequence[Prompt],
    sampling: DiffusionSampling,
    generate: Callable[[Sequence[Request], Any], Rollouts],
    score: Callable[[Rollouts], Float[Tensor, "B"]],
    budget: int,
) -> dict[str, Stat]:
    """Mean reward of the image that the network predicts at each step, sampled as in training."""
    every = replace(sampling, noise="independent", train_from=0, train_to=0, train_fraction=1.0)
    rollouts = generate([Request(prompt, 1) for prompt in prompts], every)
    stats = {}
    expected: list[Iterable[Any]] = [*_predicted(policy, rollouts, budget), rollouts.completions]
    for step, completions in enumerate(expected):
        rewards = score(replace(rollouts, completions=tuple(completions)))
        stats[f"mean:timestep/reward/{step}"] = Stat.of(rewards, rewards.isfinite())
    return stats


def _predicted(policy: Policy, rollouts: Rollouts, budget: int) -> Iterable[Tensor]:
    """The predicted image [B, C, H, W] at each step that has noise."""
    steps = rollouts.mask.shape[1] - 1
    states = torch.zeros(len(rollouts), steps, *rollouts.actions.shape[2:])
    for micro_batch in policy.micro_batches(rollouts, rollouts.mask, budget):
        output = policy.likelihood(rollouts, micro_batch, outputs=("output",)).output.float().cpu()  # [b, t, *E]
        columns = torch.arange(micro_batch.cols.start or 0, min(micro_batch.cols.stop, steps))
        states[micro_batch.rows[:, None], columns[None]] = output[:, : len(columns)]
    return (policy.denoiser.codec.decode(states[:, step]) for step in range(steps))  # type: ignore[attr-defined]
