"""A real chat model learns arithmetic on a laptop."""

from __future__ import annotations

from gruppo.training.config import Config, Evaluation, Optim, Prompts, Rollout, Saving


def arithmetic() -> Config:
    """SmolLM2-135M-Instruct learns two-number sums and differences with an exact reward.

    TODO
    """
    return Config(
        model="smollm2-135m",
        data="arithmetic",
        reward=("exact_match",),
        steps=100,
        rollout=Rollout(prompts=8, group_size=16, max_new_tokens=8),
        optim=Optim(lr=1e-5, warmup_steps=3),
        prompts=Prompts(held_out_fraction=0.3),
        evaluation=Evaluation(prompts=256),
        saving=Saving(every=50),
    )
