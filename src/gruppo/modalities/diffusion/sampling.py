"""Sampling from a denoiser: options, the noise of each step by its address, and the loop over steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from gruppo.core.distributions import gaussian_logprob
from gruppo.modalities.common.images import RowBatch, image_rollouts
from gruppo.modalities.diffusion.denoiser import Denoiser
from gruppo.modalities.diffusion.schedules import TRANSITIONS, ode, split_prediction, step_of
from gruppo.protocols import device_of
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
        name, eta, noisy = self.transition, self.eta, self.max_actions - 1
        choices = {
            "transition": (name, tuple(TRANSITIONS)),
            "noise": (self.noise, get_args(NoiseSharing)),
        }
        for field, (value, known) in choices.items():
            if value not in known:
                raise GruppoError(
                    f"{field}={value!r} is not one of {', '.join(map(repr, known))}. Set one of them."
                )
        if self.temperature not in (0, 1):
            raise GruppoError(
                f"temperature={self.temperature}: a denoising step has no temperature",
                advice="Set 1, and $diffusion.eta for its noise; 0 is the ODE",
            )
        if self.top_k or self.top_p != 1 or self.stop:
            raise GruppoError(f"""top_k={self.top_k}, top_p={self.top_p:g} and stop={self.stop!r} apply to tokens. Leave
                them out.""")
        if name in ("ddpm", "ddpm_large") and eta not in (None, 1):
            raise GruppoError(
                f"eta={eta} is not read by transition={name!r}. Set transition ddim, or leave eta out."
            )
        if self.temperature and (name == "ode" or eta == 0):
            got = "eta=0" if eta == 0 else f"transition={name!r}"
            raise GruppoError(f"""{got} draws nothing: without a density there is no policy gradient. Set eta above 0;
                the ODE is for evaluation, temperature 0.""")
        if not 0 <= self.guidance < math.inf:
            raise GruppoError(
                f"guidance={self.guidance} is out of range; it needs to be at least 0. Set 1 for none."
            )
        if self.ode_steps < 0:
            raise GruppoError(
                f"ode_steps={self.ode_steps} is negative; use 0 for as many steps as in training."
            )
        step_of(name, eta)  # raises for an eta out of its range
        if self.temperature == 0:
            return
        if noisy < 1:
            raise GruppoError(f"""{self.max_actions} step has no noise to learn from: the last is of the ODE. Set 2
                steps or more.""")
        if not 0 <= self.train_from < (self.train_to or noisy) <= noisy:
            raise GruppoError(f"""train_from={self.train_from}, train_to={self.train_to} are not a range of the steps 0
                to {noisy} that have noise. Set train_from below train_to, and train_to at most {noisy}.""")
        share = f"train_fraction={self.train_fraction:g}"
        if not 0 < self.train_fraction <= 1:
            raise GruppoError(f"{share} is out of range; it needs to be above 0 and at most 1.")
        if self.noise == "branched" and self.train_fraction != 1:
            raise GruppoError(f"""{share} with noise='branched', which trains one step of each group. Set train_fraction
                1, or noise 'shared'.""")

    @staticmethod
    def of(sampling: Sampling) -> DiffusionSampling:
        """The options of a plain ``Sampling``, with the defaults of this class for the others."""
        if isinstance(sampling, DiffusionSampling):
            return sampling
        return DiffusionSampling(
            **{field.name: getattr(sampling, field.name) for field in fields(Sampling)}
        )

    @property
    def steps(self) -> int:
        return self.max_actions if self.temperature else self.ode_steps or self.max_actions


# --- noise and its addresses ------------------------------------------------------------------------------------------


def branch_step(sampling: DiffusionSampling, seed: int, draw: int) -> int:
    """The step at which the samples of a branched group part."""
    first, last = sampling.train_from, sampling.train_to or sampling.max_actions - 1
    return int(torch.randint(first, last, (), generator=generator_at(seed, "branch", draw)))


def step_noise(
    sampling: DiffusionSampling,
    seed: int,
    rows: list[tuple[int, int]],
    shape: tuple[int, ...],
    step: int | None,
) -> Float[Tensor, "B ..."]:
    """Standard normal noise of a step for rows of (draw, sample); of the initial latents where ``step`` is None."""
    addresses: list[tuple[int | str, ...]] = []
    is_branched = sampling.noise == "branched"
    branches = (
        {n: branch_step(sampling, seed, n) for n in {draw for draw, _ in rows}}
        if is_branched
        else {}
    )
    for draw, sample in rows:
        # A group shares the initial latents unless samples are independent; a branched one all but one step's noise.
        is_own = (
            sampling.noise == "independent" if step is None else step == branches.get(draw, step)
        )
        address = (
            seed,
            "noise",
            draw,
            sample if is_own else "group",
            "first" if step is None else step,
        )
        # An evaluation at temperature 0 has the same latents for every seed, so that runs are comparable.
        addresses.append(("mode", draw, sample) if sampling.temperature == 0 else address)
    noise = {at: torch.randn(shape, generator=generator_at(*at)) for at in dict.fromkeys(addresses)}
    return torch.stack([noise[at] for at in addresses])


# --- the loop over steps ----------------------------------------------------------------------------------------------


@torch.no_grad()
def sample_batch(
    denoiser: Denoiser, batch: RowBatch, sampling: DiffusionSampling, seed: int
) -> Rollouts:
    """Rollouts of a batch of rows, with all that scoring needs to know about how they were sampled."""
    size, groups, device = (len(batch.group_ids),), batch.group_ids, device_of(denoiser.module)
    name = sampling.transition if sampling.temperature else "ode"
    per_row = {
        "first": step_noise(sampling, seed, batch.addresses, denoiser.shape, None),
        "steps": torch.full(size, sampling.steps),
        "transition": torch.full(size, list(TRANSITIONS).index(name)),
        # NaN: the transition's own default
        "eta": torch.full(
            size, math.nan if sampling.eta is None else sampling.eta, dtype=torch.float64
        ),
        "guidance": torch.full(size, sampling.guidance, dtype=torch.float64),
    }
    condition = None if batch.inputs is None else batch.inputs[groups].to(device)
    x, states, logprobs = per_row["first"].to(device), [], []
    for column in range(sampling.steps):
        is_stochastic = column < sampling.steps - 1 and sampling.temperature > 0
        levels, times = denoiser.levels(per_row["steps"], torch.full_like(groups, column))
        prediction, _ = denoiser.predict(x, times, condition, per_row["guidance"], groups)
        step = step_of(name, sampling.eta) if is_stochastic else ode
        normal = step(x, *split_prediction(x, prediction, levels, denoiser.predicts), levels)
        x, nats = normal.mean.float(), torch.zeros_like(normal.std)
        if is_stochastic:  # the log-prob is that of the float32 state, as it is stored
            noise = step_noise(sampling, seed, batch.addresses, denoiser.shape, column).to(
                normal.mean
            )
            x = (normal.mean + normal.std.reshape(-1, *[1] * (x.ndim - 1)) * noise).float()
            nats = gaussian_logprob(x[None], normal.mean[None], normal.std[None])[0]
        states.append(x.cpu())
        logprobs.append(nats.cpu())
    actions = torch.stack(states, dim=1)  # [B, T, *E]
    is_finite = actions.isfinite().flatten(1).all(dim=1)
    # The steps that are trained, by group: one where its samples part, else a random share of a range; none of the ODE.
    chosen = torch.zeros(len(batch.prompts), sampling.steps, dtype=torch.bool)  # [P, T]
    first, last = sampling.train_from, sampling.train_to or sampling.max_actions - 1
    for group, prompt in enumerate(batch.prompts if sampling.temperature else ()):
        if sampling.noise == "branched":
            chosen[group, branch_step(sampling, seed, prompt.draw)] = True
            continue
        count = max(round(sampling.train_fraction * (last - first)), 1)
        order = torch.randperm(
            last - first, generator=generator_at(seed, "trained steps", prompt.draw)
        )
        chosen[group, first + order[:count]] = True
    mask = chosen[groups] & is_finite[:, None]  # a row that is not finite is not trained on
    return image_rollouts(
        batch.prompts,
        actions,
        denoiser.codec.decode(actions[:, -1].nan_to_num()),
        shared={} if batch.inputs is None else {"condition": batch.inputs},
        per_row=per_row,
        group_ids=groups,
        logprobs=torch.where(mask, torch.stack(logprobs, dim=1), 0),
        mask=mask,
        is_finite=is_finite,
        temperature=float(sampling.temperature),
    )
