"""The script of source document 001: a language model, a length to hit and words that join sentences."""

from __future__ import annotations

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

PROMPTS = Path(__file__).with_name("qwen_prompts.jsonl")
"""Thirty questions in Chinese that ask for a reason; the document names none of its own."""


def qwen() -> Config:
    """Document 001's script with its settings: Qwen2.5-0.5B, groups of 8 at temperature 0.8, KL 0.1, clip 0.2.

    Its two rewards: about 50 in length, and 因为, 所以, 然而, 但是. Otherwise than there: length in visible characters,
    as Chinese has no spaces and every answer was one word; equal rewards are found by comparison, and advantages are
    divided with ddof 1. --model a folder, or another hub id: gruppo train qwen --model smollm2-135m runs without a hub.
    Both rewards are cheap to please. Qwen is for a GPU and has not been run here. One CPU core: two steps of SmolLM2
    take 3 to 10 minutes, of which answers of 96 tokens are nearly all (--rollout.max-new-tokens).
    """
    return Config(
        model="Qwen/Qwen2.5-0.5B",
        data=str(PROMPTS),
        reward=("length_target:50,characters", "keywords:因为,所以,然而,但是"),
        steps=100,
        rollout=RolloutConfig(prompts=4, group_size=8, max_new_tokens=96, temperature=0.8),
        optim=OptimConfig(lr=1e-5, max_grad_norm=0.5),
        stage=Stage(kl_coef=0.1, entropy_coef=0.01),
        prompts=PromptsConfig(held_out_fraction=0.2),
        evaluation=EvaluationConfig(prompts=8),
        saving=SavingConfig(every=50, keep=1),
    )
