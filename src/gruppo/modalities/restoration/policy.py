"""A restoration network as a policy: one action per image."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from gruppo import trust
from gruppo.core.distributions import gaussian_entropy, gaussian_logprob
from gruppo.core.images import MAX_PSNR_DB, PIXEL_LOSSES, PixelLoss, psnr, quantize
from gruppo.core.layers import recompute_layers
from gruppo.distributed.sharding import blocks_of
from gruppo.modalities.common.images import ImagePolicy, RowBatch, image_error, image_rollouts
from gruppo.modalities.common.state_dict import save_policy
from gruppo.modalities.common.validation import refuse
from gruppo.modalities.restoration.actions import Action, Images
from gruppo.modalities.restoration.consistency import Consistency, to_reference
from gruppo.modalities.restoration.networks import NETWORKS, Restorer
from gruppo.protocols import Outputs, RestorationMixin, StatisticsMixin
from gruppo.seeds import generator_at
from gruppo.types import (
    Gaussian,
    GruppoError,
    Likelihood,
    MicroBatch,
    Prompt,
    Rollouts,
    Sampling,
    Stat,
)

SETTINGS = "restorer.json"
SQUARE = 16
"""A square of this many pixels per side is one unit of a micro-batch's budget."""
Supervises = Literal["output", "base"]


