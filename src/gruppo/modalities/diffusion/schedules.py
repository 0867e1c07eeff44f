"""Noise schedules: the levels of noise that a sampler visits, and the times that the network is given.

Ours, by name, and those of ``diffusers`` schedulers, so that a pipeline is sampled as diffusers samples it.
"""

from __future__ import annotations

import copy
import inspect
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from gruppo.loading import import_extra
from gruppo.modalities.diffusion.transitions import PredictionType
from gruppo.types import GruppoError

Betas = Literal["linear", "scaled_linear", "cosine"]


@dataclass(frozen=True)
class FlowSchedule:
    """Flow matching: x = (1 - t) x0 + t e. The network is given t in (0, 1].

    Sampler times are evenly spaced, then shifted to shift t / (1 + (shift - 1) t): above 1, more steps at high noise
    (Esser et al. 2024, arXiv 2403.03206, eq. 23).
    """

    shift: float = 1.0
    is_flow = True

    def __post_init__(self) -> None:
        if not 0 < self.shift < math.inf:
            raise GruppoError(f"shift={self.shift} is out of range; it needs to be above 0. Use 1 for even times.")

    def times(self, steps: int) -> Float[Tensor, "steps+1"]:
        """Times of a sampler, from pure noise to clean data; float64."""
        times = self._shifted(torch.linspace(1, 0, steps + 1, dtype=torch.float64))
        times[0] = 1  # exactly: a transition divides by what rounding would leave of alpha
        return times

    def level(self, times: Float[Tensor, "b"]) -> tuple[Float[Tensor, "b"], Float[Tensor, "b"]]:
        """alpha and sigma of x = alpha x0 + sigma e; float64."""
        return 1 - times, times

    def training_times(self, uniforms: Float[Tensor, "b"]) -> Float[Tensor, "b"]:
        """Times of denoising training, from uniforms in [0, 1)."""
        return self._shifted(1 - uniforms.double())

    def _shifted(self, t: Tensor) -> Tensor:
        return self.shift * t / (1 + (self.shift - 1) * t)


@dataclass
class DiffusionSchedule:
    """Variance preserving: x = sqrt(a) x0 + sqrt(1 - a) e, a = cumprod(1 - beta) at a time 0 .. length - 1.

    Clean data are at time -1. ``linear``: betas of Ho et al. 2020 (arXiv 2006.11239). ``scaled_linear``: Stable
    Diffusion's, linear in sqrt(beta) from 0.00085 to 0.012. ``cosine``: Nichol & Dhariwal 2021 (arXiv 2102.09672), eq.
    17. Sampler times are evenly spaced from the noisiest one ("trailing", Lin et al. 2023, arXiv 2305.08891).
    """

    betas: Betas = "linear"
    length: int = 1000
    is_flow = False

    def __post_init__(self) -> None:
        if self.betas not in get_args(Betas):
            known = ", ".join(map(repr, get_args(Betas)))
            raise GruppoError(f"betas={self.betas!r} is not one of {known}. Use 'linear'.")
        if self.length < 2:
            raise GruppoError(f"length={self.length} is out of range; it needs at least 2 times. Use 1000.")
        if self.betas == "cosine":
            angles = (torch.linspace(0, 1, self.length + 1, dtype=torch.float64) + 0.008) / 1.008 * math.pi / 2
            cumprod = angles.cos().square()
            betas = (1 - cumprod[1:] / cumprod[:-1]).clamp(max=0.999)
        elif self.betas == "linear":
            betas = torch.linspace(1e-4, 0.02, self.length, dtype=torch.float64)
        else:
            betas = torch.linspace(0.00085**0.5, 0.012**0.5, self.length, dtype=torch.float64).square()
        # a at the times -1, 0, 1, ...
        self.alphas_cumprod = torch.cat([torch.ones(1, dtype=torch.float64), (1 - betas).cumprod(0)])

    def times(self, steps: int) -> Float[Tensor, "steps+1"]:
        """Times of a sampler, from pure noise to clean data; float64."""
        if steps > self.length:
            raise GruppoError(f"{steps} steps are more than the {self.length} times of the schedule. Set fewer steps.")
        return (self.length * torch.linspace(1, 0, steps + 1, dtype=torch.float64)).round() - 1

    def level(self, times: Float[Tensor, "b"]) -> tuple[Float[Tensor, "b"], Float[Tensor, "b"]]:
        """alpha and sigma of x = alpha x0 + sigma e; float64."""
        alphas_cumprod = self.alphas_cumprod[times.long() + 1]
        return alphas_cumprod.sqrt(), (1 - alphas_cumprod).sqrt()

    def training_times(self, uniforms: Float[Tensor, "b"]) -> Float[Tensor, "b"]:
        """Times of denoising training, from uniforms in [0, 1)."""
        return (uniforms.double() * self.length).floor()


