"""Language models: arithmetic on a laptop by GRPO, by PPO, and in a format that has to be shown
first; and a start for your own data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gruppo.config.schema import (
    SUPERVISED,
    Config,
    CriticConfig,
    EvaluationConfig,
    OptimConfig,
    PromptsConfig,
    RolloutConfig,
    SavingConfig,
    Stage,
    SupervisedConfig,
)
from gruppo.core.objective import PPO
from gruppo.rewards.text import text_of

OPENING, CLOSING = "<answer>", "</answer>"


def arithmetic() -> Config:
    """SmolLM2-135M-Instruct learns sums and differences of numbers up to 20, by GRPO with an exact
    reward.

    The prompt is "What is 7 + 12?", continued as "7 + 12 =". The reward is 1 if the completion is
    the right number and nothing else. The model first learns to stop after the number, then to
    calculate. Sampling is hotter than the model (temperature 1.5 among the 12 most likely tokens):
    at temperature 1 it soon stops exploring. 2 CPU cores: about 4 minutes of training, held-out
    exact match from 0.02 to 0.85.
    """
    return Config(
        model="smollm2-135m",
        data="arithmetic:0:20:natural",
        reward=("exact_match",),
        steps=50,
        rollout=RolloutConfig(
            prompts=48, group_size=8, max_new_tokens=6, temperature=1.5, top_k=12
        ),
        optim=OptimConfig(lr=1.2e-5, warmup_steps=3),
        prompts=PromptsConfig(held_out_fraction=0.4),
        saving=SavingConfig(every=25, keep=1),
    )


def arithmetic_ppo() -> Config:
    """The arithmetic recipe with PPO: a value head on the policy's network, GAE, and the KL in the
    token rewards.

    Each batch is evaluated before the updates and passed over twice, so a step takes half the
    prompts of GRPO. The value head is new and has its own learning rate. 2 CPU cores: about 9
    minutes of training, held-out exact match from 0.02 to 0.83 or more (three seeds).
    """
    recipe = arithmetic()
    return replace(
        recipe,
        objective=PPO,
        rollout=replace(recipe.rollout, prompts=24),
        critic=CriticConfig(lr=1e-3),  # the rate of a new head; the network keeps optim.lr
        stage=Stage(kl_coef=0.005, value_coef=0.1),
        optim=OptimConfig(lr=6e-6, warmup_steps=3, epochs=2),
    )


def arithmetic_format() -> Config:
    """SmolLM2-135M-Instruct learns to write <answer>19</answer>, which no prompt mentions, and to
    calculate.

    The untrained model begins with "<" once in 200,000 times, so rewards alone find nothing to
    reinforce. Six steps of 32 demonstrations teach the format, GRPO then the numbers, with reward 1
    for the right number in its tags and nothing else. ``--stages full`` leaves the demonstrations
    out. One CPU core: held-out exact match from 0.00 to 0.48 in the first half minute of training,
    0.66 after two and a half minutes (step 15, three seeds), 0.77 after three and a half (step 20,
    seed 0). Rewards alone: 0.00.
    """
    recipe = arithmetic()
    return replace(
        recipe,
        reward=("gruppo.recipes.arithmetic:in_tags",),
        rollout=replace(recipe.rollout, prompts=24, max_new_tokens=12),
        # Six steps reduce the negative log-likelihood from 4.43 to 0.17 nats per token. Rewards
        # alone find nothing in the same time, even with partial credit.
        stages=(
            replace(SUPERVISED, steps=6, lr=5e-5, warmup_steps=3),
            Stage(name="full", warmup_steps=3),
        ),
        supervised=SupervisedConfig(template=f" {OPENING}{{target}}{CLOSING}"),
        optim=replace(recipe.optim, warmup_steps=0),
    )


def plain() -> Config:
    """Neutral settings for your own model, data and reward: GRPO, 8 prompts x 8 samples of up to
    128 tokens a step.

    gruppo train plain --model smollm2-135m --data mine.jsonl --reward my.py:f. Sampling is the
    model's own (temperature 1, all tokens). On a CPU, a step of a small model takes the time of its
    8192 sampled tokens: lower --rollout.max-new-tokens to what an answer needs. Hardware, wall time
    and curve depend on your model and data.
    """
    return Config(
        rollout=RolloutConfig(prompts=8, group_size=8),
        optim=OptimConfig(lr=1e-5, warmup_steps=5),
        evaluation=EvaluationConfig(prompts=64),
        saving=SavingConfig(every=20),
    )


def in_tags(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 if the stripped completion is the answer in its tags, else 0."""
    pairs = zip(completions, answer, strict=True)
    return [float(text_of(text).strip() == f"{OPENING}{gold}{CLOSING}") for text, gold in pairs]
