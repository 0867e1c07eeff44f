"""Paths whose levels of noise are those of a ``diffusers`` scheduler, so that both sample alike."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gruppo.loading import import_extra
from gruppo.modalities.diffusion.transitions import Predicts
from gruppo.types import GruppoError

PREDICTS: dict[str, Predicts] = {"epsilon": "noise", "v_prediction": "v", "sample": "x0"}


class ScheduledDiffusion:
    """Betas, spacing and last level of a scheduler; steps are DDIM's, whichever solver the pipeline has.

    Times are the scheduler's own, then -1: the data, of which ``set_alpha_to_one`` says whether noise is left in them.
    A step goes to the next time of the list, also where ``DDIMScheduler.step`` rounds to another (a number of steps
    that does not divide the times, "linspace"). x0 is never clipped.
    """

    is_flow = False

    def __init__(self, scheduler: Any) -> None:
        config = scheduler.config
        if "beta_schedule" not in config or config.get("prediction_type", "epsilon") not in PREDICTS:
            raise GruppoError(
                f"the pipeline's scheduler is a {type(scheduler).__name__}, and its UNet needs one with betas that "
                f"predicts {', '.join(PREDICTS)}. Give the pipeline the DDIMScheduler of its own config."
            )
        ddim = import_extra("diffusers", "diffusion", "an image pipeline").DDIMScheduler
        known = inspect.signature(ddim).parameters
        self._scheduler = ddim(**{name: value for name, value in config.items() if name in known})
        self.predicts = PREDICTS[self._scheduler.config.prediction_type]
        self.length = int(self._scheduler.config.num_train_timesteps)
        of_data = self._scheduler.final_alpha_cumprod.reshape(1)
        self._kept: Float[Tensor, "length+1"] = torch.cat([of_data, self._scheduler.alphas_cumprod]).double()

    def times(self, steps: int) -> Float[Tensor, "steps+1"]:
        if steps <= self.length:
            self._scheduler.set_timesteps(steps)
            times = self._scheduler.timesteps.double().cpu()
            if len(times) == steps and times[0] < self.length:
                return torch.cat([times, times.new_full((1,), -1)])
        raise GruppoError(
            f"{steps} steps are more than the {self.length} times of the pipeline's scheduler make. Set fewer steps."
        )

    def level(self, times: Float[Tensor, "b"]) -> tuple[Tensor, Tensor]:
        kept = self._kept[times.long() + 1]
        return kept.sqrt(), (1 - kept).sqrt()

    def spread(self, uniforms: Float[Tensor, "b"]) -> Tensor:
        return (uniforms.double() * self.length).floor()


class ScheduledFlow:
    """The sigmas of a ``FlowMatchEulerDiscreteScheduler``, with its shift; the network is told sigma.

    ``mu``: of a shift that depends on the size of the picture. ``is_even``: sigmas 1 to 1 / steps before the shift, as
    FLUX's pipeline has them; else the scheduler's own.
    """

    is_flow = True
    predicts: Predicts = "velocity"

    def __init__(self, scheduler: Any, *, mu: float, is_even: bool) -> None:
        config = scheduler.config
        if "use_dynamic_shifting" not in config or config.get("invert_sigmas"):
            raise GruppoError(
                f"the pipeline's scheduler is a {type(scheduler).__name__}, and its transformer needs a "
                "FlowMatchEulerDiscreteScheduler whose sigmas fall. Give the pipeline that of its own config."
            )
        self._scheduler, self._mu = copy.deepcopy(scheduler), mu
        self._is_even = is_even and not config.get("use_flow_sigmas")

    def times(self, steps: int) -> Float[Tensor, "steps+1"]:
        even = torch.linspace(1, 1 / steps, steps, dtype=torch.float64).tolist()
        self._scheduler.set_timesteps(steps, sigmas=even if self._is_even else None, mu=self._mu)
        sigmas = self._scheduler.sigmas.double().cpu()
        return torch.where((1 - sigmas).abs() < 1e-6, 1.0, sigmas)  # rounding of a shift: alpha is divided by

    def level(self, times: Float[Tensor, "b"]) -> tuple[Tensor, Tensor]:
        return 1 - times, times

    def spread(self, uniforms: Float[Tensor, "b"]) -> Tensor:
        t, shift = 1 - uniforms.double(), float(self._scheduler.shift)
        if self._scheduler.config.use_dynamic_shifting:
            return self._scheduler.time_shift(self._mu, 1.0, t)
        return shift * t / (1 + (shift - 1) * t)
