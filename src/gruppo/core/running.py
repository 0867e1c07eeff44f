"""Statistics that outlive a batch, held as JSON so that a resumed run has them to the bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

PROMPT_HISTORY = 32
"""Rewards of one prompt that its standard deviation is taken over, the newest last."""


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


def prompt_std(
    rewards: Float[Tensor, "B"],
    group_ids: Int[Tensor, "B"],
    prompt_ids: Sequence[str],
    history: Mapping[str, Sequence[float]],
    share: Callable[[Any], list[Any]],
) -> tuple[Float[Tensor, "groups"], dict[str, Sequence[float]]]:
    """Standard deviation (ddof 1) of each prompt's last rewards, this batch's among them; and the history after it.

    ``share`` gives what every rank has, in order of rank, so that all ranks hold one history. NaN below two rewards.
    """
    here = [[prompt, rewards[(group_ids == g) & rewards.isfinite()].tolist()] for g, prompt in enumerate(prompt_ids)]
    after = dict(history)  # lists of the old one are replaced, never changed
    for rank in share(here):
        for prompt, new in rank:
            after[prompt] = [*after.get(prompt, ()), *new][-PROMPT_HISTORY:]
    return torch.stack([_std(after[prompt]) for prompt in prompt_ids]), after


def _std(past: Sequence[float]) -> Tensor:
    rewards = torch.tensor(past, dtype=torch.float64)
    return rewards.std() if len(past) > 1 else rewards.new_tensor(torch.nan)
