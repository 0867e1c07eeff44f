"""What differs between pipelines: the network's arguments, its captions, its latents, and its path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from gruppo.modalities.diffusion.demonstrations import Weighting
from gruppo.modalities.diffusion.network import dtype_of
from gruppo.modalities.diffusion.schedules import ScheduledDiffusion, ScheduledFlow

Parts = tuple[Tensor, ...]
"""What an encoder makes of captions: hidden states [N, L, D], and pooled ones [N, P] where there are any."""


@dataclass(frozen=True)
class PipelineSettings:
    """What a pipeline's own files do not say."""

    size: tuple[int, int] | None = None
    """Height and width of pictures in pixels; None takes what the network was trained for."""
    embedded_guidance: float = 3.5
    """The guidance that FLUX dev is told as a number, in sampling and scoring alike. It is not classifier-free."""
    caption_tokens: int = 0
    """Of a T5 encoder; 0 takes the pipeline's own: 256 of SD3, 512 of FLUX."""
    dropped: float = 0.1
    """Share of demonstrations learned from without their caption; of FLUX it is 0."""
    weighting: Weighting = "uniform"
    """Of the denoising loss."""


class Family(Protocol):
    """Pipelines of one class; all are asked one caption at a time."""

    network: str
    """Its name in the pipeline."""
    middle: str
    targets: tuple[str, ...]
    """Layers that get an adapter: all projections of attention."""
    has_guidance: bool
    """Whether it can be asked without a caption."""
    patch: int
    """Both sides of a picture are multiples of it."""

    def __init__(self, pipeline: Any, settings: PipelineSettings, size: tuple[int, int]) -> None: ...

    def latent_channels(self) -> int: ...

    def path(self) -> ScheduledDiffusion | ScheduledFlow: ...

    def captioned(self, caption: str) -> Parts: ...

    def uncaptioned(self) -> Parts: ...

    def said(self, module: Any, x: Tensor, times: Tensor, parts: Parts) -> Tensor: ...

    def pooled(self, output: Any) -> Tensor: ...


UNET_TARGETS = ("to_k", "to_q", "to_v", "to_out.0")
TRANSFORMER_TARGETS = (*UNET_TARGETS, "add_k_proj", "add_q_proj", "add_v_proj", "to_add_out")


class StableDiffusion:
    """A UNet that attends to CLIP's hidden states: SD 1 and 2."""

    network = "unet"
    targets: tuple[str, ...] = UNET_TARGETS
    has_guidance = True

    def __init__(self, pipeline: Any, settings: PipelineSettings, size: tuple[int, int]) -> None:
        self.pipeline, self.size, self.patch = pipeline, size, pipeline.vae_scale_factor
        self.middle = "mid_block"

    def latent_channels(self) -> int:
        return self.pipeline.unet.config.in_channels

    def path(self) -> ScheduledDiffusion:
        return ScheduledDiffusion(self.pipeline.scheduler)

    def captioned(self, caption: str) -> Parts:
        hidden, _ = self.pipeline.encode_prompt(caption, self.pipeline.text_encoder.device, 1, False)
        return (hidden,)

    def uncaptioned(self) -> Parts:
        return self.captioned("")

    def said(self, module: Any, x: Tensor, times: Tensor, parts: Parts) -> Tensor:
        return module(x, times, encoder_hidden_states=parts[0], return_dict=False)[0]

    def pooled(self, output: Tensor) -> Float[Tensor, "N F"]:
        return output.flatten(2).mean(dim=-1)


class StableDiffusionXl(StableDiffusion):
    """A UNet that also adds a pooled text and the picture's size, uncropped, to what it knows of time."""

    def captioned(self, caption: str) -> Parts:
        device = self.pipeline.text_encoder_2.device
        hidden, _, pooled, _ = self.pipeline.encode_prompt(caption, device=device, do_classifier_free_guidance=False)
        return hidden, pooled

    def uncaptioned(self) -> Parts:
        parts = self.captioned("")
        if self.pipeline.config.force_zeros_for_empty_prompt:
            return tuple(torch.zeros_like(part) for part in parts)
        return parts

    def said(self, module: Any, x: Tensor, times: Tensor, parts: Parts) -> Tensor:
        sizes = x.new_tensor([*self.size, 0, 0, *self.size]).expand(len(x), -1)  # original, crop, target
        added = {"text_embeds": parts[1], "time_ids": sizes}
        return module(x, times, encoder_hidden_states=parts[0], added_cond_kwargs=added, return_dict=False)[0]


