"""A diffusion or flow model as a policy: its actions are the states after each denoising step."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self, get_args

import torch
from jaxtyping import Bool, Float
from safetensors.torch import save_file
from torch import Tensor, nn

from gruppo.core.distributions import gaussian_entropy, gaussian_logprob
from gruppo.core.layers import recompute_layers
from gruppo.modalities.common.critic import NetworkCritic
from gruppo.modalities.common.images import image_error, image_rollouts, row_batches
from gruppo.modalities.common.validation import joint_clip_nats, refuse
from gruppo.modalities.diffusion import denoiser as denoising
from gruppo.modalities.diffusion import schedules
from gruppo.modalities.diffusion.sampling import DiffusionSampling, sample_batch
from gruppo.modalities.diffusion.schedules import (
    DiffusionSchedule,
    FlowSchedule,
    NoiseSchedule,
    PredictionType,
)
from gruppo.modalities.diffusion.unet import DenoisingUNet
from gruppo.protocols import (
    DemonstrationMixin,
    ImageDescriptionMixin,
    MemoryMixin,
    Outputs,
    Policy,
    PromptMixin,
    ShardingMixin,
    ValueHeadMixin,
)
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
WEIGHTS, SETTINGS = "model.safetensors", "denoiser.json"
NOISE = {
    "independent": "each sample its own",
    "shared": "a group has one first latent",
    "branched": "a group has all in common but that of one random step",
}


class DenoiserPolicy(
    Policy,
    DemonstrationMixin,
    ValueHeadMixin,
    ShardingMixin,
    PromptMixin,
    ImageDescriptionMixin,
    MemoryMixin,
):
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

    likelihood_outputs = frozenset({"entropy", "entropy_value", "gaussian", "output", "values"})
    action_name, budget_name = "step", "evaluations"
    default_budgets = (128, 1024)
    out_of_memory_hint = (
        "one evaluation of the network",
        "Train smaller images (--diffusion.size), a --lora.rank in place of all weights, or a "
        "smaller --model.",
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
        schedule, call = schedule or FlowSchedule(), call or denoising.ModuleCall()
        codec = codec or denoising.PixelCodec(tuple(shape))
        self.module = module.eval()
        names, known = [name for name, _ in module.named_modules()], get_args(PredictionType)
        alpha = float(schedule.level(schedule.times(1)[:1])[0])
        if middle not in names:  # "" is the module itself
            raise GruppoError(f"""the network has no submodule {middle!r} to read features from; it
                has {", ".join(names[1:9])}.""")
        if predicts not in known:
            raise GruppoError(
                f"predicts={predicts!r} is not one of {', '.join(map(repr, known))}. Use 'x0'."
            )
        if predicts == "noise" and alpha < MIN_ALPHA:
            raise GruppoError(f"""predicts='noise' with a schedule that starts at alpha={alpha:.1g}
                divides rounding errors by it; it needs at least {MIN_ALPHA:g}. Predict 'v',
                'velocity' or 'x0', or use DiffusionSchedule('linear').""")
        self.denoiser = denoising.Denoiser(
            module, tuple(shape), predicts, schedule, condition, codec, middle, call
        )
        self.weighting: denoising.Weighting = weighting
        self.value_head: nn.Module | None = None
        """Features [N, F] to values [N]. Not part of ``module``, so that saves, copies and
        references exclude it."""

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
        settings = {
            **{"shape": denoiser.shape, "predicts": denoiser.predicts, "weighting": self.weighting},
            "middle": denoiser.middle,
            "path": {"kind": "flow" if schedule.is_flow else "diffusion", **asdict(schedule)},
            "condition": None
            if condition is None
            else {"classes": condition.names, "dropped": condition.dropped},
            "unet": module.sizes if isinstance(module, DenoisingUNet) else None,
        }
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: value.contiguous() for name, value in module.state_dict().items()},
            folder / WEIGHTS,
        )
        (folder / SETTINGS).write_text(json.dumps(settings, indent=1), encoding="utf-8")

    @torch.no_grad()
    def feature_width(self) -> int:
        """Number of features that ``value_head`` reads for each state."""
        return self.denoiser.dummy_features().shape[-1]

    def describe(
        self, config: Any, sampling: Any, prompts: Sequence[Prompt], group_size: int
    ) -> list[str]:
        guided, is_branched = sampling.guidance != 1, sampling.noise == "branched"
        rows, evaluations = config.rollout.prompts * group_size, 2 if guided else 1
        last = sampling.train_to or sampling.steps - 1
        trained = max(round(sampling.train_fraction * (last - sampling.train_from)), 1)
        # a branched group is in one state until it parts: the trained step is evaluated once for
        # all its samples
        total = (config.rollout.prompts if is_branched else trained * rows) * evaluations
        steps = "1, at which its group parts," if is_branched else f"{trained}"
        eta = "" if sampling.eta is None else f", eta {sampling.eta:g}"
        further = f"{', guided' if guided else ''}"
        further += (
            ", less where a group has its state in common"
            if sampling.noise != "independent"
            else ""
        )
        lines = [
            f"an image    {list(self.denoiser.codec.image_shape)}; an action has {self.dims:,} "
            f"dimensions",
            f"sampled     {sampling.steps} steps of {sampling.transition}{eta}, the last without "
            f"noise; "
            f"{sampling.steps * rows * evaluations:,} evaluations of the network{further}",
            f"noise       {NOISE[sampling.noise]}",
            f"trained on  {steps} of steps {sampling.train_from} to {last - 1} of each row, "
            f"{total:,} evaluations",
        ]
        if config.objective.surrogate in ("clip", "cispo"):
            nats = joint_clip_nats(config.objective, self.dims)
            lines.append(
                f"clip        the log-ratio of a step's joint density above {nats:.3g} nats"
            )
        return [
            *lines,
            f"evaluated   by the ODE, in {sampling.ode_steps or sampling.max_actions} steps",
        ]

    def parse_prompt(self, text: str, *, is_plain: bool, read_image: Callable[..., Tensor]) -> Any:
        """The name of a class or its number, or a caption."""
        labels = self.denoiser.condition  # a class may be named "7"
        is_number = (
            isinstance(labels, denoising.ClassLabels)
            and text not in labels.names
            and text.isdecimal()
        )
        return int(text) if is_number else text

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
        sampling, condition, schedule = (
            DiffusionSampling.of(sampling),
            self.denoiser.condition,
            self.denoiser.schedule,
        )
        schedule.times(sampling.steps)  # raises for more steps than the schedule has times
        fitting = [
            n for n, t in schedules.TRANSITIONS.items() if t.is_flow in (None, schedule.is_flow)
        ]
        if sampling.temperature and sampling.transition not in fitting:
            raise GruppoError(f"""transition={sampling.transition!r} does not fit the
                {"flow" if schedule.is_flow else "diffusion"} schedule that this network was trained
                on. Set one of {", ".join(fitting)}.""")
        if sampling.guidance != 1 and not (condition and condition.dropped):
            what = (
                "has no condition"
                if condition is None
                else "was never trained without its condition"
            )
            raise GruppoError(
                f"""guidance={sampling.guidance:g} needs a prediction without a condition, and this
                    network {what}""",
                advice="Set guidance 1, or train with $diffusion.dropped 0.1 (ClassLabels(..., "
                "dropped=0.1))",
            )
        return sampling

    def sample(self, requests: Sequence[Request], sampling: Sampling, *, seed: int) -> Rollouts:
        """``request.size`` images of each prompt. Randomness depends on (seed, draw, sample, step)
        alone."""
        if not requests or any(request.size < 1 for request in requests):
            raise ValueError("sample needs at least one request, each of size 1 or more.")
        sampling = self.check_sampling(sampling)
        refuse(*(self.check_prompt(request.prompt, sampling) for request in requests))
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
        if not loss_mask.any():
            return []
        guidance = rollouts.per_row.get(
            "guidance", torch.ones(len(rollouts))
        )  # demonstrations have none
        cost = 1 + (guidance != 1).long()
        columns = slice(0, int(loss_mask.any(dim=0).nonzero()[:, 0].max()) + 1)
        micro_batches, rows, left = list[MicroBatch](), list[int](), budget
        for row in loss_mask.any(dim=1).nonzero()[:, 0].tolist():
            needed = int(rollouts.mask[row].sum()) * int(cost[row])
            if rows and needed > left:
                micro_batches.append(MicroBatch(torch.tensor(rows), columns))
                rows, left = [], budget
            if needed <= budget:
                rows.append(row)
                left -= needed
                continue
            # The row is cut by columns: each step reads only the state before it, which the
            # rollouts hold.
            for part in rollouts.mask[row].nonzero()[:, 0].split(max(budget // int(cost[row]), 1)):
                cols = slice(int(part[0]), int(part[-1]) + 1)
                if loss_mask[row, cols].any():
                    micro_batches.append(MicroBatch(torch.tensor([row]), cols))
        return micro_batches + ([MicroBatch(torch.tensor(rows), columns)] if rows else [])

    def likelihood(
        self, rollouts: Rollouts, micro_batch: MicroBatch, *, outputs: Outputs = ()
    ) -> Likelihood:
        """Joint log-prob of each state given the one before, in float64 nats; 0 where mask is
        False.

        "output" is the predicted x0 of each step. For demonstrations the log-probs are minus the
        denoising loss.
        """
        self.module.eval()
        steps = denoising.StepSelection(rollouts, micro_batch, self.device)
        if "level" in rollouts.per_row:
            return denoising.demonstration_likelihood(self.denoiser, steps, self.weighting, outputs)
        rows = micro_batch.rows
        if (rollouts.temperature[rows] <= 0).any():
            raise GruppoError(
                "rollouts of the ODE (temperature 0) have no density to learn from. Sample at 1."
            )
        # the transition that these rows were sampled with: one forward can score one alone
        numbers, etas = (rollouts.per_row[name][rows].tolist() for name in ("transition", "eta"))
        kinds = set(zip(numbers, etas, strict=True))
        if len(kinds) > 1:
            raise GruppoError(
                "these rollouts mix several transitions or etas; evaluate each kind apart."
            )
        wants_entropy = "entropy" in outputs or "entropy_value" in outputs
        if len(steps.row):
            number, eta = kinds.pop()
            transition = list(schedules.TRANSITIONS.values())[number]
            levels, inputs = steps.inputs(self.denoiser)
            prediction, features = self.denoiser.predict(
                *inputs, steps.group, features="values" in outputs
            )
            x0, noise = schedules.split_prediction(
                inputs[0], prediction, levels, self.denoiser.predicts
            )
            normal = transition.step(x0, noise, levels, eta)
        else:  # no network is called with an empty batch
            x0 = torch.zeros(0, *self.denoiser.shape, dtype=torch.float64, device=self.device)
            normal, features = Gaussian(x0, x0.new_zeros(0)), None
        mean, std = normal.mean, normal.std
        # The density is that of the float32 state as stored, in float64, as when it was sampled.
        actions = rollouts.actions[steps.row, steps.column].to(self.device)  # [N, *E]
        logprobs = steps.scatter(gaussian_logprob(actions[None], mean[None], std[None])[0])
        entropy = (
            steps.scatter(gaussian_entropy(mean[None], std[None])[0]) if wants_entropy else None
        )
        # a standard normal where no step was chosen: its KL is 0, and a std of 0 would give NaN
        grid = (
            Gaussian(steps.scatter(mean), steps.scatter(std, fill=1.0))
            if "gaussian" in outputs
            else None
        )
        values = steps.scatter(self._values(features)) if "values" in outputs else None
        return Likelihood(
            logprobs, entropy, grid, values, steps.scatter(x0) if "output" in outputs else None
        )

    def values(self, rollouts: Rollouts, micro_batch: MicroBatch) -> Float[Tensor, "b t"]:
        """Values of the states before each step, by ``value_head``; 0 where mask is False."""
        self.module.eval()
        steps = denoising.StepSelection(rollouts, micro_batch, self.device)
        features = None
        if len(steps.row):
            x, times, condition, guidance = steps.inputs(self.denoiser)[1]
            # A value needs the features under the condition alone: one evaluation, whatever the
            # guidance.
            unguided = torch.ones_like(guidance)
            features = self.denoiser.predict(
                x, times, condition, unguided, steps.group, features=True
            )[1]
        return steps.scatter(self._values(features))

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
        denoiser, targets = self.denoiser, [prompt.target for prompt in prompts]
        conditions = denoiser.encode([prompt.inputs for prompt in prompts])
        generators = [generator_at(seed, "demonstration", prompt.draw) for prompt in prompts]
        uniforms = torch.stack(
            [torch.rand(2, generator=generator, dtype=torch.float64) for generator in generators]
        )
        per_row = {
            "first": torch.stack(
                [torch.randn(denoiser.shape, generator=generator) for generator in generators]
            ),
            "level": denoiser.schedule.training_times(uniforms[:, 0]),
            "dropped": uniforms[:, 1]
            < (0.0 if denoiser.condition is None else denoiser.condition.dropped),
        }
        states = torch.stack([denoiser.codec.encode(target) for target in targets])[
            :, None
        ]  # [B, 1, *E]
        shared = {} if conditions is None else {"condition": conditions}
        return image_rollouts(prompts, states, targets, shared=shared, per_row=per_row)


class DenoiserCritic(NetworkCritic):
    """Values of the states before each step from a network of its own: a copy of the policy's, with
    a value head.

    Layers after the middle get no gradient, and are frozen. ``SharedCritic`` is the one on the
    policy's network.
    """

    def __init__(self, policy: DenoiserPolicy) -> None:
        trunk = copy.deepcopy(policy.module).requires_grad_(True)
        for parameter in trunk.parameters():  # the base below an adapter may be held in bfloat16
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
        network = policy.at(trunk)
        parameters = list(trunk.parameters())
        features = network.denoiser.dummy_features().sum()
        gradients = torch.autograd.grad(features, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.requires_grad_(gradient is not None)
        super().__init__(network, trunk)
