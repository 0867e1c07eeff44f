"""Pictures that are given, not sampled: noise is added, and the network says what was there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gruppo.modalities.diffusion.cells import Cells
from gruppo.modalities.diffusion.conditions import Condition
from gruppo.modalities.diffusion.denoiser import Denoiser
from gruppo.modalities.diffusion.network import Asked
from gruppo.modalities.diffusion.transitions import Predicts, Step, split
from gruppo.protocols import Outputs
from gruppo.seeds import generator_at
from gruppo.types import Finish, Likelihood, Prompt, Rollouts

Weighting = Literal["uniform", "clean"]


def demonstrated(denoiser: Denoiser, prompts: Sequence[Prompt], seed: int) -> Rollouts:
    """One row and one action of each prompt: its picture in [-1, 1].

    ``per_row``: the noise (``first``), the time that it is added at (``level``), and whether the condition is left out
    (``dropped``). No sampler said anything of it: its log-probs are 0.
    """
    rows, conditions = len(prompts), denoiser.encoded([prompt.inputs for prompt in prompts])
    dropped = 0.0 if denoiser.condition is None else denoiser.condition.dropped
    generators = [generator_at(seed, "demonstration", prompt.draw) for prompt in prompts]
    uniforms = torch.stack([torch.rand(2, generator=generator, dtype=torch.float64) for generator in generators])
    finish: Finish = "stop"
    return Rollouts(
        prompts=tuple(prompts),
        group_ids=torch.arange(rows),
        actions=torch.stack([denoiser.codec.encode(prompt.target) for prompt in prompts])[:, None],  # [B, 1, *E]
        mask=torch.ones(rows, 1, dtype=torch.bool),
        lengths=torch.ones(rows, dtype=torch.long),
        completions=tuple(prompt.target for prompt in prompts),
        sampler_logprobs=torch.zeros(rows, 1),
        policy_version=torch.zeros(rows, 1, dtype=torch.long),
        temperature=torch.ones(rows),
        finish=(finish,) * rows,
        shared={} if conditions is None else {"condition": conditions},
        per_row={
            "first": torch.stack([torch.randn(denoiser.shape, generator=generator) for generator in generators]),
            "level": denoiser.path.spread(uniforms[:, 0]),
            "dropped": uniforms[:, 1] < dropped,
        },
    )


def likelihood_of_demonstrations(
    denoiser: Denoiser, rollouts: Rollouts, cells: Cells, weighting: Weighting, outputs: Outputs
) -> Likelihood:
    """Log-probs are -w mean (prediction - truth)^2: a normal's of std (d / 2 w)^(1/2), less its constant."""
    device, row = denoiser.device, cells.row
    picture, noise = rollouts.actions[row, 0].to(device), rollouts.per_row["first"][row].to(device)
    times = rollouts.per_row["level"][row]
    alpha, sigma = (level.to(device) for level in denoiser.path.level(times))
    step = Step(alpha, sigma, torch.ones_like(alpha), torch.zeros_like(sigma))
    x = noised(picture, noise, step)
    condition = _without_dropped(cells.condition(rollouts), denoiser.condition, rollouts.per_row["dropped"][row])
    said, _ = denoiser.network(Asked(x, times.to(device), condition, torch.ones(len(x))))
    error = (said.double() - truth(picture, noise, step, denoiser.predicts)).square().flatten(1).mean(dim=1)
    weight = 1 / (sigma.square() + 0.05) if weighting == "clean" else torch.ones_like(sigma)
    output = cells.spread(split(x, said, step, denoiser.predicts)[0]) if "output" in outputs else None
    return Likelihood(cells.spread(-weight * error), output=output)


def _without_dropped(given: Tensor | None, condition: Condition | None, is_dropped: Bool[Tensor, "N"]) -> Tensor | None:
    if given is None or condition is None or not condition.dropped:
        return given
    at = is_dropped.to(given.device).reshape(-1, *[1] * (given.ndim - 1))
    return torch.where(at, condition.nothing().to(given), given)


def noised(picture: Float[Tensor, "N ..."], noise: Float[Tensor, "N ..."], step: Step) -> Float[Tensor, "N ..."]:
    """alpha x0 + sigma e, float32."""
    alpha, sigma = (_over(level, picture) for level in (step.alpha, step.sigma))
    return (alpha * picture.double() + sigma * noise.double()).float()


def truth(
    picture: Float[Tensor, "N ..."], noise: Float[Tensor, "N ..."], step: Step, predicts: Predicts
) -> Float[Tensor, "N ..."]:
    """What the network should say, float64."""
    x0, e = picture.double(), noise.double()
    alpha, sigma = (_over(level, picture) for level in (step.alpha, step.sigma))
    return {"noise": e, "x0": x0, "v": alpha * e - sigma * x0, "velocity": e - x0}[predicts]


def _over(level: Float[Tensor, "N"], x: Tensor) -> Tensor:
    return level.reshape(-1, *[1] * (x.ndim - 1))
