"""Image restoration: a start for your own images, photographs and text, and a staged run."""

from __future__ import annotations

from dataclasses import replace

from gruppo.config.schema import (
    SUPERVISED,
    Config,
    EvaluationConfig,
    OptimConfig,
    RolloutConfig,
    SavingConfig,
    Stage,
    SupervisedConfig,
)
from gruppo.core.objective import Objective
from gruppo.modalities.restoration.config import RestorationConfig

EXACT_KL = Objective(kl="exact")
"""GRPO with the closed-form KL; the clip applies to an action's joint density, which has few
dimensions."""


def restore() -> Config:
    """Neutral settings for your own degraded images and reward: a new UNet, supervised, then GRPO.

    gruppo train restore --data degrade:FOLDER:noise=25 --reward my.py:f, or pairs:DEGRADED:CLEAN;
    --model RUN or restore:my.py:Network for your own network. Clean images train the network until
    PSNR no longer rises; rewards then train the action, four gains of detail per grid cell, and the
    network is frozen. If a reward is differentiable, follow its gradient instead of a policy
    gradient. Hardware, wall time and curve depend on your images.
    """
    return Config(
        model="restore:unet",
        data="photos:noise=25",
        reward=("psnr",),
        steps=3000,
        modality=RestorationConfig(
            action="band_gains:grid=8,std=0.15", supervises="base", action_lr_factor=2.0
        ),
        objective=EXACT_KL,
        rollout=RolloutConfig(prompts=16, group_size=8),
        optim=OptimConfig(lr=1e-3),
        stages=(
            replace(
                SUPERVISED,
                steps=2800,
                lr="cosine:1e-3,1e-5",
                until="eval/psnr flat 4",
            ),
            Stage("full", kl_coef=0.01, lr=1e-3, new_reference=True),
        ),
        supervised=SupervisedConfig(batch=16),
        evaluation=EvaluationConfig(prompts=64, every=200),
        saving=SavingConfig(every=500, keep=1),
        show_samples_every=100,
    )
