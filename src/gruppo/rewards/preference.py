"""Human-preference models of images as rewards: CLIP and PickScore. They read image and caption."""

from __future__ import annotations

from collections.abc import Sequence
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
    return _clip_reward("clip_score", str(model), str(model), device)


def pick_score(model: str | Path = PICKSCORE, *, device: str = "cpu") -> ImageReward:
    """PickScore: the cosine times the model's own scale, about 15 to 25 (arXiv 2305.01569)."""
    processor = PICKSCORE_PROCESSOR if str(model) == PICKSCORE else str(model)
    return _clip_reward("pick_score", str(model), processor, device)


def _clip_reward(name: str, model: str, processor: str, device: str) -> ImageReward:
    """Return a reward function of images, which are read as RGB images of Pillow, and captions."""
    import transformers

    try:
        module = transformers.CLIPModel.from_pretrained(model, use_safetensors=True)
        preprocess = transformers.CLIPProcessor.from_pretrained(processor)
    except Exception as error:  # transformers, its tokenizers and the hub raise many kinds
        raise GruppoError(f"""{name}: the CLIP model {model!r} could not be loaded:
            {transformers_error(error, "model")} Set model= to a folder with a CLIP model in
            safetensors and its processor, or to a hub id that this machine can reach. Image
            processors need {install_command("images")}.""") from error
    module.requires_grad_(False).eval().to(device)
    scale = float(module.logit_scale.exp()) if name == "pick_score" else 1.0

    @torch.no_grad()
    def reward(images: Sequence[Tensor], prompts: Sequence[Any], **_: Any) -> list[float | None]:
        scores: list[float | None] = [NAN] * len(images)
        for n, (image, prompt) in enumerate(zip(images, prompts, strict=True)):
            if not isinstance(prompt, Sequence):
                raise GruppoError(f"""{name} reads captions, and a prompt is {prompt!r:.60}
                    ({type(prompt).__name__}). Use data with captions, or the reward classifier for
                    classes.""")
            if bool(image.isfinite().all()):
                inputs = preprocess(
                    text=[plain_text(prompt).strip()],
                    images=[to_pillow(image).convert("RGB")],
                    return_tensors="pt",
                    padding=True,
                    truncation=True,
                )
                output = module(**inputs.to(device))
                cosine = torch.cosine_similarity(output.image_embeds, output.text_embeds)
                scores[n] = scale * float(cosine)
        return scores

    reward.__name__ = name
    reward.timeout_s = None  # type: ignore[attr-defined]  # a forward pass is waited for
    return reward