NoiseSchedule = FlowSchedule | DiffusionSchedule


# --- schedulers of diffusers ------------------------------------------------------------------------------------------


class SchedulerDiffusion(DiffusionSchedule):
    """Betas, spacing and final level of a ``diffusers`` scheduler; steps are DDIM's, whatever the pipeline's solver.

    Times are the scheduler's own, then -1: clean data, where ``set_alpha_to_one`` says whether noise remains. A step
    goes to the next time of the list, also where ``DDIMScheduler.step`` rounds to another one (a number of steps that
    does not divide the times, or "linspace" spacing). x0 is never clipped.
    """

    PREDICTS: ClassVar[dict[str, PredictionType]] = {"epsilon": "noise", "v_prediction": "v", "sample": "x0"}

    def __init__(self, scheduler: Any) -> None:
        config = scheduler.config
        if "beta_schedule" not in config or config.get("prediction_type", "epsilon") not in self.PREDICTS:
            raise GruppoError(
                f"the pipeline's scheduler is a {type(scheduler).__name__}; its UNet needs one with betas that "
                f"predicts {', '.join(self.PREDICTS)}. Give the pipeline the DDIMScheduler of its own config."
            )
        ddim = import_extra("diffusers", "diffusion", "an image pipeline").DDIMScheduler
        known = inspect.signature(ddim).parameters
        self._scheduler = ddim(**{name: value for name, value in config.items() if name in known})
        self.predicts = self.PREDICTS[self._scheduler.config.prediction_type]
        final = self._scheduler.final_alpha_cumprod.reshape(1)
        super().__init__(length=int(self._scheduler.config.num_train_timesteps))
        self.alphas_cumprod = torch.cat([final, self._scheduler.alphas_cumprod]).double()  # in place of named betas

    def times(self, steps: int) -> Float[Tensor, "steps+1"]:
        if steps <= self.length:
            self._scheduler.set_timesteps(steps)
            times = self._scheduler.timesteps.double().cpu()
            if len(times) == steps and times[0] < self.length:
                return torch.cat([times, times.new_full((1,), -1)])
        raise GruppoError(f"{steps} steps are more than the scheduler makes of {self.length} times. Set fewer steps.")


class SchedulerFlow(FlowSchedule):
    """Sigmas of a ``FlowMatchEulerDiscreteScheduler``, with its shift; the network is given sigma.

    ``mu``: of a shift that depends on the image size. ``is_even``: sigmas 1 to 1 / steps before the shift, as FLUX's
    pipeline sets them; otherwise the scheduler's own.
    """

    predicts: PredictionType = "velocity"

    def __init__(self, scheduler: Any, *, mu: float, is_even: bool) -> None:
        config = scheduler.config
        if "use_dynamic_shifting" not in config or config.get("invert_sigmas"):
            raise GruppoError(
                f"the pipeline's scheduler is a {type(scheduler).__name__}; its transformer needs a "
                "FlowMatchEulerDiscreteScheduler whose sigmas fall. Give the pipeline that of its own config."
            )
        super().__init__(float(scheduler.shift))
        self._scheduler, self._mu = copy.deepcopy(scheduler), mu
        self._is_even = is_even and not config.get("use_flow_sigmas")

    def times(self, steps: int) -> Float[Tensor, "steps+1"]:
        even = torch.linspace(1, 1 / steps, steps, dtype=torch.float64).tolist()
        self._scheduler.set_timesteps(steps, sigmas=even if self._is_even else None, mu=self._mu)
        sigmas = self._scheduler.sigmas.double().cpu()
        return torch.where((1 - sigmas).abs() < 1e-6, 1.0, sigmas)  # undo the shift's rounding: alpha is divided by

    def training_times(self, uniforms: Float[Tensor, "b"]) -> Float[Tensor, "b"]:
        if self._scheduler.config.use_dynamic_shifting:
            return self._scheduler.time_shift(self._mu, 1.0, 1 - uniforms.double())
        return super().training_times(uniforms)
