"""The scripts of the source documents (docs/dev/sources.md) as recipes.

gruppo train examples/documents.py:qwen --model smollm2-135m
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gruppo.config.schema import (
    SUPERVISED,
    BackOffConfig,
    Config,
    EvaluationConfig,
    OptimConfig,
    PromptsConfig,
    ReferenceConfig,
    RolloutConfig,
    SavingConfig,
    ScoringConfig,
    Stage,
)
from gruppo.core.objective import Objective
from gruppo.modalities.diffusion.config import DiffusionConfig
from gruppo.modalities.restoration.config import RestorationConfig
from gruppo.recipes.arithmetic import arithmetic
from gruppo.recipes.diffusion import PRETRAINED
from gruppo.recipes.restoration import EXACT_KL, restore

QWEN_PROMPTS = Path(__file__).with_name("qwen_prompts.jsonl")
"""Thirty questions in Chinese that ask for a reason; the data of the qwen recipe."""


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
    readable. A pipeline, on a GPU and not run here: gruppo train examples/documents.py:ddpo
    --model FOLDER --data images:FOLDER --lora.rank 4 --optim.lr 3e-4 --diffusion.steps 50
    --diffusion.guidance 5.
    """
    return Config(
        model=PRETRAINED,
        data="digits",
        reward=("jpeg_compressibility",),
        objective=Objective(kl="exact", clip_unit="nats"),
        rollout=RolloutConfig(prompts=16, group_size=8),
        modality=DiffusionConfig(eta=1.0),
        optim=OptimConfig(
            lr=5e-5, minibatches=2
        ),  # at one update the ratio is 1, and nothing is clipped
        stage=Stage(kl_coef=0.04),
        # A reference that follows is no anchor: black images are at 3 nats of KL to it
        # (docs/dev/history/lab.md).
        reference=ReferenceConfig(kind="mixed", update_every=50),
        evaluation=EvaluationConfig(prompts=100, every=50),
        saving=SavingConfig(keep=1),
        show_samples_every=25,
    )


def qwen() -> Config:
    """Qwen2.5-0.5B learns to give reasons in Chinese, in about 50 characters: groups of 8, KL 0.1
    (for a GPU).

    Thirty questions, temperature 0.8, clip 0.2. Two rewards: a length of about 50 visible
    characters, as Chinese has no spaces to count words by, and the words 因为, 所以, 然而, 但是.
    Set --model to a folder or another hub id; --model smollm2-135m needs no hub. Both rewards are
    easy to exploit. Qwen is for a GPU and has not been run here. One CPU core: two steps of
    SmolLM2 take 3 to 10 minutes, nearly all of it for answers of 96 tokens
    (--rollout.max-new-tokens).
    """
    return Config(
        model="Qwen/Qwen2.5-0.5B",
        data=str(QWEN_PROMPTS),
        reward=("length_target:50,characters", "keywords:因为,所以,然而,但是"),
        steps=100,
        rollout=RolloutConfig(prompts=4, group_size=8, max_new_tokens=96, temperature=0.8),
        optim=OptimConfig(lr=1e-5, max_grad_norm=0.5),
        stage=Stage(kl_coef=0.1, entropy_coef=0.01),
        prompts=PromptsConfig(held_out_fraction=0.2),
        evaluation=EvaluationConfig(prompts=8),
        saving=SavingConfig(keep=1),
    )


def chat() -> Config:
    """SmolLM2-135M-Instruct learns sums and differences with nanochat's sampling: groups of 16, KL
    0.04 (17 minutes).

    Clip 0.2, one update per batch. Sampling (temperature 1, the 50 most likely tokens) and the
    linear decay are nanochat's. ``--objective nanochat --stage.kl-coef 0`` is the original script:
    reward minus the group's mean, no clip, no KL, the average of each prompt. With one update per
    batch the ratio is 1 and the clip has no effect; ``--optim.epochs 2`` gives it one.

    Measured here on one thread of an AMD EPYC CPU (Zen 5) with 2 cores, beside other jobs, 17
    minutes (18 s a step); sampled reward 0.01 at first, 0.5 by step 8, about 0.8 from step 14
    on; held-out exact match from 0.01 to 0.86. --model examples/chat_rl.py:model --optim.lr
    5e-4 is the same on a plain module of 0.1 million weights, without transformers: a minute of
    one core, half of it to pretrain the module; held-out 0.09 to 0.93 and 0.07 to 0.91 (seeds 0
    and 1). Your own module, task and reward: --model mine.py:function --data mine.jsonl
    --reward numeric_match.
    """
    return replace(
        arithmetic(),
        rollout=RolloutConfig(prompts=16, group_size=16, max_new_tokens=6, top_k=50),
        optim=OptimConfig(lr=1.2e-5, decay="linear"),
        stage=Stage(kl_coef=0.04),
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
        optim=OptimConfig(lr=1e-3, weight_decay=0.01),
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

    --model RUN continues a run of ``restore`` or ``restore_progressive``, whose rewards and
    coefficients it has. One CPU core: 3 minutes.
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
