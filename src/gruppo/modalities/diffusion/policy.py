"""An image model as a policy: its actions are the states after each denoising step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path as FilePath
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from gruppo.core.gaussian import gaussian_entropy, gaussian_logprob
from gruppo.modalities.diffusion import pictures
from gruppo.modalities.diffusion.cells import Cells
from gruppo.modalities.diffusion.conditions import ClassLabels, Condition
from gruppo.modalities.diffusion.demonstrations import Weighting, demonstrated, likelihood_of_demonstrations
from gruppo.modalities.diffusion.denoiser import Denoiser
from gruppo.modalities.diffusion.drawing import Rows, drawn, transition_drawn
from gruppo.modalities.diffusion.layouts import micro_batches_by_evaluations
from gruppo.modalities.diffusion.load import save_denoiser
from gruppo.modalities.diffusion.network import Call, Network
from gruppo.modalities.diffusion.paths import Flow, Path
from gruppo.modalities.diffusion.pictures import Codec, Pixels
from gruppo.modalities.diffusion.sampling import DiffusionSampling
from gruppo.modalities.diffusion.step_metrics import branch_stats, rewards_along_steps, update_stats
from gruppo.modalities.diffusion.transitions import Predicts
from gruppo.modalities.diffusion.trust_region import joint_clip_nats
from gruppo.protocols import Outputs, Policy
from gruppo.types import (
    Batch,
    Gaussian,
    GruppoError,
    Likelihood,
    MicroBatch,
    Prompt,
    Request,
    Rollouts,
    Sampling,
    Stat,
)

NOISE = {
    "independent": "each sample its own",
    "shared": "a group has one first latent",
    "branched": "a group has all in common but that of one random step",
}
BATCH_ROWS = 256
"""Rows denoised together."""


class DenoiserPolicy(Policy):
    """Samples pictures step by step and evaluates each step as the normal that it was drawn from.

    ``module``, called with x [N, *E], times [N] and conditions [N, ...] (None without a ``condition``), says what it
    ``predicts`` of x, all in its own dtype; dropout and moving statistics are off. States are kept in float32 and a
    log-prob is that of the state as kept. ``middle`` names the submodule whose output, averaged over space, a value
    head reads. ``weighting`` of the denoising loss: "uniform", or "clean", 1 / (sigma^2 + 0.05). ``call``: another way
    to ask the module. ``codec``: between states and pictures where a state is not the picture itself.
    """

    copy = None
    """No copy of the weights in another dtype."""
    batch_rows = BATCH_ROWS
    supports = frozenset({"demonstrations", "separate_critic", "shared_critic"})
    likelihood_outputs = frozenset({"entropy", "entropy_value", "gaussian", "output", "values"})
    action_name, budget_name, renders_images = "step", "evaluations", True

    def __init__(
        self,
        module: nn.Module,
        shape: Sequence[int],
        *,
        predicts: Predicts = "x0",
        path: Path | None = None,
        condition: Condition | None = None,
        weighting: Weighting = "uniform",
        middle: str = "",
        call: Call | None = None,
        codec: Codec | None = None,
    ) -> None:
        path = Flow() if path is None else path
        self.module = module.eval()
        network, codec = Network(module, middle, call), codec or Pixels(tuple(shape))
        self.denoiser = Denoiser(network, tuple(shape), predicts, path, condition, codec)
        self.weighting: Weighting = weighting
        self.value_head: nn.Module | None = None
        """Features [N, F] to values [N]; beside ``module``, so that saves, copies and references are without it."""

    @property
    def device(self) -> torch.device:
        return self.denoiser.device

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.denoiser.network.dtype

    @property
    def dims(self) -> int:
        """Numbers in one action."""
        return math.prod(self.denoiser.shape)

    def at(self, module: nn.Module) -> DenoiserPolicy:
        """This policy over other weights of the same kind: a reference."""
        other = copy.copy(self)
        other.module, other.denoiser, other.value_head = module.eval(), self.denoiser.on(module), None
        return other

    def save(self, folder: FilePath) -> None:
        """The weights and what they are called with; ``load_denoiser`` opens it."""
        save_denoiser(self, folder)

    @torch.no_grad()
    def feature_width(self) -> int:
        """Numbers that ``value_head`` reads of each state."""
        return self.denoiser.features(self.denoiser.probe(), torch.zeros(1, dtype=torch.long)).shape[-1]

    def describe(self, config: Any, sampling: Sampling, prompts: Sequence[Prompt], group_size: int) -> list[str]:
        sampling, rows = DiffusionSampling.of(sampling), config.rollout.prompts * group_size
        evaluations = 2 if sampling.guidance != 1 else 1
        last, is_branched = sampling.train_to or sampling.steps - 1, sampling.noise == "branched"
        each = max(round(sampling.train_fraction * (last - sampling.train_from)), 1)
        steps = "1, at which its group parts," if is_branched else f"{each}"
        eta = "" if sampling.eta is None else f", eta {sampling.eta:g}"
        trained = (config.rollout.prompts if is_branched else each * rows) * evaluations
        lines = [
            f"an image    {list(self.denoiser.codec.picture_shape)}; an action has {self.dims:,} dimensions",
            f"sampled     {sampling.steps} steps of {sampling.transition}{eta}, the last without noise; "
            f"{sampling.steps * rows * evaluations:,} evaluations of the network"
            + (", guided" if evaluations == 2 else "")
            + (", less where a group has its state in common" if sampling.noise != "independent" else ""),
            f"noise       {NOISE[sampling.noise]}",
            f"trained on  {steps} of steps {sampling.train_from} to {last - 1} of each row, {trained:,} evaluations",
        ]
        if config.objective.surrogate in ("clip", "cispo"):
            nats = joint_clip_nats(config.objective, self.dims)
            lines.append(f"clip        the log-ratio of a step's joint density above {nats:.3g} nats")
        return [*lines, f"evaluated   by the ODE, in {sampling.ode_steps or sampling.max_actions} steps"]

    def parse_prompt(self, text: str, *, is_plain: bool, read_image: Callable[..., Tensor]) -> Any:
        """The name of a class or its number, or a caption."""
        condition = self.denoiser.condition
        is_number = isinstance(condition, ClassLabels) and text not in condition.names and text.isdecimal()
        return int(text) if is_number else text

    def default_budget(self) -> int:
        return 128 if self.device.type == "cpu" else 1024

    def out_of_memory_hint(self, units: int) -> tuple[str, str]:
        return (
            "one evaluation of the network",
            "Train smaller pictures (--diffusion.size), a --lora.rank in place of all weights, or a smaller --model.",
        )

    def batch_stats(self, rollouts: Rollouts, rewards: Float[Tensor, "B"], sampling: Sampling) -> dict[str, Stat]:
        return branch_stats(rollouts, rewards, DiffusionSampling.of(sampling))

    def update_stats(
        self, batch: Batch, micro_batch: MicroBatch, likelihood: Likelihood, inputs: Any
    ) -> dict[str, Stat]:
        assert batch.rollouts is not None
        return update_stats(batch.rollouts, micro_batch, likelihood, inputs)

    def evaluate_steps(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, generate: Any, score: Any, budget: int
    ) -> dict[str, Stat]:
        return rewards_along_steps(self, prompts, DiffusionSampling.of(sampling), generate, score, budget)

    # --- sampling ---

    def check_prompt(self, prompt: Prompt, sampling: Sampling) -> str | None:
        """Why this prompt cannot be sampled from, or None."""
        try:
            self.denoiser.encoded([prompt.inputs])
        except GruppoError as error:
            return f"prompt {prompt.id!r}: {error}"
        return None

    def check_sampling(self, sampling: Sampling) -> DiffusionSampling:
        """Refuse what this network cannot draw and score alike."""
        sampling, condition = DiffusionSampling.of(sampling), self.denoiser.condition
        sampling.check_path(self.denoiser.path)
        if sampling.guidance != 1 and not (condition and condition.dropped):
            what = "has no condition" if condition is None else "was never asked without its condition"
            raise GruppoError(
                f"guidance={sampling.guidance:g} is measured from what the network says without a condition, and this "
                f"one {what}. Set guidance 1, or train with --diffusion.dropped 0.1 "
                "(ClassLabels(..., dropped=0.1))."
            )
        return sampling

    def sample(self, requests: Sequence[Request], sampling: Sampling, *, seed: int) -> Rollouts:
        """``request.size`` pictures of each prompt; randomness hangs on (seed, draw, sample, step), see ``noise``."""
        if not requests or any(request.size < 1 for request in requests):
            raise ValueError("sample needs at least one request, each of size 1 or more.")
        sampling = self.check_sampling(sampling)
        for request in requests:
            if why := self.check_prompt(request.prompt, sampling):
                raise GruppoError(why)
        conditions = self.denoiser.encoded([request.prompt.inputs for request in requests])
        _refuse_namesakes(requests, conditions)
        self.module.eval()
        owners = torch.tensor([p for p, request in enumerate(requests) for _ in range(request.size)])
        samples = [request.first + n for request in requests for n in range(request.size)]
        parts = []
        size = self.batch_rows if sampling.guidance == 1 else max(self.batch_rows // 2, 1)
        for at in range(0, len(owners), size):
            asked, own = owners[at : at + size].unique(return_inverse=True)
            prompts = tuple(requests[p].prompt for p in asked.tolist())
            of_asked = None if conditions is None else conditions[asked]
            rows = Rows(prompts, of_asked, own, samples[at : at + size])
            parts.append(drawn(self.denoiser, rows, sampling, seed))
        return Rollouts.cat(parts)

    # --- evaluating ---

    def micro_batches(self, rollouts: Rollouts, loss_mask: Bool[Tensor, "B T"], budget: int) -> list[MicroBatch]:
        """Pieces of at most ``budget`` evaluations of the network; a guided step takes two.

        Whole rows where one fits, as many as fit; a longer row is cut into columns. Each row counts, also where one
        evaluation serves a group.
        """
        guidance = rollouts.per_row.get("guidance", torch.ones(len(rollouts)))
        cost = 1 + (guidance != 1).long()
        return micro_batches_by_evaluations(rollouts.mask & loss_mask.any(dim=1, keepdim=True), loss_mask, cost, budget)

    def likelihood(self, rollouts: Rollouts, micro_batch: MicroBatch, *, outputs: Outputs = ()) -> Likelihood:
        """Joint nats of each state under the step that leads to it, in float64; 0 where mask is False.

        "output" is the network's x0 of each step. Of demonstrations the log-probs are minus the denoising loss.
        """
        self.module.eval()
        cells = Cells.of(rollouts, micro_batch, self.device)
        if "level" in rollouts.per_row:
            return likelihood_of_demonstrations(self.denoiser, rollouts, cells, self.weighting, outputs)
        transition = transition_drawn(rollouts, micro_batch.rows)
        if not len(cells):
            return cells.nothing_said(self.denoiser.shape, outputs)
        step, times = self.denoiser.steps(rollouts.per_row["steps"][cells.row], cells.column)
        asked = cells.asked(rollouts, times)
        stepped = self.denoiser.stepped(asked, step, transition, cells.group, features="values" in outputs)
        reached = rollouts.actions[cells.row, cells.column].to(self.device)  # [N, *E]
        mean, std = stepped.normal.mean, stepped.normal.std
        wants_entropy = "entropy" in outputs or "entropy_value" in outputs
        return Likelihood(
            cells.spread(gaussian_logprob(reached[None], mean[None], std[None])[0]),
            cells.spread(gaussian_entropy(mean[None], std[None])[0]) if wants_entropy else None,
            Gaussian(cells.spread(mean), cells.spread(std, filling=1.0)) if "gaussian" in outputs else None,
            cells.spread(self._valued(stepped.features)) if "values" in outputs else None,
            cells.spread(stepped.x0) if "output" in outputs else None,
        )

    def values(self, rollouts: Rollouts, micro_batch: MicroBatch) -> Float[Tensor, "b t"]:
        """What ``value_head`` says of the state before each step, 0 where mask is False."""
        self.module.eval()
        cells = Cells.of(rollouts, micro_batch, self.device)
        if not len(cells):
            return cells.spread(torch.zeros(0, device=self.device))
        _, times = self.denoiser.steps(rollouts.per_row["steps"][cells.row], cells.column)
        return cells.spread(self._valued(self.denoiser.features(cells.asked(rollouts, times), cells.group)))

    def _valued(self, features: Tensor) -> Float[Tensor, "N"]:
        if self.value_head is None:
            raise GruppoError("values are wanted of a policy without a value head. Set policy.value_head first.")
        return self.value_head(features)

    # --- demonstrations ---

    def check_demonstration(self, prompt: Prompt) -> str | None:
        """Why this prompt's target cannot be learned from, or None."""
        why = pictures.refusal(prompt.target, self.denoiser.codec.picture_shape)
        return f"prompt {prompt.id!r} {why}" if why else self.check_prompt(prompt, DiffusionSampling())

    def demonstrations(self, prompts: Sequence[Prompt], *, seed: int) -> Rollouts:
        """Each prompt's picture, once, at a level of noise and with noise that hang on (seed, draw)."""
        for prompt in prompts:
            if why := self.check_demonstration(prompt):
                raise GruppoError(why)
        return demonstrated(self.denoiser, prompts, seed)

    def supervised_loss(self, rollouts: Rollouts, likelihood: Likelihood) -> Float[Tensor, "b t"]:
        """w mean (prediction - truth)^2 over the dimensions, w by ``weighting``."""
        return -likelihood.logprobs


def _refuse_namesakes(requests: Sequence[Request], conditions: Tensor | None) -> None:
    """Rows of equal prompt id and draw become one group, so one id and draw must mean one condition."""
    asked: dict[tuple[str, int], Tensor] = {}
    for n, prompt in enumerate(request.prompt for request in requests):
        if conditions is not None and not torch.equal(
            asked.setdefault((prompt.id, prompt.draw), conditions[n]), conditions[n]
        ):
            raise GruppoError(
                f"two different prompts have the id {prompt.id!r} and the draw {prompt.draw}; their rows would become "
                "one group. Give each prompt an id of its own."
            )
