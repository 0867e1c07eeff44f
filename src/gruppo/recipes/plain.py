"""A starting point for one's own data and reward."""

from __future__ import annotations

from gruppo.config.schema import Config, EvaluationConfig, OptimConfig, RolloutConfig, SavingConfig


def plain() -> Config:
    """Neutral settings for your own model, data and reward: GRPO, 8 prompts x 8 samples of up to 128 tokens a step.

    gruppo train plain --model smollm2-135m --data mine.jsonl --reward my.py:f. Sampling is the model's own
    (temperature 1, every token). On a CPU a step of a small model takes the time of its 8192 sampled tokens: lower
    --rollout.max-new-tokens to what an answer needs. Hardware, wall time and curve are those of your model and data.
    """
    return Config(
        steps=200,
        rollout=RolloutConfig(prompts=8, group_size=8, max_new_tokens=128),
        optim=OptimConfig(lr=1e-5, warmup_steps=5),
        evaluation=EvaluationConfig(prompts=64),
        saving=SavingConfig(every=20),
    )
