"""Stable Diffusion and FLUX, as ``diffusers`` has them: a policy over a pipeline's UNet or transformer."""

from __future__ import annotations

import copy
import difflib
import json
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path as FilePath
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gruppo.loading import import_extra
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
from gruppo.modalities.diffusion.families import FAMILIES, CallOf, Family, Parts, PipelineSettings
from gruppo.modalities.diffusion.pictures import latent_of, pictures_of
from gruppo.modalities.diffusion.policy import DenoiserPolicy
from gruppo.modalities.diffusion.sampling import DiffusionSampling
from gruppo.seeds import generator_at
from gruppo.types import GruppoError, Prompt, Sampling

SETTINGS = "gruppo.json"
CAPTIONS_KEPT = 64
"""Encoded captions that are remembered; one of FLUX is 8 MB."""


class DiffusersPolicy(DenoiserPolicy):
    """A pipeline's denoising network: it is trained, or its adapters are; text encoders and VAE are frozen.

    States are latents, float32, at the levels of noise of the pipeline's scheduler. ``module`` is the network itself.
    Prompts are captions, each encoded once. Pictures are decoded one at a time.
    """

    batch_rows = 8
    """Rows denoised together."""
    supports = frozenset({"demonstrations", "lora", "separate_critic", "shared_critic"})

    def __init__(self, pipeline: Any, settings: PipelineSettings | None = None) -> None:
        settings = settings or PipelineSettings()
        family_of = FAMILIES.get(type(pipeline).__name__)
        if family_of is None:
            raise GruppoError(
                f"a {type(pipeline).__name__} is not a pipeline that can be trained; it needs to be one of "
                f"{', '.join(FAMILIES)}. Load it with that class."
            )
        size = settings.size or _own_size(pipeline, getattr(pipeline, family_of.network))
        family = family_of(pipeline, settings, size)
        network = getattr(pipeline, family.network)
        _check_fits(pipeline, family, network, size)
        self.pipeline, self.settings, self.network_name = pipeline, replace(settings, size=size), family.network
        _freeze_all_but(pipeline, network)
        captions = Captions(family, settings.dropped if family.has_guidance else 0.0)
        scale, path = pipeline.vae_scale_factor, family.path()
        super().__init__(
            network,
            (family.latent_channels(), size[0] // scale, size[1] // scale),
            predicts=path.predicts,
            path=path,
            condition=captions,
            weighting=settings.weighting,
            middle=family.middle,
            call=CallOf(family, captions.shapes),
            codec=Vae(pipeline.vae, (3, *size)),
        )

    def check_prompt(self, prompt: Prompt, sampling: Sampling) -> str | None:
        """Why this prompt cannot be sampled from, or None; nothing is encoded."""
        if isinstance(prompt.inputs, str):
            return None
        return f"prompt {prompt.id!r}: {_no_caption(prompt.inputs)}"

    def check_sampling(self, sampling: Sampling) -> DiffusionSampling:
        sampling = DiffusionSampling.of(sampling)
        if sampling.guidance != 1 and not FAMILIES[type(self.pipeline).__name__].has_guidance:
            raise GruppoError(
                f"guidance={sampling.guidance:g} is classifier-free, and FLUX is told its guidance as a number. Set "
                f"guidance 1, and PipelineSettings(embedded_guidance={sampling.guidance:g})."
            )
        return super().check_sampling(sampling)

    def to(self, device: torch.device) -> None:
        self.pipeline.to(device)

    def default_budget(self) -> int:
        return 8

    def memory_estimate(self, config: Any, prompts: Sequence[Prompt], budget: int, group_size: int) -> dict[str, float]:
        parts = [p for p in self.pipeline.components.values() if isinstance(p, nn.Module) and p is not self.module]
        size = sum(p.numel() * p.element_size() for part in parts for p in part.parameters())
        return {"text encoders and VAE": float(size)} if parts else {}

    def checkpoint_weights(self) -> dict[str, Tensor]:
        """Of a network with adapters, the trained adapter alone."""
        if has_adapter(self.module):
            return {name: p.detach().contiguous() for name, p in self.module.named_parameters() if p.requires_grad}
        return super().checkpoint_weights()

    def frozen_base(self) -> dict[str, Tensor]:
        return base_weights(self.module) if has_adapter(self.module) else {}

    @property
    def base_sha256(self) -> str | None:
        base = base_of(self.module)
        return None if base is None else base.sha256

    def save(self, folder: FilePath) -> None:
        """A pipeline that ``diffusers.DiffusionPipeline.from_pretrained`` opens, with the weights as trained.

        Adapters are merged into a copy of the network, and beside it for ``pipeline.load_lora_weights(folder)`` on the
        base. ``load_diffusers`` opens the folder here.
        """
        folder = FilePath(folder)
        shown, network = copy.copy(self.pipeline), self.module
        if has_adapter(self.module):
            network = copy.deepcopy(self.module)
            merge(network)
        setattr(shown, self.network_name, network)
        shown.save_pretrained(folder)
        (folder / SETTINGS).write_text(json.dumps(asdict(self.settings), indent=1), encoding="utf-8")
        if has_adapter(self.module):
            self._save_adapter(folder)

    def _save_adapter(self, folder: FilePath) -> None:
        own: Any = self.module
        config = own.peft_config[POLICY].to_dict()
        config["target_modules"] = sorted(config["target_modules"])
        type(self.pipeline).save_lora_weights(
            folder,
            **{
                f"{self.network_name}_lora_layers": dict(adapter_weights(self.module)),
                f"{self.network_name}_lora_adapter_metadata": {
                    name: config[name] for name in ("r", "lora_alpha", "target_modules")
                },
            },
        )


# --- making one -------------------------------------------------------------------------------------------------------


def load_diffusers(
    place: str | FilePath, settings: PipelineSettings | None = None, *, dtype: torch.dtype = torch.float32
) -> DiffusersPolicy:
    """The policy of a pipeline's folder or hub id; a folder that ``save`` wrote has its settings."""
    diffusers = import_extra("diffusers", "diffusion", "an image pipeline")
    logging = diffusers.utils.logging
    has_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        left_out = _left_out(FilePath(place) / "model_index.json")
        pipeline = diffusers.DiffusionPipeline.from_pretrained(str(place), dtype=dtype, **left_out)
    except (OSError, ValueError, AttributeError, ImportError) as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise GruppoError(
            f"{place} is no pipeline that diffusers opens: {why} It needs a folder with model_index.json, as "
            "policy.save(folder) writes it, or a hub id."
        ) from None
    finally:
        if has_bar:
            logging.enable_progress_bar()
    kept = FilePath(place) / SETTINGS
    if settings is None and kept.is_file():
        settings = _read_settings(kept)
    return DiffusersPolicy(pipeline, settings)


def _read_settings(file: FilePath) -> PipelineSettings:
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        return PipelineSettings(**{**said, "size": tuple(said["size"])})
    except (ValueError, TypeError, KeyError) as error:
        raise GruppoError(
            f"{file} holds no settings of a pipeline: {error}. Delete it, and give load_diffusers its settings."
        ) from None


def _left_out(index: FilePath) -> dict[str, None]:
    """Parts that a saved pipeline was without, SD 3's T5 for one; diffusers asks to be told again."""
    said = json.loads(index.read_text(encoding="utf-8")) if index.is_file() else {}
    return {name: None for name, place in said.items() if place == [None, None]}


def add_adapter(
    policy: DiffusersPolicy, *, rank: int, alpha: float, targets: Sequence[str] = (), seed: int = 0, base: str = ""
) -> None:
    """Give the network's linear layers an adapter, and freeze all else; the policy stays what it was.

    ``targets``: names of layers, or their last parts; without any, all projections of attention. The base keeps the
    dtype that it has, and adapters are float32 where that is less.
    """
    module = policy.module
    peft = import_extra("peft", "lora", "LoRA (lora.rank)")
    if has_adapter(module):
        raise GruppoError("the network has an adapter already. Train that one, and leave --lora.rank out.")
    chosen = _checked_targets(module, targets) if targets else list(FAMILIES[type(policy.pipeline).__name__].targets)
    whole = int(alpha) if float(alpha).is_integer() else alpha
    dtype = policy.compute_dtype
    inject_config(module, peft.LoraConfig(r=rank, lora_alpha=whole, target_modules=sorted(chosen)), base=base)
    for name, weight in adapter_weights(module).items():
        weight.data = weight.data.float()
        with torch.no_grad():
            if ".lora_B." in name:
                weight.zero_()
                continue
            drawn = torch.rand(weight.shape, generator=generator_at(seed, "lora", name.removesuffix(".weight")))
            weight.copy_((drawn * 2 - 1) / math.sqrt(weight.shape[1]))
    cast_base(module, dtype)


def _checked_targets(module: nn.Module, targets: Sequence[str]) -> list[str]:
    parts = dict(module.named_modules())
    known = sorted({name.rpartition(".")[2] for name, part in parts.items() if is_linear(part)})
    for target in targets:
        named = [part for name, part in parts.items() if name == target or name.endswith(f".{target}")]
        if not named or not all(map(is_linear, named)):
            near = difflib.get_close_matches(target, known, 1)
            guess = f"Did you mean {near[0]}?" if near else f"Set --lora.targets to some of {', '.join(known)}."
            raise GruppoError(f"lora.targets: the network has no linear layers {target!r}. {guess}")
    return list(targets)


def _own_size(pipeline: Any, network: Any) -> tuple[int, int]:
    """Height and width in pixels."""
    sample = getattr(network.config, "sample_size", None) or pipeline.default_sample_size
    height, width = (sample, sample) if isinstance(sample, int) else sample
    return height * pipeline.vae_scale_factor, width * pipeline.vae_scale_factor


def _check_fits(pipeline: Any, family: Family, network: Any, size: tuple[int, int]) -> None:
    if min(size) < 1 or any(side % family.patch for side in size):
        raise GruppoError(
            f"size={size[0]} x {size[1]} does not fit the pipeline; both sides need to be multiples of {family.patch}."
            " Set such a size."
        )
    if family.latent_channels() != pipeline.vae.config.latent_channels:
        raise GruppoError(
            f"the network reads {family.latent_channels()} channels and the VAE has "
            f"{pipeline.vae.config.latent_channels}: it is for inpainting or editing. Give a pipeline from text alone."
        )
    if network.config.get("time_cond_proj_dim"):
        raise GruppoError(
            "the UNet is told its guidance as a number (a latent consistency model), which is not built here. Give "
            "the pipeline that it was distilled from."
        )
    if has_adapter(network) and base_of(network) is None:
        raise GruppoError(
            "the pipeline has LoRA weights loaded. Call pipeline.fuse_lora() and pipeline.unload_lora_weights() first."
        )


def _freeze_all_but(pipeline: Any, network: nn.Module) -> None:
    for part in pipeline.components.values():
        if isinstance(part, nn.Module) and part is not network:
            part.requires_grad_(False).eval()


# --- captions and pictures --------------------------------------------------------------------------------------------


class Captions:
    """Captions as all that a family's encoders say of them, packed into one row of numbers; float32, on the CPU."""

    def __init__(self, family: Family, dropped: float) -> None:
        if not 0 <= dropped < 1:
            raise GruppoError(f"dropped={dropped} is out of range; it needs 0 up to below 1. Use 0.1 for guidance.")
        self._family, self.dropped = family, dropped
        with torch.no_grad():
            parts = family.uncaptioned()
        self.shapes = tuple(part.shape[1:] for part in parts)
        self._nothing = _packed(parts)
        self._kept: OrderedDict[str, Tensor] = OrderedDict()

    @torch.no_grad()
    def encode(self, inputs: Any) -> Float[Tensor, "numbers"]:
        if not isinstance(inputs, str):
            raise GruppoError(_no_caption(inputs))
        if inputs not in self._kept:
            self._kept[inputs] = _packed(self._family.captioned(inputs))
            if len(self._kept) > CAPTIONS_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(inputs)
        return self._kept[inputs]

    def nothing(self) -> Float[Tensor, "numbers"]:
        return self._nothing


def _packed(parts: Parts) -> Float[Tensor, "numbers"]:
    return torch.cat([part[0].float().cpu().flatten() for part in parts])


def _no_caption(inputs: Any) -> str:
    return f"a {type(inputs).__name__} is no caption: {inputs!r:.80}. Ask with a string."


class Vae:
    """Latents as the network knows them: scaled and shifted as the VAE's config says."""

    def __init__(self, vae: Any, picture_shape: tuple[int, ...]) -> None:
        self._vae, self.picture_shape = vae, picture_shape
        if vae.dtype == torch.float16 and getattr(vae.config, "force_upcast", False):
            vae.float()  # SDXL's overflows

    @torch.no_grad()
    def encode(self, picture: Tensor) -> Float[Tensor, "c h w"]:
        """Of the most likely latent: nothing is drawn."""
        x = latent_of(picture)[None].to(self._vae.device, self._vae.dtype)
        scale, shift = self._numbers()
        return ((self._vae.encode(x).latent_dist.mode().float().cpu() - shift) * scale)[0]

    @torch.no_grad()
    def decode(self, states: Float[Tensor, "B c h w"]) -> Float[Tensor, "B 3 H W"]:
        scale, shift = self._numbers()
        latents = (states.float() / scale + shift).to(self._vae.device, self._vae.dtype)
        decoded = [self._vae.decode(latent[None], return_dict=False)[0].float().cpu() for latent in latents]
        return pictures_of(torch.cat(decoded).nan_to_num())

    def _numbers(self) -> tuple[Tensor, Tensor]:
        """What latents are multiplied by, and what is taken from them before; [1] or [c, 1, 1]."""
        config = self._vae.config
        scale = torch.tensor([float(config.scaling_factor)])
        if getattr(config, "latents_mean", None) is not None and getattr(config, "latents_std", None) is not None:
            mean, std = (
                torch.tensor(numbers).reshape(-1, 1, 1) for numbers in (config.latents_mean, config.latents_std)
            )
            return scale / std, mean
        return scale, torch.tensor([float(getattr(config, "shift_factor", None) or 0)])
