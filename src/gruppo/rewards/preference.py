"""Models of what people prefer, as rewards: CLIP, PickScore, HPS v2 and ImageReward. They read image and caption.

CLIP and PickScore are loaded by transformers; HPS and ImageReward come as packages of their own with versions pinned,
which are no extra of gruppo, and read checkpoints that are pickles: theirs, not ours.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gruppo.rewards.images import NAN, ImageReward, is_picture, named, to_pillow
from gruppo.rewards.models import plain
from gruppo.types import GruppoError

Score = Callable[[str, list[Any]], Sequence[float]]
"""Of a caption and its images."""

CLIP = "openai/clip-vit-large-patch14"
PICKSCORE, PICKSCORE_PROCESSOR = "yuvalkirstain/PickScore_v1", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"


def clip_score(model: str | Path = CLIP, *, batch: int = 32, device: str = "cpu") -> ImageReward:
    """Cosine of image and caption under a CLIP model, a folder or a hub id: -1 to 1 (arXiv 2104.08718).

    Captions of more than the model's tokens are cut. Text painted into the image is read as if it were shown.
    """
    return _by_clip("clip_score", str(model), str(model), 1.0, batch, device)


def pick_score(
    model: str | Path = PICKSCORE, processor: str | Path = "", *, batch: int = 32, device: str = "cpu"
) -> ImageReward:
    """PickScore: the cosine times the model's own scale, about 15 to 25 (arXiv 2305.01569).

    ``processor``: the model's own where it is a folder of yours, else that of the CLIP it was trained from.
    """
    own = PICKSCORE_PROCESSOR if str(model) == PICKSCORE else str(model)
    return _by_clip("pick_score", str(model), str(processor) or own, None, batch, device)


def hps_score(version: str = "v2.1") -> ImageReward:
    """Human Preference Score v2 by the package hpsv2, about 0.2 to 0.35 (arXiv 2306.09341)."""
    package = _package("hpsv2", "hps_score")

    def score(caption: str, files: list[str]) -> Sequence[float]:
        return package.score(files, caption, hps_version=version)

    return _of_captions("hps_score", _from_files(score))


def image_reward(version: str = "ImageReward-v1.0", *, device: str = "cpu") -> ImageReward:
    """ImageReward by the package image-reward: standardised, so about -2 to 2 (arXiv 2304.05977)."""
    model = _package("ImageReward", "image_reward", "image-reward").load(version, device=device)

    def score(caption: str, files: list[str]) -> Sequence[float]:
        with torch.no_grad():
            return [float(model.score(caption, file)) for file in files]

    return _of_captions("image_reward", _from_files(score))


# --- CLIP -------------------------------------------------------------------------------------------------------------


def _by_clip(name: str, model: str, processor: str, scale: float | None, batch: int, device: str) -> ImageReward:
    """``scale``: of the cosine; None is the model's own."""
    module, read = _loaded_clip(name, model, processor)
    module.requires_grad_(False).eval().to(device)
    factor = float(module.logit_scale.exp()) if scale is None else scale

    @torch.no_grad()
    def score(caption: str, images: list[Any]) -> list[float]:
        found: list[float] = []
        for start in range(0, len(images), batch):
            part = images[start : start + batch]
            inputs = read(text=[caption], images=part, return_tensors="pt", padding=True, truncation=True)
            said = module.eval()(**inputs.to(device))
            cosines = torch.nn.functional.cosine_similarity(said.image_embeds, said.text_embeds)  # [part]
            found += (factor * cosines.double()).tolist()
        return found

    return _of_captions(name, score)


def _loaded_clip(name: str, model: str, processor: str) -> tuple[Any, Any]:
    import transformers
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    try:
        module = transformers.CLIPModel.from_pretrained(model, use_safetensors=True)
        return module, transformers.CLIPProcessor.from_pretrained(processor)
    except Exception as error:  # whatever transformers, its tokenizers and the hub raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise GruppoError(
            f"{name}: the CLIP model {model!r} could not be loaded: {reason} Give model=, a folder with a CLIP model "
            "in safetensors and its processor, or a hub id that this machine can reach; what reads images comes with "
            'pip install "gruppo[images]".'
        ) from error


# --- how they are called ----------------------------------------------------------------------------------------------


def _of_captions(name: str, score: Score) -> ImageReward:
    """Images of one caption are scored in one call."""

    def reward(images: Sequence[Tensor], prompts: Sequence[Any], **_: Any) -> list[float | None]:
        captions = [caption_of(prompt, name) for prompt in prompts]
        scores: list[float | None] = [NAN] * len(images)
        for caption in dict.fromkeys(captions):
            rows = [n for n, own in enumerate(captions) if own == caption and is_picture(images[n])]
            given = score(caption, [to_pillow(images[n]).convert("RGB") for n in rows]) if rows else []
            for n, value in zip(rows, given, strict=True):
                scores[n] = float(value)
        return scores

    return named(reward, name, is_waited_for=True)


def caption_of(prompt: Any, name: str) -> str:
    """A caption, or the words of a conversation."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence):
        return plain(prompt).strip()
    raise GruppoError(
        f"{name} reads captions, and a prompt is {prompt!r:.60} ({type(prompt).__name__}). Use data with captions, or "
        "the reward classifier for classes."
    )


def _from_files(score: Callable[[str, list[str]], Sequence[float]]) -> Score:
    """For a model that reads files: each image as the PNG that a run would save."""

    def of_images(caption: str, images: list[Any]) -> Sequence[float]:
        with tempfile.TemporaryDirectory(prefix="gruppo-images-") as folder:
            files = [f"{folder}/{n}.png" for n in range(len(images))]
            for image, file in zip(images, files, strict=True):
                image.save(file)
            return score(caption, files)

    return of_images


def _package(module: str, reward: str, install: str = "") -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise GruppoError(
            f'{reward} needs the package "{install or module}" ({error}); run: pip install {install or module}'
        ) from error
