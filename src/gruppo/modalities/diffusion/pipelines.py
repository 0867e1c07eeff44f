"""Stable Diffusion and FLUX as ``diffusers`` has them: policies over the network of a pipeline."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from gruppo.integrity import check_seal, read_json
from gruppo.loading import import_extra
from gruppo.modalities.common import lora
from gruppo.modalities.diffusion.denoiser import ModuleCall, PixelCodec
from gruppo.modalities.diffusion.policy import DenoiserPolicy
from gruppo.modalities.diffusion.schedules import DiffusionSchedule, SchedulerFlow
from gruppo.types import GruppoError, Prompt, Sampling

SETTINGS = "gruppo.json"
CAPTIONS_KEPT = 64
"""Encoded captions in the cache; one of FLUX takes 8 MB."""


@dataclass(frozen=True)
class PipelineSettings:
    """What a pipeline's own files do not say."""

    size: tuple[int, int] | None = None
    """Height and width of images in pixels; None takes what the network was trained for."""
    embedded_guidance: float = 3.5
    """Distilled guidance scale that FLUX dev reads, in sampling and scoring. It is not
    classifier-free."""
    caption_tokens: int = 0
    """Sequence length of a T5 encoder; 0 takes the pipeline's own: 256 for SD3, 512 for FLUX."""
    dropped: float = 0.1
    """Share of demonstrations trained without their caption; 0 for FLUX."""


class StableDiffusion(ModuleCall):
    """A UNet with cross-attention to CLIP's hidden states: SD 1, 2 and XL. Base class of the
    transformers."""

    network = "unet"
    """Its name in the pipeline."""
    targets: tuple[str, ...] = ("to_k", "to_q", "to_v", "to_out.0")
    """Layers that LoRA adapts by default: all projections of attention."""
    has_guidance = True
    """Whether it can be used without a caption."""
    embeddings = slice(0, 3, 2)
    """Hidden states and pooled embeddings, if there are any, in what ``encode_prompt`` returns."""
    middle = "mid_block"
    schedule: DiffusionSchedule | SchedulerFlow
    shapes: list[torch.Size]
    """Of the embeddings, which a condition holds flattened and concatenated."""

    def __init__(self, pipeline: Any, settings: PipelineSettings, size: tuple[int, int]) -> None:
        self.pipeline = pipeline
        self.size = size
        self.patch = pipeline.vae_scale_factor
        self.latent_channels = pipeline.unet.config.in_channels
        self.schedule = DiffusionSchedule(pipeline.scheduler)

    def forward(self, module: Any, x: Tensor, times: Tensor, embeddings: list[Tensor]) -> Tensor:
        added = None
        if len(embeddings) > 1:  # Stable Diffusion XL: original size, crop and target size
            sizes = x.new_tensor([*self.size, 0, 0, *self.size]).expand(len(x), -1)
            added = {"text_embeds": embeddings[1], "time_ids": sizes}
        return module(x, times, encoder_hidden_states=embeddings[0], added_cond_kwargs=added).sample

    def predict(self, module: nn.Module, x: Tensor, times: Tensor, condition: Tensor) -> Tensor:
        """Prediction in float32 or wider, so that guidance is not rounded; times are not rounded
        either."""
        dtype = next(module.parameters()).dtype
        parts = condition.to(dtype).split([shape.numel() for shape in self.shapes], dim=1)
        pairs = zip(parts, self.shapes, strict=True)
        embeddings = [part.unflatten(1, shape) for part, shape in pairs]
        wide = torch.promote_types(dtype, torch.float32)
        return self.forward(module, x.to(dtype), times.to(wide), embeddings).to(wide)


