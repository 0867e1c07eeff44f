"""Sampling from a denoiser: options, the noise of each step by its address, and the loop over steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gruppo.core.distributions import gaussian_logprob
from gruppo.modalities.common.images import RowBatch, image_rollouts
from gruppo.modalities.common.validation import refuse
from gruppo.modalities.diffusion.denoiser import Denoiser
from gruppo.modalities.diffusion.schedules import TRANSITIONS, Step, ode, split_prediction, step_of
from gruppo.seeds import generator_at
from gruppo.types import GruppoError, Rollouts, Sampling

NoiseSharing = Literal["independent", "shared", "branched"]


@dataclass(frozen=True)
class DiffusionSampling(Sampling):
    """Options of sampling. The last step is always an ODE step: noise added there would remain in the image.

    ``temperature`` is 1, or 0: the ODE throughout, from latents that do not depend on the run's seed.
    """

    max_actions: int = 10
    """Denoising steps."""
    transition: str = "ancestral"
    """Sampler of every step but the last: a name in ``TRANSITIONS``."""
    eta: float | None = None
    """Scale of the noise added in a step; None takes the transition's own default."""
    guidance: float = 1.0
    """Classifier-free guidance: unconditional + guidance (conditional - unconditional), in sampling and scoring."""
    noise: NoiseSharing = "independent"
    """shared: a group starts from one latent. branched: it also shares all noise but that of one random step, the only
    one that is trained."""
    train_from: int = 0
    """First step that is trained."""
    train_to: int = 0
    """Step before which training ends; 0 for the last one."""
    train_fraction: float = 1.0
    """Fraction of these steps that is trained, sampled per group."""
    ode_steps: int = 0
    """Steps at temperature 0; 0 for ``max_actions``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        name, eta, noise_choices = self.transition, self.eta, get_args(NoiseSharing)
        got = "eta=0" if eta == 0 else f"transition={name!r}"
        refuse(
            name not in TRANSITIONS
            and f"transition={name!r} is not one of {', '.join(map(repr, TRANSITIONS))}. Set one of them.",
            self.temperature not in (0, 1)
            and f"temperature={self.temperature}: a denoising step has no temperature. Set 1, and --diffusion.eta for "
            "its noise; 0 is the ODE.",
            (self.top_k or self.top_p != 1 or self.stop)
            and f"top_k={self.top_k}, top_p={self.top_p:g} and stop={self.stop!r} apply to tokens. Leave them out.",
            name in ("ddpm", "ddpm_large")
            and eta not in (None, 1)
            and f"eta={eta} is not read by transition={name!r}. Set transition ddim, or leave eta out.",
            not self.is_mode
            and (name == "ode" or eta == 0)
            and f"{got} draws nothing: without a density there is no policy gradient. Set eta above 0; the ODE is for "
            "evaluation, temperature 0.",
            self.noise not in noise_choices
            and f"noise={self.noise!r} is not one of {', '.join(map(repr, noise_choices))}. Set one of them.",
            not 0 <= self.guidance < math.inf
            and f"guidance={self.guidance} is out of range; it needs to be at least 0. Set 1 for none.",
            self.ode_steps < 0 and f"ode_steps={self.ode_steps} is negative; use 0 for as many steps as in training.",
        )
        step_of(name, eta)  # raises for an eta out of its range
        if self.is_mode:
            return
        noisy = self.max_actions - 1
        refuse(
            noisy < 1
            and f"{self.max_actions} step has no noise to learn from: the last is of the ODE. Set 2 steps or more.",
            not 0 <= self.train_from < (self.train_to or noisy) <= noisy
            and f"train_from={self.train_from}, train_to={self.train_to} are not a range of the steps 0 to {noisy} "
            f"that have noise. Set train_from below train_to, and train_to at most {noisy}.",
            not 0 < self.train_fraction <= 1
            and f"train_fraction={self.train_fraction:g} is out of range; it needs to be above 0 and at most 1.",
            self.noise == "branched"
            and self.train_fraction != 1
            and f"train_fraction={self.train_fraction:g} with noise='branched', which trains one step of each group. "
            "Set train_fraction 1, or noise 'shared'.",
        )

    @staticmethod
    def of(sampling: Sampling) -> DiffusionSampling:
        """The options of a plain ``Sampling``, with the defaults of this class for the others."""
        if isinstance(sampling, DiffusionSampling):
            return sampling
        return DiffusionSampling(**{field.name: getattr(sampling, field.name) for field in fields(Sampling)})

    @property
    def is_mode(self) -> bool:
        return self.temperature == 0

    @property
    def steps(self) -> int:
        return self.ode_steps or self.max_actions if self.is_mode else self.max_actions


# --- noise and its addresses ------------------------------------------------------------------------------------------


def branch_step(sampling: DiffusionSampling, seed: int, draw: int) -> int:
    """The step at which the samples of a branched group part."""
    first, last = sampling.train_from, sampling.train_to or sampling.max_actions - 1
    return int(torch.randint(first, last, (), generator=generator_at(seed, "branch", draw)))


def trained_steps(sampling: DiffusionSampling, seed: int, draw: int) -> Bool[Tensor, "T"]:
    """Which steps of a group are trained: none at temperature 0."""
    chosen = torch.zeros(sampling.steps, dtype=torch.bool)
    if sampling.is_mode:
        return chosen
    if sampling.noise == "branched":
        chosen[branch_step(sampling, seed, draw)] = True
        return chosen
    first, last = sampling.train_from, sampling.train_to or sampling.max_actions - 1
    count = max(round(sampling.train_fraction * (last - first)), 1)
    order = torch.randperm(last - first, generator=generator_at(seed, "trained steps", draw))
    chosen[first + order[:count]] = True
    return chosen


def step_noise(
    sampling: DiffusionSampling, seed: int, rows: list[tuple[int, int]], shape: tuple[int, ...], step: int | None
) -> Float[Tensor, "B ..."]:
    """Standard normal noise of a step for rows of (draw, sample); of the initial latents where ``step`` is None."""
    addresses: list[tuple[int | str, ...]] = []
    draws = dict.fromkeys(draw for draw, _ in rows)
    branches = {draw: branch_step(sampling, seed, draw) for draw in draws} if sampling.noise == "branched" else {}
    for draw, sample in rows:
        # A group shares the initial latents unless samples are independent; a branched one all but one step's noise.
        is_own = sampling.noise == "independent" if step is None else step == branches.get(draw, step)
        address = (seed, "noise", draw, sample if is_own else "group", "first" if step is None else step)
        # An evaluation at temperature 0 has the same latents for every seed, so that runs are comparable.
        addresses.append(("mode", draw, sample) if sampling.is_mode else address)
    noise = {at: torch.randn(shape, generator=generator_at(*at)) for at in dict.fromkeys(addresses)}
    return torch.stack([noise[at] for at in addresses])


# --- the loop over steps ----------------------------------------------------------------------------------------------


@torch.no_grad()
def sample_batch(denoiser: Denoiser, batch: RowBatch, sampling: DiffusionSampling, seed: int) -> Rollouts:
    """Rollouts of a batch of rows, with all that scoring needs to know about how they were sampled."""
    count, groups, device = len(batch.group_ids), batch.group_ids, denoiser.device
    name = "ode" if sampling.is_mode else sampling.transition
    per_row = {
        "first": step_noise(sampling, seed, batch.addresses, denoiser.shape, None),
        "steps": torch.full((count,), sampling.steps),
        "transition": torch.full((count,), list(TRANSITIONS).index(name)),
        # NaN: the transition's own default
        "eta": torch.full((count,), math.nan if sampling.eta is None else sampling.eta, dtype=torch.float64),
        "guidance": torch.full((count,), sampling.guidance, dtype=torch.float64),
    }
    condition = None if batch.inputs is None else batch.inputs[groups].to(device)
    x, states, logprobs = per_row["first"].to(device), [], []
    for column in range(sampling.steps):
        is_stochastic = column < sampling.steps - 1 and not sampling.is_mode
        levels, times = denoiser.levels(per_row["steps"], torch.full_like(groups, column))
        prediction, _ = denoiser.predict(x, times, condition, per_row["guidance"], groups)
        step = step_of(name, sampling.eta) if is_stochastic else ode
        normal = step(x, *split_prediction(x, prediction, levels, denoiser.predicts), levels)
        x, nats = normal.mean.float(), torch.zeros_like(normal.std)
        if is_stochastic:  # the log-prob is that of the float32 state, as it is stored
            noise = step_noise(sampling, seed, batch.addresses, denoiser.shape, column).to(normal.mean)
            x = (normal.mean + normal.std.reshape(-1, *[1] * (x.ndim - 1)) * noise).float()
            nats = gaussian_logprob(x[None], normal.mean[None], normal.std[None])[0]
        states.append(x.cpu())
        logprobs.append(nats.cpu())
    actions = torch.stack(states, dim=1)  # [B, T, *E]
    is_finite = actions.isfinite().flatten(1).all(dim=1)
    chosen = torch.stack([trained_steps(sampling, seed, prompt.draw) for prompt in batch.prompts])  # [P, T]
    mask = chosen[groups] & is_finite[:, None]
    return image_rollouts(
        batch.prompts,
        actions,
        tuple(denoiser.codec.decode(actions[:, -1].nan_to_num())),
        shared={} if batch.inputs is None else {"condition": batch.inputs},
        per_row=per_row,
        group_ids=groups,
        logprobs=torch.where(mask, torch.stack(logprobs, dim=1), 0),
        mask=mask,
        is_finite=is_finite,
        temperature=float(sampling.temperature),
    )


def sampled_step(rollouts: Rollouts, rows: Int[Tensor, "b"]) -> Step:
    """The transition step that all of these rows were sampled with."""
    if (rollouts.temperature[rows] <= 0).any():
        raise GruppoError("rollouts of the ODE (temperature 0) have no density to learn from. Sample at 1.")
    names = list(TRANSITIONS)
    numbers = torch.stack([rollouts.per_row["transition"][rows].double(), rollouts.per_row["eta"][rows]], dim=1)
    kinds = {(names[int(n)], None if math.isnan(eta) else eta) for n, eta in numbers.tolist()}
    if len(kinds) > 1:
        raise GruppoError("these rollouts mix several transitions or etas; evaluate each kind apart.")
    return step_of(*next(iter(kinds), ("ancestral", None)))
