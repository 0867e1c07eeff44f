"""Pipelines of ``diffusers``: what differs between their networks, captions, latents and schedules."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from gruppo.modalities.diffusion.demonstrations import Weighting
from gruppo.modalities.diffusion.denoiser import ModuleCall
from gruppo.modalities.diffusion.encoders import PixelCodec, postprocess
from gruppo.modalities.diffusion.schedules import SchedulerDiffusion, SchedulerFlow
from gruppo.types import GruppoError

Embeddings = tuple[Tensor, ...]
"""What text encoders make of a caption: hidden states [N, L, D], and pooled ones [N, P] where there are any."""
CAPTIONS_KEPT = 64
"""Encoded captions in the cache; one of FLUX takes 8 MB."""


@dataclass(frozen=True)
class PipelineSettings:
    """What a pipeline's own files do not say."""

    size: tuple[int, int] | None = None
    """Height and width of images in pixels; None takes what the network was trained for."""
    embedded_guidance: float = 3.5
    """Distilled guidance scale that FLUX dev reads, in sampling and scoring alike. It is not classifier-free."""
    caption_tokens: int = 0
    """Sequence length of a T5 encoder; 0 takes the pipeline's own: 256 for SD3, 512 for FLUX."""
    dropped: float = 0.1
    """Share of demonstrations trained without their caption; 0 for FLUX."""
    weighting: Weighting = "uniform"
    """Weighting of the denoising loss."""


class StableDiffusion(ModuleCall):
    """A UNet with cross-attention to CLIP's hidden states: SD 1 and 2. Base class of the other architectures."""

    network = "unet"
    """Its name in the pipeline."""
    targets: tuple[str, ...] = ("to_k", "to_q", "to_v", "to_out.0")
    """Layers that LoRA adapts by default: all projections of attention."""
    has_guidance = True
    """Whether it can be used without a caption."""
    shapes: list[torch.Size]
    """Of the embeddings that conditions hold flattened and concatenated."""

    def __init__(self, pipeline: Any, settings: PipelineSettings, size: tuple[int, int]) -> None:
        self.pipeline, self.size, self.patch = pipeline, size, pipeline.vae_scale_factor
        self.middle, self.latent_channels = "mid_block", pipeline.unet.config.in_channels
        self.schedule: SchedulerDiffusion | SchedulerFlow = SchedulerDiffusion(pipeline.scheduler)

    def encode(self, caption: str) -> Embeddings:
        """Embeddings of one caption. One at a time, so that they are the same in any batch."""
        hidden, _ = self.pipeline.encode_prompt(caption, self.pipeline.text_encoder.device, 1, False)
        return (hidden,)

    def unconditional(self) -> Embeddings:
        return self.encode("")

    def forward(self, module: Any, x: Tensor, times: Tensor, embeddings: Embeddings) -> Tensor:
        return module(x, times, encoder_hidden_states=embeddings[0], return_dict=False)[0]

    def predict(self, module: nn.Module, x: Tensor, times: Tensor, condition: Tensor | None) -> Tensor:
        """Prediction in float32 or wider, so that guidance is not rounded; times are not rounded either."""
        assert condition is not None
        dtype = next(module.parameters()).dtype
        packed = condition.to(dtype).split([shape.numel() for shape in self.shapes], dim=1)
        embeddings = tuple(part.reshape(-1, *shape) for part, shape in zip(packed, self.shapes, strict=True))
        wide = torch.promote_types(dtype, torch.float32)
        prediction = self.forward(module, x.to(dtype), times.to(wide), embeddings)
        return prediction.to(torch.promote_types(prediction.dtype, torch.float32))


