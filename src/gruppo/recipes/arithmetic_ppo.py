"""The same arithmetic, learned by PPO with a critic."""

from __future__ import annotations

from dataclasses import replace

from gruppo.core.objective import PPO
from gruppo.recipes.arithmetic import arithmetic
from gruppo.training.config import Config, Critic, Optim, Stage


def arithmetic_ppo() -> Config:
    """PPO: a value head on the policy's own network, GAE, KL in the reward of each token, two passes over each batch."""
    return replace(
        arithmetic(),
        objective=PPO,
        critic=Critic(kind="shared", lr=1e-3),
        stage=Stage(kl_coef=0.005, value_coef=0.1),
        optim=Optim(lr=1.2e-5, warmup_steps=3, epochs=2, minibatches=2),
    )
