"""A restoration network as a policy: one action per image, or one per patch.

With patches, the columns of the rollouts are places, not times: a column's log-prob is that of its
patch of the action, so that a reward of the same patch can be its credit. What an action changes
outside its own patch (a smooth grid, a network's receptive field) is credited to other patches:
advantages by patch omit those cross terms, and are unbiased only for pixel noise and nearest grids.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import save_file
from torch import Tensor, nn

from gruppo import trust
from gruppo.core.distributions import gaussian_entropy, gaussian_logprob
from gruppo.core.images import PIXEL_LOSSES, PixelLoss, psnr, quantize
from gruppo.core.layers import recompute_layers
from gruppo.distributed.sharding import blocks_of
from gruppo.modalities.common.images import image_error, image_rollouts, row_batches
from gruppo.modalities.common.validation import refuse
from gruppo.modalities.restoration.actions import Action, Controls, Images
from gruppo.modalities.restoration.config import RestorationConfig
from gruppo.modalities.restoration.consistency import Consistency, ToReference
from gruppo.modalities.restoration.networks import NETWORKS, Restorer
from gruppo.protocols import (
    DemonstrationMixin,
    ImageDescriptionMixin,
    MemoryMixin,
    Outputs,
    Policy,
    PromptMixin,
    RestorationMixin,
    ShardingMixin,
    StatisticsMixin,
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
    Stat,
)

SUPERVISED = {
    "output": "the image of the mean action",
    "base": "the network's own image, without an action",
    "told": "the image of the network that is given the true controls",
}
MAX_PSNR_DB = 100.0
"""Equal images have an infinite PSNR; a mean needs a number."""

WEIGHTS, SETTINGS = "model.safetensors", "restorer.json"
SAVED = ("patches", "trains", "loss", "supervises")
"""Arguments of the policy that are saved as they are."""
SQUARE = 16
"""A square of this many pixels per side is one unit of a micro-batch's budget."""
Trains = Literal["all", "action"]
Supervises = Literal["output", "base", "told"]


