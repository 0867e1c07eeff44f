"""Diffusion models: a starting point for your own model and reward, and DDPO's compressibility
task."""

from __future__ import annotations

from gruppo.config.schema import (
    Config,
    EvaluationConfig,
    OptimConfig,
    RolloutConfig,
    SavingConfig,
    Stage,
)
from gruppo.core.objective import Objective
from gruppo.modalities.diffusion.config import DiffusionConfig

PRETRAINED = "runs/digits-pretrain"
"""What ``gruppo train digits-pretrain`` writes."""
CLIP_IN_NATS = Objective(kl="exact", clip_unit="nats", clip_low=1.0, clip_high=1.0)
"""GRPO with the closed-form KL, clipped in nats of a step's joint density."""


def images() -> Config:
    """Neutral settings for your own image model, data and reward: GRPO, 4 prompts x 8 images a
    step, branched noise.

    gruppo train images --model FOLDER --data images:FOLDER --reward my.py:f. Train a diffusers
    pipeline with --lora.rank 16 --optim.lr 1e-4, and sample it with its usual guidance
    (--diffusion.guidance 5). Hardware, wall time and curve depend on your model and data.
    """
    return Config(
        objective=CLIP_IN_NATS,
        rollout=RolloutConfig(prompts=4, group_size=8),
        modality=DiffusionConfig(noise="branched"),
        optim=OptimConfig(lr=1e-5, warmup_steps=5),
        stage=Stage(kl_coef=0.01),
        evaluation=EvaluationConfig(prompts=16, every=50),
        saving=SavingConfig(every=20),
    )
