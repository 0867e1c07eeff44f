"""Photographs are restored, and then stored in smaller JPEG files, a reward without a gradient.

gruppo train examples/photos.py:denoise_photos
"""

from __future__ import annotations

from dataclasses import replace

from gruppo.config.schema import (
    SUPERVISED,
    Config,
    EvaluationConfig,
    OptimConfig,
    RolloutConfig,
    SavingConfig,
    ScoringConfig,
    Stage,
    SupervisedConfig,
)
from gruppo.modalities.restoration.config import RestorationConfig


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
