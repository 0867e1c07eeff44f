"""Denoising training on given images: noise is added, and the loss is the error of the network's prediction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from gruppo.modalities.common.images import image_rollouts
from gruppo.modalities.diffusion.denoiser import Denoiser, DenoiserInputs, StepSelection
from gruppo.modalities.diffusion.transitions import StepLevels, broadcast, split_prediction
from gruppo.protocols import Outputs
from gruppo.seeds import generator_at
from gruppo.types import Likelihood, Prompt, Rollouts

Weighting = Literal["uniform", "clean"]


def demonstration_rollouts(denoiser: Denoiser, prompts: Sequence[Prompt], seed: int) -> Rollouts:
    """One row and one action per prompt: its target as a state, with log-probs of 0.

    ``per_row``: the noise (``first``), the time that it is added at (``level``), and whether the condition is left out
    (``dropped``), all by (seed, draw).
    """
    conditions = denoiser.encode([prompt.inputs for prompt in prompts])
    dropped = 0.0 if denoiser.condition is None else denoiser.condition.dropped
    generators = [generator_at(seed, "demonstration", prompt.draw) for prompt in prompts]
    uniforms = torch.stack([torch.rand(2, generator=generator, dtype=torch.float64) for generator in generators])
    return image_rollouts(
        prompts,
        torch.stack([denoiser.codec.encode(prompt.target) for prompt in prompts])[:, None],  # [B, 1, *E]
        [prompt.target for prompt in prompts],
        shared={} if conditions is None else {"condition": conditions},
        per_row={
            "first": torch.stack([torch.randn(denoiser.shape, generator=generator) for generator in generators]),
            "level": denoiser.schedule.training_times(uniforms[:, 0]),
            "dropped": uniforms[:, 1] < dropped,
        },
    )


def demonstration_likelihood(
    denoiser: Denoiser, rollouts: Rollouts, steps: StepSelection, weighting: Weighting, outputs: Outputs
) -> Likelihood:
    """Log-probs -w mean((prediction - truth)^2): of a normal with std (d / 2 w)^(1/2), without its constant."""
    device, row = denoiser.device, steps.row
    image, noise = rollouts.actions[row, 0].to(device), rollouts.per_row["first"][row].to(device)
    times = rollouts.per_row["level"][row]
    alpha, sigma = (level.to(device) for level in denoiser.schedule.level(times))
    levels = StepLevels(alpha, sigma, torch.ones_like(alpha), torch.zeros_like(sigma))
    a, s, x0, e = broadcast(alpha, image), broadcast(sigma, image), image.double(), noise.double()
    x = (a * x0 + s * e).float()  # as the network would see it in sampling, whose states are float32

    condition: Tensor | None = rollouts.shared.get("condition")
    if condition is not None:
        condition = condition[rollouts.group_ids[row]].to(device)
        if denoiser.condition is not None and denoiser.condition.dropped:
            is_dropped = rollouts.per_row["dropped"][row].to(device).reshape(-1, *[1] * (condition.ndim - 1))
            condition = torch.where(is_dropped, denoiser.condition.unconditional().to(condition), condition)

    inputs = DenoiserInputs(x, times.to(device), condition, torch.ones(len(x)))
    prediction, _ = denoiser.predict(inputs, torch.arange(len(x)))
    truth = {"noise": e, "x0": x0, "v": a * e - s * x0, "velocity": e - x0}[denoiser.predicts]
    error = (prediction.double() - truth).square().flatten(1).mean(dim=1)
    weight = 1 / (sigma.square() + 0.05) if weighting == "clean" else torch.ones_like(sigma)
    predicted_x0, _ = split_prediction(x, prediction, levels, denoiser.predicts)
    output = steps.scatter(predicted_x0) if "output" in outputs else None
    return Likelihood(steps.scatter(-weight * error), output=output)
