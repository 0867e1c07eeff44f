"""Steps of diffusion and flow samplers as normals of what the network predicts.

A level of noise is x = alpha x0 + sigma e with e standard normal: alpha^2 + sigma^2 = 1 on a diffusion path, where the
papers write a = alpha^2, and alpha = 1 - t, sigma = t on a flow's. A sampler goes from one level to the next and less
noisy one; its transition says the mean and the std of that step. Sampling and scoring call the same function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from gruppo.types import Gaussian, GruppoError

Predicts = Literal["noise", "x0", "v", "velocity"]
"""What a network is trained to say of x: e, x0, alpha e - sigma x0, or e - x0."""


@dataclass(frozen=True, eq=False)
class Step:
    """From one level of noise to the next, for b rows; float64."""

    alpha: Float[Tensor, "b"]
    sigma: Float[Tensor, "b"]
    next_alpha: Float[Tensor, "b"]
    next_sigma: Float[Tensor, "b"]

    @staticmethod
    def between(level: tuple[float, float], following: tuple[float, float]) -> Step:
        """One row's step, from (alpha, sigma) to (alpha, sigma)."""
        numbers = torch.tensor([*level, *following], dtype=torch.float64)
        return Step(*(number[None] for number in numbers))


class Transition(Protocol):
    """How a sampler steps."""

    @property
    def is_flow(self) -> bool | None:
        """Whether it steps on a flow's path (alpha + sigma = 1) or a diffusion's (alpha^2 + sigma^2 = 1); None: any."""
        ...

    def __call__(
        self, x: Float[Tensor, "b ..."], x0: Float[Tensor, "b ..."], noise: Float[Tensor, "b ..."], step: Step
    ) -> Gaussian:
        """Of the next x: mean [b, ...] like ``x`` and std [b], float64; std 0 where the step has no randomness."""
        ...


def split(
    x: Float[Tensor, "b ..."], predicted: Float[Tensor, "b ..."], step: Step, predicts: Predicts
) -> tuple[Float[Tensor, "b ..."], Float[Tensor, "b ..."]]:
    """What x is made of, by the network's prediction: x0 and noise, float64.

    A noise or x0 prediction divides by alpha or sigma: at pure noise (alpha 0) or none (sigma 0) it says nothing.
    """
    x, predicted = x.double(), predicted.double()
    alpha, sigma = (_over(level, x) for level in (step.alpha, step.sigma))
    if predicts == "noise":
        return (x - sigma * predicted) / alpha, predicted
    if predicts == "x0":
        return predicted, (x - alpha * predicted) / sigma
    if predicts == "v":
        norm = alpha.square() + sigma.square()
        return (alpha * x - sigma * predicted) / norm, (sigma * x + alpha * predicted) / norm
    return (x - sigma * predicted) / (alpha + sigma), (x + alpha * predicted) / (alpha + sigma)


# --- any path ---


@dataclass(frozen=True)
class Ancestral:
    """mean = alpha' x0 + (sigma'^2 - var)^(1/2) e,  var = eta^2 sigma'^2 (1 - (alpha sigma' / (alpha' sigma))^2).

    At eta 1 the posterior of x' given x and x0 (Kingma et al. 2021, arXiv 2107.00630, eq. 25), on a diffusion's path
    DDIM's step. At pure noise (alpha 0) all of the noise is new; at clean data there is none.
    """

    eta: float = 1.0
    is_flow = None

    def __post_init__(self) -> None:
        if not 0 < self.eta <= 1:
            raise GruppoError(
                f"eta={self.eta} is out of range: a step without noise has no density to learn from, and above 1 it "
                "has more noise than the next level holds. Set eta above 0 up to 1."
            )

    def __call__(self, x: Tensor, x0: Tensor, noise: Tensor, step: Step) -> Gaussian:
        kept = (step.alpha * step.next_sigma / (step.next_alpha * step.sigma)).square()
        var = self.eta**2 * step.next_sigma.square() * (1 - kept).clamp(min=0)
        left = (step.next_sigma.square() - var).clamp(min=0).sqrt()
        return Gaussian(_over(step.next_alpha, x) * x0 + _over(left, x) * noise, var.sqrt())


# --- diffusion paths ---


@dataclass(frozen=True)
class Ddim:
    """mean = alpha' x0 + (1 - alpha'^2 - var)^(1/2) e,  var = eta^2 (1 - a') / (1 - a) (1 - a / a'), a = alpha^2.

    Song et al. 2021 (arXiv 2010.02502), eq. 12 and 16. ``eta`` 0 is the ODE, which has no density; 1 is DDPM.
    """

    eta: float = 1.0
    is_flow = False

    def __post_init__(self) -> None:
        if not 0 <= self.eta <= 1:
            raise GruppoError(
                f"eta={self.eta} is out of range: above 1 a DDIM step has more noise than the next level holds. Set "
                "eta to 0 (the ODE, for evaluation) up to 1 (DDPM)."
            )

    def __call__(self, x: Tensor, x0: Tensor, noise: Tensor, step: Step) -> Gaussian:
        var = self.eta**2 * _posterior_var(step)
        left = (step.next_sigma.square() - var).clamp(min=0).sqrt()
        mean = _over(step.next_alpha, x) * x0 + _over(left, x) * noise
        return Gaussian(mean, var.sqrt())


