"""Diffusion models: a starting point for your own model and reward, and DDPO's compressibility
task."""

from __future__ import annotations

from gruppo.config.schema import (
    Config,
    EvaluationConfig,
    OptimConfig,
    ReferenceConfig,
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
        steps=200,
        objective=CLIP_IN_NATS,
        rollout=RolloutConfig(prompts=4, group_size=8),
        modality=DiffusionConfig(noise="branched"),
        optim=OptimConfig(lr=1e-5, warmup_steps=5),
        stage=Stage(kl_coef=0.01),
        evaluation=EvaluationConfig(prompts=16, every=50),
        saving=SavingConfig(every=20),
    )


def ddpo() -> Config:
    """A diffusion model of digits learns to make smaller JPEG files, the compressibility task of
    DDPO (20 minutes).

    Groups of 8, clip 0.2, KL 0.04 to a mixed reference. The KL is exact, the clip is in nats of a
    step's joint density, and each batch makes two updates, without which the clip has no effect.
    The reference follows the policy (0.6 of it every 50 steps), so it is no anchor; use
    --reference.kind frozen for one. The short form runs on runs/digits-pretrain, written by gruppo
    train digits-pretrain. Measured here on one thread of an AMD EPYC CPU (Zen 5): 5.5 s a step
    where nothing else runs, so 18 minutes for 200. **The reward is gamed**: held-out kB go from
    0.81 to 0.66 (step 50) and 0.46 (step 100), where nearly all images are black; 0.45 at step 150,
    soon after which the run was stopped (docs/dev/history/lab.md). digits-compress keeps them
    readable. A pipeline, on a GPU and not run here: gruppo train ddpo --model FOLDER
    --data images:FOLDER --lora.rank 4 --optim.lr 3e-4 --diffusion.steps 50 --diffusion.guidance 5.
    """
    return Config(
        model=PRETRAINED,
        data="digits",
        reward=("jpeg_compressibility",),
        steps=200,
        objective=Objective(kl="exact", clip_unit="nats", clip_low=0.2, clip_high=0.2),
        rollout=RolloutConfig(prompts=16, group_size=8),
        modality=DiffusionConfig(eta=1.0),
        optim=OptimConfig(
            lr=5e-5, minibatches=2
        ),  # at one update the ratio is 1, and nothing is clipped
        stage=Stage(kl_coef=0.04),
        # A reference that follows is no anchor: black images are at 3 nats of KL to it
        # (docs/dev/history/lab.md).
        reference=ReferenceConfig(kind="mixed", update_rate=0.6, update_every=50),
        evaluation=EvaluationConfig(prompts=100, every=50),
        saving=SavingConfig(every=50, keep=1),
        show_samples_every=25,
    )
