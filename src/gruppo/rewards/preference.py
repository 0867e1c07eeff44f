"""Human-preference models of images as rewards: CLIP and PickScore. They read image and caption."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gruppo.core.images import to_pillow
from gruppo.loading import install_command, transformers_error
from gruppo.rewards.images import NAN, ImageReward
from gruppo.rewards.models import plain_text
from gruppo.types import GruppoError

CLIP = "openai/clip-vit-large-patch14"
PICKSCORE = "yuvalkirstain/PickScore_v1"
PICKSCORE_PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"


def clip_score(model: str | Path = CLIP, *, device: str = "cpu") -> ImageReward:
    """Cosine of image and caption under a CLIP model, a folder or a hub id: -1 to 1 (arXiv
    2104.08718).

    Captions longer than the model's context are truncated. Text painted into the image is read as
    if it were shown.
    """
    module, preprocess = _clip("clip_score", str(model), str(model), device)
    return _per_image("clip_score", lambda *pair: _cosine(module, preprocess, *pair))


def pick_score(model: str | Path = PICKSCORE, *, device: str = "cpu") -> ImageReward:
    """PickScore: the cosine times the model's own scale, about 15 to 25 (arXiv 2305.01569)."""
    processor = PICKSCORE_PROCESSOR if str(model) == PICKSCORE else str(model)
    module, preprocess = _clip("pick_score", str(model), processor, device)
    scale = float(module.logit_scale.exp())
    return _per_image("pick_score", lambda *pair: scale * _cosine(module, preprocess, *pair))


def _clip(reward: str, model: str, processor: str, device: str) -> tuple[Any, Any]:
    """A CLIP model and its processor."""
    import transformers

    try:
        module = transformers.CLIPModel.from_pretrained(model, use_safetensors=True)
        preprocess = transformers.CLIPProcessor.from_pretrained(processor)
    except Exception as error:  # transformers, its tokenizers and the hub raise many kinds
        raise GruppoError(f"""{reward}: the CLIP model {model!r} could not be loaded:
            {transformers_error(error, "model")} Set model= to a folder with a CLIP model in
            safetensors and its processor, or to a hub id that this machine can reach. Image
            processors need {install_command("images")}.""") from error
    return module.requires_grad_(False).eval().to(device), preprocess


def _cosine(module: Any, preprocess: Any, caption: str, image: Any) -> float:
    inputs = preprocess(
        text=[caption], images=[image], return_tensors="pt", padding=True, truncation=True
    )
    output = module(**inputs.to(module.device))
    return float(torch.cosine_similarity(output.image_embeds, output.text_embeds))


def _per_image(name: str, score: Callable[[str, Any], float]) -> ImageReward:
    """Return a reward function that scores each caption and image, an RGB image of Pillow."""

    @torch.no_grad()
    def reward(images: Sequence[Tensor], prompts: Sequence[Any], **_: Any) -> list[float | None]:
        scores: list[float | None] = []
        for image, prompt in zip(images, prompts, strict=True):
            if not isinstance(prompt, Sequence):
                raise GruppoError(f"""{name} reads captions, and a prompt is {prompt!r:.60}
                    ({type(prompt).__name__}). Use data with captions, or the reward classifier for
                    classes.""")
            is_finite = bool(image.isfinite().all())
            picture = to_pillow(image).convert("RGB") if is_finite else None
            scores.append(float(score(plain_text(prompt).strip(), picture)) if is_finite else NAN)
        return scores

    reward.__name__ = name
    reward.timeout_s = None  # type: ignore[attr-defined]  # a forward pass is waited for
    return reward