class RestorationPolicy(
    Policy,
    RestorationMixin,
    DemonstrationMixin,
    ValueHeadMixin,
    ShardingMixin,
    PromptMixin,
    ImageDescriptionMixin,
    StatisticsMixin,
    MemoryMixin,
):
    """Samples an action from N(m(x), s^2) for each degraded image x, and renders an image from it.

    - ``network``: any module from images [N, C, H, W] in [0, 1] to images of the same size, in its
      own dtype; dropout
      and moving statistics are off.
    - ``action``: one of ``actions``.
    - ``patches`` per side: an image has that many squared actions.
    - ``trains``: all weights, or those of the action, with a frozen network.
    - ``loss`` and ``supervises``: the supervised term compares the deterministic image ("output")
      or the network's
      without an action ("base") with clean ones; with a detached action, clean images then train
      the network alone and rewards the action alone, in one run. "told", for controls: the
      network's image at the true value of each control, from the prompts' columns of the same
      names.
    - ``consistency``: see ``consistency``.
    - ``spec``: how ``open_network`` finds the network, for a save.

    Actions are stored in float32, and a log-prob is that of the action as stored: joint nats, in
    float64. A temperature t samples from the density to the power 1 / t: a standard deviation of s
    t^(1/2). At temperature 0 the action is the mean, with its log-prob at 1; it is never trained
    on. Rewards read an image as a file would hold it.
    """

    likelihood_outputs = frozenset({"entropy", "entropy_value", "gaussian", "output", "values"})
    action_name, budget_name = "action", "squares"
    out_of_memory_hint = (
        "one image",
        "Crop the data smaller (crop=64), or train a smaller network.",
    )
    module: Restorer
    batch_rows = 64
    """Rows sampled together."""

    def __init__(
        self,
        network: nn.Module,
        action: Action,
        *,
        channels: int = 3,
        patches: int = 1,
        trains: Trains = "all",
        loss: PixelLoss = "charbonnier",
        supervises: Supervises = "output",
        consistency: Consistency | None = None,
        spec: str = "",
    ) -> None:
        given = {
            "trains": (trains, Trains),
            "loss": (loss, PixelLoss),
            "supervises": (supervises, Supervises),
        }
        for name, (value, literal) in given.items():
            if value not in (choices := get_args(literal)):
                known = ", ".join(map(repr, choices))
                raise GruppoError(f"{name}={value!r} is not one of {known}. Set {choices[0]!r}.")
        if action.channels != channels:
            raise GruppoError(f"""the action is for {action.channels} channels and the network for
                {channels}; give both the same.""")
        if patches < 1:
            raise GruppoError(
                f"patches={patches} is out of range; set 1 for an image as one action."
            )
        if action.grid is not None and action.grid % patches:
            raise GruppoError(f"""the action's grid of {action.grid} x {action.grid} cannot be cut
                into {patches} x {patches} equal patches; its side needs to be a multiple of
                {patches}. Set patches 1, or another grid.""")
        if supervises == "told" and not action.conditions:
            raise GruppoError(f"""supervises='told' sets the network's controls, and the action
                {action.kind!r} has none. Set the action controls:noise=0-50@25, or
                supervises='output'.""")
        if trains == "action" and supervises != "output":
            raise GruppoError(f"""supervises={supervises!r} trains the network alone, and
                trains='action' freezes it. Set trains='all', or supervises='output'.""")
        if trains == "action" and not any(
            parameter.requires_grad for parameter in action.parameters()
        ):
            raise GruppoError(f"""trains='action' leaves nothing to train: the action
                {action.kind!r} has no weights but its std, which is fixed. Set trains='all', or
                learned=true.""")
        if trains == "action":
            network.requires_grad_(False)  # also where the action's gradient would reach it
        self.channels, self.patches, self.spec = channels, patches, spec
        self.trains, self.loss, self.supervises = trains, loss, supervises
        self.consistency: Consistency = consistency or ToReference(loss)
        self.module = Restorer(network, action).eval()
        self.module.probe(channels)

    @property
    def columns(self) -> int:
        """Actions per image."""
        return self.patches**2

    def dims(self, image: Sequence[int]) -> int:
        """Return the number of dimensions of one action, for an image [C, H, W]."""
        action = self.module.action
        return (
            action.count
            * (math.prod(image[1:]) if action.grid is None else action.grid**2)
            // self.columns
        )

    def shard(self, apply: Callable[..., None]) -> None:
        apply(
            self.module, blocks_of(self.module.network)
        )  # parts of the action are read without calling them

    def recompute(self) -> None:
        recompute_layers(self.module.network)

    def save(self, folder: Path) -> None:
        """Write the weights and the settings; ``load_restorer`` reads them. Only networks of gruppo
        have sizes."""
        network: Any = self.module.network
        name = next((name for name, kind in NETWORKS.items() if isinstance(network, kind)), None)
        settings = {
            "network": name or self.spec,
            "channels": self.channels,
            "action": self.module.action.settings,
        }
        settings |= {field: getattr(self, field) for field in SAVED} | {
            "sizes": network.sizes if name else None
        }
        weights = {
            name: w.detach().cpu().contiguous().clone()
            for name, w in self.module.state_dict().items()
        }
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / WEIGHTS)
        (folder / SETTINGS).write_text(json.dumps(settings, indent=1), encoding="utf-8")
        trust.record(folder, trust.imports(settings))

    # --- sampling ---------------------------------------------------------------------------------

    def describe(
        self, config: Any, sampling: Sampling, prompts: Sequence[Prompt], group_size: int
    ) -> list[str]:
        image, action = prompts[0].inputs, self.module.action.settings
        settings = ", ".join(
            f"{name} {value}" for name, value in action.items() if name != "controls"
        )
        weights = {
            name: sum(p.numel() for p in part.parameters())
            for name, part in self.module.named_children()
        }
        parts = (
            ""
            if self.patches == 1
            else f"; one for each of {self.patches} x {self.patches} patches"
        )
        frozen = ", frozen" if self.trains == "action" else ""
        return [
            f"an image    {list(image.shape)}",
            f"an action   {settings}: {self.dims(image.shape):,} numbers{parts}",
            f"weights     {weights['network']:,} of the network{frozen}, {weights['action']:,} of "
            f"the action, at "
            f"{config.section(RestorationConfig).action_lr_factor:g} times the learning rate",
            f"losses      supervised on {SUPERVISED[self.supervises]}, by {self.loss}; consistency "
            f"to "
            f"{config.section(RestorationConfig).consistency}",
            "evaluated   the image of the mean action",
        ]

    def parse_prompt(
        self, text: str, *, is_plain: bool, read_image: Callable[..., Tensor]
    ) -> Tensor:
        return read_image(text, channels=self.channels)

    def step_groups(self, group_ids: Int[Tensor, "B"], columns: int) -> Int[Tensor, "B T"]:
        """Compare each patch with the same patch of the group's other images."""
        return group_ids[:, None] * columns + torch.arange(columns)

    def batch_stats(
        self,
        rollouts: Rollouts,
        rewards: Float[Tensor, "B"],
        sampling: Any,
        *,
        is_evaluation: bool = False,
    ) -> dict[str, Stat]:
        """PSNR in dB to the clean images of an evaluation, whatever is rewarded."""
        if not is_evaluation:
            return {}
        targets = [rollouts.prompts[group].target for group in rollouts.group_ids.tolist()]
        pairs = [
            (x, y)
            for x, y in zip(rollouts.completions, targets, strict=True)
            if isinstance(y, Tensor)
        ]
        values = [
            float(psnr(x[None], quantize(y)[None])[0].clamp(max=MAX_PSNR_DB)) for x, y in pairs
        ]
        return {"mean:psnr": Stat.of(torch.tensor(values, dtype=torch.float64))}

    def check_prompt(self, prompt: Prompt, sampling: Sampling) -> str | None:
        """Return why this prompt cannot be sampled from, or None."""
        error = image_error(prompt.inputs, "input", self.channels)
        if error is None and any(side % self.patches for side in prompt.inputs.shape[-2:]):
            (h, w), side = prompt.inputs.shape[-2:], self.patches
            error = (
                f"is {h} x {w}, which {side} x {side} patches do not divide. Crop it to a "
                f"multiple of {side}."
            )
        return f"prompt {prompt.id!r} {error}" if error else None

    def check_sampling(self, sampling: Sampling) -> Sampling:
        """Raise GruppoError for options that do not apply to a normal distribution."""
        if sampling.top_k or sampling.top_p != 1 or sampling.stop:
            raise GruppoError(f"""top_k={sampling.top_k}, top_p={sampling.top_p:g} and
                stop={sampling.stop!r} apply to tokens, and images have none. Leave them out.""")
        if sampling.max_actions < self.columns:
            raise GruppoError(f"""max_actions={sampling.max_actions} is less than the {self.columns}
                patches of an image. Set it to {self.columns}.""")
        return sampling

    @torch.no_grad()
    def sample(self, requests: Sequence[Request], sampling: Sampling, *, seed: int) -> Rollouts:
        """Sample ``request.size`` images of each prompt; noise depends on (seed, draw, sample)
        alone."""
        if not requests or any(request.size < 1 for request in requests):
            raise ValueError("sample needs at least one request, each of size 1 or more.")
        temperature = float(self.check_sampling(sampling).temperature)
        refuse(*(self.check_prompt(request.prompt, sampling) for request in requests))
        images = stack_images([request.prompt.inputs for request in requests])
        module, sampled = (
            self.module.eval(),
            [],
        )  # dropout would make sampling and scoring two functions
        std = math.sqrt(temperature or 1) * module.action.scale()[:, None, None]  # [K, 1, 1]
        for batch in row_batches(requests, images, self.batch_rows):
            assert batch.inputs is not None
            x, group = batch.inputs.to(self.device), batch.group_ids.to(self.device)
            means, base = module(x)  # [P, K, h, w], and [P, C, H, W] or None
            action = means.double()[group]  # [B, K, h, w]
            if temperature:
                generators = [
                    generator_at(seed, "restoration", *address) for address in batch.addresses
                ]
                noise = [
                    torch.randn(tuple(action.shape[1:]), generator=generator)
                    for generator in generators
                ]
                action = action + std * torch.stack(noise).to(self.device).double()
            action = action.float()  # rounded as it is stored, before it is scored
            base = (
                None if base is None else base[group]
            )  # one forward of the network serves a group
            restored = module.action.render(module.call_network, x[group], base, action).float()
            is_finite = action.isfinite().flatten(1).all(dim=1) & restored.isfinite().flatten(
                1
            ).all(dim=1)
            mask = is_finite[:, None].expand(-1, self.columns)  # [B, T]
            actions, means = (
                to_columns(action, self.patches),
                to_columns(means, self.patches)[group],
            )  # [B, T, K, h, w]
            logprobs = masked_logprob(actions, means, std, mask).float()
            rollouts = image_rollouts(
                batch.prompts,
                actions.cpu(),
                quantize(restored.nan_to_num()).cpu(),
                shared={"degraded": batch.inputs},
                per_row={},
                group_ids=batch.group_ids,
                logprobs=logprobs.cpu(),
                mask=mask.cpu().contiguous(),
                is_finite=is_finite.cpu(),
                temperature=temperature,
            )
            sampled.append(rollouts)
        return Rollouts.cat(sampled)

    # --- scoring ----------------------------------------------------------------------------------

    def micro_batches(
        self, rollouts: Rollouts, loss_mask: Bool[Tensor, "B T"], budget: int
    ) -> list[MicroBatch]:
        """Whole rows, those of a group together; each row costs its squares of 16 x 16 pixels.

        Every row counts, although the rows of a group share one forward of the network.
        """
        height, width = rollouts.shared["degraded"].shape[-2:]
        cost = max(-(-height * width // SQUARE**2), 1)
        rows = loss_mask.any(dim=1).nonzero()[:, 0]
        rows = rows[rollouts.group_ids[rows].argsort(stable=True)]
        return [
            MicroBatch(part, slice(0, self.columns))
            for part in rows.split(max(budget // cost, 1))
            if len(part)
        ]

    def likelihood(
        self, rollouts: Rollouts, micro_batch: MicroBatch, *, outputs: Outputs = ()
    ) -> Likelihood:
        """Joint log-prob of each action in float64 nats, 0 where mask is False. One network forward
        per prompt.

        "output" is the deterministic image [b, C, H, W], neither clamped nor rounded.
        Demonstrations always have it, and log-probs of 0: their actions are clean images, which the
        policy did not sample.
        """
        module, cols = self.module.eval(), micro_batch.cols
        mask = micro_batch.of(rollouts.mask).to(self.device)
        prompt_ids, group = rollouts.group_ids[micro_batch.rows].unique(return_inverse=True)
        x, group = rollouts.shared["degraded"][prompt_ids].to(self.device), group.to(self.device)
        if "demonstration" in rollouts.per_row:
            zeros = torch.zeros(mask.shape, dtype=torch.float64, device=self.device)
            prompts = [rollouts.prompts[n] for n in prompt_ids.tolist()]
            return Likelihood(zeros, output=self.output_of(x, self.supervises, prompts)[group])
        mean, base = module(x)  # [P, K, h, w], and [P, C, H, W] or None
        output = (
            module.action.render(module.call_network, x, base, mean)[group]
            if "output" in outputs
            else None
        )
        mean = to_columns(mean, self.patches)[group][:, cols]  # [b, t, *E]
        # the density to the power 1 / t is a normal with t^(1/2) times the std; at temperature 0
        # rows are scored at 1
        temperature = rollouts.temperature[micro_batch.rows].double()
        factor = torch.where(temperature > 0, temperature, 1).sqrt().to(self.device)
        std = (
            factor[:, None, None, None, None] * module.action.scale()[:, None, None]
        )  # [b, 1, K, 1, 1]
        each_std = std.expand(mean.shape)
        values = None
        if "values" in outputs:
            # mean and mean square of each channel of a patch, of the degraded image and of the
            # network's
            images = torch.cat(
                [one.to(self.compute_dtype) for one in (x, base) if one is not None], dim=1
            )
            features = to_columns(torch.cat([images, images.square()], dim=1), self.patches).mean(
                dim=(-2, -1)
            )
            each = self._values(features.flatten(0, 1)).reshape(features.shape[:2])  # [P, T]
            values = torch.where(mask, each[group][:, cols], 0)
        wants_entropy = "entropy" in outputs or "entropy_value" in outputs
        logprobs = masked_logprob(micro_batch.of(rollouts.actions).to(self.device), mean, std, mask)
        entropy = torch.where(mask, gaussian_entropy(mean, each_std), 0) if wants_entropy else None
        normal = Gaussian(mean, each_std) if "gaussian" in outputs else None
        return Likelihood(logprobs, entropy, normal, values, output)

    def feature_width(self) -> int:
        """Return the number of features that ``value_head`` reads for each patch."""
        return 2 * self.channels * (1 if isinstance(self.module.action, Controls) else 2)

    def values(self, rollouts: Rollouts, micro_batch: MicroBatch) -> Any:
        """Values of each patch before it is acted on [b, t], by ``value_head``; 0 where mask is
        False."""
        return self.likelihood(rollouts, micro_batch, outputs=("values",)).values

    # --- demonstrations and consistency -----------------------------------------------------------

    def check_demonstration(self, prompt: Prompt) -> str | None:
        """Return why this prompt's clean image cannot be trained on, or None."""
        if error := self.check_prompt(prompt, Sampling()):
            return error
        error = image_error(prompt.target, "target", self.channels)
        if error is None and prompt.target.shape != prompt.inputs.shape:
            sizes = f"is {list(prompt.inputs.shape)} and its target {list(prompt.target.shape)}"
            error = f"{sizes}; both need one size. Resize the degraded image."
        if error is None and self.supervises == "told":
            action: Any = self.module.action
            try:
                action.true_values(prompt.meta)
            except GruppoError as problem:
                error = str(problem)
        return f"prompt {prompt.id!r} {error}" if error else None

    def demonstrations(self, prompts: Sequence[Prompt], *, seed: int) -> Rollouts:
        """Return each prompt's degraded image, with the patches of its clean one as actions.
        Nothing is random."""
        refuse(*map(self.check_demonstration, prompts))
        targets = [prompt.target for prompt in prompts]
        shared = {"degraded": stack_images([prompt.inputs for prompt in prompts])}
        per_row = {"demonstration": torch.ones(len(prompts), dtype=torch.bool)}
        actions = to_columns(stack_images(targets), self.patches)  # [B, T, C, h, w]
        return image_rollouts(prompts, actions, targets, shared=shared, per_row=per_row)

    def supervised_loss(self, rollouts: Rollouts, likelihood: Likelihood) -> Float[Tensor, "b t"]:
        """Mean of rho(image, clean) over the channels and pixels of each patch.

        For demonstrations, or for rollouts of prompts with clean images, whose likelihood has its
        "output".
        """
        if likelihood.output is None:
            raise GruppoError(
                'the supervised loss needs the deterministic image. Pass outputs=("output",).'
            )
        if "demonstration" not in rollouts.per_row:
            refuse(*map(self.check_demonstration, rollouts.prompts))
        clean = stack_images([prompt.target for prompt in rollouts.prompts])[rollouts.group_ids]
        loss = PIXEL_LOSSES[self.loss](likelihood.output, clean.to(likelihood.output))
        return to_columns(loss, self.patches).flatten(2).mean(dim=-1)

    def consistency_loss(
        self, rollouts: Rollouts, likelihood: Likelihood, ref: Likelihood
    ) -> Float[Tensor, "b t"]:
        """Mean of ``consistency`` over the channels and pixels of each patch; ``likelihood`` has
        its "output"."""
        if likelihood.output is None:
            raise GruppoError(
                'the consistency loss needs the deterministic image. Pass outputs=("output",).'
            )
        loss = self.consistency(self, rollouts, likelihood, ref)
        return to_columns(loss, self.patches).flatten(2).mean(dim=-1)

    # --- images -----------------------------------------------------------------------------------

    def output_of(
        self, x: Images, kind: Supervises = "output", prompts: Sequence[Prompt] = ()
    ) -> Images:
        """Compute the deterministic images, with gradient, neither clamped nor rounded.

        ``kind``: at the mean action, without an action, or at the prompts' true controls; see
        ``supervises``.
        """
        module = self.module.eval()
        action: Any = module.action
        network = module.call_network
        if kind == "told":
            return action.restored(
                network, x, torch.tensor([action.true_values(p.meta) for p in prompts]).to(x)
            )
        if kind == "base" and not isinstance(action, Controls):
            return network(x)
        zeros = torch.zeros(
            len(x), action.count, 1, 1, device=x.device
        )  # every control at its start
        mean, base = (zeros, None) if kind == "base" else module(x)
        return action.render(network, x, base, mean)

    @torch.no_grad()
    def restore(self, images: Images) -> Images:
        """Return the deterministic images as a file would hold them, on the CPU."""
        for image in images:
            if error := image_error(image, "input", self.channels):
                raise GruppoError(f"an image to restore {error}")
        parts = [
            self.output_of(part.float().to(self.device)).float().cpu()
            for part in images.split(self.batch_rows)
        ]
        return quantize(torch.cat(parts))


def masked_logprob(
    actions: Tensor, mean: Tensor, std: Tensor, mask: Bool[Tensor, "b t"]
) -> Float[Tensor, "b t"]:
    """Log-prob of N(mean, std^2), 0 where mask is False; std is broadcast.

    Selects before computing: actions outside of the mask may be NaN, which would reach the
    gradient.
    """
    chosen = mask.reshape(*mask.shape, 1, 1, 1)
    action = torch.where(chosen, actions.double(), 0)
    mean = torch.where(chosen, mean.double(), 0)
    return torch.where(mask, gaussian_logprob(action, mean, std.expand(mean.shape)), 0)


def to_columns(grid: Float[Tensor, "N K H W"], side: int) -> Float[Tensor, "N T K h w"]:
    """Cut a grid into T = side x side patches, row by row from the top left; with side 1 it is one
    patch."""
    n, k, height, width = grid.shape
    h, w = height // side, width // side
    return (
        grid.reshape(n, k, side, h, side, w)
        .permute(0, 2, 4, 1, 3, 5)
        .reshape(n, side * side, k, h, w)
    )


def stack_images(images: Sequence[Tensor]) -> Images:
    """Stack images as float32; GruppoError if they differ in size."""
    sizes = sorted({tuple(image.shape[1:]) for image in images})
    if len(sizes) > 1:
        listed = ", ".join(f"{height} x {width}" for height, width in sizes[:3])
        raise GruppoError(f"""images of {len(sizes)} sizes ({listed}) cannot be restored together;
            they need one. Crop them, as the option crop=64 of the data does.""")
    return torch.stack([image.float() for image in images])
