"""Lines of text, restored so that a reader reads them."""

from __future__ import annotations

from gruppo.config.schema import (
    Config,
    EvaluationConfig,
    OptimConfig,
    PromptsConfig,
    RolloutConfig,
    SavingConfig,
    Stage,
    SupervisedConfig,
)
from gruppo.core.objective import Objective
from gruppo.modalities.restoration.config import RestorationConfig


def restore_text() -> Config:
    """Blind restoration: blurred, noisy lines of text with transcripts and no clean images, read by an OCR network.

    First a small UNet is told the blur and the noise of other lines, of which there are clean images. Of the lines that
    matter neither is known; what the network would be told by default, a blur of 2 and a noise of 30, is wrong for
    them. The share of characters that rapidocr reads (extras ``ocr``, ``photos``) then teaches a head what to tell it,
    and how much of the given image to keep; no gradient passes the reader, and the network rests. One CPU core: 7
    minutes (430 processor seconds), two thirds of it the reader's.
    """
    return Config(
        model="restore:unet:width=16",
        data="lines:blur=0.8-1.8,noise=5-40,count=5000,clean=no",
        reward=("ocr_accuracy",),
        steps=1060,
        modality=RestorationConfig(
            action="controls:blur=0-2.5@2,noise=0-60@30,mix=0-1@1,std=0.15,unit=true", supervises="told"
        ),
        objective=Objective(),
        rollout=RolloutConfig(prompts=12, group_size=8),
        optim=OptimConfig(lr=3e-3),
        stages=(
            Stage("supervised", steps=1000, rl_coef=0.0, sup_coef=1.0, lr="cosine:3e-3,0", warmup_steps=30),
            Stage("full", lr="linear:1.3e-3,2e-4"),
        ),
        supervised=SupervisedConfig(data="lines:blur=0-2.5,noise=0-60,count=16000,set=1", batch=16),
        prompts=PromptsConfig(held_out_fraction=0.25),
        evaluation=EvaluationConfig(prompts=256, every=1000),
        saving=SavingConfig(every=500, keep=1),
        show_samples_every=20,
    )
