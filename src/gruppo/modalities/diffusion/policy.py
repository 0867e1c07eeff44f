"""A diffusion or flow model as a policy: its actions are the states after each denoising step."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from gruppo.core.distributions import gaussian_entropy, gaussian_logprob
from gruppo.core.layers import recompute_layers
from gruppo.modalities.common.critic import NetworkCritic
from gruppo.modalities.common.images import ImagePolicy, RowBatch, image_error, image_rollouts
from gruppo.modalities.common.state_dict import save_policy
from gruppo.modalities.common.validation import joint_clip_nats, refuse
from gruppo.modalities.diffusion.denoiser import (
    ClassLabels,
    Denoiser,
    NoCondition,
    StepSelection,
    Weighting,
    denoising_loss,
)
from gruppo.modalities.diffusion.sampling import DiffusionSampling, step_noise, trained_steps
from gruppo.modalities.diffusion.schedules import (
    TRANSITIONS,
    broadcast,
)
from gruppo.modalities.diffusion.unet import DenoisingUNet
from gruppo.protocols import Outputs, ValueHeadMixin
from gruppo.seeds import generator_at
from gruppo.types import Gaussian, GruppoError, Likelihood, MicroBatch, Prompt, Rollouts, Sampling

SETTINGS = "denoiser.json"


class DenoiserPolicy(ImagePolicy, ValueHeadMixin):
    """Samples images step by step and scores each step under the normal distribution that it was
    drawn from.

    ``module``, called with x [N, *E], times [N] and conditions [N, ...] (None without a
    ``condition``), ``predicts`` one number for each of x, in its own dtype; dropout and moving
    statistics are off. States are stored in float32, and a log-prob is that of the state as stored.
    ``weighting`` of the denoising loss: "uniform", or "clean", 1 / (sigma^2 + 0.05). ``options``
    are those of ``Denoiser``: predicts, schedule, condition, codec, middle, call.
    """

    action_name, budget_name = "step", "evaluations"
    default_budgets = (128, 1024)
    out_of_memory_hint = (
        "Train smaller images (--diffusion.size), a --lora.rank in place of all weights, or a "
        "smaller --model."
    )
    likelihood_outputs = ImagePolicy.likelihood_outputs | {"values"}
    batch_rows = 256

    def __init__(
        self,
        module: nn.Module,
        shape: Sequence[int],
        *,
        weighting: Weighting = "uniform",
        **options: Any,
    ) -> None:
        self.module = module.eval()
        self.denoiser = Denoiser(module, tuple(shape), **options)
        self.image_shape = self.denoiser.shape
        self.weighting: Weighting = weighting

    def recompute(self) -> None:
        recompute_layers(self.module)

    def action_dims(self, prompt: Prompt) -> int:
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
        if not isinstance(condition, ClassLabels | NoCondition):
            raise GruppoError(f"""a folder can hold the names of classes, not a
                {type(condition).__name__}. Save policy.module yourself.""")
        labels = None
        if isinstance(condition, ClassLabels):
            labels = {"classes": condition.names, "dropped": condition.dropped}
        settings = {
            "shape": denoiser.shape,
            "predicts": denoiser.predicts,
            "weighting": self.weighting,
            "middle": denoiser.middle,
            "path": schedule.config,
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
        evaluations = config.rollout.prompts * group_size * (2 if sampling.guidance != 1 else 1)
        dims = self.action_dims(prompts[0])
        nats = joint_clip_nats(config.objective, dims)
        return [
            f"an image    {list(self.image_shape)}; an action has {dims:,} dimensions",
            f"sampled     {sampling.steps} steps of {sampling.transition}, the last without noise, "
            f"{sampling.noise} in a group; at most {sampling.steps * evaluations:,} evaluations of "
            f"the network",
            f"trained on  {int(trained_steps(sampling, 0, 0).sum())} steps of each row; a clip is "
            f"at {nats:.3g} nats of a step's joint density",
            f"evaluated   by the ODE, in {sampling.ode_steps or sampling.max_actions} steps",
        ]

    def parse_prompt(self, text: str, **options: Any) -> str:
        """The name of a class, or a caption."""
        return text

    # --- sampling ---------------------------------------------------------------------------------

    def check_prompt(self, prompt: Prompt, sampling: Sampling) -> str | None:
        """Why this prompt cannot be sampled from, or None."""
        try:
            self.denoiser.condition.encode(prompt.inputs)
        except GruppoError as error:
            return f"prompt {prompt.id!r}: {error}"
        return None

    def check_sampling(self, sampling: Sampling) -> DiffusionSampling:
        """Sampling options in full; raises GruppoError for those that cannot be both sampled and
        scored."""
        sampling = DiffusionSampling.of(super().check_sampling(sampling))
        condition, schedule = self.denoiser.condition, self.denoiser.schedule
        schedule.times(sampling.steps)  # raises for more steps than the schedule has times
        fitting = [n for n, t in TRANSITIONS.items() if t.is_flow in (None, schedule.is_flow)]
        if sampling.temperature and sampling.transition not in fitting:
            raise GruppoError(f"""transition={sampling.transition!r} does not fit the
                {"flow" if schedule.is_flow else "diffusion"} schedule that this network was trained
                on. Set one of {", ".join(fitting)}.""")
        if sampling.guidance != 1 and not condition.dropped:
            raise GruppoError(
                f"""guidance={sampling.guidance:g} needs a prediction without a condition, and this
                    network was never trained without one""",
                advice="""Set guidance 1, or train with $diffusion.dropped 0.1 (ClassLabels(...,
                    dropped=0.1)); FLUX reads $diffusion.embedded_guidance instead""",
            )
        return sampling

    def encode_prompts(self, prompts: Sequence[Prompt]) -> Float[Tensor, "P ..."]:
        return torch.stack([self.denoiser.condition.encode(prompt.inputs) for prompt in prompts])

    def sample_batch(self, batch: RowBatch, sampling: DiffusionSampling, seed: int) -> Rollouts:
        """Sample the rows of a batch, step by step."""
        denoiser, groups = self.denoiser, batch.group_ids
        condition = batch.inputs[groups].to(self.device)
        first = step_noise(sampling, seed, batch.addresses, denoiser.shape, None)
        x = first.to(self.device)
        states, logprobs = [], []
        for column in range(sampling.steps):
            is_ode = not sampling.temperature or column == sampling.steps - 1
            columns = torch.full_like(groups, column)
            normal, _ = denoiser.step(x, columns, sampling, condition, groups, is_ode=is_ode)
            x, nats = normal.mean.float(), torch.zeros(len(groups), dtype=torch.float64)
            if not is_ode:
                noise = step_noise(sampling, seed, batch.addresses, denoiser.shape, column)
                # the log-prob is that of the float32 state, as it is stored
                x = (normal.mean + broadcast(normal.std, x) * noise.to(normal.mean)).float()
                nats = gaussian_logprob(x[None], normal.mean[None], normal.std[None])[0]
            states.append(x.cpu())
            logprobs.append(nats.cpu())
        actions = torch.stack(states, dim=1)  # [B, T, *E]
        is_finite = actions.isfinite().flatten(1).all(dim=1)
        trained = torch.stack([trained_steps(sampling, seed, p.draw) for p in batch.prompts])
        mask = trained[groups] & is_finite[:, None]  # a row that is not finite is not trained on
        return image_rollouts(
            batch.prompts,
            actions,
            denoiser.codec.decode(actions[:, -1].nan_to_num()),
            shared={"condition": batch.inputs},
            per_row={"first": first, "sampling": sampling.to_row().repeat(len(groups), 1)},
            group_ids=groups,
            logprobs=torch.where(mask, torch.stack(logprobs, dim=1), 0),
            mask=mask,
            is_finite=is_finite,
            temperature=float(sampling.temperature),
        )

    # --- scoring ----------------------------------------------------------------------------------

    def micro_batches(
        self, rollouts: Rollouts, loss_mask: Bool[Tensor, "B T"], budget: int
    ) -> list[MicroBatch]:
        """Micro-batches of at most ``budget`` evaluations of the network; a guided step takes two.

        Whole rows in their order or, if a row does not fit, some columns of one row, with at least
        one evaluated action. Every row counts, also if one evaluation serves a group.
        """
        rows = loss_mask.any(dim=1).nonzero()[:, 0]
        if not len(rows):
            return []
        guidance = rollouts.per_row.get("sampling", torch.ones(1, 1))[:, -1]
        limit = max(budget // (2 if (guidance != 1).any() else 1), 1)  # in steps
        steps = int(rollouts.mask[rows].sum(dim=1).max())
        if steps <= limit:
            columns = slice(0, int(loss_mask.any(dim=0).nonzero()[:, 0].max()) + 1)
            return [MicroBatch(part, columns) for part in rows.split(limit // steps)]
        micro_batches = [
            # each step reads only the state before it, which the rollouts hold
            MicroBatch(rows[n : n + 1], slice(int(part[0]), int(part[-1]) + 1))
            for n, row in enumerate(rows.tolist())
            for part in rollouts.mask[row].nonzero()[:, 0].split(limit)
        ]
        return [one for one in micro_batches if one.of(loss_mask).any()]

    def likelihood(
        self, rollouts: Rollouts, micro_batch: MicroBatch, *, outputs: Outputs = ()
    ) -> Likelihood:
        """Joint log-prob of each state given the one before, in float64 nats; 0 where mask is
        False.

        For demonstrations the log-probs are minus the denoising loss.
        """
        self.module.eval()
        steps = StepSelection(self.denoiser, rollouts, micro_batch)
        if "level" in rollouts.per_row:
            return Likelihood(-denoising_loss(steps, self.weighting))
        if (rollouts.temperature[micro_batch.rows] <= 0).any():
            raise GruppoError(
                "rollouts of the ODE (temperature 0) have no density to learn from. Sample at 1."
            )
        normal, features = steps.normal(features="values" in outputs)
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
        )

    def values(self, rollouts: Rollouts, micro_batch: MicroBatch) -> Float[Tensor, "b t"]:
        """Values of the states before each step, by ``value_head``; 0 where mask is False."""
        self.module.eval()
        steps = StepSelection(self.denoiser, rollouts, micro_batch)
        return steps.scatter(self._values(steps.features()))

    # --- demonstrations ---------------------------------------------------------------------------

    def check_demonstration(self, prompt: Prompt) -> str | None:
        """Why this prompt's target cannot be trained on, or None."""
        channels, *size = self.image_shape
        if error := image_error(prompt.target, "target", channels, tuple(size)):
            return f"prompt {prompt.id!r} {error}"
        return self.check_prompt(prompt, DiffusionSampling())

    def demonstrations(self, prompts: Sequence[Prompt], *, seed: int) -> Rollouts:
        """One row and one action per prompt: its target as a state, with log-probs of 0.

        ``per_row``: the noise (``first``), the time that it is added at (``level``), and whether
        the condition is left out (``dropped``), all by (seed, draw). The supervised loss is w
        mean((prediction - target)^2) over the dimensions, with w by ``weighting``.
        """
        refuse(*map(self.check_demonstration, prompts))
        denoiser = self.denoiser
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
            shared={"condition": self.encode_prompts(prompts)},
            per_row={
                "first": torch.stack(noise),
                "level": denoiser.schedule.training_times(level),
                "dropped": drop < denoiser.condition.dropped,
            },
        )


class DenoiserCritic(NetworkCritic):
    """Values of the states before each step from a copy of the policy's network with a value head.

    Layers after the middle get no gradient, and are frozen.
    """

    def __init__(self, policy: DenoiserPolicy) -> None:
        # the base below an adapter may be held in bfloat16
        dtype = torch.promote_types(policy.compute_dtype, torch.float32)
        trunk = copy.deepcopy(policy.module).requires_grad_(True).to(dtype)
        network = policy.at(trunk)
        network.denoiser.dummy_features().sum().backward()
        for parameter in trunk.parameters():
            parameter.requires_grad_(parameter.grad is not None)
        trunk.zero_grad()
        super().__init__(network, trunk)
