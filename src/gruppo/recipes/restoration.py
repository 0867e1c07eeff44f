"""Image restoration: a start for your own images, photographs and text, and a staged run."""

from __future__ import annotations

from dataclasses import replace

from gruppo.config.schema import (
    SUPERVISED,
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


def restore_progressive() -> Config:
    """A UNet learns to denoise photographs in stages: supervision, a ramp to rewards (PSNR, SSIM),
    GRPO (6 minutes).

    KL 0.01, consistency 0.1, clip 0.2, advantages limited to 3, gradients to 1. Groups of 8 (with
    two, every advantage is 0.7 or -0.7), advantages within the group (a mean over all images
    measures how hard an image is), a frozen reference that is reset after supervision, and 20 times
    the learning rate for the action. Photographs of installed packages. One CPU core: 6 minutes;
    30.2 dB after supervision and no more after GRPO: PSNR and SSIM are differentiable, and
    supervision follows their gradient.
    """
    full = Stage("full", sup_coef=0.5, cons_coef=0.1, kl_coef=0.01, lr=5e-5)
    ramp = replace(
        full,
        name="ramp",
        steps=150,
        rl_coef="linear:0,1",
        sup_coef="linear:1,0.5",
        new_reference=True,
    )
    return replace(
        restore(),
        reward=("psnr", "ssim"),
        steps=1000,
        modality=RestorationConfig(action="low_resolution:grid=8,std=0.02", action_lr_factor=20.0),
        objective=replace(EXACT_KL, adv_clip=3.0),
        rollout=RolloutConfig(prompts=8, group_size=8),
        optim=OptimConfig(lr=1e-3, weight_decay=0.01, max_grad_norm=1.0),
        stages=(
            replace(
                SUPERVISED,
                steps=700,
                lr="cosine:2e-3,5e-5",
                warmup_steps=10,
            ),
            ramp,
            full,
        ),
        back_off=BackOffConfig(metric="eval/psnr", drop=0.5),
        scoring=ScoringConfig(
            weights=(0.6 / 40, 0.4)
        ),  # the source document: 0.6 PSNR / 40 + 0.4 SSIM
        evaluation=EvaluationConfig(prompts=64, every=50),
        saving=SavingConfig(every=200, keep=1),
        show_samples_every=50,
    )


def restore_quick() -> Config:
    """A trained denoiser continues with supervision, GRPO, KL and consistency in one stage (3
    minutes).

    gruppo train restore-quick --model RUN, where RUN is a run of ``restore`` or
    ``restore-progressive``. Rewards and coefficients are those of restore-progressive. One CPU
    core: 3 minutes.
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


def denoise_photos() -> Config:
    """A small UNet learns to denoise real photographs (sigma 25), then to make smaller JPEG files.

    Three stages in one run: supervision, a ramp, rewards. The rewards are PSNR and minus 6 times
    the kB of the file at quality 90, which is not differentiable; they train four gains of detail
    in each of 8 x 8 cells on top of the network, which is frozen by then. Photographs of installed
    packages (extra ``photos``), three of them held out. One CPU core: 10 minutes (576 processor
    seconds); 23% to 32% fewer bytes at +0.3 dB or more (docs/dev/results.md).
    """
    return Config(
        model="restore:unet",
        data="photos:noise=25",
        reward=("psnr", "jpeg_compressibility:quality=90,without_header=true"),
        steps=6170,
        # A ramp at 1e-4, five times the network's last rate, lost 0.15 dB in 20 steps: hence 2.5e-5
        # for the network, and 200 times that for the gains (docs/dev/history/lab.md).
        modality=RestorationConfig(
            action="band_gains:grid=8,std=0.15", supervises="base", action_lr_factor=200.0
        ),
        rollout=RolloutConfig(prompts=8, group_size=8),
        optim=OptimConfig(lr=2e-3),
        stages=(
            replace(
                SUPERVISED,
                steps=6000,
                lr="cosine:2e-3,2e-5",
                warmup_steps=20,
            ),
            Stage(
                "ramp",
                steps=20,
                rl_coef="linear:0,1",
                sup_coef="linear:1,0",
                lr=2.5e-5,
                warmup_steps=10,
            ),
            Stage("full", lr="cosine:2.5e-5,1.25e-6"),
        ),
        supervised=SupervisedConfig(batch=8),
        # dB and kB: at 5 the gain in PSNR is larger, from 7 on most of it is gone
        # (docs/dev/history/lab.md).
        scoring=ScoringConfig(weights=(1.0, 6.0)),
        evaluation=EvaluationConfig(prompts=142, every=600),
        saving=SavingConfig(every=600, keep=1),
        show_samples_every=200,
    )
