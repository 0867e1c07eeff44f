"""The digits of runs/digits-pretrain become sevens, whatever class is requested, by GRPO.

gruppo train digits-pretrain
gruppo train examples/digits_sevens.py:digits_sevens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from gruppo.config.schema import Config, OptimConfig, ScoringConfig, Stage
from gruppo.data.digits import load_digits, split_images
from gruppo.modalities.diffusion.config import DiffusionConfig
from gruppo.recipes.diffusion import CLIP_IN_NATS
from gruppo.recipes.digits import digits_compress, trained_once
from gruppo.rewards.image_classifiers import classifier
from gruppo.seeds import generator_at

FLOOR = -20.0
"""Lower bound of the reward, in nats: what is far from a seven must gain by coming closer."""


def digits_sevens() -> Config:
    """The digits of runs/digits-pretrain become sevens, whatever class is requested, by GRPO.

    The reward is a classifier's log-probability of a seven. The last three of ten steps, which
    change only details, are not trained on. One CPU core: 2 minutes; sevens from 10% to 99%.
    """
    return replace(
        digits_compress(),
        reward=(f"{__file__}:reads_as_seven",),
        steps=100,
        objective=CLIP_IN_NATS,
        scoring=ScoringConfig(),
        modality=DiffusionConfig(noise="branched", train_to=6),
        optim=OptimConfig(lr=1.5e-4),
        stage=Stage(kl_coef=0.02),
    )


def reads_as_seven(images: Sequence[Any], **_: Any) -> list[float | None]:
    """Log-probability of a seven under the classifier, at least ``FLOOR``."""
    return classifier(digit_classifier(), label=7, floor=FLOOR)(images=images)


reads_as_seven.timeout_s = None  # the first call trains the classifier


@cache
def digit_classifier() -> Any:
    """A classifier of real digits, with an eleventh class of non-digits (blank, faded and torn
    digits, specks).

    Without it a black image is more of a seven (-3.1 nats) than most real digits are (-8.8).
    """
    (images, labels), _ = split_images(*load_digits())
    others = _non_digits(images)
    labels = torch.cat([labels, torch.full((len(others),), 10)])
    return trained_once("digits-reader-11", torch.cat([images, others]), labels, classes=11)


def _non_digits(images: Any) -> Any:
    """A quarter as many images of no digit: faded to a third or less, two thirds torn off, gray, or
    specks only."""
    generator, side = generator_at(0, "no digits"), images.shape[-1]
    some = images[torch.randperm(len(images), generator=generator)[: len(images) // 4]].clone()
    faded, torn, gray, specks = some.tensor_split(4)
    uniform = partial(torch.rand, generator=generator)
    faded *= uniform(len(faded), 1, 1, 1) / 3
    kept = (torch.arange(side) - uniform(len(torn), 1) * side) % side < side // 3  # [n, side]
    torn *= torch.where(
        uniform(len(torn), 1, 1, 1) < 0.5, kept[:, None, :, None], kept[:, None, None, :]
    )
    gray = (uniform(len(gray), 1, 1, 1) ** 3).expand_as(gray)
    brightness, chance = uniform(specks.shape), uniform(specks.shape)
    return torch.cat(
        [faded, torn, gray, brightness * (chance < 0.1 * uniform(len(specks), 1, 1, 1))]
    )
