"""Sampling from a denoiser: options, the noise of each step by its address, and the loop over
steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gruppo.core.distributions import gaussian_logprob
from gruppo.modalities.common.images import RowBatch, image_rollouts
from gruppo.modalities.diffusion.denoiser import Denoiser
from gruppo.modalities.diffusion.schedules import ODE, TRANSITIONS, broadcast, split_prediction
from gruppo.protocols import device_of
from gruppo.seeds import generator_at
from gruppo.types import GruppoError, Rollouts, Sampling

NoiseSharing = Literal["independent", "shared", "branched"]


@dataclass(frozen=True)
class DiffusionSampling(Sampling):
    """Options of sampling. The last step is always an ODE step: noise added there would remain in
    the image.

    ``temperature`` is 1, or 0: the ODE throughout, from latents that do not depend on the run's
    seed.
    """

    max_actions: int = 10
    """Denoising steps."""
    transition: str = "ancestral"
    """Sampler of every step but the last: a name in ``TRANSITIONS``."""
    eta: float | None = None
    """Scale of the noise added in a step; None takes the transition's own default."""
    guidance: float = 1.0
    """Classifier-free guidance: unconditional + guidance (conditional - unconditional), in sampling
    and scoring."""
    noise: NoiseSharing = "independent"
    """shared: a group starts from one latent. branched: it also shares all noise but that of one
    random step, the only one that is trained."""
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
        if self.transition not in TRANSITIONS or self.noise not in get_args(NoiseSharing):
            raise GruppoError(f"""transition={self.transition!r} and noise={self.noise!r}:
                transition is one of {", ".join(TRANSITIONS)}, and noise one of
                {", ".join(get_args(NoiseSharing))}.""")
        if self.temperature not in (0, 1):
            raise GruppoError(
                f"temperature={self.temperature}: a denoising step has no temperature",
                advice="Set 1, and $diffusion.eta for its noise; 0 is the ODE",
            )
        if self.top_k or self.top_p != 1 or self.stop:
            raise GruppoError(f"""top_k={self.top_k}, top_p={self.top_p:g} and stop={self.stop!r}
                apply to tokens. Leave them out.""")
        etas = TRANSITIONS[self.transition].etas
        if self.eta is not None and not (etas and etas.contains(self.eta)):
            raise GruppoError(
                f"eta={self.eta} does not fit transition={self.transition!r}; it needs to be "
                f"{etas or 'left out'}",
                advice="At eta 0 there is no density: the ODE is for evaluation, temperature 0",
            )
        if not 0 <= self.guidance < math.inf or self.ode_steps < 0:
            raise GruppoError(f"""guidance={self.guidance} and ode_steps={self.ode_steps} need to be
                at least 0. Set guidance 1 for none, and ode_steps 0 for as many as in training.""")
        if self.temperature == 0:
            return
        noisy = self.max_actions - 1
        if noisy < 1:
            raise GruppoError(f"""{self.max_actions} step has no noise to learn from: the last is of
                the ODE. Set 2 steps or more.""")
        if not 0 <= self.train_from < (self.train_to or noisy) <= noisy:
            raise GruppoError(f"""train_from={self.train_from}, train_to={self.train_to} are not a
                range of the steps 0 to {noisy} that have noise. Set train_from below train_to, and
                train_to at most {noisy}.""")
        share = f"train_fraction={self.train_fraction:g}"
        if not 0 < self.train_fraction <= 1:
            raise GruppoError(f"{share} is out of range; it needs to be above 0 and at most 1.")
        if self.noise == "branched" and self.train_fraction != 1:
            raise GruppoError(f"""{share} with noise='branched', which trains one step of each
                group. Set train_fraction 1, or noise 'shared'.""")

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


