"""What other loops hand over: shapes brought to rows of actions, and refusals."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gruppo.core.objective import Objective
from gruppo.core.weights import loss_total, loss_weights
from gruppo.types import GruppoError, Stat

Terms = tuple[dict[str, Tensor], dict[str, Stat]]
"""The terms of a loss, coefficients included, so that their sum is the loss; and statistics of its actions."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Rewards of rows, and which rows share a prompt."""

    rewards: Float[Tensor, "B"]
    group_ids: Int[Tensor, "B"]
    mask: Bool[Tensor, "B T"]

    @classmethod
    def of(cls, logprobs: Tensor, rewards: Tensor, mask: Tensor | None, group_ids: Tensor | None) -> Rows:
        if mask is None:
            if logprobs.shape != rewards.shape:
                raise GruppoError(
                    f"policy_logprobs are {list(logprobs.shape)} and rewards {list(rewards.shape)}; without a mask "
                    "both are [prompts, group], of whole sequences. For log-probs of tokens [B, T] give mask [B, T]."
                )
            mask = torch.ones(rewards.numel(), 1, dtype=torch.bool, device=rewards.device)
        else:
            same_shape(logprobs, mask=mask)
            boolean(mask)
        rows = len(mask)
        if (mask.ndim, rewards.numel()) != (2, rows) or rewards.ndim != (2 if group_ids is None else 1):
            raise GruppoError(
                f"rewards are {list(rewards.shape)} for {rows} rows; they need [prompts, group] with prompts * group = "
                f"{rows}, prompt after prompt. For groups of other sizes give rewards [{rows}] and group_ids [{rows}]."
            )
        if group_ids is None:
            group_ids = torch.arange(len(rewards), device=rewards.device).repeat_interleave(rewards.shape[1])
        same_shape(rewards.flatten(), group_ids=group_ids)
        rewards = rewards.detach().flatten()
        rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
        return cls(rewards, group_ids.unique(return_inverse=True)[1], mask)

    @property
    def loss_mask(self) -> Bool[Tensor, "B T"]:
        return self.mask & self.rewards.isfinite()[:, None]


def weights(loss_mask: Bool[Tensor, "B T"], objective: Objective, max_length: int | None) -> Float[Tensor, "B T"]:
    total = loss_total(loss_mask, average=objective.average, max_length=max_length or 1)
    return loss_weights(loss_mask, average=objective.average, total=total)


def columns(x: Tensor) -> Tensor:
    """[batch] as one action a row."""
    return x[:, None] if x.ndim == 1 else x


def coefficient(name: str, value: float) -> float:
    if not 0 <= value < math.inf:
        raise GruppoError(
            f"{name}={value} would reward what it should hold; it needs a number from 0 on. Use 0 for none."
        )
    return value


def same_shape(like: Tensor, **others: Tensor | None) -> None:
    for name, other in others.items():
        if other is not None and other.shape != like.shape:
            raise GruppoError(
                f"{name} is {list(other.shape)} beside {list(like.shape)}; it needs the same shape. Reshape it; "
                "nothing is broadcast here."
            )


def boolean(mask: Tensor) -> None:
    if mask.dtype != torch.bool:
        raise GruppoError(
            f"mask is {mask.dtype}; it needs True and False, True where the policy chose. Use mask.bool()."
        )


def refuse_nan(loss_mask: Tensor, **entries: Tensor) -> None:
    for name, x in entries.items():
        bad = int((loss_mask & ~x.isfinite()).sum())
        if bad:
            raise GruppoError(
                f"{name} holds {bad} numbers that are not finite where mask is True. Leave those rows out of the mask; "
                "a failed reward is not a reward of 0."
            )
