"""Stable Diffusion and FLUX as ``diffusers`` has them: a policy over a pipeline's UNet or transformer."""

from __future__ import annotations

import copy
import difflib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gruppo.loading import import_extra
from gruppo.modalities.common.critic import module_weights
from gruppo.modalities.common.lora import (
    POLICY,
    adapter_weights,
    base_of,
    base_weights,
    cast_base,
    has_adapter,
    inject_config,
    is_linear,
    merge,
)
from gruppo.modalities.diffusion.pipelines import ARCHITECTURES, CaptionEncoder, PipelineSettings, VaeCodec
from gruppo.modalities.diffusion.policy import DenoiserPolicy
from gruppo.modalities.diffusion.sampling import DiffusionSampling
from gruppo.seeds import generator_at
from gruppo.types import GruppoError, Prompt, Sampling

SETTINGS = "gruppo.json"


class DiffusersPolicy(DenoiserPolicy):
    """A pipeline's denoising network, trained itself or through adapters; text encoders and VAE are frozen.

    States are latents in float32, at the noise levels of the pipeline's scheduler. ``module`` is the network itself.
    Prompts are captions, each encoded once. Images are decoded one at a time.
    """

    batch_rows, default_budgets = 8, (8, 8)
    supports = frozenset({"demonstrations", "lora", "separate_critic", "shared_critic"})

    def __init__(self, pipeline: Any, settings: PipelineSettings | None = None) -> None:
        settings = settings or PipelineSettings()
        architecture_of = ARCHITECTURES.get(type(pipeline).__name__)
        if architecture_of is None:
            raise GruppoError(
                f"a {type(pipeline).__name__} is not a pipeline that can be trained; it needs to be one of "
                f"{', '.join(ARCHITECTURES)}. Load it with that class."
            )
        network, scale = getattr(pipeline, architecture_of.network), pipeline.vae_scale_factor
        size = settings.size
        if size is None:
            sample = getattr(network.config, "sample_size", None) or pipeline.default_sample_size
            height, width = (sample, sample) if isinstance(sample, int) else sample
            size = (height * scale, width * scale)
        architecture = architecture_of(pipeline, settings, size)
        if min(size) < 1 or any(side % architecture.patch for side in size):
            raise GruppoError(
                f"size={size[0]} x {size[1]} does not fit the pipeline; both sides need to be multiples of "
                f"{architecture.patch}. Set such a size."
            )
        if architecture.latent_channels != pipeline.vae.config.latent_channels:
            raise GruppoError(
                f"the network reads {architecture.latent_channels} channels and the VAE has "
                f"{pipeline.vae.config.latent_channels}: it is for inpainting or editing. Give one of text to image."
            )
        if network.config.get("time_cond_proj_dim"):
            raise GruppoError(
                "the UNet reads its guidance as a number (a latent consistency model), which is not supported. Give "
                "the pipeline that it was distilled from."
            )
        if has_adapter(network) and base_of(network) is None:
            raise GruppoError(
                "the pipeline has LoRA weights loaded. Call pipeline.fuse_lora() and pipeline.unload_lora_weights() "
                "first."
            )
        for part in pipeline.components.values():
            if isinstance(part, nn.Module) and part is not network:
                part.requires_grad_(False).eval()
        self.pipeline, self.settings = pipeline, replace(settings, size=size)
        self.network_name, schedule = architecture.network, architecture.schedule
        super().__init__(
            network,
            (architecture.latent_channels, size[0] // scale, size[1] // scale),
            predicts=schedule.predicts,
            schedule=schedule,
            condition=CaptionEncoder(architecture, settings.dropped if architecture.has_guidance else 0.0),
            weighting=settings.weighting,
            middle=architecture.middle,
            call=architecture,
            codec=VaeCodec(pipeline.vae, (3, *size)),
        )

    def check_prompt(self, prompt: Prompt, sampling: Sampling) -> str | None:
        """Why this prompt cannot be sampled from, or None; a caption is not encoded for it."""
        return None if isinstance(prompt.inputs, str) else super().check_prompt(prompt, sampling)

    def check_sampling(self, sampling: Sampling) -> DiffusionSampling:
        sampling = DiffusionSampling.of(sampling)
        if sampling.guidance != 1 and not ARCHITECTURES[type(self.pipeline).__name__].has_guidance:
            raise GruppoError(
                f"guidance={sampling.guidance:g} is classifier-free, and FLUX reads its guidance as a number. Set "
                f"guidance 1, and PipelineSettings(embedded_guidance={sampling.guidance:g})."
            )
        return super().check_sampling(sampling)

    def to(self, device: torch.device) -> None:
        self.pipeline.to(device)

    def memory_estimate(self, config: Any, prompts: Sequence[Prompt], budget: int, group_size: int) -> dict[str, float]:
        parts = [p for p in self.pipeline.components.values() if isinstance(p, nn.Module) and p is not self.module]
        size = sum(p.numel() * p.element_size() for part in parts for p in part.parameters())
        return {"text encoders and VAE": float(size)} if parts else {}

    def checkpoint_weights(self) -> dict[str, Tensor]:
        return module_weights(self.module)

    def frozen_base(self) -> dict[str, Tensor]:
        return base_weights(self.module) if has_adapter(self.module) else {}

    @property
    def base_sha256(self) -> str | None:
        base = base_of(self.module)
        return None if base is None else base.sha256

    def save(self, folder: Path) -> None:
        """Write a pipeline that ``diffusers.DiffusionPipeline.from_pretrained`` opens, with the trained weights.

        Adapters are merged into a copy of the network, and also saved apart for ``pipeline.load_lora_weights(folder)``
        on the base. ``load_diffusers`` opens the folder as a policy.
        """
        folder, module = Path(folder), self.module
        pipeline = copy.copy(self.pipeline)
        if has_adapter(module):
            module = copy.deepcopy(module)
            merge(module)
        setattr(pipeline, self.network_name, module)
        pipeline.save_pretrained(folder)
        (folder / SETTINGS).write_text(json.dumps(asdict(self.settings), indent=1), encoding="utf-8")
        if has_adapter(self.module):
            own: Any = self.module
            config = own.peft_config[POLICY].to_dict()
            config["target_modules"] = sorted(config["target_modules"])
            metadata = {name: config[name] for name in ("r", "lora_alpha", "target_modules")}
            layers = {
                f"{self.network_name}_lora_layers": dict(adapter_weights(self.module)),
                f"{self.network_name}_lora_adapter_metadata": metadata,
            }
            type(self.pipeline).save_lora_weights(folder, **layers)


def load_diffusers(
    name: str | Path, settings: PipelineSettings | None = None, *, dtype: torch.dtype = torch.float32
) -> DiffusersPolicy:
    """The policy of a pipeline's folder or hub id; for a folder that ``save`` wrote, with its settings by default."""
    diffusers = import_extra("diffusers", "diffusion", "an image pipeline")
    logging, folder = diffusers.utils.logging, Path(name)
    has_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        # diffusers needs to be told again which components a saved pipeline was without, such as SD 3's T5.
        index = folder / "model_index.json"
        components = json.loads(index.read_text(encoding="utf-8")) if index.is_file() else {}
        without = {part: None for part, place in components.items() if place == [None, None]}
        pipeline = diffusers.DiffusionPipeline.from_pretrained(str(name), dtype=dtype, **without)
    except (OSError, ValueError, AttributeError, ImportError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise GruppoError(
            f"{name} is no pipeline that diffusers opens: {reason} It needs a folder with model_index.json, as "
            "policy.save(folder) writes it, or a hub id."
        ) from None
    finally:
        if has_bar:
            logging.enable_progress_bar()
    file = folder / SETTINGS
    if settings is None and file.is_file():
        try:
            saved = json.loads(file.read_text(encoding="utf-8"))
            settings = PipelineSettings(**{**saved, "size": tuple(saved["size"])})
        except (ValueError, TypeError, KeyError) as error:
            raise GruppoError(
                f"{file} holds no settings of a pipeline: {error}. Delete it, and give load_diffusers its settings."
            ) from None
    return DiffusersPolicy(pipeline, settings)


def add_adapter(
    policy: DiffusersPolicy, *, rank: int, alpha: float, targets: Sequence[str] = (), seed: int = 0, base: str = ""
) -> None:
    """Add a LoRA adapter to linear layers of the network and freeze everything else; outputs do not change yet.

    ``targets``: names of layers, or their last parts; all projections of attention by default. The base keeps its
    dtype, and adapters are at least float32.
    """
    module = policy.module
    peft = import_extra("peft", "lora", "LoRA (lora.rank)")
    if has_adapter(module):
        raise GruppoError("the network has an adapter already. Train that one, and leave --lora.rank out.")
    parts = dict(module.named_modules())
    for target in targets:
        matches = [part for name, part in parts.items() if name == target or name.endswith(f".{target}")]
        if not matches or not all(map(is_linear, matches)):
            known = sorted({name.rpartition(".")[2] for name, part in parts.items() if is_linear(part)})
            near = difflib.get_close_matches(target, known, 1)
            advice = f"Did you mean {near[0]}?" if near else f"Set --lora.targets to some of {', '.join(known)}."
            raise GruppoError(f"lora.targets: the network has no linear layers {target!r}. {advice}")
    chosen = sorted(targets or ARCHITECTURES[type(policy.pipeline).__name__].targets)
    whole = int(alpha) if float(alpha).is_integer() else alpha
    dtype = policy.compute_dtype
    inject_config(module, peft.LoraConfig(r=rank, lora_alpha=whole, target_modules=chosen), base=base)
    for name, weight in adapter_weights(module).items():
        weight.data = weight.data.float()
        with torch.no_grad():
            if ".lora_B." in name:
                weight.zero_()
                continue
            uniform = torch.rand(weight.shape, generator=generator_at(seed, "lora", name.removesuffix(".weight")))
            weight.copy_((uniform * 2 - 1) / math.sqrt(weight.shape[1]))
    cast_base(module, dtype)