class RestorationPolicy(ImagePolicy, RestorationMixin, StatisticsMixin):
    """Samples an action from N(m(x), s^2) for each degraded image x, and renders an image from it.

    - ``network``: any module from images [N, C, H, W] in [0, 1] to images of the same size, in its
      own dtype; dropout and moving statistics are off. Freeze its parameters to train the action
      alone.
    - ``action``: one of ``actions``.
    - ``loss`` and ``supervises``: the supervised term compares the deterministic image ("output")
      or the network's without an action ("base") with clean ones; with a detached action, clean
      images then train the network alone and rewards the action alone, in one run.
    - ``consistency``: see ``consistency``.
    - ``spec``: how ``open_network`` finds the network, for a save.

    Actions are stored in float32, and a log-prob is that of the action as stored: joint nats, in
    float64. At temperature 0 the action is the mean, which is never trained on. Rewards read an
    image as a file would hold it.
    """

    budget_name = "squares"
    out_of_memory_hint = "Crop the data smaller (crop=64), or train a smaller network."
    likelihood_outputs = ImagePolicy.likelihood_outputs | {"output"}
    module: Restorer
    batch_rows = 64

    def __init__(
        self,
        network: nn.Module,
        action: Action,
        *,
        channels: int = 3,
        loss: PixelLoss = "charbonnier",
        supervises: Supervises = "output",
        consistency: Consistency = to_reference,
        spec: str = "",
    ) -> None:
        if action.channels != channels:
            raise GruppoError(f"""the action is for {action.channels} channels and the network for
                {channels}; give both the same.""")
        self.channels = channels
        self.spec = spec
        self.loss: PixelLoss = loss
        self.supervises: Supervises = supervises
        self.consistency = consistency
        self.module = Restorer(network, action).eval()
        self.module.probe(channels)

    def action_dims(self, prompt: Prompt) -> int:
        action = self.module.action
        cells = math.prod(prompt.inputs.shape[1:]) if action.grid is None else action.grid**2
        return action.count * cells

    def shard(self, apply: Callable[..., None]) -> None:
        # parts of the action are read without calling them
        apply(self.module, blocks_of(self.module.network))

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
            "sizes": network.sizes if name else None,
            "loss": self.loss,
            "supervises": self.supervises,
        }
        save_policy(folder, SETTINGS, settings, self.module)
        trust.record(folder, trust.imports(settings))

    def describe(
        self, config: Any, sampling: Sampling, prompts: Sequence[Prompt], group_size: int
    ) -> list[str]:
        return [
            f"an image    {list(prompts[0].inputs.shape)}",
            f"an action   {self.module.action.settings}: {self.action_dims(prompts[0]):,} numbers",
            f"supervised  on {self.supervises}, by {self.loss}",
        ]

    def parse_prompt(self, text: str, *, read_image: Callable[..., Tensor], **_: Any) -> Tensor:
        return read_image(text, channels=self.channels)

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
        values = []
        for image, group in zip(rollouts.completions, rollouts.group_ids.tolist(), strict=True):
            target = rollouts.prompts[group].target
            if isinstance(target, Tensor):
                values.append(psnr(image[None], quantize(target)[None])[0].clamp(max=MAX_PSNR_DB))
        return {"mean:psnr": Stat.of(torch.tensor(values, dtype=torch.float64))}

    # --- sampling ---------------------------------------------------------------------------------

    def check_prompt(self, prompt: Prompt, sampling: Sampling) -> str | None:
        """Return why this prompt cannot be sampled from, or None."""
        error = image_error(prompt.inputs, "input", self.channels)
        return f"prompt {prompt.id!r} {error}" if error else None

    def encode_prompts(self, prompts: Sequence[Prompt]) -> Images:
        return stack_images([prompt.inputs for prompt in prompts])

    def sample_batch(self, batch: RowBatch, sampling: Sampling, seed: int) -> Rollouts:
        """Sample the rows of a batch; one forward of the network serves a group."""
        module, temperature = self.module, float(sampling.temperature)
        x, group = batch.inputs.to(self.device), batch.group_ids.to(self.device)
        means, base = module(x)  # [P, K, h, w], [P, C, H, W]
        std = module.action.std.double()  # [K, 1, 1]
        action = means.double()[group]  # [B, K, h, w]
        if temperature:
            noise = []
            for address in batch.addresses:
                generator = generator_at(seed, "restoration", *address)
                noise.append(torch.randn(action.shape[1:], generator=generator))
            action = action + std * torch.stack(noise).to(self.device).double()
        action = action.float()  # rounded as it is stored, before it is scored
        restored = module.action.render(base[group], action).float()
        is_finite = action.isfinite().flatten(1).all(dim=1)
        is_finite &= restored.isfinite().flatten(1).all(dim=1)
        mask = is_finite[:, None]  # [B, 1]
        logprobs = masked_logprob(action[:, None], means[group][:, None], std, mask)
        return image_rollouts(
            batch.prompts,
            action[:, None].cpu(),
            quantize(restored.nan_to_num()).cpu(),
            shared={"degraded": batch.inputs},
            per_row={},
            group_ids=batch.group_ids,
            logprobs=logprobs.float().cpu(),
            mask=mask.cpu(),
            is_finite=is_finite.cpu(),
            temperature=temperature,
        )

    # --- scoring ----------------------------------------------------------------------------------

    def micro_batches(
        self, rollouts: Rollouts, loss_mask: Bool[Tensor, "B 1"], budget: int
    ) -> list[MicroBatch]:
        """Whole rows, those of a group together; each row costs its squares of 16 x 16 pixels.

        Every row counts, although the rows of a group share one forward of the network.
        """
        height, width = rollouts.shared["degraded"].shape[-2:]
        rows = loss_mask.any(dim=1).nonzero()[:, 0]
        rows = rows[rollouts.group_ids[rows].argsort(stable=True)]
        parts = rows.split(max(budget // -(-height * width // SQUARE**2), 1))
        return [MicroBatch(part, slice(0, 1)) for part in parts if len(part)]

    def likelihood(
        self, rollouts: Rollouts, micro_batch: MicroBatch, *, outputs: Outputs = ()
    ) -> Likelihood:
        """Joint log-prob of each action in float64 nats, 0 where mask is False. One network forward
        per prompt.

        "output" is the deterministic image [b, C, H, W], neither clamped nor rounded.
        Demonstrations always have it, and log-probs of 0: their actions are clean images, which the
        policy did not sample.
        """
        module = self.module.eval()
        mask = micro_batch.of(rollouts.mask).to(self.device)
        prompt_ids, group = rollouts.group_ids[micro_batch.rows].unique(return_inverse=True)
        x, group = rollouts.shared["degraded"][prompt_ids].to(self.device), group.to(self.device)
        if "demonstration" in rollouts.per_row:
            zeros = torch.zeros(mask.shape, dtype=torch.float64, device=self.device)
            return Likelihood(zeros, output=self.output_of(x, self.supervises)[group])
        mean, base = module(x)  # [P, K, h, w], [P, C, H, W]
        output = entropy = normal = None
        if "output" in outputs:
            output = module.action.render(base, mean)[group]
        mean = mean[group][:, None]  # [b, 1, K, h, w]
        std = module.action.std.double().expand(mean.shape)
        if "entropy" in outputs or "entropy_value" in outputs:
            entropy = torch.where(mask, gaussian_entropy(mean, std), 0)
        if "gaussian" in outputs:
            normal = Gaussian(mean, std)
        actions = micro_batch.of(rollouts.actions).to(self.device)
        logprobs = masked_logprob(actions, mean, std, mask)
        return Likelihood(logprobs, entropy, normal, output=output)

    # --- demonstrations and consistency -----------------------------------------------------------

    def check_demonstration(self, prompt: Prompt) -> str | None:
        """Return why this prompt's clean image cannot be trained on, or None."""
        if error := self.check_prompt(prompt, Sampling()):
            return error
        size = tuple(prompt.inputs.shape[1:])
        error = image_error(prompt.target, "target", self.channels, size)
        return f"prompt {prompt.id!r} {error}" if error else None

    def demonstrations(self, prompts: Sequence[Prompt], *, seed: int) -> Rollouts:
        """Return each prompt's degraded image, with its clean one as the action. Nothing is
        random."""
        refuse(*map(self.check_demonstration, prompts))
        targets = [prompt.target for prompt in prompts]
        return image_rollouts(
            prompts,
            stack_images(targets)[:, None],  # [B, 1, C, H, W]
            targets,
            shared={"degraded": self.encode_prompts(prompts)},
            per_row={"demonstration": torch.ones(len(prompts), dtype=torch.bool)},
        )

    def supervised_loss(self, rollouts: Rollouts, likelihood: Likelihood) -> Float[Tensor, "b 1"]:
        """Mean of rho(image, clean) over the channels and pixels of each image.

        For demonstrations, or for rollouts of prompts with clean images, whose likelihood has its
        "output".
        """
        assert likelihood.output is not None
        if "demonstration" not in rollouts.per_row:
            refuse(*map(self.check_demonstration, rollouts.prompts))
        clean = stack_images([prompt.target for prompt in rollouts.prompts])[rollouts.group_ids]
        return self._pixel_loss(likelihood.output, clean.to(likelihood.output))

    def consistency_loss(
        self, rollouts: Rollouts, likelihood: Likelihood, ref: Likelihood
    ) -> Float[Tensor, "b 1"]:
        """Mean of rho over the two images of ``consistency``; ``likelihood`` has its "output"."""
        return self._pixel_loss(*self.consistency(self, rollouts, likelihood, ref))

    def _pixel_loss(self, x: Images, y: Images) -> Float[Tensor, "b 1"]:
        return PIXEL_LOSSES[self.loss](x, y).flatten(1).mean(dim=-1, keepdim=True)

    # --- images -----------------------------------------------------------------------------------

    def output_of(self, x: Images, kind: Supervises = "output") -> Images:
        """Compute the deterministic images, with gradient, neither clamped nor rounded: at the mean
        action, or without an action ("base")."""
        module = self.module.eval()
        if kind == "base":
            return module.call_network(x)
        mean, base = module(x)
        return module.action.render(base, mean)

    @torch.no_grad()
    def restore(self, images: Images) -> Images:
        """Return the deterministic images as a file would hold them, on the CPU."""
        refuse(*(image_error(image, "input", self.channels) for image in images))
        parts = images.float().split(self.batch_rows)
        outputs = [self.output_of(part.to(self.device)).float().cpu() for part in parts]
        return quantize(torch.cat(outputs))


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


def stack_images(images: Sequence[Tensor]) -> Images:
    """Stack images as float32; GruppoError if they differ in size."""
    sizes = sorted({tuple(image.shape[1:]) for image in images})
    if len(sizes) > 1:
        listed = ", ".join(f"{height} x {width}" for height, width in sizes[:3])
        raise GruppoError(f"""images of {len(sizes)} sizes ({listed}) cannot be restored together;
            they need one. Crop them, as the option crop=64 of the data does.""")
    return torch.stack([image.float() for image in images])
