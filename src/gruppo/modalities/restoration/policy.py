"""A restoration network as a policy: one action per image, or one per patch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import save_file
from torch import Tensor, nn

from gruppo.core.distributions import gaussian_entropy, gaussian_logprob
from gruppo.core.images import PIXEL_LOSSES, PixelLoss, psnr, quantize
from gruppo.modalities.common.images import RowBatch, image_error, image_rollouts, row_batches
from gruppo.modalities.restoration.actions import Action, ActionMean, Controls, Images
from gruppo.modalities.restoration.config import RestorationConfig
from gruppo.modalities.restoration.consistency import Consistency, ToReference
from gruppo.modalities.restoration.networks import DnCNN, RestorationUNet, Restorer
from gruppo.modalities.restoration.patches import from_columns, patch_means, to_columns
from gruppo.protocols import Outputs, Policy
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
    "output": "the picture of the mean action",
    "base": "the network's own picture, without an action",
    "told": "the picture of the network that is given the true controls",
}
MAX_PSNR_DB = 100.0
"""Equal images have an infinite PSNR; a mean needs a number."""

WEIGHTS, SETTINGS = "model.safetensors", "restorer.json"
SQUARE = 16
"""A square of this many pixels a side is one unit of a micro-batch's budget."""
Trains = Literal["all", "action"]
Supervises = Literal["output", "base", "told"]