@dataclass(frozen=True)
class Ddpm:
    """The posterior of x' given x and x0: DDIM's mean at eta 1, with its variance or the larger one, 1 - a / a'.

    Ho et al. 2020 (arXiv 2006.11239), section 3.2; both variances are theirs.
    """

    variance: Literal["small", "large"] = "small"
    is_flow = False

    def __call__(self, x: Tensor, x0: Tensor, noise: Tensor, step: Step) -> Gaussian:
        small = Ddim(1.0)(x, x0, noise, step)
        if self.variance == "small":
            return small
        large = (1 - (step.alpha / step.next_alpha).square()).clamp(min=0)
        return Gaussian(small.mean, large.sqrt())


def _posterior_var(step: Step) -> Float[Tensor, "b"]:
    kept = (step.alpha / step.next_alpha).square()
    return (step.next_sigma / step.sigma).square() * (1 - kept).clamp(min=0)


# --- flow paths ---


@dataclass(frozen=True)
class FlowSde:
    """x + (v + s^2 (x + (1 - t) v) / (2 t)) dt with std s |dt|^(1/2),  s = eta (t / (1 - t))^(1/2),  dt < 0.

    Liu et al. 2025 (Flow-GRPO, arXiv 2505.05470), eq. 12. At t = 1 the divisor 1 - t is that of the next time: s would
    be infinite. The step to t = 0 has noise too, which would stay in the picture: whoever samples ends with the ODE's.
    """

    eta: float = 0.7
    is_flow = True

    def __post_init__(self) -> None:
        _check_positive(self.eta)

    def __call__(self, x: Tensor, x0: Tensor, noise: Tensor, step: Step) -> Gaussian:
        left = torch.where(step.alpha > 0, step.alpha, step.next_alpha)
        return _sde(x, x0, noise, step, self.eta * (step.sigma / left).sqrt())


@dataclass(frozen=True)
class DanceSde:
    """Flow-SDE's step with a constant s = eta. Xue et al. 2025 (DanceGRPO, arXiv 2505.07818)."""

    eta: float = 0.3
    is_flow = True

    def __post_init__(self) -> None:
        _check_positive(self.eta)

    def __call__(self, x: Tensor, x0: Tensor, noise: Tensor, step: Step) -> Gaussian:
        return _sde(x, x0, noise, step, torch.full_like(step.sigma, self.eta))


def _sde(x: Tensor, x0: Tensor, noise: Tensor, step: Step, s: Float[Tensor, "b"]) -> Gaussian:
    dt = step.next_sigma - step.sigma  # [b], below 0
    half = s.square() / (2 * step.sigma)
    v = noise - x0
    mean = x.double() * _over(1 + half * dt, x) + v * _over((1 + half * step.alpha) * dt, x)
    return Gaussian(mean, s * dt.abs().sqrt())


@dataclass(frozen=True)
class Cps:
    """(1 - t') x0 + (t'^2 - std^2)^(1/2) e,  std = t' sin(eta pi / 2): new noise replaces noise that was there.

    Wang & Yu 2025 (Flow-CPS, arXiv 2509.05952). Its samples are clean and it does not keep the marginals exactly; its
    density here is the normal's own, with 1 / (2 std^2), which published code leaves out.
    """

    eta: float = 0.7
    is_flow = True

    def __post_init__(self) -> None:
        if not 0 < self.eta <= 1:
            raise GruppoError(f"eta={self.eta} is out of range; CPS needs above 0 (0 is the ODE) up to 1.")

    def __call__(self, x: Tensor, x0: Tensor, noise: Tensor, step: Step) -> Gaussian:
        std = step.next_sigma * math.sin(self.eta * math.pi / 2)
        left = (step.next_sigma.square() - std.square()).clamp(min=0).sqrt()
        return Gaussian(_over(step.next_alpha, x) * x0 + _over(left, x) * noise, std)


@dataclass(frozen=True)
class Ode:
    """alpha' x0 + sigma' e: DDIM at eta 0, and Euler's step of a flow. For evaluation; it has no density."""

    is_flow: bool = False

    def __call__(self, x: Tensor, x0: Tensor, noise: Tensor, step: Step) -> Gaussian:
        mean = _over(step.next_alpha, x) * x0 + _over(step.next_sigma, x) * noise
        return Gaussian(mean, torch.zeros_like(step.sigma))


TRANSITIONS: dict[str, Callable[..., Transition]] = {
    "ancestral": Ancestral,
    "ddim": Ddim,
    "ddpm": Ddpm,
    "ddpm_large": partial(Ddpm, "large"),
    "flow_sde": FlowSde,
    "dance_sde": DanceSde,
    "cps": Cps,
    "ode": Ode,
}
"""By the name that a config has for them."""


def _check_positive(eta: float) -> None:
    if not 0 < eta < math.inf:
        raise GruppoError(
            f"eta={eta} is out of range: a step without noise has no density to learn from. Set eta above 0; the ode "
            "transition is for evaluation."
        )


def _over(level: Float[Tensor, "b"], x: Tensor) -> Tensor:
    return level.to(x.device).double().reshape(-1, *[1] * (x.ndim - 1))