class StableDiffusion3(StableDiffusion):
    """A transformer over text and image tokens with a flow schedule; it reads 1000 sigma."""

    network = "transformer"
    targets = (*StableDiffusion.targets, "add_k_proj", "add_q_proj", "add_v_proj", "to_add_out")
    max_shift = 1.16
    has_even_sigmas = False
    packing = 1
    """Latents a side that the pipeline packs into one token."""
    time_scale = 1000.0
    """Times the network reads, per sigma."""

    def __init__(self, pipeline: Any, settings: PipelineSettings, size: tuple[int, int]) -> None:
        transformer, config = pipeline.transformer, pipeline.scheduler.config
        self.pipeline = pipeline
        self.middle = f"transformer_blocks.{len(transformer.transformer_blocks) // 2}"
        self.guidance = settings.embedded_guidance
        self.patch = pipeline.vae_scale_factor * transformer.config.patch_size * self.packing
        self.latent_channels = transformer.config.in_channels // self.packing**2
        # mu, the scheduler's shift, is linear in the number of image tokens
        tokens = (size[0] // self.patch) * (size[1] // self.patch)
        few, many = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
        low, high = config.get("base_shift", 0.5), config.get("max_shift", self.max_shift)
        mu = low + (high - low) / (many - few) * (tokens - few)
        self.schedule = SchedulerFlow(pipeline.scheduler, mu=mu, is_even=self.has_even_sigmas)

    def forward(
        self, module: Any, x: Tensor, times: Tensor, embeddings: list[Tensor], **further: Any
    ) -> Tensor:
        return module(
            hidden_states=x,
            timestep=times * self.time_scale,
            encoder_hidden_states=embeddings[0],
            pooled_projections=embeddings[1],
            **further,
        ).sample

    def pool(self, output: tuple[Tensor, Tensor]) -> Float[Tensor, "N F"]:
        return output[1].mean(dim=1)  # text tokens, image tokens


class Flux(StableDiffusion3):
    """A transformer over 2 x 2 patches of latents; it reads sigma, and a guidance scale if it is
    distilled."""

    has_guidance, max_shift, packing, time_scale = False, 1.15, 2, 1.0
    embeddings = slice(0, 2)
    has_even_sigmas = True

    def forward(
        self, module: Any, x: Tensor, times: Tensor, embeddings: list[Tensor], **further: Any
    ) -> Tensor:
        patches = pixel_unshuffle(x, 2)  # [N, 4 C, h, w]
        sides = patches.shape[-2:]
        axes = [torch.arange(side, device=x.device) for side in (1, *sides)]
        places = torch.cartesian_prod(*axes).to(x)  # [h w, 3]
        guidance = None
        if module.config.guidance_embeds:
            guidance = times.new_full((len(x),), self.guidance)
        tokens = patches.flatten(2).transpose(1, 2)
        text = places.new_zeros(embeddings[0].shape[1], 3)
        prediction = super().forward(
            module, tokens, times, embeddings, guidance=guidance, txt_ids=text, img_ids=places
        )
        return pixel_shuffle(prediction.transpose(1, 2).unflatten(2, sides), 2)


ARCHITECTURES: dict[str, type[StableDiffusion]] = {
    "StableDiffusionPipeline": StableDiffusion,
    "StableDiffusionXLPipeline": StableDiffusion,
    "StableDiffusion3Pipeline": StableDiffusion3,
    "FluxPipeline": Flux,
}
"""By the class name of a pipeline."""


class CaptionEncoder:
    """Captions as conditions: the embeddings of all text encoders, flattened into one row; float32,
    on the CPU."""

    def __init__(self, architecture: StableDiffusion, settings: PipelineSettings) -> None:
        self.dropped = settings.dropped if architecture.has_guidance else 0.0
        options: dict[str, Any] = {
            "prompt_2": None,
            "prompt_3": None,
            "num_images_per_prompt": 1,
            "do_classifier_free_guidance": False,  # the denoiser guides, with ``unconditional``
        }
        if settings.caption_tokens:
            options["max_sequence_length"] = settings.caption_tokens
        # the pipelines differ in what their ``encode_prompt`` takes
        known = inspect.signature(architecture.pipeline.encode_prompt).parameters
        self._options = {name: value for name, value in options.items() if name in known}
        self._architecture = architecture
        self._cached = lru_cache(CAPTIONS_KEPT)(self._encode)
        self.unconditional = self.encode("")
        if architecture.pipeline.config.get("force_zeros_for_empty_prompt"):  # Stable Diffusion XL
            self.unconditional = torch.zeros_like(self.unconditional)

    def encode(self, inputs: Any) -> Float[Tensor, "numbers"]:
        if not isinstance(inputs, str):
            raise GruppoError(
                f"a {type(inputs).__name__} is no caption: {inputs!r:.80}. Give a string."
            )
        return self._cached(inputs)

    @torch.no_grad()
    def _encode(self, caption: str) -> Float[Tensor, "numbers"]:
        # one caption at a time, so that its embeddings are the same in any batch
        architecture, pipeline = self._architecture, self._architecture.pipeline
        encoded = pipeline.encode_prompt(caption, device=pipeline.vae.device, **self._options)
        embeddings = encoded[architecture.embeddings]
        architecture.shapes = [part.shape[1:] for part in embeddings]
        return torch.cat([part[0].float().cpu().flatten() for part in embeddings])


class VaeCodec(PixelCodec):
    """States are latents, scaled and shifted as the VAE's config says. Images are decoded one at a
    time."""

    def __init__(self, vae: Any) -> None:
        self._vae = vae
        self._scale = float(vae.config.scaling_factor)
        self._shift = float(vae.config.get("shift_factor") or 0)

    @torch.no_grad()
    def encode(self, image: Tensor) -> Float[Tensor, "c h w"]:
        """The mode of the VAE's posterior, without sampling."""
        x = super().encode(image)[None].to(self._vae.device, self._vae.dtype)
        mode = self._vae.encode(x).latent_dist.mode()[0]
        return (mode.float().cpu() - self._shift) * self._scale

    @torch.no_grad()
    def decode(self, states: Float[Tensor, "B c h w"]) -> Float[Tensor, "B 3 H W"]:
        latents = (states.float() / self._scale + self._shift).to(self._vae.device, self._vae.dtype)
        decoded = [self._vae.decode(latent[None]).sample.float().cpu() for latent in latents]
        return super().decode(torch.cat(decoded).nan_to_num())


# --- the policy ---


class DiffusersPolicy(DenoiserPolicy, lora.AdaptablePolicy):
    """A pipeline's denoising network, trained itself or through adapters; text encoders and VAE are
    frozen.

    States are latents in float32, at the noise levels of the pipeline's scheduler. ``module`` is
    the network itself. Prompts are captions, each encoded once. Images are decoded one at a time.
    """

    batch_rows, default_budgets = 4, (8, 8)
    saves_base = True

    def __init__(self, pipeline: Any, settings: PipelineSettings | None = None) -> None:
        settings = settings or PipelineSettings()
        kind = ARCHITECTURES.get(type(pipeline).__name__)
        if kind is None:
            raise GruppoError(f"""a {type(pipeline).__name__} is not a pipeline that can be trained;
                it needs to be one of {", ".join(ARCHITECTURES)}. Load it with that class.""")
        network, scale = getattr(pipeline, kind.network), pipeline.vae_scale_factor
        size = settings.size or default_size(pipeline, network)
        architecture = kind(pipeline, settings, size)
        channels, vae = architecture.latent_channels, pipeline.vae
        if any(side < 1 or side % architecture.patch for side in size):
            raise GruppoError(f"""size={size[0]} x {size[1]} does not fit the pipeline; both sides
                need to be multiples of {architecture.patch}. Set such a size.""")
        if (
            channels != vae.config.latent_channels
            or network.config.get("time_cond_proj_dim")
            or vae.config.get("latents_mean")
        ):
            raise GruppoError(f"""the network reads {channels} channels and the VAE has
                {vae.config.latent_channels}, or it reads a guidance, or the VAE's latents are
                normalized by channel: a model for inpainting or editing, or a latent consistency
                model. Give a pipeline of text to image.""")
        if lora.has_adapter(network) and not hasattr(network, "gruppo_base"):
            raise GruppoError("""the pipeline has LoRA weights loaded. Call its fuse_lora() and
                unload_lora_weights() first.""")
        for part in frozen_parts(pipeline, network):
            part.requires_grad_(False).eval()
        self.pipeline = pipeline
        self.settings = replace(settings, size=size)
        self.architecture = architecture
        super().__init__(
            network,
            (channels, size[0] // scale, size[1] // scale),
            predicts=architecture.schedule.predicts,
            schedule=architecture.schedule,
            condition=CaptionEncoder(architecture, settings),
            middle=architecture.middle,
            call=architecture,
            codec=VaeCodec(vae),
        )
        self.image_shape = (3, *size)

    def check_prompt(self, prompt: Prompt, sampling: Sampling) -> str | None:
        """Why this prompt cannot be sampled from, or None; a caption is not encoded for it."""
        return None if isinstance(prompt.inputs, str) else super().check_prompt(prompt, sampling)

    def to(self, device: torch.device) -> None:
        self.pipeline.to(device)

    def memory_estimate(
        self, config: Any, prompts: Sequence[Prompt], budget: int, group_size: int
    ) -> dict[str, float]:
        parts = frozen_parts(self.pipeline, self.module)
        size = sum(p.numel() * p.element_size() for part in parts for p in part.parameters())
        return {"text encoders and VAE": float(size)}

    def save(self, folder: Path) -> None:
        """Write a pipeline that ``diffusers.DiffusionPipeline.from_pretrained`` opens, with the
        trained weights.

        Adapters are merged into a copy of the network, and also saved by themselves for
        ``pipeline.load_lora_weights(folder)`` on the base. ``load_diffusers`` opens the folder as a
        policy.
        """
        own: Any = self.module
        name, module = self.architecture.network, own
        if lora.has_adapter(own):
            module = copy.deepcopy(own)
            lora.merge(module)
        pipeline = copy.copy(self.pipeline)
        setattr(pipeline, name, module)
        pipeline.save_pretrained(folder)
        settings = json.dumps(asdict(self.settings), indent=1)
        (folder / SETTINGS).write_text(settings, encoding="utf-8")
        if lora.has_adapter(own):
            config = own.peft_config[lora.POLICY]
            facts = {"r": config.r, "lora_alpha": config.lora_alpha}
            facts["target_modules"] = sorted(config.target_modules)
            weights = dict(lora.adapter_weights(own))
            pipeline.save_lora_weights(
                folder, **{f"{name}_lora_layers": weights, f"{name}_lora_adapter_metadata": facts}
            )


def default_size(pipeline: Any, network: Any) -> tuple[int, int]:
    """Height and width in pixels that the network was trained for."""
    sample = getattr(network.config, "sample_size", None) or pipeline.default_sample_size
    height, width = (sample, sample) if isinstance(sample, int) else sample
    return height * pipeline.vae_scale_factor, width * pipeline.vae_scale_factor


def frozen_parts(pipeline: Any, network: nn.Module) -> list[nn.Module]:
    """The text encoders and the VAE."""
    parts = pipeline.components.values()
    return [part for part in parts if isinstance(part, nn.Module) and part is not network]


def load_diffusers(
    name: str | Path,
    settings: PipelineSettings | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> DiffusersPolicy:
    """The policy of a pipeline's folder or hub id; for a folder that ``save`` wrote, with its
    settings by default."""
    diffusers = import_extra("diffusers", "diffusion", "an image pipeline")
    folder = Path(name)
    check_seal(folder)
    try:
        # diffusers needs the names of components that a saved pipeline lacks, such as SD 3's T5.
        index = folder / "model_index.json"
        components = read_json(index) if index.is_file() else {}
        without = {part: None for part, place in components.items() if place == [None, None]}
        pipeline = diffusers.DiffusionPipeline.from_pretrained(
            str(name),
            dtype=dtype,
            use_safetensors=True,  # without it, pickles are read if there are no others
            **without,
        )
    except (OSError, ValueError, AttributeError, ImportError, RecursionError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise GruppoError(f"""{name} is no pipeline that diffusers opens: {reason} It needs a folder
            with model_index.json, as policy.save(folder) writes it, or a hub id.""") from None
    file = folder / SETTINGS
    if settings is None and file.is_file():
        try:
            saved = read_json(file)
            settings = PipelineSettings(**{**saved, "size": tuple(saved["size"])})
        except (ValueError, TypeError, KeyError) as error:
            raise GruppoError(f"""{file} holds no settings of a pipeline: {error}. Delete it, and
                give load_diffusers its settings.""") from None
    return DiffusersPolicy(pipeline, settings)


def add_adapter(policy: DiffusersPolicy, **options: Any) -> None:
    """Add a LoRA adapter to linear layers of the network and freeze everything else; outputs do not
    change yet.

    ``options``: those of ``lora.inject``; the layers are all projections of attention by default.
    The base keeps its dtype, and adapters are at least float32.
    """
    dtype = policy.compute_dtype
    lora.inject(policy.module, default_targets=policy.architecture.targets, **options)
    lora.cast_base(policy.module, dtype)
