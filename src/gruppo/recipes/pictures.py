"""A starting point for one's own image model and reward."""

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

CLOSE = Objective(kl="exact", clip_unit="nats", clip_low=1.0, clip_high=1.0)
"""GRPO with a KL in closed form and a clip in nats of a step's joint density."""


def pictures() -> Config:
    """Neutral settings for your own image model, data and reward: GRPO, 4 prompts x 8 pictures a step, branched noise.

    gruppo train pictures --model FOLDER --data images:FOLDER --reward my.py:f. A pipeline of diffusers is best trained
    with --lora.rank 16 --optim.lr 1e-4, and drawn with the guidance that it is used with (--diffusion.guidance 5).
    Hardware, wall time and curve are those of your model and data.
    """
    return Config(
        steps=200,
        objective=CLOSE,
        rollout=RolloutConfig(prompts=4, group_size=8),
        modality=DiffusionConfig(noise="branched"),
        optim=OptimConfig(lr=1e-5, warmup_steps=5),
        stage=Stage(kl_coef=0.01),
        evaluation=EvaluationConfig(prompts=16, every=50),
        saving=SavingConfig(every=20),
    )