class StableDiffusionXl(StableDiffusion):
    """A UNet that adds a pooled caption and the size of the image, uncropped, to its time embedding."""

    def encode(self, caption: str) -> Embeddings:
        device = self.pipeline.text_encoder_2.device
        hidden, _, pooled, _ = self.pipeline.encode_prompt(caption, device=device, do_classifier_free_guidance=False)
        return hidden, pooled

    def unconditional(self) -> Embeddings:
        embeddings = self.encode("")
        if self.pipeline.config.force_zeros_for_empty_prompt:
            return tuple(torch.zeros_like(part) for part in embeddings)
        return embeddings

    def forward(self, module: Any, x: Tensor, times: Tensor, embeddings: Embeddings) -> Tensor:
        sizes = x.new_tensor([*self.size, 0, 0, *self.size]).expand(len(x), -1)  # original, crop, target
        added = {"text_embeds": embeddings[1], "time_ids": sizes}
        return module(x, times, encoder_hidden_states=embeddings[0], added_cond_kwargs=added, return_dict=False)[0]


class StableDiffusion3(StableDiffusion):
    """A transformer over text and image tokens with a flow schedule; it reads 1000 sigma."""

    network = "transformer"
    targets = (*StableDiffusion.targets, "add_k_proj", "add_q_proj", "add_v_proj", "to_add_out")
    max_shift = 1.16
    has_even_sigmas = False
    packing = 1
    """Latents a side that the pipeline packs into one token."""

    def __init__(self, pipeline: Any, settings: PipelineSettings, size: tuple[int, int]) -> None:
        self.pipeline, self.size = pipeline, size
        transformer, config = pipeline.transformer, pipeline.scheduler.config
        self.middle = f"transformer_blocks.{len(transformer.transformer_blocks) // 2}"
        self._tokens = {"max_sequence_length": settings.caption_tokens} if settings.caption_tokens else {}
        self._per_sigma = float(config.num_train_timesteps)
        self._guidance = settings.embedded_guidance if transformer.config.get("guidance_embeds") else None
        self.patch = pipeline.vae_scale_factor * transformer.config.patch_size * self.packing
        self.latent_channels = transformer.config.in_channels // self.packing**2
        # mu, the scheduler's shift, is linear in the number of image tokens
        tokens = (size[0] // self.patch) * (size[1] // self.patch)
        few, many = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
        low, high = config.get("base_shift", 0.5), config.get("max_shift", self.max_shift)
        mu = low + (high - low) / (many - few) * (tokens - few)
        self.schedule = SchedulerFlow(pipeline.scheduler, mu=mu, is_even=self.has_even_sigmas)

    def encode(self, caption: str) -> Embeddings:
        device = self.pipeline.text_encoder.device
        hidden, _, pooled, _ = self.pipeline.encode_prompt(
            caption, None, None, device=device, do_classifier_free_guidance=False, **self._tokens
        )
        return hidden, pooled

    def forward(self, module: Any, x: Tensor, times: Tensor, embeddings: Embeddings) -> Tensor:
        return module(
            hidden_states=x,
            timestep=times * self._per_sigma,
            encoder_hidden_states=embeddings[0],
            pooled_projections=embeddings[1],
            return_dict=False,
        )[0]

    def pool(self, output: tuple[Tensor, Tensor]) -> Float[Tensor, "N F"]:
        return output[1].mean(dim=1)  # text tokens, image tokens


class Flux(StableDiffusion3):
    """A transformer over 2 x 2 patches of latents; it reads sigma, and a guidance scale where it is distilled."""

    has_guidance = False
    max_shift = 1.15
    has_even_sigmas = True
    packing = 2

    def encode(self, caption: str) -> Embeddings:
        device = self.pipeline.text_encoder.device
        hidden, pooled, _ = self.pipeline.encode_prompt(caption, None, device=device, **self._tokens)
        return hidden, pooled

    def forward(self, module: Any, x: Tensor, times: Tensor, embeddings: Embeddings) -> Tensor:
        patches = pixel_unshuffle(x, 2)  # [N, 4 C, h, w]
        h, w = patches.shape[-2:]
        places = torch.cartesian_prod(*(torch.arange(side, device=x.device) for side in (1, h, w))).to(x)  # [h w, 3]
        prediction = module(
            hidden_states=patches.flatten(2).transpose(1, 2),
            timestep=times,
            guidance=None if self._guidance is None else times.new_full((len(x),), self._guidance),
            encoder_hidden_states=embeddings[0],
            pooled_projections=embeddings[1],
            txt_ids=places.new_zeros(embeddings[0].shape[1], 3),
            img_ids=places,
            return_dict=False,
        )[0]
        return pixel_shuffle(prediction.transpose(1, 2).unflatten(2, (h, w)), 2)


ARCHITECTURES: dict[str, type[StableDiffusion]] = {
    "StableDiffusionPipeline": StableDiffusion,
    "StableDiffusionXLPipeline": StableDiffusionXl,
    "StableDiffusion3Pipeline": StableDiffusion3,
    "FluxPipeline": Flux,
}
"""By the class name of a pipeline."""


class CaptionEncoder:
    """Captions as conditions: the embeddings of all text encoders, flattened into one row; float32, on the CPU."""

    def __init__(self, architecture: StableDiffusion, dropped: float) -> None:
        if not 0 <= dropped < 1:
            raise GruppoError(f"dropped={dropped} is out of range; it needs 0 <= dropped < 1. Use 0.1 for guidance.")
        self._architecture, self.dropped = architecture, dropped
        with torch.no_grad():
            embeddings = architecture.unconditional()
        architecture.shapes = [part.shape[1:] for part in embeddings]
        self._unconditional = self._packed(embeddings)
        self._cache: OrderedDict[str, Tensor] = OrderedDict()

    @torch.no_grad()
    def encode(self, inputs: Any) -> Float[Tensor, "numbers"]:
        if not isinstance(inputs, str):
            raise GruppoError(f"a {type(inputs).__name__} is no caption: {inputs!r:.80}. Give a string.")
        if inputs not in self._cache:
            self._cache[inputs] = self._packed(self._architecture.encode(inputs))
            if len(self._cache) > CAPTIONS_KEPT:
                self._cache.popitem(last=False)
        self._cache.move_to_end(inputs)
        return self._cache[inputs]

    def unconditional(self) -> Float[Tensor, "numbers"]:
        return self._unconditional

    @staticmethod
    def _packed(embeddings: Embeddings) -> Float[Tensor, "numbers"]:
        return torch.cat([part[0].float().cpu().flatten() for part in embeddings])


class VaeCodec(PixelCodec):
    """States are latents, scaled and shifted as the VAE's config says. Images are decoded one at a time."""

    def __init__(self, vae: Any, image_shape: tuple[int, ...]) -> None:
        super().__init__(image_shape)
        self._vae, config = vae, vae.config
        if vae.dtype == torch.float16 and getattr(config, "force_upcast", False):
            vae.float()  # SDXL's overflows in float16
        self._scale = torch.tensor([float(config.scaling_factor)])
        self._shift = torch.tensor([float(getattr(config, "shift_factor", None) or 0)])
        if getattr(config, "latents_mean", None) is not None and getattr(config, "latents_std", None) is not None:
            self._shift, std = (
                torch.tensor(numbers).reshape(-1, 1, 1) for numbers in (config.latents_mean, config.latents_std)
            )
            self._scale = self._scale / std

    @torch.no_grad()
    def encode(self, image: Tensor) -> Float[Tensor, "c h w"]:
        """The mode of the VAE's posterior: nothing is drawn."""
        x = (image.float() * 2 - 1)[None].to(self._vae.device, self._vae.dtype)
        return ((self._vae.encode(x).latent_dist.mode().float().cpu() - self._shift) * self._scale)[0]

    @torch.no_grad()
    def decode(self, states: Float[Tensor, "B c h w"]) -> Float[Tensor, "B 3 H W"]:
        latents = (states.float() / self._scale + self._shift).to(self._vae.device, self._vae.dtype)
        decoded = [self._vae.decode(latent[None], return_dict=False)[0].float().cpu() for latent in latents]
        return postprocess(torch.cat(decoded).nan_to_num())
