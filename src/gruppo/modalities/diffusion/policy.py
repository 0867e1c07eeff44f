"""A diffusion or flow model as a policy: its actions are the states after each denoising step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from gruppo.core.distributions import gaussian_entropy, gaussian_logprob
from gruppo.core.layers import recompute_layers
from gruppo.modalities.common.critic import NetworkCritic
from gruppo.modalities.common.images import (
    ImagePolicy,
    check_requests,
    image_error,
    image_rollouts,
    row_batches,
)
from gruppo.modalities.common.state_dict import save_policy
from gruppo.modalities.common.validation import joint_clip_nats, refuse
from gruppo.modalities.diffusion import denoiser as denoising
from gruppo.modalities.diffusion.sampling import DiffusionSampling, sample_batch
from gruppo.modalities.diffusion.schedules import (
    TRANSITIONS,
    DiffusionSchedule,
    FlowSchedule,
    NoiseSchedule,
    PredictionType,
)
from gruppo.modalities.diffusion.unet import DenoisingUNet
from gruppo.protocols import Outputs
from gruppo.seeds import generator_at
from gruppo.types import (
    Gaussian,
    GruppoError,
    Likelihood,
    MicroBatch,
    Prompt,
    Request,
    Rollouts,
    Sampling,
)

MIN_ALPHA = 1e-3
"""Least alpha at which a noise prediction determines x0 well enough: log-ratios stay within 1e-5
nats per dimension."""
SETTINGS = "denoiser.json"


class DenoiserPolicy(ImagePolicy):
    """Samples images step by step and scores each step under the normal distribution that it was
    drawn from.

    ``module``, called with x [N, *E], times [N] and conditions [N, ...] (None without a
    ``condition``), ``predicts`` one number for each of x, in its own dtype; dropout and moving
    statistics are off. States are stored in float32, and a log-prob is that of the state as stored.
    ``middle`` names the submodule whose output, averaged over space, a value head reads.
    ``weighting`` of the denoising loss: "uniform", or "clean", 1 / (sigma^2 + 0.05). ``call``:
    another way to call the module. ``codec``: between states and images, where a state is not the
    image itself.
    """

    action_name, budget_name = "step", "evaluations"
    default_budgets = (128, 1024)
    out_of_memory_hint = (
        "Train smaller images (--diffusion.size), a --lora.rank in place of all weights, or a "
        "smaller --model."
    )
    batch_rows = 256
    """Rows denoised together; half as many with guidance."""

    def __init__(
        self,
        module: nn.Module,
        shape: Sequence[int],
        *,
        predicts: PredictionType = "x0",
        schedule: NoiseSchedule | None = None,
        condition: denoising.ConditionEncoder | None = None,
        weighting: denoising.Weighting = "uniform",
        middle: str = "",
        call: denoising.ModuleCall | None = None,
        codec: denoising.PixelCodec | None = None,
    ) -> None:
        schedule = schedule or FlowSchedule()
        if predicts not in get_args(PredictionType):
            known = ", ".join(map(repr, get_args(PredictionType)))
            raise GruppoError(f"predicts={predicts!r} is not one of {known}. Use 'x0'.")
        alpha = float(schedule.level(schedule.times(1)[:1])[0])
        if predicts == "noise" and alpha < MIN_ALPHA:
            raise GruppoError(f"""predicts='noise' with a schedule that starts at alpha={alpha:.1g}
                divides rounding errors by it; it needs at least {MIN_ALPHA:g}. Predict 'v',
                'velocity' or 'x0', or use DiffusionSchedule('linear').""")
        self.module = module.eval()
        self.denoiser = denoising.Denoiser(
            module,
            tuple(shape),
            predicts,
            schedule,
            condition,
            codec or denoising.PixelCodec(tuple(shape)),
            middle,
            call or denoising.ModuleCall(),
        )
        self.weighting: denoising.Weighting = weighting
        self.value_head = None

    def recompute(self) -> None:
        recompute_layers(self.module)

    @property
    def dims(self) -> int:
        """Numbers in one action."""
        return math.prod(self.denoiser.shape)

    def at(self, module: nn.Module) -> Self:
        """This policy with other weights of the same network: a reference."""
        other = super().at(module)
        other.denoiser = replace(self.denoiser, module=module)
        return other

    def save(self, folder: Path) -> None:
        """Write the weights and how they are called; ``load_denoiser`` reads them.

        Of a module of your own, only the weights: it is an argument of ``load_denoiser``.
        """
        denoiser, module = self.denoiser, self.module
        condition, schedule = denoiser.condition, denoiser.schedule
        # by type: the schedules of pipelines, which extend these, hold a scheduler of diffusers
        is_plain = type(schedule) in (FlowSchedule, DiffusionSchedule)
        if not isinstance(condition, denoising.ClassLabels | None) or not is_plain:
            raise GruppoError(f"""a folder can hold ClassLabels and a FlowSchedule or
                DiffusionSchedule, not a {type(condition).__name__} and a {type(schedule).__name__}.
                Save policy.module yourself.""")
        labels = condition and {"classes": condition.names, "dropped": condition.dropped}
        settings = {
            "shape": denoiser.shape,
            "predicts": denoiser.predicts,
            "weighting": self.weighting,
            "middle": denoiser.middle,
            "path": {"kind": "flow" if schedule.is_flow else "diffusion", **asdict(schedule)},
            "condition": labels,
            "unet": module.sizes if isinstance(module, DenoisingUNet) else None,
        }
        save_policy(folder, SETTINGS, settings, module)

    @torch.no_grad()
    def feature_width(self) -> int:
        """Number of features that ``value_head`` reads for each state."""
        return self.denoiser.dummy_features().shape[-1]

    def describe(
        self, config: Any, sampling: Any, prompts: Sequence[Prompt], group_size: int
    ) -> list[str]:
        first, last = sampling.window
        evaluations = config.rollout.prompts * group_size * (2 if sampling.guidance != 1 else 1)
        is_branched = sampling.noise == "branched"
        count = 1 if is_branched else max(round(sampling.train_fraction * (last - first)), 1)
        nats = joint_clip_nats(config.objective, self.dims)
        return [
            f"an image    {list(self.denoiser.codec.image_shape)}; an action has {self.dims:,} "
            f"dimensions",
            f"sampled     {sampling.steps} steps of {sampling.transition}, the last without noise, "
            f"{sampling.noise} in a group; at most {sampling.steps * evaluations:,} evaluations of "
            f"the network",
            f"trained on  {count} of steps {first} to {last - 1} of each row; a clip is at "
            f"{nats:.3g} nats of a step's joint density",
            f"evaluated   by the ODE, in {sampling.ode_steps or sampling.max_actions} steps",
        ]

    def parse_prompt(self, text: str, *, is_plain: bool, read_image: Callable[..., Tensor]) -> Any:
        """The name of a class or its number, or a caption."""
        labels = self.denoiser.condition
        if isinstance(labels, denoising.ClassLabels) and text not in labels.names:
            return int(text) if text.isdecimal() else text
        return text  # a class may be named "7"

    # --- sampling ---------------------------------------------------------------------------------

    def check_prompt(self, prompt: Prompt, sampling: Sampling) -> str | None:
        """Why this prompt cannot be sampled from, or None."""
        try:
            self.denoiser.encode([prompt.inputs])
        except GruppoError as error:
            return f"prompt {prompt.id!r}: {error}"
        return None

    def check_sampling(self, sampling: Sampling) -> DiffusionSampling:
        """Sampling options in full; raises GruppoError for those that cannot be both sampled and
        scored."""
        sampling = DiffusionSampling.of(sampling)
        condition, schedule = self.denoiser.condition, self.denoiser.schedule
        schedule.times(sampling.steps)  # raises for more steps than the schedule has times
        fitting = [n for n, t in TRANSITIONS.items() if t.is_flow in (None, schedule.is_flow)]
        if sampling.temperature and sampling.transition not in fitting:
            raise GruppoError(f"""transition={sampling.transition!r} does not fit the
                {"flow" if schedule.is_flow else "diffusion"} schedule that this network was trained
                on. Set one of {", ".join(fitting)}.""")
        if sampling.guidance != 1 and not (condition and condition.dropped):
            raise GruppoError(
                f"""guidance={sampling.guidance:g} needs a prediction without a condition, and this
                    network was never trained without one""",
                advice="Set guidance 1, or train with $diffusion.dropped 0.1 (ClassLabels(..., "
                "dropped=0.1))",
            )
        return sampling

    def sample(self, requests: Sequence[Request], sampling: Sampling, *, seed: int) -> Rollouts:
        """``request.size`` images of each prompt. Randomness depends on (seed, draw, sample, step)
        alone."""
        sampling = self.check_sampling(sampling)
        check_requests(self, requests, sampling)
        conditions = self.denoiser.encode([request.prompt.inputs for request in requests])
        self.module.eval()
        batch_rows = self.batch_rows if sampling.guidance == 1 else max(self.batch_rows // 2, 1)
        parts = row_batches(requests, conditions, batch_rows)
        return Rollouts.cat([sample_batch(self.denoiser, part, sampling, seed) for part in parts])

    # --- scoring ----------------------------------------------------------------------------------

    def micro_batches(
        self, rollouts: Rollouts, loss_mask: Bool[Tensor, "B T"], budget: int
    ) -> list[MicroBatch]:
        """Micro-batches of at most ``budget`` evaluations of the network; a guided step takes two.

        Rows in their order, as many as fit. The columns of a row that does not fit alone are cut,
        with at least one evaluated action each. Every row counts, also where one evaluation serves
        a group.
        """
        rows = loss_mask.any(dim=1).nonzero()[:, 0]
        if not len(rows):
            return []
        guidance = rollouts.per_row.get("guidance", torch.ones(1))  # demonstrations have none
        limit = max(budget // (1 + int((guidance != 1).any())), 1)  # in steps
        columns = slice(0, int(loss_mask.any(dim=0).nonzero()[:, 0].max()) + 1)
        micro_batches = list[MicroBatch]()
        fitting, steps = list[int](), 0
        for row in rows.tolist():
            needed = int(rollouts.mask[row].sum())
            if fitting and steps + needed > limit:
                micro_batches.append(MicroBatch(torch.tensor(fitting), columns))
                fitting, steps = [], 0
            if needed <= limit:
                fitting.append(row)
                steps += needed
                continue
            # each step reads only the state before it, which the rollouts hold
            for part in rollouts.mask[row].nonzero()[:, 0].split(limit):
                cols = slice(int(part[0]), int(part[-1]) + 1)
                if loss_mask[row, cols].any():
                    micro_batches.append(MicroBatch(torch.tensor([row]), cols))
        if fitting:
            micro_batches.append(MicroBatch(torch.tensor(fitting), columns))
        return micro_batches

    def likelihood(
        self, rollouts: Rollouts, micro_batch: MicroBatch, *, outputs: Outputs = ()
    ) -> Likelihood:
        """Joint log-prob of each state given the one before, in float64 nats; 0 where mask is
        False.

        "output" is the predicted x0 of each step. For demonstrations the log-probs are minus the
        denoising loss.
        """
        self.module.eval()
        steps = denoising.StepSelection(self.denoiser, rollouts, micro_batch)
        if "level" in rollouts.per_row:
            return denoising.demonstration_likelihood(steps, self.weighting, outputs)
        if (rollouts.temperature[micro_batch.rows] <= 0).any():
            raise GruppoError(
                "rollouts of the ODE (temperature 0) have no density to learn from. Sample at 1."
            )
        normal, x0, features = steps.normal(features="values" in outputs)
        mean, std = normal.mean, normal.std
        # The density is that of the float32 state as stored, in float64, as when it was sampled.
        actions = rollouts.actions[steps.row, steps.column].to(self.device)  # [N, *E]
        entropy = grid = None
        if "entropy" in outputs or "entropy_value" in outputs:
            entropy = steps.scatter(gaussian_entropy(mean[None], std[None])[0])
        if "gaussian" in outputs:
            # a standard normal where no step was chosen: its KL is 0, and a std of 0 would give NaN
            grid = Gaussian(steps.scatter(mean), steps.scatter(std, fill=1.0))
        return Likelihood(
            steps.scatter(gaussian_logprob(actions[None], mean[None], std[None])[0]),
            entropy,
            grid,
            steps.scatter(self._values(features)) if "values" in outputs else None,
            steps.scatter(x0) if "output" in outputs else None,
        )

    def values(self, rollouts: Rollouts, micro_batch: MicroBatch) -> Float[Tensor, "b t"]:
        """Values of the states before each step, by ``value_head``; 0 where mask is False."""
        self.module.eval()
        steps = denoising.StepSelection(self.denoiser, rollouts, micro_batch)
        return steps.scatter(self._values(steps.features()))

    # --- demonstrations ---------------------------------------------------------------------------

    def check_demonstration(self, prompt: Prompt) -> str | None:
        """Why this prompt's target cannot be trained on, or None."""
        channels, *size = self.denoiser.codec.image_shape
        if error := image_error(prompt.target, "target", channels, tuple(size)):
            return f"prompt {prompt.id!r} {error}"
        return self.check_prompt(prompt, DiffusionSampling())

    def demonstrations(self, prompts: Sequence[Prompt], *, seed: int) -> Rollouts:
        """One row and one action per prompt: its target as a state, with log-probs of 0.

        ``per_row``: the noise (``first``), the time that it is added at (``level``), and whether
        the condition is left out (``dropped``), all by (seed, draw). The supervised loss is w
        mean((prediction - truth)^2) over the dimensions, with w by ``weighting``.
        """
        refuse(*map(self.check_demonstration, prompts))
        denoiser = self.denoiser
        condition = denoiser.condition
        conditions = denoiser.encode([prompt.inputs for prompt in prompts])
        states, uniforms, noise = [], [], []
        for prompt in prompts:
            generator = generator_at(seed, "demonstration", prompt.draw)
            uniforms.append(torch.rand(2, generator=generator, dtype=torch.float64))
            noise.append(torch.randn(denoiser.shape, generator=generator))
            states.append(denoiser.codec.encode(prompt.target))
        level, drop = torch.stack(uniforms).unbind(dim=1)  # [B]
        return image_rollouts(
            prompts,
            torch.stack(states)[:, None],  # [B, 1, *E]
            [prompt.target for prompt in prompts],
            shared={} if conditions is None else {"condition": conditions},
            per_row={
                "first": torch.stack(noise),
                "level": denoiser.schedule.training_times(level),
                "dropped": drop < (condition.dropped if condition else 0.0),
            },
        )


class DenoiserCritic(NetworkCritic):
    """Values of the states before each step from a network of its own: a copy of the policy's, with
    a value head.

    Layers after the middle get no gradient, and are frozen. ``SharedCritic`` is the one on the
    policy's network.
    """

    def __init__(self, policy: DenoiserPolicy) -> None:
        # the base below an adapter may be held in bfloat16
        dtype = torch.promote_types(policy.compute_dtype, torch.float32)
        trunk = copy.deepcopy(policy.module).requires_grad_(True).to(dtype)
        network = policy.at(trunk)
        parameters = list(trunk.parameters())
        features = network.denoiser.dummy_features().sum()
        gradients = torch.autograd.grad(features, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.requires_grad_(gradient is not None)
        super().__init__(network, trunk)
