"""A policy over three tokens and at most two steps: every expectation is a sum. Token 0 ends a
row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gruppo.core.loss import LossInputs, policy_loss
from gruppo.core.objective import Objective
from gruppo.core.weights import loss_total, loss_weights
from gruppo.types import Likelihood

SEQUENCES = torch.tensor([[0, 0], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2]])
MASK = torch.tensor([[True, token != 0] for token in SEQUENCES[:, 0].tolist()])
MAX_LENGTH = 2

LOGITS = torch.tensor([[0.3, -0.2, 0.5], [1.0, 0.1, -0.4], [-0.7, 0.2, 0.6]], dtype=torch.float64)
"""Row 0 before the first token, row 1 after token 1, row 2 after token 2."""
OTHER = torch.tensor([[-0.1, 0.4, 0.2], [0.3, 0.9, -0.2], [0.5, -0.3, 0.1]], dtype=torch.float64)
"""Another policy: the one that drew the actions, or the reference."""
SCORES = torch.tensor([0.5, -1.0, 2.0, 0.25, 1.5, -0.5, 3.0], dtype=torch.float64)
"""The reward of each sequence; exact in float32."""


def logprobs_of(logits: Tensor, rows: Tensor) -> Tensor:
    """[b, 2] of the given sequences; 0 where the sequence is over."""
    log_p, tokens = logits.log_softmax(dim=-1), SEQUENCES[rows]
    both = torch.stack([log_p[0, tokens[:, 0]], log_p[tokens[:, 0], tokens[:, 1]]], dim=1)
    return torch.where(MASK[rows], both, 0)


def probabilities(logits: Tensor) -> Tensor:
    """Of each sequence: [7], sums to 1."""
    return logprobs_of(logits, torch.arange(len(SEQUENCES))).sum(dim=1).exp()


def gradient(of: Callable[[Tensor], Tensor], logits: Tensor = LOGITS) -> Tensor:
    leaf = logits.clone().requires_grad_()
    return torch.autograd.grad(of(leaf), leaf, allow_unused=True, materialize_grads=True)[0]


def true_gradient() -> Tensor:
    """Of the expected score."""
    return gradient(lambda logits: (probabilities(logits) * SCORES).sum())


def terms_of(
    logits: Tensor,
    rows: Tensor,
    advantages: Tensor,
    objective: Objective,
    *,
    old: Tensor | None = None,
    ref: Tensor | None = None,
) -> dict[str, Tensor]:
    """The loss terms of a batch of the given sequences, as the trainer forms them."""
    loss_mask = MASK[rows]
    one_group = torch.zeros(len(rows), dtype=torch.long)
    total = loss_total(
        loss_mask, average=objective.average, max_length=MAX_LENGTH, group_ids=one_group
    )
    inputs = LossInputs(
        advantages=advantages,
        loss_mask=loss_mask,
        weights=loss_weights(
            loss_mask, average=objective.average, total=total, group_ids=one_group
        ),
        old_logprobs=None if old is None else logprobs_of(old, rows),
        ref=None if ref is None else Likelihood(logprobs_of(ref, rows)),
    )
    return policy_loss(Likelihood(logprobs_of(logits, rows)), inputs, objective)[0]
