"""The script of source document 000: ddpo-pytorch with groups, a reference and a clip."""

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
from gruppo.recipes.digits import PRETRAINED


def ddpo() -> Config:
    """Document 000's diffusion script: JPEG size as the reward, groups of 8, epsilon 0.2, beta 0.04, a mixed reference.

    Otherwise than there: the KL is to the reference and exact (the document's has no gradient on average), epsilon is
    in nats of a step's joint density, and each batch makes two updates, without which no epsilon does anything. The
    reference follows the policy (0.6 of it every 50 steps), so it is no anchor; --reference.kind frozen is one. The
    short form is on runs/digits-pretrain, which gruppo train digits-pretrain leaves. Measured here on one thread of an
    AMD EPYC CPU (Zen 5): 5.5 s a step where nothing else runs, so 18 minutes for 200. **The reward is gamed**: held-out
    kB go from 0.81 to 0.66 (step 50) and 0.46 (step 100), where nearly all pictures are black; 0.45 at step 150, soon
    after which the run was stopped (docs/lab.md). digits-compress holds them readable. A pipeline of diffusers, on a
    GPU and not run here: gruppo train ddpo --model FOLDER --data images:FOLDER --lora.rank 4 --optim.lr 3e-4
    --diffusion.steps 50 --diffusion.guidance 5.
    """
    return Config(
        model=PRETRAINED,
        data="digits",
        reward=("jpeg_compressibility",),
        steps=200,
        objective=Objective(kl="exact", clip_unit="nats", clip_low=0.2, clip_high=0.2),
        rollout=RolloutConfig(prompts=16, group_size=8),
        modality=DiffusionConfig(eta=1.0),
        optim=OptimConfig(lr=5e-5, minibatches=2),
        stage=Stage(kl_coef=0.04),
        reference=ReferenceConfig(kind="mixed", update_rate=0.6, update_every=50),
        evaluation=EvaluationConfig(prompts=100, every=50),
        saving=SavingConfig(every=50, keep=1),
        show_samples_every=25,
    )
