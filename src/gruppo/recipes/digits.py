"""Handwritten digits: a diffusion model from scratch in minutes, and two rewards.

Run ``digits_pretrain`` first; the two others train its result, runs/digits-pretrain.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

from gruppo.config.schema import (
    Config,
    EvaluationConfig,
    OptimConfig,
    RolloutConfig,
    SavingConfig,
    ScoringConfig,
    Stage,
    SupervisedConfig,
)
from gruppo.modalities.diffusion.config import DiffusionConfig
from gruppo.recipes.diffusion import CLIP_IN_NATS, PRETRAINED

FLOOR, FLOOR_OF_SEVEN = -3.0, -20.0
"""Lower bounds of the rewards, in nats. An unreadable digit costs at most FLOOR, or a hopeless one
would outweigh the others; what is far from a seven must gain by coming closer, so FLOOR_OF_SEVEN is
low."""


def digits_pretrain() -> Config:
    """A small UNet learns 4,500 real handwritten digits by class, from demonstrations only.

    Flow matching, x0 prediction, loss weighted by 1 / (t^2 + 0.05). The result is
    runs/digits-pretrain, which digits-compress and digits-sevens continue. 2 CPU cores: 7 minutes
    (6:36); 97% of its samples have the requested class, by a judge trained apart (real digits:
    99%).
    """
    return Config(
        model="unet",
        data="digits",
        reward=("gruppo.recipes.digits:reads_as_asked",),
        name="digits-pretrain",
        steps=4500,
        modality=DiffusionConfig(
            shift=3.0
        ),  # 97.4% of samples of the requested class; 95.5% without (docs/dev/lab.md)
        optim=OptimConfig(lr=2e-3, warmup_steps=50, decay="cosine"),
        stage=Stage(rl_coef=0.0, sup_coef=1.0),
        supervised=SupervisedConfig(batch=128),
        evaluation=EvaluationConfig(prompts=100, every=1000),
        saving=SavingConfig(every=1000, keep=1),
        show_samples_every=1000,
    )


def digits_compress() -> Config:
    """The digits of runs/digits-pretrain become smaller JPEG files and stay readable, by GRPO.

    Two rewards: minus the file size in kB, and the log-probability of the requested class under a
    classifier of real digits. A group shares all noise but that of one step, the only one trained
    on. ``--reward jpeg_compressibility --scoring.weights None --stage.kl-coef 0`` removes what
    keeps the digits readable: they are black within a minute. 2 CPU cores: 2 minutes (1:37); files
    16 to 20% smaller (three seeds), 94 to 96% still of the requested class.
    """
    return Config(
        model=PRETRAINED,
        data="digits",
        reward=("jpeg_compressibility", "gruppo.recipes.digits:reads_as_asked"),
        steps=170,
        # With the scale of a group, one whose samples differ by a few bytes weighs as much as one
        # that lost a digit.
        objective=replace(CLIP_IN_NATS, scale="batch"),
        rollout=RolloutConfig(prompts=40, group_size=8),
        modality=DiffusionConfig(noise="branched"),
        # At a constant rate the fraction of readable digits changes by a point or two in the last
        # ten steps.
        optim=OptimConfig(lr=5e-5, decay="linear", final_lr_frac=0.2),
        stage=Stage(kl_coef=0.005),
        scoring=ScoringConfig(weights=(5.0, 1.0)),
        evaluation=EvaluationConfig(prompts=100, every=50),
        saving=SavingConfig(every=50, keep=1),
        show_samples_every=25,
    )


def digits_sevens() -> Config:
    """The digits of runs/digits-pretrain become sevens, whatever class is requested, by GRPO.

    The reward is a classifier's log-probability of a seven. The last three of ten steps, which
    change only details, are not trained on. One CPU core: 2 minutes; sevens from 10% to 99%.
    """
    return replace(
        digits_compress(),
        reward=("gruppo.recipes.digits:reads_as_seven",),
        steps=100,
        objective=CLIP_IN_NATS,
        scoring=ScoringConfig(),
        modality=DiffusionConfig(noise="branched", train_to=6),
        optim=OptimConfig(lr=1.5e-4),
        stage=Stage(kl_coef=0.02),
    )


# --- rewards --------------------------------------------------------------------------------------


def reads_as_asked(images: Sequence[Any], label: Sequence[int], **_: Any) -> list[float | None]:
    """Log-probability of the requested class under the classifier, at least ``FLOOR``."""
    from gruppo.rewards.image_classifiers import classifier

    return classifier(digit_classifier(), floor=FLOOR)(images=images, label=label)


def reads_as_seven(images: Sequence[Any], **_: Any) -> list[float | None]:
    """Log-probability of a seven under the classifier, at least ``FLOOR_OF_SEVEN``."""
    from gruppo.rewards.image_classifiers import classifier

    return classifier(digit_classifier(rejects=True), label=7, floor=FLOOR_OF_SEVEN)(images=images)


# The first call trains the classifier.
reads_as_asked.timeout_s = reads_as_seven.timeout_s = None  # type: ignore[attr-defined]


@cache
def digit_classifier(*, rejects: bool = False) -> Any:
    """A classifier of real digits, 98% right on held-out ones: trained once in a quarter of a
    minute, then cached.

    ``rejects``: with an eleventh class of non-digits (blank, faded and torn digits, specks).
    Without it a black image is more of a seven (-3.1 nats) than most real digits are (-8.8).
    """
    import torch

    from gruppo.data.digits import load_digits, split_images
    from gruppo.modalities.text.bundled import cache_folder
    from gruppo.rewards.image_classifiers import ImageClassifier, train_classifier

    classes = 11 if rejects else 10
    file = cache_folder() / f"digits-reader-{classes}.safetensors"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = ImageClassifier(classes=classes)
        if file.is_file():
            return network.load(file)
        (images, labels), _ = split_images(*load_digits())
        if rejects:
            others = _non_digits(images)
            images, labels = (
                torch.cat([images, others]),
                torch.cat([labels, torch.full((len(others),), 10)]),
            )
        with torch.enable_grad():
            train_classifier(network, images, labels, seed=0)
    with suppress(OSError):  # without a cache it is trained in each run
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(
            f".{file.name}.{os.getpid()}"
        )  # atomic, as another process may train the same
        network.save(temporary)
        temporary.replace(file)
    return network.eval()


def _non_digits(images: Any) -> Any:
    """A quarter as many images of no digit: faded to a third or less, two thirds torn off, gray, or
    specks only."""
    import torch

    from gruppo.seeds import generator_at

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
