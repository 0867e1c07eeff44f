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
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from gruppo.config.options import Range
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


# --- steps of samplers: from x, x0 and noise [b, ...] to a Gaussian with mean [b, ...] and std [b] --------------------


def ancestral(x: Tensor, x0: Tensor, noise: Tensor, step: StepLevels, eta: float = 1.0) -> Gaussian:
    """mean = alpha' x0 + (sigma'^2 - var)^(1/2) e,  var = eta^2 sigma'^2 (1 - (alpha sigma' / (alpha' sigma))^2).

    At eta 1 the posterior of x' given x and x0 (Kingma et al. 2021, arXiv 2107.00630, eq. 25); on a diffusion schedule
    DDIM's step. From pure noise (alpha 0) all noise is new; at clean data there is none.
    """
    kept = (step.alpha * step.next_sigma / (step.next_alpha * step.sigma)).square()
    var = eta**2 * step.next_sigma.square() * (1 - kept).clamp(min=0)
    left = (step.next_sigma.square() - var).clamp(min=0).sqrt()
    return Gaussian(broadcast(step.next_alpha, x) * x0 + broadcast(left, x) * noise, var.sqrt())


def ode(x: Tensor, x0: Tensor, noise: Tensor, step: StepLevels, eta: float = 0.0) -> Gaussian:
    """alpha' x0 + sigma' e: DDIM at eta 0, and Euler's step of a flow. For evaluation; it has no density."""
    mean = broadcast(step.next_alpha, x) * x0 + broadcast(step.next_sigma, x) * noise
    return Gaussian(mean, torch.zeros_like(step.sigma))


def ddim(
    x: Tensor, x0: Tensor, noise: Tensor, step: StepLevels, eta: float = 1.0, *, has_large_variance: bool = False
) -> Gaussian:
    """mean = alpha' x0 + (1 - alpha'^2 - var)^(1/2) e,  var = eta^2 (1 - a') / (1 - a) (1 - a / a'), a = alpha^2.

    Song et al. 2021 (arXiv 2010.02502), eq. 12 and 16. ``eta`` 0 is the ODE, which has no density; 1 is DDPM. The large
    variance, 1 - a / a', keeps the mean (Ho et al. 2020, arXiv 2006.11239, section 3.2, has both).
    """
    added = (1 - (step.alpha / step.next_alpha).square()).clamp(min=0)
    var = eta**2 * ((step.next_sigma / step.sigma).square() * added)
    left = (step.next_sigma.square() - var).clamp(min=0).sqrt()
    mean = broadcast(step.next_alpha, x) * x0 + broadcast(left, x) * noise
    return Gaussian(mean, (added if has_large_variance else var).sqrt())


def flow_sde(
    x: Tensor, x0: Tensor, noise: Tensor, step: StepLevels, eta: float = 0.7, *, is_constant: bool = False
) -> Gaussian:
    """x + (v + s^2 (x + (1 - t) v) / (2 t)) dt with std s |dt|^(1/2),  s = eta (t / (1 - t))^(1/2),  dt < 0.

    Liu et al. 2025 (Flow-GRPO, arXiv 2505.05470), eq. 12; with ``is_constant`` s = eta, as Xue et al. 2025 (DanceGRPO,
    arXiv 2505.07818). The step to t = 0 has noise too, which would remain in the image: samplers end with an ODE step.
    """
    if is_constant:
        s = torch.full_like(step.sigma, eta)
    else:  # at t = 1 s would be infinite: the divisor 1 - t is that of the next time
        s = eta * (step.sigma / torch.where(step.alpha > 0, step.alpha, step.next_alpha)).sqrt()
    dt = step.next_sigma - step.sigma  # [b], below 0
    half = s.square() / (2 * step.sigma)
    v = noise - x0
    mean = x.double() * broadcast(1 + half * dt, x) + v * broadcast((1 + half * step.alpha) * dt, x)
    return Gaussian(mean, s * dt.abs().sqrt())


def cps(x: Tensor, x0: Tensor, noise: Tensor, step: StepLevels, eta: float = 0.7) -> Gaussian:
    """(1 - t') x0 + (t'^2 - std^2)^(1/2) e,  std = t' sin(eta pi / 2): new noise replaces noise that was there.

    Wang & Yu 2025 (Flow-CPS, arXiv 2509.05952). Its samples are clean and it does not keep the marginals exactly. The
    density here is the normal's own, with 1 / (2 std^2), which published code leaves out.
    """
    std = step.next_sigma * math.sin(eta * math.pi / 2)
    left = (step.next_sigma.square() - std.square()).clamp(min=0).sqrt()
    return Gaussian(broadcast(step.next_alpha, x) * x0 + broadcast(left, x) * noise, std)


Step = Callable[[Tensor, Tensor, Tensor, StepLevels], Gaussian]


@dataclass(frozen=True)
class Transition:
    """A sampler by name."""

    step: Callable[..., Gaussian]
    is_flow: bool | None
    """Whether it steps on a flow schedule or a diffusion schedule; None: on either."""
    etas: Range | None
    """Scales of the noise that it takes; above 1 most would add more than the next level holds."""


UP_TO_1 = Range(gt=0, le=1)
TRANSITIONS = {
    "ancestral": Transition(ancestral, None, UP_TO_1),
    "ddim": Transition(ddim, False, Range(ge=0, le=1)),
    "ddpm": Transition(ddim, False, None),
    "ddpm_large": Transition(partial(ddim, has_large_variance=True), False, None),
    "flow_sde": Transition(flow_sde, True, Range(gt=0)),
    "dance_sde": Transition(partial(flow_sde, eta=0.3, is_constant=True), True, Range(gt=0)),
    "cps": Transition(cps, True, UP_TO_1),
    "ode": Transition(ode, False, None),
}
"""By the name that a config has for them. Rollouts store the index of a name in this order."""


def step_of(name: str, eta: float | None) -> Step:
    """The step of a transition; ``eta`` None takes its own default."""
    transition = TRANSITIONS[name]
    if eta is None or transition.etas is None:
        return transition.step
    if not transition.etas.contains(eta):
        raise GruppoError(
            f"eta={eta} is out of range for transition={name!r}; it needs to be {transition.etas}. Set eta in that "
            "range; the ode is for evaluation."
        )
    return partial(transition.step, eta=eta)
