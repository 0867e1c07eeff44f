"""A real chat model learns arithmetic on a laptop."""

from __future__ import annotations

from gruppo.config.schema import Config, EvaluationConfig, OptimConfig, PromptsConfig, RolloutConfig, SavingConfig


def arithmetic() -> Config:
    """SmolLM2-135M-Instruct learns sums and differences of two numbers up to 20, by GRPO with an exact reward.

    The model is asked "What is 7 + 12?" and continues "7 + 12 =". The reward is 1 where what it writes is the right
    number and nothing else. It first learns to stop after the number, then to calculate. Sampling is a little hotter
    than the model (temperature 1.5 among the 12 likeliest tokens): at temperature 1 it soon stops trying other answers.
    2 CPU cores: about 4 minutes of training, held-out exact match from 0.02 to 0.85.
    """
    return Config(
        model="smollm2-135m",
        data="arithmetic:0:20:natural",
        reward=("exact_match",),
        steps=50,
        rollout=RolloutConfig(prompts=48, group_size=8, max_new_tokens=6, temperature=1.5, top_k=12),
        optim=OptimConfig(lr=1.2e-5, warmup_steps=3),
        prompts=PromptsConfig(held_out_fraction=0.4),
        evaluation=EvaluationConfig(prompts=256),
        saving=SavingConfig(every=25, keep=1),
    )
