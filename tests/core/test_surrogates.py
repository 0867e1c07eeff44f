"""Surrogates per action, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gruppo.core.surrogates import clip_surrogate, log_ratio, reinforce_surrogate

NAN = float("nan")


def row(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def test_clip_by_hand_in_value_and_gradient():
    """Ratios inside, above and below [0.8, 1.3] for advantages of both signs. The gradient is -r A where unclipped."""
    ratio = row(1.1, 1.5, 0.5, 1.1, 1.5, 0.5)
    advantages = row(2, 2, 2, -2, -2, -2)
    leaf = ratio.log().requires_grad_()
    loss = clip_surrogate(leaf, advantages, low=0.2, high=0.3)
    torch.testing.assert_close(loss, row(-2.2, -2.6, -1.0, 2.2, 3.0, 1.6))
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), leaf)[0], row(-2.2, 0, -1.0, 2.2, 3.0, 0))


def test_reinforce_by_hand():
    logprobs = row(-1.0, -2.0, NAN).requires_grad_()
    loss = reinforce_surrogate(logprobs, row(3, -0.5, 1), torch.tensor([[True, True, False]]))
    torch.testing.assert_close(loss, row(3.0, -1.0, 0.0))
    assert torch.autograd.grad(loss.sum(), logprobs)[0].tolist() == [[-3, 0.5, 0]]


@pytest.mark.silent_bug(5)
@pytest.mark.parametrize("filling", [NAN, 1e6, -1e6, float("inf"), -float("inf")])
def test_log_ratio_is_zero_with_zero_gradient_where_not_kept(filling):
    logprobs, old = row(-1.0, filling, -3.0).requires_grad_(), row(-2.0, 5.0, filling)
    ratio = log_ratio(logprobs, old, torch.tensor([[True, False, False]]))
    assert ratio.tolist() == [[1, 0, 0]]
    assert torch.autograd.grad(ratio.exp().sum(), logprobs)[0].tolist() == [[pytest.approx(torch.e), 0, 0]]