# --- noise and its addresses ----------------------------------------------------------------------


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
    """Standard normal noise of a step for rows of (draw, sample); of the initial latents where
    ``step`` is None."""
    addresses: list[tuple[int | str, ...]] = []
    for draw, sample in rows:
        # An evaluation at temperature 0 has the same latents for every seed, so that runs are
        # comparable.
        if sampling.temperature == 0:
            addresses.append(("mode", draw, sample))
            continue
        # A group shares the initial latents unless samples are independent; a branched one all but
        # one step's noise.
        is_own = sampling.noise == "independent"
        if step is not None and not is_own:
            is_own = sampling.noise == "shared" or step == branch_step(sampling, seed, draw)
        place = "first" if step is None else step
        addresses.append((seed, "noise", draw, sample if is_own else "group", place))
    noise = {at: torch.randn(shape, generator=generator_at(*at)) for at in dict.fromkeys(addresses)}
    return torch.stack([noise[at] for at in addresses])


def trained_steps(sampling: DiffusionSampling, seed: int, draw: int) -> Bool[Tensor, "T"]:
    """The steps of a group that are trained: one where its samples part, else a share of a range;
    none of the ODE."""
    chosen = torch.zeros(sampling.steps, dtype=torch.bool)
    if not sampling.temperature:
        return chosen
    if sampling.noise == "branched":
        chosen[branch_step(sampling, seed, draw)] = True
        return chosen
    first, last = sampling.train_from, sampling.train_to or sampling.max_actions - 1
    count = max(round(sampling.train_fraction * (last - first)), 1)
    order = torch.randperm(last - first, generator=generator_at(seed, "trained steps", draw))
    chosen[first + order[:count]] = True
    return chosen


# --- the loop over steps --------------------------------------------------------------------------


@torch.no_grad()
def sample_batch(
    denoiser: Denoiser, batch: RowBatch, sampling: DiffusionSampling, seed: int
) -> Rollouts:
    """Rollouts of a batch of rows, with all that scoring needs to know about how they were
    sampled."""
    groups = batch.group_ids
    device = device_of(denoiser.module)
    size = (len(groups),)
    transition = TRANSITIONS[sampling.transition]
    per_row = {
        "first": step_noise(sampling, seed, batch.addresses, denoiser.shape, None),
        "steps": torch.full(size, sampling.steps),
        "transition": torch.full(size, list(TRANSITIONS).index(sampling.transition)),
        "eta": torch.full(size, sampling.eta or transition.eta, dtype=torch.float64),
        "guidance": torch.full(size, sampling.guidance, dtype=torch.float64),
    }
    condition = None if batch.inputs is None else batch.inputs[groups].to(device)
    x = per_row["first"].to(device)
    states, logprobs = [], []
    for column in range(sampling.steps):
        is_stochastic = column < sampling.steps - 1 and sampling.temperature > 0
        levels, times = denoiser.levels(per_row["steps"], torch.full_like(groups, column))
        prediction, _ = denoiser.predict(x, times, condition, per_row["guidance"], groups)
        x0, noise = split_prediction(x, prediction, levels, denoiser.predicts)
        if is_stochastic:  # the log-prob is that of the float32 state, as it is stored
            normal = transition.step(x0, noise, levels, sampling.eta)
            new = step_noise(sampling, seed, batch.addresses, denoiser.shape, column)
            x = (normal.mean + broadcast(normal.std, x) * new.to(normal.mean)).float()
            nats = gaussian_logprob(x[None], normal.mean[None], normal.std[None])[0]
        else:
            x = ODE.step(x0, noise, levels).mean.float()
            nats = torch.zeros(size, dtype=torch.float64)
        states.append(x.cpu())
        logprobs.append(nats.cpu())
    actions = torch.stack(states, dim=1)  # [B, T, *E]
    is_finite = actions.isfinite().flatten(1).all(dim=1)
    trained = torch.stack([trained_steps(sampling, seed, p.draw) for p in batch.prompts])  # [P, T]
    mask = trained[groups] & is_finite[:, None]  # a row that is not finite is not trained on
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
