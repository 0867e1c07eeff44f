"""Sampler steps as normal distributions, from what the network predicts.

A noise level is x = alpha x0 + sigma e with e standard normal: alpha^2 + sigma^2 = 1 for diffusion, where the papers
write a = alpha^2, and alpha = 1 - t, sigma = t for flow matching. A transition gives the mean and std of the step to
the next, less noisy level. Sampling and scoring call the same function, so that a ratio starts at 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from gruppo.types import Gaussian, GruppoError

PredictionType = Literal["noise", "x0", "v", "velocity"]
"""What a network predicts of x: e, x0, alpha e - sigma x0, or e - x0."""


@dataclass(frozen=True, eq=False)
class StepLevels:
    """From one noise level to the next, for b rows; float64."""

    alpha: Float[Tensor, "b"]
    sigma: Float[Tensor, "b"]
    next_alpha: Float[Tensor, "b"]
    next_sigma: Float[Tensor, "b"]


def split_prediction(
    x: Float[Tensor, "b ..."], prediction: Float[Tensor, "b ..."], levels: StepLevels, predicts: PredictionType
) -> tuple[Float[Tensor, "b ..."], Float[Tensor, "b ..."]]:
    """x0 and noise that x is made of, according to the network; float64.

    A noise prediction divides by alpha and an x0 prediction by sigma: neither works at pure noise or clean data.
    """
    x, prediction = x.double(), prediction.double()
    alpha, sigma = broadcast(levels.alpha, x), broadcast(levels.sigma, x)
    if predicts == "noise":
        return (x - sigma * prediction) / alpha, prediction
    if predicts == "x0":
        return prediction, (x - alpha * prediction) / sigma
    if predicts == "v":
        norm = alpha.square() + sigma.square()
        return (alpha * x - sigma * prediction) / norm, (sigma * x + alpha * prediction) / norm
    return (x - sigma * prediction) / (alpha + sigma), (x + alpha * prediction) / (alpha + sigma)


def broadcast(level: Float[Tensor, "b"], x: Float[Tensor, "b ..."]) -> Float[Tensor, "b ..."]:
    """Numbers of each row as float64, shaped to multiply x."""
    return level.to(x.device).double().reshape(-1, *[1] * (x.ndim - 1))


@dataclass(frozen=True)
class _Stochastic:
    """A transition with a share ``eta`` of new noise."""

    eta: float = 1.0
    max_eta: ClassVar[float] = 1.0
    """Above it a step would have more noise than the next level holds."""
    allows_zero: ClassVar[bool] = False

    def __post_init__(self) -> None:
        is_valid = 0 < self.eta <= self.max_eta and self.eta < math.inf
        if not is_valid and not (self.allows_zero and self.eta == 0):
            above, most = ("0 <=" if self.allows_zero else "0 <"), ("< inf" if self.max_eta > 1 else "<= 1")
            raise GruppoError(
                f"eta={self.eta} is out of range for {type(self).__name__}: it needs {above} eta {most}, and a step "
                "without noise has no density to learn from. Set eta in that range; the ode is for evaluation."
            )


# --- any schedule -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ancestral(_Stochastic):
    """mean = alpha' x0 + (sigma'^2 - var)^(1/2) e,  var = eta^2 sigma'^2 (1 - (alpha sigma' / (alpha' sigma))^2).

    At eta 1 the posterior of x' given x and x0 (Kingma et al. 2021, arXiv 2107.00630, eq. 25); on a diffusion schedule
    DDIM's step. From pure noise (alpha 0) all noise is new; at clean data there is none.
    """

    is_flow = None

    def __call__(self, x: Tensor, x0: Tensor, noise: Tensor, step: StepLevels) -> Gaussian:
        kept = (step.alpha * step.next_sigma / (step.next_alpha * step.sigma)).square()
        var = self.eta**2 * step.next_sigma.square() * (1 - kept).clamp(min=0)
        left = (step.next_sigma.square() - var).clamp(min=0).sqrt()
        return Gaussian(broadcast(step.next_alpha, x) * x0 + broadcast(left, x) * noise, var.sqrt())


@dataclass(frozen=True)
class Ode:
    """alpha' x0 + sigma' e: DDIM at eta 0, and Euler's step of a flow. For evaluation; it has no density."""

    is_flow: bool = False

    def __call__(self, x: Tensor, x0: Tensor, noise: Tensor, step: StepLevels) -> Gaussian:
        mean = broadcast(step.next_alpha, x) * x0 + broadcast(step.next_sigma, x) * noise
        return Gaussian(mean, torch.zeros_like(step.sigma))


# --- diffusion schedules ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ddim(_Stochastic):
    """mean = alpha' x0 + (1 - alpha'^2 - var)^(1/2) e,  var = eta^2 (1 - a') / (1 - a) (1 - a / a'), a = alpha^2.

    Song et al. 2021 (arXiv 2010.02502), eq. 12 and 16. ``eta`` 0 is the ODE, which has no density; 1 is DDPM. A large
    ``variance`` keeps the mean and has 1 - a / a' (Ho et al. 2020, arXiv 2006.11239, section 3.2, has both).
    """

    variance: Literal["small", "large"] = "small"
    allows_zero = True
    is_flow = False

    def __call__(self, x: Tensor, x0: Tensor, noise: Tensor, step: StepLevels) -> Gaussian:
        added = (1 - (step.alpha / step.next_alpha).square()).clamp(min=0)
        var = self.eta**2 * ((step.next_sigma / step.sigma).square() * added)
        left = (step.next_sigma.square() - var).clamp(min=0).sqrt()
        mean = broadcast(step.next_alpha, x) * x0 + broadcast(left, x) * noise
        return Gaussian(mean, (added if self.variance == "large" else var).sqrt())


# --- flow schedules ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FlowSde(_Stochastic):
    """x + (v + s^2 (x + (1 - t) v) / (2 t)) dt with std s |dt|^(1/2),  s = eta (t / (1 - t))^(1/2),  dt < 0.

    Liu et al. 2025 (Flow-GRPO, arXiv 2505.05470), eq. 12; with ``is_constant`` s = eta, as Xue et al. 2025 (DanceGRPO,
    arXiv 2505.07818). The step to t = 0 has noise too, which would remain in the image: samplers end with an ODE step.
    """

    eta: float = 0.7
    is_constant: bool = False
    max_eta = math.inf
    is_flow = True

    def __call__(self, x: Tensor, x0: Tensor, noise: Tensor, step: StepLevels) -> Gaussian:
        if self.is_constant:
            s = torch.full_like(step.sigma, self.eta)
        else:  # at t = 1 s would be infinite: the divisor 1 - t is that of the next time
            s = self.eta * (step.sigma / torch.where(step.alpha > 0, step.alpha, step.next_alpha)).sqrt()
        dt = step.next_sigma - step.sigma  # [b], below 0
        half = s.square() / (2 * step.sigma)
        v = noise - x0
        mean = x.double() * broadcast(1 + half * dt, x) + v * broadcast((1 + half * step.alpha) * dt, x)
        return Gaussian(mean, s * dt.abs().sqrt())


@dataclass(frozen=True)
class Cps(_Stochastic):
    """(1 - t') x0 + (t'^2 - std^2)^(1/2) e,  std = t' sin(eta pi / 2): new noise replaces noise that was there.

    Wang & Yu 2025 (Flow-CPS, arXiv 2509.05952). Its samples are clean and it does not keep the marginals exactly. The
    density here is the normal's own, with 1 / (2 std^2), which published code leaves out.
    """

    eta: float = 0.7
    is_flow = True

    def __call__(self, x: Tensor, x0: Tensor, noise: Tensor, step: StepLevels) -> Gaussian:
        std = step.next_sigma * math.sin(self.eta * math.pi / 2)
        left = (step.next_sigma.square() - std.square()).clamp(min=0).sqrt()
        return Gaussian(broadcast(step.next_alpha, x) * x0 + broadcast(left, x) * noise, std)


Transition = Ancestral | Ode | Ddim | FlowSde | Cps
"""Called with x, x0, noise [b, ...] and the levels: a Gaussian with mean [b, ...] and std [b], 0 without randomness.

``is_flow``: whether it steps on a flow schedule or a diffusion schedule; None: on either.
"""

TRANSITIONS: dict[str, Callable[..., Transition]] = {
    "ancestral": Ancestral,
    "ddim": Ddim,
    "ddpm": Ddim,
    "ddpm_large": partial(Ddim, variance="large"),
    "flow_sde": FlowSde,
    "dance_sde": partial(FlowSde, eta=0.3, is_constant=True),
    "cps": Cps,
    "ode": Ode,
}
"""By the name that a config has for them. Rollouts store the index of a name in this order."""
WITHOUT_ETA = ("ddpm", "ddpm_large", "ode")


def build_transition(name: str, eta: float | None) -> Transition:
    """The transition of a name; ``eta`` None takes its own default."""
    return TRANSITIONS[name]() if eta is None or name in WITHOUT_ETA else TRANSITIONS[name](eta=eta)
