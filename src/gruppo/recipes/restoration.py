"""Networks that restore images: a starting point for one's own, and the two scripts of source document 004."""

from __future__ import annotations

from dataclasses import replace

from gruppo.config.schema import (
    BackOffConfig,
    Config,
    EvaluationConfig,
    OptimConfig,
    RolloutConfig,
    SavingConfig,
    ScoringConfig,
    Stage,
    SupervisedConfig,
)
from gruppo.core.objective import Objective
from gruppo.modalities.restoration.config import RestorationConfig

PLAIN = Objective(kl="exact")
"""GRPO with the KL in closed form; the clip is of an action's joint density, which has few dimensions."""


def restore() -> Config:
    """Neutral settings for your own degraded images and reward: a new UNet, taught by clean images, then GRPO.

    gruppo train restore --data degrade:FOLDER:noise=25 --reward my.py:f, or pairs:DEGRADED:CLEAN; --model RUN or
    restore:my.py:Network for your own network. Clean images teach the network until PSNR no longer rises; rewards then
    teach what is drawn, four gains of detail in each cell of a grid, and the network rests. Where a reward has a
    gradient, teaching by it is better than any policy gradient. Hardware, wall time and curve are those of your images.
    """
    return Config(
        model="restore:unet",
        data="photos:noise=25",
        reward=("psnr",),
        steps=3000,
        modality=RestorationConfig(action="band_gains:grid=8,std=0.15", supervises="base", action_lr_factor=2.0),
        objective=PLAIN,
        rollout=RolloutConfig(prompts=16, group_size=8),
        optim=OptimConfig(lr=1e-3),
        stages=(
            Stage("supervised", steps=2800, rl_coef=0.0, sup_coef=1.0, lr="cosine:1e-3,1e-5", until="eval/psnr flat 4"),
            Stage("full", kl_coef=0.01, lr=1e-3, new_reference=True),
        ),
        supervised=SupervisedConfig(batch=16),
        evaluation=EvaluationConfig(prompts=64, every=200),
        saving=SavingConfig(every=500, keep=1),
        show_samples_every=100,
    )


def restore_progressive() -> Config:
    """Document 004's staged script: supervision (5 parts), GRPO comes in as supervision goes out (20), GRPO (25).

    Its rewards, weights of KL (0.01) and consistency (0.1), clip (0.2), limits on advantages (3) and gradients (1) are
    kept. Otherwise than there: groups of 8 (of two, every advantage is 0.7 or -0.7), advantages of the group (a mean of
    all images says how hard an image is), a frozen reference that is renewed after supervision, and 20 times the rate
    for what is drawn. Photographs of installed packages. One CPU core: 6 minutes; 30.2 dB after supervision and no more
    after GRPO: PSNR and SSIM have a gradient, which supervision follows.
    """
    return Config(
        model="restore:unet",
        data="photos:noise=25",
        reward=("psnr", "ssim"),
        steps=1000,
        modality=RestorationConfig(action="low_resolution:grid=8,std=0.02", action_lr_factor=20.0),
        objective=replace(PLAIN, adv_clip=3.0),
        rollout=RolloutConfig(prompts=8, group_size=8),
        optim=OptimConfig(lr=1e-3, weight_decay=0.01, max_grad_norm=1.0, terms_every=50),
        stages=(
            Stage("supervised", steps=700, rl_coef=0.0, sup_coef=1.0, lr="cosine:2e-3,5e-5", warmup_steps=10),
            Stage(
                "ramp",
                steps=150,
                rl_coef="linear:0,1",
                sup_coef="linear:1,0.5",
                cons_coef=0.1,
                kl_coef=0.01,
                lr=5e-5,
                new_reference=True,
            ),
            Stage("full", sup_coef=0.5, cons_coef=0.1, kl_coef=0.01, lr=5e-5),
        ),
        supervised=SupervisedConfig(batch=16),
        back_off=BackOffConfig(metric="eval/psnr", drop=0.5),
        scoring=ScoringConfig(weights=(0.6 / 40, 0.4)),
        evaluation=EvaluationConfig(prompts=64, every=50),
        saving=SavingConfig(every=200, keep=1),
        show_samples_every=50,
    )


def restore_quick() -> Config:
    """Document 004's quick script: one stage of supervision, GRPO, KL and consistency together, of a trained network.

    gruppo train restore-quick --model RUN, where RUN is a run of ``restore`` or ``restore-progressive``. Values are the
    document's, corrected as in restore-progressive. One CPU core: 3 minutes.
    """
    staged = restore_progressive()
    return replace(
        staged,
        model="",
        steps=200,
        modality=RestorationConfig(action_lr_factor=20.0),
        optim=replace(staged.optim, lr=5e-5, warmup_steps=10),
        stages=(),
        stage=Stage(sup_coef=0.5, cons_coef=0.1, kl_coef=0.01),
    )
