"""Human-preference models of images as rewards: CLIP, PickScore, HPS v2 and ImageReward. They read
image and caption.

CLIP and PickScore are loaded by transformers. HPS and ImageReward are packages with pinned versions
of their own, which are therefore no extra of gruppo, and load checkpoints that are pickles.
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

from gruppo.core.images import to_pillow
from gruppo.loading import install_command
from gruppo.rewards.images import NAN, ImageReward
from gruppo.rewards.models import plain_text
from gruppo.types import GruppoError

CLIP = "openai/clip-vit-large-patch14"
PICKSCORE, PICKSCORE_PROCESSOR = (
    "yuvalkirstain/PickScore_v1",
    "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
)


def clip_score(model: str | Path = CLIP, *, batch: int = 32, device: str = "cpu") -> ImageReward:
    """Cosine of image and caption under a CLIP model, a folder or a hub id: -1 to 1 (arXiv
    2104.08718).

    Captions longer than the model's context are truncated. Text painted into the image is read as
    if it were shown.
    """
    return _clip_reward("clip_score", str(model), str(model), 1.0, batch, device)


def pick_score(
    model: str | Path = PICKSCORE,
    processor: str | Path = "",
    *,
    batch: int = 32,
    device: str = "cpu",
) -> ImageReward:
    """PickScore: the cosine times the model's own scale, about 15 to 25 (arXiv 2305.01569).

    ``processor``: by default that in the model's folder, or for PickScore's hub id that of the CLIP
    it started from.
    """
    default = PICKSCORE_PROCESSOR if str(model) == PICKSCORE else str(model)
    return _clip_reward("pick_score", str(model), str(processor) or default, None, batch, device)


def hps_score(version: str = "v2.1") -> ImageReward:
    """Human Preference Score v2 by the package hpsv2, about 0.2 to 0.35 (arXiv 2306.09341)."""
    package = _package("hpsv2", "hps_score", "hpsv2")
    score = lambda caption, files: package.score(files, caption, hps_version=version)  # noqa: E731
    return _per_caption("hps_score", score, reads_files=True)


def image_reward(version: str = "ImageReward-v1.0", *, device: str = "cpu") -> ImageReward:
    """ImageReward by the package image-reward: standardized, so about -2 to 2 (arXiv
    2304.05977)."""
    model = _package("ImageReward", "image_reward", "image-reward").load(version, device=device)
    score = lambda caption, files: [float(model.score(caption, file)) for file in files]  # noqa: E731
    return _per_caption("image_reward", score, reads_files=True)


def _package(module: str, reward: str, install: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise GruppoError(
            f'{reward} needs the package "{install}" ({error}); run: pip install {install}'
        ) from error


def _clip_reward(
    name: str, model: str, processor: str, scale: float | None, batch: int, device: str
) -> ImageReward:
    """Load a CLIP model as a reward. ``scale`` multiplies the cosine; None: the model's own
    scale."""
    import transformers
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    try:
        module = transformers.CLIPModel.from_pretrained(model, use_safetensors=True)
        preprocess = transformers.CLIPProcessor.from_pretrained(processor)
    except Exception as error:  # transformers, its tokenizers and the hub raise many kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise GruppoError(f"""{name}: the CLIP model {model!r} could not be loaded: {reason} Set model= to a folder with
            a CLIP model in safetensors and its processor, or to a hub id that this machine can reach. Image processors
            need {install_command("images")}.""") from error
    module.requires_grad_(False).eval().to(device)
    factor = float(module.logit_scale.exp()) if scale is None else scale

    def score(caption: str, images: list[Any]) -> list[float]:
        scores: list[float] = []
        for start in range(0, len(images), batch):
            part = images[start : start + batch]
            inputs = preprocess(
                text=[caption], images=part, return_tensors="pt", padding=True, truncation=True
            )
            output = module.eval()(**inputs.to(device))
            cosines = torch.nn.functional.cosine_similarity(
                output.image_embeds, output.text_embeds
            )  # [part]
            scores += (factor * cosines.double()).tolist()
        return scores

    return _per_caption(name, score)


def _per_caption(
    name: str, score: Callable[[str, list], Sequence[float]], *, reads_files: bool = False
) -> ImageReward:
    """Return a reward function that scores the images of one caption at once. ``reads_files``: as
    PNG files."""

    @torch.no_grad()
    def reward(images: Sequence[Tensor], prompts: Sequence[Any], **_: Any) -> list[float | None]:
        captions = []
        for prompt in prompts:
            if not isinstance(prompt, Sequence):
                problem = (
                    f"{name} reads captions, and a prompt is {prompt!r:.60} "
                    f"({type(prompt).__name__})"
                )
                raise GruppoError(
                    f"{problem}. Use data with captions, or the reward classifier for classes."
                )
            captions.append(prompt if isinstance(prompt, str) else plain_text(prompt).strip())
        scores: list[float | None] = [NAN] * len(images)
        for caption in dict.fromkeys(captions):
            rows = [
                n
                for n, text in enumerate(captions)
                if text == caption and images[n].isfinite().all()
            ]
            inputs: list[Any] = [to_pillow(images[n]).convert("RGB") for n in rows]
            with tempfile.TemporaryDirectory(prefix="gruppo-images-") as folder:
                for n, image in enumerate(inputs if reads_files else ()):
                    inputs[n] = f"{folder}/{n}.png"
                    image.save(inputs[n])
                values = score(caption, inputs) if rows else []
            for n, value in zip(rows, values, strict=True):
                scores[n] = float(value)
        return scores

    reward.__name__, reward.timeout_s = name, None  # type: ignore[attr-defined]  # as of per_image(is_network=True)
    return reward
