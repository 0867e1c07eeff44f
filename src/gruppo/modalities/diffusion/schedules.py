"""Noise schedules, and the steps of samplers between their levels as normal distributions.

A noise level is x = alpha x0 + sigma e with e standard normal: alpha^2 + sigma^2 = 1 for diffusion,
where the papers write a = alpha^2, and alpha = 1 - t, sigma = t for flow matching. A transition
gives the mean and std of the step to the next, less noisy level.
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

    @property
    def config(self) -> dict[str, Any]:
        """Arguments of the constructor, as JSON."""
        return {"shift": self.shift}

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


class DiffusionSchedule:
    """Variance preserving: x = sqrt(a) x0 + sqrt(1 - a) e, with the a = cumprod(1 - beta) of a
    scheduler of diffusers, or of its config.

    Times are the scheduler's own, then -1: clean data, where ``set_alpha_to_one`` says whether
    noise remains. Steps are those of ``TRANSITIONS``, whatever the scheduler's solver, and x0 is
    never clipped. A step goes to the next time of the list, also where ``DDIMScheduler.step``
    rounds to another one (a number of steps that does not divide the times, or "linspace" spacing).
    """

    is_flow = False

    def __init__(self, scheduler: Any) -> None:
        diffusers = import_extra("diffusers", "diffusion", "a diffusion schedule")
        config = getattr(scheduler, "config", scheduler)
        kinds: dict[str, PredictionType]
        kinds = {"epsilon": "noise", "v_prediction": "v", "sample": "x0"}
        kind = config.get("prediction_type", "epsilon")
        if "beta_schedule" not in config or kind not in kinds:
            raise GruppoError(f"""the pipeline's scheduler is a {type(scheduler).__name__}; its UNet
                needs one with betas that predicts {", ".join(kinds)}. Give the pipeline the
                DDIMScheduler of its own config.""")
        self.predicts = kinds[kind]
        self._scheduler = diffusers.DDIMScheduler.from_config(config)
        self.config = dict(self._scheduler.config)
        final = self._scheduler.final_alpha_cumprod.reshape(1)
        self.alphas_cumprod = torch.cat([final, self._scheduler.alphas_cumprod]).double()
        """a at the times -1, 0, 1, ..."""

    def times(self, steps: int) -> Float[Tensor, "steps+1"]:
        """Times of a sampler, from pure noise to clean data; float64."""
        length = len(self.alphas_cumprod) - 1
        if steps > length:
            raise GruppoError(f"""{steps} steps are more than the {length} times of the schedule.
                Set fewer steps.""")
        self._scheduler.set_timesteps(steps)
        times = self._scheduler.timesteps.double().cpu()
        return torch.cat([times, times.new_full((1,), -1)])

    def level(self, times: Float[Tensor, "b"]) -> Level:
        alphas_cumprod = self.alphas_cumprod[times.long() + 1]
        return alphas_cumprod.sqrt(), (1 - alphas_cumprod).sqrt()

    def training_times(self, uniforms: Float[Tensor, "b"]) -> Float[Tensor, "b"]:
        """Times of denoising training, from uniforms in [0, 1)."""
        return (uniforms.double() * (len(self.alphas_cumprod) - 1)).floor()


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
        self._is_even = is_even

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


NoiseSchedule = FlowSchedule | DiffusionSchedule


# --- between predictions, x0 and noise ------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class StepLevels:
    """From one noise level to the next, for b rows; float64."""

    alpha: Float[Tensor, "b"]
    sigma: Float[Tensor, "b"]
    next_alpha: Float[Tensor, "b"]
    next_sigma: Float[Tensor, "b"]


def broadcast(level: Float[Tensor, "b"], x: Float[Tensor, "b ..."]) -> Float[Tensor, "b ..."]:
    """Numbers of each row as float64, shaped to multiply x."""
    return level.to(x.device).double().reshape(-1, *[1] * (x.ndim - 1))


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


def prediction_target(
    x0: Float[Tensor, "b ..."],
    noise: Float[Tensor, "b ..."],
    level: Level,
    predicts: PredictionType,
) -> Float[Tensor, "b ..."]:
    """What a perfect network predicts of alpha x0 + sigma noise."""
    alpha, sigma = (broadcast(one, x0) for one in level)
    targets = {"noise": noise, "x0": x0, "velocity": noise - x0, "v": alpha * noise - sigma * x0}
    return targets[predicts]


# --- samplers: from x0 and noise [b, ...] to a Gaussian with mean [b, ...] and std [b] ------------
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
    eta: float
    """Default scale of the noise."""
    max_eta: float = 1.0
    """Above 1 most would add more noise than the next level holds."""

    def step(
        self, x0: Tensor, noise: Tensor, levels: StepLevels, eta: float | None = None
    ) -> Gaussian:
        """The normal distribution of the next state; ``eta`` None takes the default."""
        left, std = self.noise(levels, self.eta if eta is None else eta)
        mean = broadcast(levels.next_alpha, x0) * x0 + broadcast(left, x0) * noise
        return Gaussian(mean, std)


TRANSITIONS = {
    "ancestral": Transition(ancestral, None, 1.0),
    "ddim": Transition(ancestral, False, 1.0),
    "flow_sde": Transition(flow_sde, True, 0.7, math.inf),
    "dance_sde": Transition(dance_sde, True, 0.3, math.inf),
    "cps": Transition(cps, True, 0.7),
}
"""By the name that a config has for them. Rollouts store the index of a name in this order."""
ODE = Transition(ancestral, None, 0.0)
"""Without noise, for evaluation and for the last step; it has no density."""
