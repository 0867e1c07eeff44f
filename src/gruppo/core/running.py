"""Statistics that outlive a batch, held as JSON so that a resumed run has them to the bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

PROMPT_HISTORY = 32
"""Rewards of one prompt that its mean and standard deviation are taken over, the newest last."""


@dataclass(frozen=True)
class Ema:
    """A moving average, corrected for its start at 0: sum / (1 - decay^n), as in Adam (arXiv 1412.6980)."""

    sum: float = 0.0
    weight: float = 0.0

    @classmethod
    def of(cls, state: Sequence[float] | None) -> Ema:
        return cls(*state) if state else cls()

    def to_list(self) -> list[float]:
        return [self.sum, self.weight]

    def after(self, x: float, decay: float) -> Ema:
        return Ema(decay * self.sum + (1 - decay) * x, decay * self.weight + (1 - decay))

    @property
    def value(self) -> float:
        return self.sum / self.weight if self.weight else 0.0


def remembered(
    rewards: Float[Tensor, "B"],
    group_ids: Int[Tensor, "B"],
    prompt_ids: Sequence[str],
    history: Mapping[str, Sequence[float]],
    share: Callable[[Any], list[Any]],
) -> dict[str, Sequence[float]]:
    """The last rewards of every prompt so far, this batch's among them.

    ``share`` gives what every rank has, in order of rank, so that all ranks hold one history.
    """
    here = [[prompt, rewards[(group_ids == g) & rewards.isfinite()].tolist()] for g, prompt in enumerate(prompt_ids)]
    after = dict(history)  # lists of the old one are replaced, never changed
    for rank in share(here):
        for prompt, new in rank:
            after[prompt] = [*after.get(prompt, ()), *new][-PROMPT_HISTORY:]
    return after


def prompt_mean(history: Mapping[str, Sequence[float]], prompt_ids: Sequence[str]) -> Float[Tensor, "groups"]:
    """Mean of each prompt's last rewards; NaN without any."""
    return torch.stack([torch.tensor(history[prompt], dtype=torch.float64).mean() for prompt in prompt_ids])


def prompt_std(history: Mapping[str, Sequence[float]], prompt_ids: Sequence[str]) -> Float[Tensor, "groups"]:
    """Standard deviation (ddof 1) of each prompt's last rewards; NaN below two."""
    return torch.stack([_std(history[prompt]) for prompt in prompt_ids])


def _std(past: Sequence[float]) -> Tensor:
    rewards = torch.tensor(past, dtype=torch.float64)
    return rewards.std() if len(past) > 1 else rewards.new_tensor(torch.nan)
