"""How pictures are drawn: the sampler's steps, whose noise is whose, and which steps are learned from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gruppo.modalities.diffusion.paths import Path
from gruppo.modalities.diffusion.transitions import TRANSITIONS, Transition
from gruppo.seeds import generator_at
from gruppo.types import GruppoError, Sampling

Noise = Literal["independent", "shared", "branched"]
WITHOUT_ETA = ("ddpm", "ddpm_large", "ode")


@dataclass(frozen=True)
class DiffusionSampling(Sampling):
    """The last step is always the ODE's: noise that it added would stay in the picture, and it is never learned from.

    ``temperature`` is 1, or 0: the ODE throughout, from latents that the run's seed has no part in.
    """

    max_actions: int = 10
    """Denoising steps."""
    transition: str = "ancestral"
    """How each step but the last is drawn, by its name in ``TRANSITIONS``."""
    eta: float | None = None
    """Share of new noise in a step; None takes the transition's own."""
    guidance: float = 1.0
    """Classifier-free: nothing + guidance (condition - nothing), sampled and scored alike; 1 asks the network once."""
    noise: Noise = "independent"
    """shared: a group has one first latent. branched: and all noise in common but one random step's, which alone is
    learned from."""
    train_from: int = 0
    """The first step that is learned from."""
    train_to: int = 0
    """The step before which learning ends; 0 for the last one."""
    train_fraction: float = 1.0
    """Share of these steps that is learned from, drawn anew for each group."""
    ode_steps: int = 0
    """Steps at temperature 0; 0 for as many."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_distribution(self)
        _check_noise(self)
        _check_trained_steps(self)

    @staticmethod
    def of(sampling: Sampling) -> DiffusionSampling:
        """A plain one's numbers, with the choices of this class as they are by default."""
        if isinstance(sampling, DiffusionSampling):
            return sampling
        return DiffusionSampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            max_actions=sampling.max_actions,
            stop=sampling.stop,
        )

    @property
    def is_mode(self) -> bool:
        return self.temperature == 0

    @property
    def steps(self) -> int:
        return self.ode_steps or self.max_actions if self.is_mode else self.max_actions

    @property
    def kind(self) -> Transition:
        return transition_of("ode" if self.is_mode else self.transition, self.eta)

    def check_path(self, path: Path) -> None:
        """Refuse a transition that is of the other kind of path, and more steps than a path has."""
        path.times(self.steps)
        kind = self.kind
        if self.is_mode or kind.is_flow in (None, path.is_flow):
            return
        fits = [name for name, make in TRANSITIONS.items() if name != "ode" and make().is_flow in (None, path.is_flow)]
        raise GruppoError(
            f"transition={self.transition!r} steps on a {'flow' if kind.is_flow else 'diffusion'}'s path, and this "
            f"network was trained on a {'flow' if path.is_flow else 'diffusion'}'s. Set one of {', '.join(fits)}."
        )


def transition_of(name: str, eta: float | None) -> Transition:
    return TRANSITIONS[name]() if eta is None or name in WITHOUT_ETA else TRANSITIONS[name](eta)


def _check_distribution(sampling: DiffusionSampling) -> None:
    if sampling.transition not in TRANSITIONS:
        raise GruppoError(
            f"transition={sampling.transition!r} is not one of {', '.join(map(repr, TRANSITIONS))}. Set 'ancestral'."
        )
    if sampling.temperature not in (0, 1):
        raise GruppoError(
            f"temperature={sampling.temperature}: a denoising step has no temperature beside eta. Set 1, and "
            "--diffusion.eta for its noise; 0 is the ODE."
        )
    if sampling.top_k or sampling.top_p != 1 or sampling.stop:
        raise GruppoError(
            f"top_k={sampling.top_k}, top_p={sampling.top_p:g} and stop={sampling.stop!r} are of tokens; denoising "
            "steps have none. Leave them out."
        )
    if sampling.eta is not None and sampling.transition in WITHOUT_ETA[:2] and sampling.eta != 1:
        raise GruppoError(
            f"eta={sampling.eta:g} is not read by transition={sampling.transition!r}, which is DDIM at 1. Set "
            "transition ddim, or leave eta out."
        )
    if not sampling.is_mode and (sampling.transition == "ode" or sampling.eta == 0):
        got = "transition='ode'" if sampling.transition == "ode" else f"eta={sampling.eta:g}"
        raise GruppoError(
            f"{got} draws nothing: such a step has no density, so a policy gradient has nothing to weigh. Set eta "
            "above 0 (1 for ddim and ancestral, 0.7 for flow_sde); the ODE is for evaluation, temperature 0."
        )
    transition_of(sampling.transition, sampling.eta)  # its own refusals


