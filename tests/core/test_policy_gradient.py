"""The expected gradient of each objective, summed over every batch that can be drawn, is the true one."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from tests.core.enumeration import (
    LOGITS,
    MASK,
    MAX_LENGTH,
    OTHER,
    SCORES,
    SEQUENCES,
    gradient,
    logprobs_of,
    probabilities,
    terms_of,
    true_gradient,
)
from torch import Tensor

from gruppo.core.advantages import group_advantages
from gruppo.core.objective import DR_GRPO, GRPO, REINFORCE, RLOO, Objective


def expected_gradient(objective: Objective, *, rows: int, drawn_by: Tensor = LOGITS, one_group: bool = True) -> Tensor:
    """Of the loss's policy term, over all batches of so many rows."""
    chance = probabilities(drawn_by)
    total = torch.zeros_like(LOGITS)
    for members in product(range(len(SEQUENCES)), repeat=rows):
        batch = torch.tensor(members)
        group_ids = torch.zeros(rows, dtype=torch.long) if one_group else torch.arange(rows)
        advantages, _ = group_advantages(
            SCORES[batch], group_ids, MASK[batch], baseline=objective.baseline, scale=objective.scale, eps=0.0
        )
        old = None if drawn_by is LOGITS else drawn_by

        def loss(logits: Tensor, batch: Tensor = batch, advantages: Tensor = advantages, old: Tensor | None = old):
            return terms_of(logits, batch, advantages, objective, old=old)["policy"]

        total += chance[batch].prod() * gradient(loss)
    return total


def test_the_enumerated_policy_is_a_distribution():
    torch.testing.assert_close(probabilities(LOGITS).sum(), torch.tensor(1.0, dtype=torch.float64))


@pytest.mark.silent_bug(1)
@pytest.mark.parametrize("surrogate", ["clip", "reinforce"])
@pytest.mark.parametrize(("average", "factor"), [("sequence_sum", 1.0), ("constant", 1 / MAX_LENGTH), ("sum", 2.0)])
def test_without_a_baseline_the_expected_gradient_is_the_policy_gradient(surrogate, average, factor):
    objective = Objective(baseline="none", scale="none", surrogate=surrogate, average=average)
    expected = expected_gradient(objective, rows=2)
    torch.testing.assert_close(expected, -factor * true_gradient(), rtol=1e-10, atol=1e-12)


@pytest.mark.silent_bug(1)
@pytest.mark.parametrize("rows", [2, 3])
def test_rloo_is_unbiased(rows):
    torch.testing.assert_close(expected_gradient(RLOO, rows=rows), -true_gradient(), rtol=1e-6, atol=1e-8)


@pytest.mark.silent_bug(1)
@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize(
    ("objective", "factor"),
    [(DR_GRPO, 1 / MAX_LENGTH), (replace(GRPO, scale="none", average="sequence_sum"), 1.0), (REINFORCE, 1.0)],
    ids=["dr_grpo", "grpo without its divisions", "reinforce"],
)
def test_a_mean_that_holds_the_row_itself_shrinks_the_gradient_by_one_part_in_g(rows, objective, factor):
    expected = expected_gradient(objective, rows=rows)
    torch.testing.assert_close(expected, -factor * (1 - 1 / rows) * true_gradient(), rtol=1e-6, atol=1e-8)


@pytest.mark.silent_bug(1)
def test_the_batch_mean_serves_groups_of_one():
    expected = expected_gradient(REINFORCE, rows=2, one_group=False)
    torch.testing.assert_close(expected, -true_gradient() / 2, rtol=1e-6, atol=1e-8)


def test_the_mean_over_tokens_is_biased_toward_short_rows():
    """GRPO's and DAPO's averages are no policy gradients; a test that they were would be blind."""
    for average in ("sequence", "token"):
        objective = Objective(baseline="none", scale="none", average=average)
        expected = expected_gradient(objective, rows=2)
        assert torch.nn.functional.cosine_similarity(expected.flatten(), -true_gradient().flatten(), dim=0) < 0.999


@pytest.mark.silent_bug(1)
def test_an_unclipped_ratio_gives_the_gradient_of_the_token_weighted_objective_off_policy():
    """With rows of another policy the surrogate descends E_old[sum_t r_t A]: each token weighted by its own ratio."""
    objective = Objective(baseline="none", scale="none", average="sequence_sum", clip_low=1.0, clip_high=1e9)

    def surrogate(logits: Tensor) -> Tensor:
        every = torch.arange(len(SEQUENCES))
        ratio = (logprobs_of(logits, every) - logprobs_of(OTHER, every)).exp()
        return (probabilities(OTHER) * (ratio * MASK).sum(dim=1) * SCORES).sum()

    expected = expected_gradient(objective, rows=1, drawn_by=OTHER)
    torch.testing.assert_close(expected, -gradient(surrogate), rtol=1e-10, atol=1e-12)
