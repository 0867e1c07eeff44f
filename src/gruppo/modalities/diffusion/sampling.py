"""Sampling from a denoiser: options, the noise of each step by its address, and the loop over
steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
    noise: Literal["independent", "shared", "branched"] = "independent"
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
        if self.transition not in TRANSITIONS:
            raise GruppoError(
                f"transition={self.transition!r} is unknown; transition is one of "
                f"{', '.join(TRANSITIONS)}"
            )
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
        first, last = self.window
        if self.temperature and not 0 <= first < last < self.max_actions:
            raise GruppoError(f"""train_from={self.train_from}, train_to={self.train_to} are not a
                range of the steps 0 to {self.max_actions - 1} that have noise. Set train_from below
                train_to, and train_to at most {self.max_actions - 1}.""")
        if self.noise == "branched" and self.train_fraction != 1:
            raise GruppoError(f"""train_fraction={self.train_fraction:g} with noise='branched',
                which trains one step of each group. Set train_fraction 1, or noise 'shared'.""")

    @staticmethod
    def of(sampling: Sampling) -> DiffusionSampling:
        """The options of a plain ``Sampling``, with the defaults of this class for the others."""
        if isinstance(sampling, DiffusionSampling):
            return sampling
        return DiffusionSampling(**vars(sampling))

    @property
    def steps(self) -> int:
        return self.max_actions if self.temperature else self.ode_steps or self.max_actions

    @property
    def window(self) -> tuple[int, int]:
        """First step that may be trained, and the step before which training ends."""
        return self.train_from, self.train_to or self.max_actions - 1


# --- noise and its addresses ----------------------------------------------------------------------


def branch_step(sampling: DiffusionSampling, seed: int, draw: int) -> int:
    """The step at which the samples of a branched group part."""
    generator = generator_at(seed, "branch", draw)
    return int(torch.randint(*sampling.window, (), generator=generator))


def step_noise(
    sampling: DiffusionSampling,
    seed: int,
    rows: list[tuple[int, int]],
    shape: tuple[int, ...],
    step: int | None,
) -> Float[Tensor, "B ..."]:
    """Standard normal noise of a step for rows of (draw, sample); of the initial latents where
    ``step`` is None."""
    noise = []
    for draw, sample in rows:
        address: tuple[int | str, ...] = ("mode", draw, sample)
        if sampling.temperature:  # the ODE has the same latents for every seed: runs are comparable
            is_own = sampling.noise == "independent"
            if step is not None and not is_own:
                is_own = sampling.noise == "shared" or step == branch_step(sampling, seed, draw)
            place = "first" if step is None else step
            address = (seed, "noise", draw, sample if is_own else "group", place)
        noise.append(torch.randn(shape, generator=generator_at(*address)))
    return torch.stack(noise)


def trained_steps(sampling: DiffusionSampling, seed: int, draw: int) -> Bool[Tensor, "T"]:
    """The steps of a group that are trained: one where its samples part, else a share of a range;
    none of the ODE."""
    chosen = torch.zeros(sampling.steps, dtype=torch.bool)
    if sampling.temperature and sampling.noise == "branched":
        chosen[branch_step(sampling, seed, draw)] = True
    elif sampling.temperature:
        first, last = sampling.window
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
    size = (len(groups),)
    transition = TRANSITIONS[sampling.transition]
    eta = sampling.eta or transition.eta
    per_row = {
        "first": step_noise(sampling, seed, batch.addresses, denoiser.shape, None),
        "steps": torch.full(size, sampling.steps),
        "transition": torch.full(size, list(TRANSITIONS).index(sampling.transition)),
        "eta": torch.full(size, eta, dtype=torch.float64),
        "guidance": torch.full(size, sampling.guidance, dtype=torch.float64),
    }
    device = device_of(denoiser.module)
    condition = None if batch.inputs is None else batch.inputs[groups].to(device)
    x = per_row["first"].to(device)
    states, logprobs = [], []
    for column in range(sampling.steps):
        levels, times = denoiser.levels(sampling.steps, torch.full_like(groups, column))
        prediction, _ = denoiser.predict(x, times, condition, sampling.guidance, groups)
        level = (levels.alpha, levels.sigma)
        x0, noise = split_prediction(x, prediction, level, denoiser.predicts)
        if sampling.temperature and column < sampling.steps - 1:
            normal = transition.step(x0, noise, levels, eta)
            new = step_noise(sampling, seed, batch.addresses, denoiser.shape, column)
            # the log-prob is that of the float32 state, as it is stored
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
