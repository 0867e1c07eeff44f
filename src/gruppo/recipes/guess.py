"""A game of several turns: the model guesses a number, the environment says higher or lower."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gruppo.config.schema import (
    Config,
    EnvironmentConfig,
    EvaluationConfig,
    OptimConfig,
    PromptsConfig,
    RolloutConfig,
    SavingConfig,
)

PROMPTS = Path(__file__).with_name("guess_prompts.jsonl")
"""Each number from 1 to 7 after each of eight openings; which are held out goes by the opening."""
LOWEST, HIGHEST = 1, 7
_GUESS = re.compile(r"\s*(\d{1,3})\s*\.?\s*")


def guess() -> Config:
    """SmolLM2-135M-Instruct learns to find a number from 1 to 7 in three guesses, by what it is told after each.

    ``reply`` is the environment: it says "Higher." or "Lower." to a number, and ends the game at the right one or at
    anything that is no number. Whoever does not listen finds 3 of 7; halving what is left finds all. The reward is 1
    for the number, else 0.1 for each guess that the replies left open. One core of an AMD EPYC (Zen 5), beside other
    jobs: 13 minutes of the processor for 60 steps, 7 s a step at the end where nothing else ran; sampled reward 0.2 at
    step 10, 0.7 at step 20, 0.9 from step 45 on. Of 14 held-out games, played greedily, it finds none before and 12
    after (seed 0): one number of the seven lies off its way.
    """
    return Config(
        model="smollm2-135m",
        data=str(PROMPTS),
        reward=("gruppo.recipes.guess:found",),
        steps=60,
        rollout=RolloutConfig(prompts=8, group_size=8, max_new_tokens=20),
        optim=OptimConfig(lr=1e-5, warmup_steps=3),
        environment=EnvironmentConfig(reply="gruppo.recipes.guess:reply", turns=3),
        prompts=PromptsConfig(held_out_fraction=0.2),
        evaluation=EvaluationConfig(prompts=64),
        saving=SavingConfig(every=20, keep=1),
    )


def reply(text: str, state: dict[str, Any], answer: str) -> str | None:
    """Higher or lower; None where the number is found, or what was said is none."""
    said = _GUESS.fullmatch(text)
    if said is None:
        return None
    number, wanted = int(said[1]), int(answer)
    low, high = state.get("left", (LOWEST, HIGHEST))
    state["sensible"] = state.get("sensible", 0) + (low <= number <= high)
    state["found"] = number == wanted
    if number == wanted:
        return None
    state["left"] = (max(low, number + 1), high) if number < wanted else (low, min(high, number - 1))
    return "Higher." if number < wanted else "Lower."


def found(state: Sequence[Mapping[str, Any]], **_: Any) -> list[float]:
    """1 where the number was found; else 0.1 for each guess that could have been right."""
    return [1.0 if game.get("found") else 0.1 * game.get("sensible", 0) for game in state]