def _check_noise(sampling: DiffusionSampling) -> None:
    if sampling.noise not in ("independent", "shared", "branched"):
        raise GruppoError(
            f"noise={sampling.noise!r} is not one of 'independent', 'shared', 'branched'. Set 'independent'."
        )
    if not 0 <= sampling.guidance < float("inf"):
        raise GruppoError(f"guidance={sampling.guidance} is out of range; it needs to be finite and at least 0. Set 1.")
    if sampling.noise == "branched" and sampling.train_fraction != 1:
        raise GruppoError(
            f"train_fraction={sampling.train_fraction:g} with noise='branched', which learns from one step of each "
            "group. Set train_fraction 1, or noise 'shared'."
        )


def _check_trained_steps(sampling: DiffusionSampling) -> None:
    if sampling.ode_steps < 0:
        raise GruppoError(f"ode_steps={sampling.ode_steps} is negative; use 0 for as many as there are in training.")
    if sampling.is_mode:
        return
    noisy = sampling.max_actions - 1
    if noisy < 1:
        raise GruppoError(
            f"{sampling.max_actions} step has no noise to learn from: the last one is the ODE's. Set 2 steps or more."
        )
    last = sampling.train_to or noisy
    if not 0 <= sampling.train_from < last <= noisy:
        raise GruppoError(
            f"train_from={sampling.train_from}, train_to={sampling.train_to} are no part of the steps 0 to {noisy} "
            f"that have noise. Set train_from below train_to, and train_to at most {noisy}."
        )
    if not 0 < sampling.train_fraction <= 1:
        raise GruppoError(f"train_fraction={sampling.train_fraction:g} is out of range; it needs above 0, up to 1.")


# --- noise and its addresses ---


def branch(sampling: DiffusionSampling, seed: int, draw: int) -> int:
    """The step at which a group's samples part."""
    first, last = sampling.train_from, sampling.train_to or sampling.max_actions - 1
    return int(torch.randint(first, last, (), generator=generator_at(seed, "branch", draw)))


def trained_steps(sampling: DiffusionSampling, seed: int, draw: int) -> Bool[Tensor, "T"]:
    """Which steps of a group are learned from: none at temperature 0."""
    chosen = torch.zeros(sampling.steps, dtype=torch.bool)
    if sampling.is_mode:
        return chosen
    if sampling.noise == "branched":
        chosen[branch(sampling, seed, draw)] = True
        return chosen
    first, last = sampling.train_from, sampling.train_to or sampling.max_actions - 1
    count = max(round(sampling.train_fraction * (last - first)), 1)
    order = torch.randperm(last - first, generator=generator_at(seed, "trained steps", draw))
    chosen[first + order[:count]] = True
    return chosen


class NoiseOf:
    """Standard normal numbers of rows, each by its address: (seed, draw, sample, step)."""

    def __init__(self, sampling: DiffusionSampling, seed: int, rows: list[tuple[int, int]], shape: tuple[int, ...]):
        """``rows``: each one's draw and sample index."""
        self._sampling, self._seed, self._rows, self._shape = sampling, seed, rows, shape

    def first(self) -> Float[Tensor, "B ..."]:
        """The latents that sampling begins with."""
        if self._sampling.is_mode:  # an evaluation that draws nothing
            return self._stacked([("mode", draw, sample) for draw, sample in self._rows])
        is_common = self._sampling.noise != "independent"
        return self._stacked([self._address(draw, "first", None if is_common else n) for draw, n in self._rows])

    def of_step(self, step: int) -> Float[Tensor, "B ..."]:
        parts = {draw: self._parts_at(draw, step) for draw, _ in self._rows}
        return self._stacked([self._address(draw, step, n if parts[draw] else None) for draw, n in self._rows])

    def _parts_at(self, draw: int, step: int) -> bool:
        """Whether the samples of a group have their own noise at a step."""
        return self._sampling.noise != "branched" or step == branch(self._sampling, self._seed, draw)

    def _address(self, draw: int, step: int | str, sample: int | None) -> tuple[int | str, ...]:
        return (self._seed, "noise", draw, "group" if sample is None else sample, step)

    def _stacked(self, addresses: list[tuple[int | str, ...]]) -> Tensor:
        drawn = {at: torch.randn(self._shape, generator=generator_at(*at)) for at in dict.fromkeys(addresses)}
        return torch.stack([drawn[at] for at in addresses])