class StableDiffusion3:
    """A transformer over text and picture on a flow's path; it is told 1000 sigma."""

    network = "transformer"
    targets: tuple[str, ...] = TRANSFORMER_TARGETS
    has_guidance = True

    def __init__(self, pipeline: Any, settings: PipelineSettings, size: tuple[int, int]) -> None:
        self.pipeline, self.size = pipeline, size
        self.patch = pipeline.vae_scale_factor * pipeline.transformer.config.patch_size
        self.middle = f"transformer_blocks.{len(pipeline.transformer.transformer_blocks) // 2}"
        self._tokens = {"max_sequence_length": settings.caption_tokens} if settings.caption_tokens else {}
        self._per_sigma = float(pipeline.scheduler.config.num_train_timesteps)

    def latent_channels(self) -> int:
        return self.pipeline.transformer.config.in_channels

    def path(self) -> ScheduledFlow:
        return ScheduledFlow(self.pipeline.scheduler, mu=self._mu(1.16), is_even=False)

    def _mu(self, most: float) -> float:
        """Of the scheduler's shift for so many tokens of picture; linear between two sizes."""
        tokens, config = (self.size[0] // self.patch) * (self.size[1] // self.patch), self.pipeline.scheduler.config
        few, many = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
        low, high = config.get("base_shift", 0.5), config.get("max_shift", most)
        return low + (high - low) / (many - few) * (tokens - few)

    def captioned(self, caption: str) -> Parts:
        hidden, _, pooled, _ = self.pipeline.encode_prompt(
            caption,
            None,
            None,
            device=self.pipeline.text_encoder.device,
            do_classifier_free_guidance=False,
            **self._tokens,
        )
        return hidden, pooled

    def uncaptioned(self) -> Parts:
        return self.captioned("")

    def said(self, module: Any, x: Tensor, times: Tensor, parts: Parts) -> Tensor:
        return module(
            hidden_states=x,
            timestep=times * self._per_sigma,
            encoder_hidden_states=parts[0],
            pooled_projections=parts[1],
            return_dict=False,
        )[0]

    def pooled(self, output: tuple[Tensor, Tensor]) -> Float[Tensor, "N F"]:
        return output[1].mean(dim=1)  # text, picture


class Flux(StableDiffusion3):
    """A transformer over 2 x 2 squares of latents, told sigma, and its guidance as a number where it reads one."""

    has_guidance = False

    def __init__(self, pipeline: Any, settings: PipelineSettings, size: tuple[int, int]) -> None:
        super().__init__(pipeline, settings, size)
        self.patch = 2 * pipeline.vae_scale_factor
        self._guidance = settings.embedded_guidance if pipeline.transformer.config.guidance_embeds else None

    def latent_channels(self) -> int:
        return self.pipeline.transformer.config.in_channels // 4

    def path(self) -> ScheduledFlow:
        return ScheduledFlow(self.pipeline.scheduler, mu=self._mu(1.15), is_even=True)

    def captioned(self, caption: str) -> Parts:
        device = self.pipeline.text_encoder.device
        hidden, pooled, _ = self.pipeline.encode_prompt(caption, None, device=device, **self._tokens)
        return hidden, pooled

    def said(self, module: Any, x: Tensor, times: Tensor, parts: Parts) -> Tensor:
        squares = pixel_unshuffle(x, 2)  # [N, 4 C, h, w]
        h, w = squares.shape[-2:]
        places = torch.cartesian_prod(*(torch.arange(side, device=x.device) for side in (1, h, w))).to(x)  # [h w, 3]
        said = module(
            hidden_states=squares.flatten(2).transpose(1, 2),
            timestep=times,
            guidance=None if self._guidance is None else times.new_full((len(x),), self._guidance),
            encoder_hidden_states=parts[0],
            pooled_projections=parts[1],
            txt_ids=places.new_zeros(parts[0].shape[1], 3),
            img_ids=places,
            return_dict=False,
        )[0]
        return pixel_shuffle(said.transpose(1, 2).unflatten(2, (h, w)), 2)


FAMILIES: dict[str, type[Family]] = {
    "StableDiffusionPipeline": StableDiffusion,
    "StableDiffusionXLPipeline": StableDiffusionXl,
    "StableDiffusion3Pipeline": StableDiffusion3,
    "FluxPipeline": Flux,
}
"""By the class of a pipeline."""


class CallOf:
    """A family's network, asked with packed captions; it says float32, so that guidance is not rounded."""

    def __init__(self, family: Family, shapes: tuple[torch.Size, ...]) -> None:
        self.family, self.shapes = family, shapes
        self.pooled = family.pooled

    def said(self, module: nn.Module, x: Tensor, times: Tensor, condition: Tensor | None) -> Tensor:
        assert condition is not None
        dtype = dtype_of(module)
        sizes = [shape.numel() for shape in self.shapes]
        packed = condition.to(dtype).split(sizes, dim=1)
        parts = tuple(part.reshape(-1, *shape) for part, shape in zip(packed, self.shapes, strict=True))
        said = self.family.said(module, x.to(dtype), times.to(torch.promote_types(dtype, torch.float32)), parts)
        return said.to(torch.promote_types(said.dtype, torch.float32))
