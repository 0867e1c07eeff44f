"""Noise schedules, and the steps of samplers between their levels as normal distributions.

A noise level is x = alpha x0 + sigma e with e standard normal: alpha^2 + sigma^2 = 1 for diffusion,
where the papers write a = alpha^2, and alpha = 1 - t, sigma = t for flow matching. A transition
gives the mean and std of the step to the next, less noisy level. Sampling and scoring call the same
function, so that a ratio starts at 1.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from gruppo.config.options import Range
from gruppo.loading import import_extra
from gruppo.types import Gaussian, GruppoError

PredictionType = Literal["noise", "x0", "v", "velocity"]
"""What a network predicts of x: e, x0, alpha e - sigma x0, or e - x0."""
Level = tuple[Float[Tensor, "b"], Float[Tensor, "b"]]
"""alpha and sigma, float64."""


@dataclass(frozen=True)
class FlowSchedule:
    """Flow matching: x = (1 - t) x0 + t e. The network is given t in (0, 1].

    Sampler times are evenly spaced, then shifted to shift t / (1 + (shift - 1) t): above 1, more
    steps at high noise (Esser et al. 2024, arXiv 2403.03206, eq. 23).
    """

    shift: float = 1.0
    is_flow = True

    def times(self, steps: int) -> Float[Tensor, "steps+1"]:
        """Times of a sampler, from pure noise to clean data; float64."""
        times = self._shifted(torch.linspace(1, 0, steps + 1, dtype=torch.float64))
        times[0] = 1  # exactly: a transition divides by what rounding would leave of alpha
        return times

    def level(self, times: Float[Tensor, "b"]) -> Level:
        return 1 - times, times

    def training_times(self, uniforms: Float[Tensor, "b"]) -> Float[Tensor, "b"]:
        """Times of denoising training, from uniforms in [0, 1)."""
        return self._shifted(1 - uniforms.double())

    def _shifted(self, t: Tensor) -> Tensor:
        return self.shift * t / (1 + (self.shift - 1) * t)


@dataclass
class DiffusionSchedule:
    """Variance preserving: x = sqrt(a) x0 + sqrt(1 - a) e, a = cumprod(1 - beta) at a time 0 ..
    length - 1.

    Clean data are at time -1. ``linear``: betas of Ho et al. 2020 (arXiv 2006.11239).
    ``scaled_linear``: Stable Diffusion's, linear in sqrt(beta) from 0.00085 to 0.012. ``cosine``:
    Nichol & Dhariwal 2021 (arXiv 2102.09672), eq. 17. Sampler times are evenly spaced from the
    noisiest one ("trailing", Lin et al. 2023, arXiv 2305.08891).
    """

    betas: Literal["linear", "scaled_linear", "cosine"] = "linear"
    length: int = 1000
    is_flow = False

    def __post_init__(self) -> None:
        share = torch.linspace(0, 1, self.length + 1, dtype=torch.float64)
        if self.betas == "cosine":
            cumprod = ((share + 0.008) / 1.008 * math.pi / 2).cos().square()
            betas = (1 - cumprod[1:] / cumprod[:-1]).clamp(max=0.999)
        elif self.betas == "linear":
            betas = torch.linspace(1e-4, 0.02, self.length, dtype=torch.float64)
        else:
            roots = torch.linspace(0.00085**0.5, 0.012**0.5, self.length, dtype=torch.float64)
            betas = roots.square()
        self.alphas_cumprod = torch.cat([torch.ones_like(betas[:1]), (1 - betas).cumprod(0)])
        """a at the times -1, 0, 1, ..."""

    def times(self, steps: int) -> Float[Tensor, "steps+1"]:
        """Times of a sampler, from pure noise to clean data; float64."""
        if steps > self.length:
            raise GruppoError(
                f"{steps} steps are more than the {self.length} times of the schedule. Set fewer "
                f"steps."
            )
        return (self.length * torch.linspace(1, 0, steps + 1, dtype=torch.float64)).round() - 1

    def level(self, times: Float[Tensor, "b"]) -> Level:
        alphas_cumprod = self.alphas_cumprod[times.long() + 1]
        return alphas_cumprod.sqrt(), (1 - alphas_cumprod).sqrt()

    def training_times(self, uniforms: Float[Tensor, "b"]) -> Float[Tensor, "b"]:
        """Times of denoising training, from uniforms in [0, 1)."""
        return (uniforms.double() * self.length).floor()


NoiseSchedule = FlowSchedule | DiffusionSchedule


# --- schedulers of diffusers ----------------------------------------------------------------------


class SchedulerDiffusion(DiffusionSchedule):
    """Betas, spacing and final level of a ``diffusers`` scheduler; steps are DDIM's, whatever the
    pipeline's solver.

    Times are the scheduler's own, then -1: clean data, where ``set_alpha_to_one`` says whether
    noise remains. A step goes to the next time of the list, also where ``DDIMScheduler.step``
    rounds to another one (a number of steps that does not divide the times, or "linspace" spacing).
    x0 is never clipped.
    """

    def __init__(self, scheduler: Any) -> None:
        diffusers = import_extra("diffusers", "diffusion", "an image pipeline")
        config = scheduler.config
        kinds: dict[str, PredictionType]
        kinds = {"epsilon": "noise", "v_prediction": "v", "sample": "x0"}
        kind = config.get("prediction_type", "epsilon")
        if "beta_schedule" not in config or kind not in kinds:
            raise GruppoError(f"""the pipeline's scheduler is a {type(scheduler).__name__}; its UNet
                needs one with betas that predicts {", ".join(kinds)}. Give the pipeline the
                DDIMScheduler of its own config.""")
        self.predicts = kinds[kind]
        self._scheduler = diffusers.DDIMScheduler.from_config(config)
        super().__init__(length=int(self._scheduler.config.num_train_timesteps))
        final = self._scheduler.final_alpha_cumprod.reshape(1)
        # in place of named betas
        self.alphas_cumprod = torch.cat([final, self._scheduler.alphas_cumprod]).double()

    def times(self, steps: int) -> Float[Tensor, "steps+1"]:
        super().times(steps)  # raises for more steps than there are times
        self._scheduler.set_timesteps(steps)
        times = self._scheduler.timesteps.double().cpu()
        return torch.cat([times, times.new_full((1,), -1)])


class SchedulerFlow(FlowSchedule):
    """Sigmas of a ``FlowMatchEulerDiscreteScheduler``, with its shift; the network is given sigma.

    ``mu``: of a shift that depends on the image size. ``is_even``: sigmas 1 to 1 / steps before the
    shift, as FLUX's pipeline sets them; otherwise the scheduler's own.
    """

    predicts: PredictionType = "velocity"

    def __init__(self, scheduler: Any, *, mu: float, is_even: bool) -> None:
        config = scheduler.config
        if "use_dynamic_shifting" not in config or config.get("invert_sigmas"):
            raise GruppoError(f"""the pipeline's scheduler is a {type(scheduler).__name__}; its
                transformer needs a FlowMatchEulerDiscreteScheduler whose sigmas fall. Give the
                pipeline that of its own config.""")
        super().__init__(float(scheduler.shift))
        self._scheduler = copy.deepcopy(scheduler)
        self._mu = mu
        self._is_even = is_even and not config.get("use_flow_sigmas")

    def times(self, steps: int) -> Float[Tensor, "steps+1"]:
        even = torch.linspace(1, 1 / steps, steps, dtype=torch.float64).tolist()
        self._scheduler.set_timesteps(steps, sigmas=even if self._is_even else None, mu=self._mu)
        sigmas = self._scheduler.sigmas.double().cpu()
        # undo the shift's rounding: alpha is divided by
        return torch.where((1 - sigmas).abs() < 1e-6, 1.0, sigmas)

    def training_times(self, uniforms: Float[Tensor, "b"]) -> Float[Tensor, "b"]:
        if self._scheduler.config.use_dynamic_shifting:
            return self._scheduler.time_shift(self._mu, 1.0, 1 - uniforms.double())
        return super().training_times(uniforms)


# --- from a prediction to a step ---


@dataclass(frozen=True, eq=False)
class StepLevels:
    """From one noise level to the next, for b rows; float64."""

    alpha: Float[Tensor, "b"]
    sigma: Float[Tensor, "b"]
    next_alpha: Float[Tensor, "b"]
    next_sigma: Float[Tensor, "b"]


def split_prediction(
    x: Float[Tensor, "b ..."],
    prediction: Float[Tensor, "b ..."],
    level: Level,
    predicts: PredictionType,
) -> tuple[Float[Tensor, "b ..."], Float[Tensor, "b ..."]]:
    """x0 and noise that x is made of, according to the network; float64.

    A noise prediction divides by alpha and an x0 prediction by sigma: neither works at pure noise
    or clean data.
    """
    x, prediction = x.double(), prediction.double()
    alpha, sigma = (broadcast(one, x) for one in level)
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


# --- steps of samplers: from x0 and noise [b, ...] to a Gaussian with mean [b, ...] and std [b] ---
#
# All have mean = alpha' x0 + c e, where e is the predicted noise: a sampler gives c and the std of
# the new noise.


def ancestral(step: StepLevels, eta: float) -> tuple[Tensor, Tensor]:
    """std^2 = eta^2 sigma'^2 (1 - (alpha sigma' / (alpha' sigma))^2),  c^2 = sigma'^2 - std^2.

    At eta 1 the posterior of x' given x and x0 (Kingma et al. 2021, arXiv 2107.00630, eq. 25). On a
    diffusion schedule DDIM's step (Song et al. 2021, arXiv 2010.02502, eq. 12 and 16), which is
    DDPM at eta 1 and the ODE at eta 0; on a flow schedule eta 0 is Euler's step. From pure noise
    (alpha 0) all noise is new; at clean data there is none.
    """
    kept = (step.alpha * step.next_sigma / (step.next_alpha * step.sigma)).square()
    var = eta**2 * step.next_sigma.square() * (1 - kept).clamp(min=0)
    return (step.next_sigma.square() - var).clamp(min=0).sqrt(), var.sqrt()


def ddpm_large(step: StepLevels, eta: float) -> tuple[Tensor, Tensor]:
    """DDPM's mean with the large variance, 1 - (alpha / alpha')^2 (Ho et al. 2020, arXiv
    2006.11239, section 3.2)."""
    var = 1 - (step.alpha / step.next_alpha).square()
    return ancestral(step, 1.0)[0], var.clamp(min=0).sqrt()


def flow_sde(step: StepLevels, eta: float) -> tuple[Tensor, Tensor]:
    """std = s |dt|^(1/2), c = t' - std^2 / (2 t), with s = eta (t / (1 - t))^(1/2).

    x + (v + s^2 (x + (1 - t) v) / (2 t)) dt of Liu et al. 2025 (Flow-GRPO, arXiv 2505.05470), eq.
    12. The step to t = 0 has noise too, which would remain in the image: samplers end with an ODE
    step.
    """
    # at t = 1 s would be infinite: the divisor 1 - t is that of the next time
    divisor = torch.where(step.alpha > 0, step.alpha, step.next_alpha)
    return dance_sde(step, eta * (step.sigma / divisor).sqrt())


def dance_sde(step: StepLevels, eta: float | Tensor) -> tuple[Tensor, Tensor]:
    """``flow_sde`` with s = eta: Xue et al. 2025 (DanceGRPO, arXiv 2505.07818)."""
    std = eta * (step.sigma - step.next_sigma).sqrt()
    return step.next_sigma - std.square() / (2 * step.sigma), std


def cps(step: StepLevels, eta: float) -> tuple[Tensor, Tensor]:
    """std = t' sin(eta pi / 2), c^2 = t'^2 - std^2: new noise replaces noise that was there.

    Wang & Yu 2025 (Flow-CPS, arXiv 2509.05952). Its samples are clean and it does not keep the
    marginals exactly. The density here is the normal's own, with 1 / (2 std^2), which published
    code leaves out.
    """
    std = step.next_sigma * math.sin(eta * math.pi / 2)
    return (step.next_sigma.square() - std.square()).clamp(min=0).sqrt(), std


@dataclass(frozen=True)
class Transition:
    """A sampler by name."""

    noise: Callable[[StepLevels, float], tuple[Tensor, Tensor]]
    is_flow: bool | None
    """Whether it steps on a flow schedule or a diffusion schedule; None: on either."""
    eta: float = 1.0
    """Default scale of the noise."""
    etas: Range | None = None
    """Scales that it takes; above 1 most would add more than the next level holds. None: the
    default alone."""

    def step(
        self, x0: Tensor, noise: Tensor, levels: StepLevels, eta: float | None = None
    ) -> Gaussian:
        """The normal distribution of the next state; ``eta`` None takes the default."""
        left, std = self.noise(levels, self.eta if eta is None else eta)
        mean = broadcast(levels.next_alpha, x0) * x0 + broadcast(left, x0) * noise
        return Gaussian(mean, std)


UP_TO_1 = Range(gt=0, le=1)
TRANSITIONS = {
    "ancestral": Transition(ancestral, None, 1.0, UP_TO_1),
    "ddim": Transition(ancestral, False, 1.0, UP_TO_1),
    "ddpm": Transition(ancestral, False),
    "ddpm_large": Transition(ddpm_large, False),
    "flow_sde": Transition(flow_sde, True, 0.7, Range(gt=0)),
    "dance_sde": Transition(dance_sde, True, 0.3, Range(gt=0)),
    "cps": Transition(cps, True, 0.7, UP_TO_1),
}
"""By the name that a config has for them. Rollouts store the index of a name in this order."""
ODE = Transition(ancestral, None, 0.0)
"""Without noise, for evaluation and for the last step; it has no density."""