class RestorationPolicy(Policy):
    """Samples an action from N(m(x), s^2) for each degraded image x, and renders an image from it.

    ``network``: any module from images [N, C, H, W] in [0, 1] to images of the same size, in its own dtype; dropout and
    moving statistics are off. ``action``: one of ``actions``. ``patches`` a side: an image has that many squared
    actions, one per patch (see ``patches``). ``trains``: all weights, or the action's alone, with a frozen network.
    ``loss`` and ``supervises``: the supervised term compares the deterministic image ("output") or the network's
    without an action ("base") with clean ones; with a detached action, clean images then train the network alone and
    rewards the action alone, in one run. "told", for controls: the network's image under the true value of each
    control, from the prompts' columns of the same names. ``consistency``: see there. ``spec``: how ``open_network``
    finds the network, for a save.

    Actions are stored in float32, and a log-prob is that of the action as stored: joint nats, in float64. A temperature
    t samples from the density to the power 1 / t: a standard deviation of s t^(1/2). At temperature 0 the action is the
    mean, with its log-prob at 1; it is never trained on. Rewards read an image as a file would hold it.
    """

    copy = None
    """No copy of the weights in another dtype."""
    supports = frozenset({"consistency", "demonstrations", "shared_critic"})
    likelihood_outputs = frozenset({"entropy", "entropy_value", "gaussian", "output", "values"})
    action_name, budget_name, renders_images = "action", "squares", True
    actions_are_positions = True
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
        for name, value, choices in (
            ("trains", trains, get_args(Trains)),
            ("loss", loss, get_args(PixelLoss)),
            ("supervises", supervises, get_args(Supervises)),
        ):
            if value not in choices:
                known = ", ".join(map(repr, choices))
                raise GruppoError(f"{name}={value!r} is not one of {known}. Set {choices[0]!r}.")
        if action.channels != channels:
            raise GruppoError(
                f"the action is for {action.channels} channels and the network for {channels}; give both the same."
            )
        if patches < 1:
            raise GruppoError(f"patches={patches} is out of range; set 1 for an image as one action.")
        if action.grid is not None and action.grid % patches:
            raise GruppoError(
                f"the action's grid of {action.grid} x {action.grid} cannot be cut into {patches} x {patches} equal "
                f"patches; its side needs to be a multiple of {patches}. Set patches 1, or another grid."
            )
        if supervises == "told" and not action.conditions:
            raise GruppoError(
                f"supervises='told' sets the network's controls, and the action {action.kind!r} has none. Set the "
                "action controls:noise=0-50@25, or supervises='output'."
            )
        self.channels, self.patches, self.spec = channels, patches, spec
        self.trains, self.loss, self.supervises = trains, loss, supervises
        self.consistency: Consistency = consistency or ToReference(loss)
        self.module = Restorer(network, action).eval()
        self.value_head: nn.Module | None = None
        """Features [N, F] to values [N]. Not part of ``module``, so that saves, copies and references exclude it."""
        if trains == "action":
            network.requires_grad_(False)
            if supervises in ("base", "told"):
                raise GruppoError(
                    f"supervises={supervises!r} trains the network alone, and trains='action' freezes it. Set "
                    "trains='all', or supervises='output'."
                )
            if not any(parameter.requires_grad for parameter in self.module.parameters()):
                raise GruppoError(
                    f"trains='action' leaves nothing to train: the action {action.kind!r} has no weights but its std, "
                    "which is fixed. Set trains='all', or learned=true."
                )
        self.module.probe(channels)

    @property
    def columns(self) -> int:
        """Actions per image."""
        return self.patches**2

    def dims(self, image: Sequence[int]) -> int:
        """Numbers in one action, for an image [C, H, W]."""
        return math.prod(self.module.action.shape(image)) // self.columns

    def at(self, module: nn.Module) -> Self:
        """This policy with other weights of the same network: a reference."""
        if not isinstance(module, Restorer):
            raise GruppoError(f"a restoration policy needs a Restorer, not a {type(module).__name__}. Give it one.")
        other = super().at(module)
        other.value_head = None
        return other

    @property
    def settings(self) -> dict[str, Any]:
        """What it was built with besides the network, as JSON."""
        options = {"patches": self.patches, "trains": self.trains, "loss": self.loss, "supervises": self.supervises}
        return {"channels": self.channels, "action": self.module.action.settings, **options}

    def save(self, folder: Path) -> None:
        """Write the weights and the settings; ``load_restorer`` reads them. The sizes only of networks of gruppo."""
        network, spec, sizes = self.module.network, self.spec, None
        if isinstance(network, DnCNN | RestorationUNet):
            spec, sizes = "dncnn" if isinstance(network, DnCNN) else "unet", network.sizes
        settings = {"network": spec, **self.settings, "sizes": sizes}
        weights = {name: w.detach().cpu().contiguous().clone() for name, w in self.module.state_dict().items()}
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / WEIGHTS)
        (folder / SETTINGS).write_text(json.dumps(settings, indent=1), encoding="utf-8")

    # --- sampling -----------------------------------------------------------------------------------------------------

    def describe(self, config: Any, sampling: Sampling, prompts: Sequence[Prompt], group_size: int) -> list[str]:
        picture, action = prompts[0].inputs, self.module.action.settings
        settings = ", ".join(f"{name} {value}" for name, value in action.items() if name != "controls")
        weights = {name: sum(p.numel() for p in part.parameters()) for name, part in self.module.named_children()}
        parts = "" if self.patches == 1 else f"; one for each of {self.patches} x {self.patches} patches"
        frozen = ", frozen" if self.trains == "action" else ""
        return [
            f"an image    {list(picture.shape)}",
            f"an action   {settings}: {self.dims(picture.shape):,} numbers{parts}",
            f"weights     {weights['network']:,} of the network{frozen}, {weights['action']:,} of the action, at "
            f"{config.section(RestorationConfig).action_lr_factor:g} times the learning rate",
            f"losses      supervised on {SUPERVISED[self.supervises]}, by {self.loss}; consistency to "
            f"{config.section(RestorationConfig).consistency}",
            "evaluated   the picture of the mean action",
        ]

    def parse_prompt(self, text: str, *, is_plain: bool, read_image: Callable[..., Tensor]) -> Tensor:
        return read_image(text, channels=self.channels)

    def default_budget(self) -> int:
        return 4096 if self.device.type == "cpu" else 65536  # squares of 16 x 16 pixels

    def out_of_memory_hint(self, units: int) -> tuple[str, str]:
        return "one picture", "Crop the data smaller (crop=64), or train a smaller network."

    def evaluation_stats(self, rollouts: Rollouts) -> dict[str, Stat]:
        """PSNR in dB to the clean images, where there are any: what gates read, whatever is rewarded."""
        targets = [rollouts.prompts[group].target for group in rollouts.group_ids.tolist()]
        pairs = [(x, y) for x, y in zip(rollouts.completions, targets, strict=True) if isinstance(y, Tensor)]
        values = [float(psnr(x[None], quantize(y)[None])[0].clamp(max=MAX_PSNR_DB)) for x, y in pairs]
        return {"mean:psnr": Stat.of(torch.tensor(values, dtype=torch.float64))}

    def check_prompt(self, prompt: Prompt, sampling: Sampling) -> str | None:
        """Why this prompt cannot be sampled from, or None."""
        error = image_error(prompt.inputs, "input", self.channels)
        if error is None and any(side % self.patches for side in prompt.inputs.shape[-2:]):
            height, width = prompt.inputs.shape[-2:]
            error = (
                f"is {height} x {width}, which {self.patches} x {self.patches} patches do not divide. Crop it to a "
                f"multiple of {self.patches}."
            )
        return f"prompt {prompt.id!r} {error}" if error else None

    def check_sampling(self, sampling: Sampling) -> Sampling:
        """Raise GruppoError for options that do not apply to a normal distribution."""
        if sampling.top_k or sampling.top_p != 1 or sampling.stop:
            raise GruppoError(
                f"top_k={sampling.top_k}, top_p={sampling.top_p:g} and stop={sampling.stop!r} apply to tokens, and "
                "images have none. Leave them out."
            )
        if sampling.max_actions < self.columns:
            raise GruppoError(
                f"max_actions={sampling.max_actions} is less than the {self.columns} patches of an image. Set it to "
                f"{self.columns}."
            )
        return sampling

    @torch.no_grad()
    def sample(self, requests: Sequence[Request], sampling: Sampling, *, seed: int) -> Rollouts:
        """``request.size`` images of each prompt; noise depends on (seed, draw, sample) alone."""
        if not requests or any(request.size < 1 for request in requests):
            raise ValueError("sample needs at least one request, each of size 1 or more.")
        sampling = self.check_sampling(sampling)
        for request in requests:
            if error := self.check_prompt(request.prompt, sampling):
                raise GruppoError(error)
        images = stack_images([request.prompt.inputs for request in requests])
        self.module.eval()
        batches = row_batches(requests, images, self.batch_rows)
        return Rollouts.cat([self._sample_batch(batch, float(sampling.temperature), seed) for batch in batches])

    def _sample_batch(self, batch: RowBatch, temperature: float, seed: int) -> Rollouts:
        assert batch.inputs is not None
        count, groups = len(batch.group_ids), batch.group_ids.to(self.device)
        x = batch.inputs.to(self.device)
        forward, std = self._forward(x, torch.full((count,), temperature, dtype=torch.float64))
        mean = forward.mean.double()[groups]  # [B, K, h, w]
        if temperature:
            generators = [generator_at(seed, "restoration", *address) for address in batch.addresses]
            noise = [torch.randn(tuple(mean.shape[1:]), generator=generator) for generator in generators]
            mean = mean + std * torch.stack(noise).to(self.device).double()
        action = mean.float()
        base = None if forward.base is None else forward.base[groups]
        images = self.module.render(x[groups], base, action).float()
        is_finite = (action.isfinite().flatten(1).all(dim=1) & images.isfinite().flatten(1).all(dim=1)).cpu()
        actions = to_columns(action, self.patches)
        mask = is_finite[:, None].expand(-1, self.columns).contiguous()
        means = to_columns(forward.mean, self.patches)[groups]
        logprobs = self._logprobs(actions, means, std, mask.to(self.device))
        return image_rollouts(
            batch.prompts,
            actions.cpu(),
            tuple(quantize(images.nan_to_num()).cpu()),
            shared={"degraded": batch.inputs},
            per_row={},
            group_ids=batch.group_ids,
            logprobs=logprobs.float().cpu(),
            mask=mask,
            is_finite=is_finite,
            temperature=temperature,
        )

    # --- scoring ------------------------------------------------------------------------------------------------------

    def micro_batches(self, rollouts: Rollouts, loss_mask: Bool[Tensor, "B T"], budget: int) -> list[MicroBatch]:
        """Whole rows, those of a group together; each row costs its squares of 16 x 16 pixels.

        Every row counts, although the rows of a group share one forward of the network.
        """
        height, width = rollouts.shared["degraded"].shape[-2:]
        cost = max(-(-height * width // SQUARE**2), 1)
        rows = loss_mask.any(dim=1).nonzero()[:, 0]
        rows = rows[rollouts.group_ids[rows].argsort(stable=True)]
        return [MicroBatch(part, slice(0, self.columns)) for part in rows.split(max(budget // cost, 1)) if len(part)]

    def likelihood(self, rollouts: Rollouts, micro_batch: MicroBatch, *, outputs: Outputs = ()) -> Likelihood:
        """Joint log-prob of each action in float64 nats, 0 where mask is False. One network forward per prompt.

        "output" is the deterministic image [b, C, H, W], neither clamped nor rounded. Demonstrations always have it,
        and log-probs of 0: their actions are clean images, which the policy did not sample.
        """
        self.module.eval()
        mask = micro_batch.of(rollouts.mask).to(self.device)
        groups, x, group = self._images_of(rollouts, micro_batch)
        if "demonstration" in rollouts.per_row:
            zeros = torch.zeros(mask.shape, dtype=torch.float64, device=self.device)
            prompts = [rollouts.prompts[n] for n in groups.tolist()]
            return Likelihood(zeros, output=self.supervised_output(x, prompts)[group])
        forward, std = self._forward(x, rollouts.temperature[micro_batch.rows].double())
        output = self.module.output(x, forward)[group] if "output" in outputs else None
        mean = to_columns(forward.mean, self.patches)[group][:, micro_batch.cols]  # [b, t, *E]
        actions = micro_batch.of(rollouts.actions).to(self.device)
        wants_entropy = "entropy" in outputs or "entropy_value" in outputs
        each_std = std[:, None].expand(mean.shape)
        values = self._values(x, forward.base)[group][:, micro_batch.cols] if "values" in outputs else None
        return Likelihood(
            self._logprobs(actions, mean, std, mask),
            torch.where(mask, gaussian_entropy(mean, each_std), 0) if wants_entropy else None,
            Gaussian(mean, each_std) if "gaussian" in outputs else None,
            None if values is None else torch.where(mask, values, 0),
            output,
        )

    def _images_of(
        self, rollouts: Rollouts, micro_batch: MicroBatch
    ) -> tuple[Int[Tensor, "P"], Float[Tensor, "P C H W"], Int[Tensor, "b"]]:
        """Groups of a micro-batch, their degraded images, each once, and the index of each row's."""
        groups, group = rollouts.group_ids[micro_batch.rows].unique(return_inverse=True)
        return groups, rollouts.shared["degraded"][groups].to(self.device), group.to(self.device)

    def _forward(self, x: Images, temperature: Float[Tensor, "b"]) -> tuple[ActionMean, Float[Tensor, "b K 1 1"]]:
        """Means for images, and the std of each row. Rows at temperature 0, which have no noise, are scored at 1."""
        factor = torch.where(temperature > 0, temperature, 1).sqrt().to(self.device)
        return self.module(x), factor[:, None, None, None] * self.module.action.scale()[:, None, None]

    def _logprobs(
        self, actions: Tensor, mean: Tensor, std: Float[Tensor, "b K 1 1"], mask: Bool[Tensor, "b t"]
    ) -> Float[Tensor, "b t"]:
        """Select before computing: actions outside of the mask may be NaN, which would reach the gradient."""
        chosen = mask.reshape(*mask.shape, 1, 1, 1)
        action = torch.where(chosen, actions.double(), 0)
        mean = torch.where(chosen, mean.double(), 0)
        return torch.where(mask, gaussian_logprob(action, mean, std[:, None].expand(mean.shape)), 0)

    # --- a critic on the network's images -----------------------------------------------------------------------------

    def feature_width(self) -> int:
        """Number of features that ``value_head`` reads for each patch."""
        return 2 * self.channels * (1 if isinstance(self.module.action, Controls) else 2)

    def values(self, rollouts: Rollouts, micro_batch: MicroBatch) -> Float[Tensor, "b t"]:
        """Values of each patch before it is acted on, by ``value_head``; 0 where mask is False."""
        self.module.eval()
        _, x, group = self._images_of(rollouts, micro_batch)
        values = self._values(x, self.module(x).base)[group][:, micro_batch.cols]
        return torch.where(micro_batch.of(rollouts.mask).to(self.device), values, 0)

    def _values(self, x: Tensor, base: Tensor | None) -> Float[Tensor, "P T"]:
        """From the mean and the mean square of each channel of a patch, of x and of the network's image."""
        if self.value_head is None:
            raise GruppoError("values were requested from a policy without a value head. Set policy.value_head first.")
        images = x.to(self.compute_dtype)
        images = images if base is None else torch.cat([images, base.to(images)], dim=1)
        parts = to_columns(torch.cat([images, images.square()], dim=1), self.patches)  # [P, T, F, h, w]
        features = parts.mean(dim=(-2, -1))
        return self.value_head(features.flatten(0, 1)).reshape(features.shape[:2])

    # --- demonstrations and consistency -------------------------------------------------------------------------------

    def check_demonstration(self, prompt: Prompt) -> str | None:
        """Why this prompt's clean image cannot be trained on, or None."""
        if error := self.check_prompt(prompt, Sampling()):
            return error
        error = image_error(prompt.target, "target", self.channels)
        if error is None and prompt.target.shape != prompt.inputs.shape:
            error = (
                f"is {list(prompt.inputs.shape)} and its target {list(prompt.target.shape)}; both need one size. "
                "Resize the degraded image."
            )
        if error is None and self.supervises == "told" and isinstance(self.module.action, Controls):
            error = self.module.action.values_error(prompt.meta)
        return f"prompt {prompt.id!r} {error}" if error else None

    def demonstrations(self, prompts: Sequence[Prompt], *, seed: int) -> Rollouts:
        """Each prompt's degraded image, with the patches of its clean one as actions. Nothing is random."""
        for prompt in prompts:
            if error := self.check_demonstration(prompt):
                raise GruppoError(error)
        return image_rollouts(
            prompts,
            to_columns(stack_images([prompt.target for prompt in prompts]), self.patches),  # [B, T, C, h, w]
            [prompt.target for prompt in prompts],
            shared={"degraded": stack_images([prompt.inputs for prompt in prompts])},
            per_row={"demonstration": torch.ones(len(prompts), dtype=torch.bool)},
        )

    def supervised_output(self, x: Images, prompts: Sequence[Prompt]) -> Images:
        """The images that clean ones are compared with: see ``supervises``."""
        action = self.module.action
        if self.supervises == "told" and isinstance(action, Controls):
            values = action.true_values([prompt.meta for prompt in prompts]).to(x)
            return action.restored(self.module.call_network, x, values)
        return self.module.baseline(x) if self.supervises == "base" else self.output_of(x)

    def supervised_loss(self, rollouts: Rollouts, likelihood: Likelihood) -> Float[Tensor, "b t"]:
        """Mean of rho(image, clean) over the channels and pixels of each patch.

        For demonstrations, or for rollouts of prompts with clean images, whose likelihood has its "output".
        """
        if likelihood.output is None:
            raise GruppoError('the supervised loss needs the deterministic image. Pass outputs=("output",).')
        if "demonstration" in rollouts.per_row:
            clean = from_columns(rollouts.actions, self.patches)
        else:
            for prompt in rollouts.prompts:
                if error := self.check_demonstration(prompt):
                    raise GruppoError(error)
            clean = stack_images([prompt.target for prompt in rollouts.prompts])[rollouts.group_ids]
        loss = PIXEL_LOSSES[self.loss](likelihood.output, clean.to(likelihood.output))
        return patch_means(loss, self.patches)

    def consistency_loss(self, rollouts: Rollouts, likelihood: Likelihood, ref: Likelihood) -> Float[Tensor, "b t"]:
        """Mean of ``consistency`` over the channels and pixels of each patch; ``likelihood`` has its "output"."""
        if likelihood.output is None:
            raise GruppoError('the consistency loss needs the deterministic image. Pass outputs=("output",).')
        return patch_means(self.consistency(self, rollouts, likelihood, ref), self.patches)

    # --- images -------------------------------------------------------------------------------------------------------

    def output_of(self, x: Images) -> Images:
        """The deterministic images, with gradient, neither clamped nor rounded."""
        self.module.eval()
        return self.module.output(x)

    @torch.no_grad()
    def restore(self, images: Images) -> Images:
        """The deterministic images as a file would hold them; on the CPU."""
        for image in images:
            if error := image_error(image, "input", self.channels):
                raise GruppoError(f"an image to restore {error}")
        parts = [self.output_of(part.float().to(self.device)).float().cpu() for part in images.split(self.batch_rows)]
        return quantize(torch.cat(parts))


def stack_images(images: Sequence[Tensor]) -> Images:
    """Stack images as float32; GruppoError if they differ in size."""
    sizes = sorted({tuple(image.shape[1:]) for image in images})
    if len(sizes) > 1:
        listed = ", ".join(f"{height} x {width}" for height, width in sizes[:3])
        raise GruppoError(
            f"images of {len(sizes)} sizes ({listed}) cannot be restored together; they need one. Crop them, as the "
            "option crop=64 of the data does."
        )
    return torch.stack([image.float() for image in images])
