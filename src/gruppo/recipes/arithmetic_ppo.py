"""The same arithmetic, learned by PPO with a critic."""

from __future__ import annotations

from dataclasses import replace

from gruppo.config.schema import Config, CriticConfig, OptimConfig, Stage
from gruppo.core.objective import PPO
from gruppo.recipes.arithmetic import arithmetic


def arithmetic_ppo() -> Config:
    """The arithmetic recipe with PPO: a value head on the policy's network, GAE, and the KL in each token's reward.

    Every row is evaluated before the updates and passed over twice, so a step takes half the prompts of GRPO's. The
    value head is new and has a learning rate of its own.
    2 CPU cores: about 9 minutes of training, held-out exact match from 0.02 to 0.83 or more (three seeds).
    """
    recipe = arithmetic()
    return replace(
        recipe,
        objective=PPO,
        rollout=replace(recipe.rollout, prompts=24),
        critic=CriticConfig(kind="shared", lr=1e-3),
        stage=Stage(kl_coef=0.005, value_coef=0.1),
        optim=OptimConfig(lr=6e-6, warmup_steps=3, epochs=2),
    )
