"""Language models: a starting point for your own data and reward, nanochat's settings, and Chinese
questions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gruppo.config.schema import (
    Config,
    EvaluationConfig,
    OptimConfig,
    PromptsConfig,
    RolloutConfig,
    SavingConfig,
    Stage,
)
from gruppo.recipes.arithmetic import arithmetic

QWEN_PROMPTS = Path(__file__).with_name("qwen_prompts.jsonl")
"""Thirty questions in Chinese that ask for a reason; the data of the qwen recipe."""


def plain() -> Config:
    """Neutral settings for your own model, data and reward: GRPO, 8 prompts x 8 samples of up to
    128 tokens a step.

    gruppo train plain --model smollm2-135m --data mine.jsonl --reward my.py:f. Sampling is the
    model's own (temperature 1, all tokens). On a CPU, a step of a small model takes the time of its
    8192 sampled tokens: lower --rollout.max-new-tokens to what an answer needs. Hardware, wall time
    and curve depend on your model and data.
    """
    return Config(
        steps=200,
        rollout=RolloutConfig(prompts=8, group_size=8, max_new_tokens=128),
        optim=OptimConfig(lr=1e-5, warmup_steps=5),
        evaluation=EvaluationConfig(prompts=64),
        saving=SavingConfig(every=20),
    )


def chat() -> Config:
    """SmolLM2-135M-Instruct learns sums and differences with nanochat's sampling: groups of 16, KL
    0.04 (17 minutes).

    Clip 0.2, one update per batch. Sampling (temperature 1, the 50 most likely tokens) and the
    linear decay are nanochat's. ``--objective nanochat --stage.kl-coef 0`` is the original script:
    reward minus the group's mean, no clip, no KL, the average of each prompt. With one update per
    batch the ratio is 1 and the clip has no effect; ``--optim.epochs 2`` gives it one.

    gruppo train chat learns sums and differences with SmolLM2-135M-Instruct: measured here on one
    thread of an AMD EPYC CPU (Zen 5) with 2 cores, beside other jobs, 17 minutes (18 s a step);
    sampled reward 0.01 at first, 0.5 by step 8, about 0.8 from step 14 on; held-out exact match
    from 0.01 to 0.86. gruppo train chat --model examples/chat_rl.py:model --optim.lr 5e-4 is the
    same on a plain module of 0.1 million weights, without transformers: a minute of one core, half
    of it to pretrain the module; held-out 0.09 to 0.93 and 0.07 to 0.91 (seeds 0 and 1). Your own
    module, task and reward: --model mine.py:function --data mine.jsonl --reward numeric_match.
    """
    return replace(
        arithmetic(),
        rollout=RolloutConfig(
            prompts=16, group_size=16, max_new_tokens=6, temperature=1.0, top_k=50
        ),
        optim=OptimConfig(lr=1.2e-5, decay="linear"),
        stage=Stage(kl_coef=0.04),
    )


def qwen() -> Config:
    """Qwen2.5-0.5B learns to give reasons in Chinese, in about 50 characters: groups of 8, KL 0.1
    (for a GPU).

    Thirty questions, temperature 0.8, clip 0.2. Two rewards: a length of about 50 visible
    characters, as Chinese has no spaces to count words by, and the words 因为, 所以, 然而, 但是.
    Set --model to a folder or another hub id: gruppo train qwen --model smollm2-135m needs no hub.
    Both rewards are easy to exploit. Qwen is for a GPU and has not been run here. One CPU core: two
    steps of SmolLM2 take 3 to 10 minutes, nearly all of it for answers of 96 tokens
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
        saving=SavingConfig(every=50, keep=1),
    )
