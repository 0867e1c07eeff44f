"""Options of sampling from a denoiser, and the noise and the trained steps by their addresses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gruppo.modalities.diffusion.schedules import TRANSITIONS
from gruppo.seeds import generator_at
from gruppo.types import GruppoError, Sampling


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
            raise GruppoError(f"""transition={self.transition!r} is unknown; transition is one of
                {", ".join(TRANSITIONS)}""")
        limit = TRANSITIONS[self.transition].max_eta
        if self.eta is not None and not 0 < self.eta <= limit:
            raise GruppoError(
                f"""eta={self.eta} does not fit transition={self.transition!r}; it needs to be above
                    0 and at most {limit:g}""",
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

    def to_row(self) -> Float[Tensor, "4"]:
        """What scoring needs to know, as rollouts store it."""
        transition = TRANSITIONS[self.transition]
        index = list(TRANSITIONS).index(self.transition)
        eta = self.eta or transition.eta
        return torch.tensor([self.steps, index, eta, self.guidance], dtype=torch.float64)

    @staticmethod
    def of_row(row: Float[Tensor, "4"]) -> DiffusionSampling:
        steps, index, eta, guidance = row.tolist()
        name = list(TRANSITIONS)[int(index)]
        return DiffusionSampling(
            max_actions=int(steps), transition=name, eta=eta, guidance=guidance
        )

    @property
    def steps(self) -> int:
        return self.max_actions if self.temperature else self.ode_steps or self.max_actions

    @property
    def window(self) -> tuple[int, int]:
        """First step that may be trained, and the step before which training ends."""
        return self.train_from, self.train_to or self.max_actions - 1


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
    """Standard normal noise of a step for rows of (draw, sample); of the initial latents if
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
    if not sampling.temperature:
        return chosen
    first, last = sampling.window
    trained = torch.tensor([branch_step(sampling, seed, draw)])
    if sampling.noise != "branched":
        count = max(round(sampling.train_fraction * (last - first)), 1)
        generator = generator_at(seed, "trained steps", draw)
        trained = first + torch.randperm(last - first, generator=generator)[:count]
    chosen[trained] = True
    return chosen
