"""Weights for a sampler that disagrees with the trainer, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gruppo.core.weights import correction_weights

NAN = float("nan")
KEEP = torch.tensor([[True, True, False, True], [True, True, True, False]])
RATIO = torch.tensor([[2.0, 0.5, 9.0, 4.0], [1.0, 0.25, 0.5, 9.0]], dtype=torch.float64)
OLD = torch.full((2, 4), -1.5, dtype=torch.float64)
SAMPLER = OLD - RATIO.log()


def weights(**choices) -> Tensor:
    return correction_weights(OLD, SAMPLER, KEEP, **choices)


def assert_close(got: Tensor, by_hand: list[list[float]]) -> None:
    torch.testing.assert_close(got, torch.tensor(by_hand, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.silent_bug(8)
def test_truncated_token_weights_by_hand():
    assert_close(weights(mode="truncate", low=0.4, high=3.0), [[2, 0.5, 0, 3], [1, 0.4, 0.5, 0]])


@pytest.mark.silent_bug(8)
def test_masked_token_weights_by_hand_and_the_bounds_are_inside():
    """IcePop: outside [0.5, 3] a weight is 0, and 0.5 itself is inside."""
    assert_close(weights(mode="mask", low=0.5, high=3.0), [[2, 0.5, 0, 0], [1, 0, 0.5, 0]])


@pytest.mark.silent_bug(8)
def test_sequence_weights_are_products_over_the_kept_actions_and_no_means():
    """2 * 0.5 * 4 = 4 and 1 * 0.25 * 0.5 = 0.125, for each action of the row."""
    sums = [[4, 4, 0, 4], [0.125, 0.125, 0.125, 0]]
    assert_close(weights(mode="truncate", level="sequence", high=5.0), sums)
    assert_close(
        weights(mode="truncate", level="sequence", low=0.5, high=3.0),
        [[3, 3, 0, 3], [0.5, 0.5, 0.5, 0]],
    )
    assert_close(
        weights(mode="mask", level="sequence", high=3.0), [[0, 0, 0, 0], [0.125, 0.125, 0.125, 0]]
    )


@pytest.mark.silent_bug(8)
def test_weights_carry_no_gradient():
    leaf = OLD.clone().requires_grad_()
    assert not correction_weights(leaf, SAMPLER, KEEP, mode="truncate").requires_grad


@pytest.mark.silent_bug(8)
def test_a_sampler_that_gave_an_action_no_chance_is_truncated_or_masked_and_never_infinite():
    compute_module = SAMPLER.masked_fill(
        torch.tensor([[True, False, False, False], [False] * 4]), -float("inf")
    )
    for level in ("token", "sequence"):
        for mode, by_hand in (("truncate", 3.0), ("mask", 0.0)):
            assert (
                correction_weights(OLD, compute_module, KEEP, mode=mode, level=level)[0, 0]
                == by_hand
            )
