"""Sampling: from prompts to rollouts, all steps of some rows at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gruppo.core.gaussian import gaussian_logprob
from gruppo.modalities.diffusion.denoiser import Denoiser
from gruppo.modalities.diffusion.network import Asked
from gruppo.modalities.diffusion.sampling import DiffusionSampling, NoiseOf, trained_steps, transition_of
from gruppo.modalities.diffusion.transitions import TRANSITIONS, Ode, Transition
from gruppo.types import Finish, GruppoError, Prompt, Rollouts

NAMES = tuple(TRANSITIONS)
"""Rollouts hold the number of their transition in it."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Whose pictures are drawn together."""

    prompts: tuple[Prompt, ...]
    conditions: Tensor | None
    """[P, ...]"""
    owners: Int[Tensor, "B"]
    """Of which prompt each row is."""
    samples: Sequence[int]
    """[B] sample indices"""

    @property
    def addresses(self) -> list[tuple[int, int]]:
        """Draw and sample index of each row."""
        return [(self.prompts[p].draw, n) for p, n in zip(self.owners.tolist(), self.samples, strict=True)]


@torch.no_grad()
def drawn(denoiser: Denoiser, rows: Rows, sampling: DiffusionSampling, seed: int) -> Rollouts:
    """Rollouts, with all that scoring needs to know of how they were drawn."""
    count, owners = len(rows.owners), rows.owners
    noise = NoiseOf(sampling, seed, rows.addresses, denoiser.shape)
    chosen = torch.stack([trained_steps(sampling, seed, prompt.draw) for prompt in rows.prompts])  # [P, T]
    per_row = {
        "first": noise.first(),
        "steps": torch.full((count,), sampling.steps),
        "transition": torch.full((count,), NAMES.index("ode" if sampling.is_mode else sampling.transition)),
        "eta": torch.full((count,), math.nan if sampling.eta is None else sampling.eta, dtype=torch.float64),
        "guidance": torch.full((count,), sampling.guidance, dtype=torch.float64),
    }
    states, logprobs = _denoised(denoiser, rows, sampling, noise, per_row)
    is_finite = states.isfinite().flatten(1).all(dim=1)  # [B]
    mask = chosen[owners] & is_finite[:, None]
    return Rollouts(
        prompts=rows.prompts,
        group_ids=owners,
        actions=states,
        mask=mask,
        lengths=torch.full((count,), sampling.steps),
        completions=tuple(denoiser.codec.decode(states[:, -1].nan_to_num())),
        sampler_logprobs=torch.where(mask, logprobs, 0),
        policy_version=torch.zeros(mask.shape, dtype=torch.long),
        temperature=torch.full((count,), float(sampling.temperature)),
        finish=tuple(map(_finish, is_finite.tolist())),
        shared={} if rows.conditions is None else {"condition": rows.conditions},
        per_row=per_row,
    )


def _denoised(
    denoiser: Denoiser, rows: Rows, sampling: DiffusionSampling, noise: NoiseOf, per_row: dict[str, Tensor]
) -> tuple[Float[Tensor, "B T ..."], Float[Tensor, "B T"]]:
    """The states, and the log-prob of their float32 numbers; 0 where a step has no noise."""
    device, owners = denoiser.device, rows.owners
    condition = None if rows.conditions is None else rows.conditions[owners].to(device)
    x, states, logprobs = per_row["first"].to(device), [], []
    for column in range(sampling.steps):
        is_drawn = column < sampling.steps - 1 and not sampling.is_mode
        step, times = denoiser.steps(per_row["steps"], torch.full_like(owners, column))
        asked = Asked(x, times, condition, per_row["guidance"])
        transition = sampling.kind if is_drawn else Ode(denoiser.path.is_flow)
        normal = denoiser.stepped(asked, step, transition, owners).normal
        new, nats = normal.mean, torch.zeros_like(normal.std)
        if is_drawn:
            new = new + normal.std.reshape(-1, *[1] * (x.ndim - 1)) * noise.of_step(column).to(new)
        x = new.float()
        if is_drawn:
            nats = gaussian_logprob(x[None], normal.mean[None], normal.std[None])[0]
        states.append(x.cpu())
        logprobs.append(nats.cpu())
    return torch.stack(states, dim=1), torch.stack(logprobs, dim=1)


def transition_drawn(rollouts: Rollouts, rows: Int[Tensor, "b"]) -> Transition:
    """How all of these rows were drawn."""
    if (rollouts.temperature[rows] <= 0).any():
        raise GruppoError(
            "these rollouts are the ODE's (temperature 0), which has no density to learn from. Sample at 1."
        )
    number, eta = (rollouts.per_row[name][rows].tolist() for name in ("transition", "eta"))
    kinds = {(NAMES[n], None if math.isnan(e) else e) for n, e in zip(number, eta, strict=True)}
    if len(kinds) > 1:
        raise GruppoError("these rollouts mix several transitions or etas; evaluate each kind apart.")
    return transition_of(*next(iter(kinds), ("ancestral", None)))


def _finish(is_finite: bool) -> Finish:
    return "stop" if is_finite else "error"
