"""The same arithmetic in a form that the model does not know: demonstrations first, then rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gruppo.config.schema import Config, Stage, SupervisedConfig
from gruppo.recipes.arithmetic import arithmetic
from gruppo.rewards.text import text_of

OPENING, CLOSING = "<answer>", "</answer>"


def arithmetic_format() -> Config:
    """SmolLM2-135M-Instruct learns to write <answer>19</answer>, which no prompt mentions, and to calculate.

    Untrained it begins with "<" once in 200,000 times, so that rewards alone find nothing to raise. Six steps of 32
    demonstrations teach the form, and GRPO then the numbers, with a reward of 1 for the right number in its tags and
    nothing else. ``--stages full`` leaves the demonstrations out. One CPU core: held-out exact match from 0.00 to 0.48
    in the first half minute of training, 0.66 after two and a half minutes (step 15, three seeds), 0.77 after three and
    a half (step 20, seed 0). Rewards alone: 0.00.
    """
    recipe = arithmetic()
    return replace(
        recipe,
        reward=("gruppo.recipes.arithmetic_format:in_tags",),
        steps=50,
        rollout=replace(recipe.rollout, prompts=24, max_new_tokens=12),
        stages=(
            Stage(name="supervised", steps=6, rl_coef=0.0, sup_coef=1.0, lr=5e-5, warmup_steps=3),
            Stage(name="full", warmup_steps=3),
        ),
        supervised=SupervisedConfig(template=f" {OPENING}{{target}}{CLOSING}", batch=32),
        optim=replace(recipe.optim, warmup_steps=0),
    )


def in_tags(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 where the completion, stripped, is the answer in its tags; else 0."""
    wanted = (f"{OPENING}{gold}{CLOSING}" for gold in answer)
    return [float(text_of(said).strip() == tagged) for said, tagged in zip(completions, wanted, strict=True)]


def partly_in_tags(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 as ``in_tags``; else 0.1 for each tag that is written once, and 0.3 for the right number beside nothing else.

    What is said to help where the form is never met as a whole.
    """
    scores = []
    for said, gold, whole in zip(completions, answer, in_tags(completions, answer), strict=True):
        text = text_of(said)
        tags = sum(text.count(tag) == 1 for tag in (OPENING, CLOSING))
        number = text.replace(OPENING, "").replace(CLOSING, "").strip() == str(gold)
        scores.append(whole or 0.1 * tags + 0.3 * number)
    return scores
