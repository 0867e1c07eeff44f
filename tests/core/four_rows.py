"""One small batch of four rows in two groups, with ratios to be clipped on both sides, and its
loss."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gruppo.core.advantages import group_advantages
from gruppo.core.loss import LossInputs, policy_loss
from gruppo.core.objective import Objective
from gruppo.core.weights import loss_total, loss_weights
from gruppo.types import Likelihood

MAX_LENGTH = 4
LENGTHS = [1, 3, 2, 2]
REWARDS = torch.tensor([1.0, 0.0, 3.0, 0.0], dtype=torch.float64)
GROUP_IDS = torch.tensor([0, 0, 1, 1])
KEEP = torch.arange(3)[None] < torch.tensor(LENGTHS)[:, None]
LOGPROBS = torch.tensor(
    [[-1, 0, 0], [-1, -2, -1], [-2, -1, 0], [-3, -1, 0]], dtype=torch.float64
) * math.log(2)
RATIO = torch.tensor([[1.5, 1, 1], [0.5, 1, 1], [1, 1.1, 1], [2, 1, 1]], dtype=torch.float64)
OLD = LOGPROBS - RATIO.log()
REF = LOGPROBS + torch.tensor(
    [[0.3, 0, 0], [-0.2, 0.1, 0], [0, 0.5, 0], [-1, 0.2, 0]], dtype=torch.float64
)

A0, A1 = 0.5 / (0.5**0.5 + 1e-4), 1.5 / (4.5**0.5 + 1e-4)
"""GRPO's advantages are +-A0 in the first group (rewards 1, 0) and +-A1 in the second (3, 0): ddof
1, eps 1e-4."""


def advantages_of(
    objective: Objective, loss_mask: Tensor = KEEP, rewards: Tensor = REWARDS
) -> Tensor:
    """One a row. A critic's are not rewards alone; what its surrogate and averages do with any
    numbers is tested."""
    baseline = "mean" if objective.has_critic else objective.baseline
    choices: dict[str, Any] = {
        "baseline": baseline,
        "scale": objective.scale,
        "eps": objective.scale_eps,
    }
    return group_advantages(rewards, GROUP_IDS, loss_mask, prompt_ids=["p", "q"], **choices)[0]


def loss_of(
    objective: Objective,
    logprobs: Tensor = LOGPROBS,
    *,
    loss_mask: Tensor = KEEP,
    advantages: Tensor | None = None,
    old: Tensor | None = OLD,
    ref: Tensor | None = None,
    entropy: Tensor | None = None,
    values: Tensor | None = None,
    rows: slice | list[int] | Tensor = slice(None),
    **inputs: Any,
):
    group_ids = GROUP_IDS[rows][: len(loss_mask)]
    total = loss_total(
        loss_mask, average=objective.average, max_length=MAX_LENGTH, group_ids=group_ids
    )
    batch = LossInputs(
        advantages=advantages_of(objective, loss_mask) if advantages is None else advantages,
        loss_mask=loss_mask,
        weights=loss_weights(
            loss_mask, average=objective.average, total=total, group_ids=group_ids
        ),
        old_logprobs=old,
        ref=None if ref is None else Likelihood(ref),
        **inputs,
    )
    return policy_loss(Likelihood(logprobs, entropy, values=values), batch, objective)


def sum_of(terms: dict[str, Tensor]) -> Tensor:
    """A loss with a coefficient of its own for each term."""
    coefs = {"policy": 1.0, "kl": 0.3, "entropy": -0.1, "value": 0.7}
    return torch.stack([coefs[name] * term for name, term in terms.items()]).sum()


def slope_of(objective: Objective, logprobs: Tensor = LOGPROBS, **choices: Any) -> Tensor:
    leaf = logprobs.clone().requires_grad_()
    terms, _ = loss_of(objective, leaf, **choices)
    return torch.autograd.grad(sum_of(terms), leaf)[0]
