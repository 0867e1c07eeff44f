"""The expected gradient of each objective, summed over every batch that can be drawn, is the true
one."""

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
from gruppo.core.objective import (
    DR_GRPO,
    GRPO,
    NANOCHAT,
    PPO,
    REINFORCE,
    REINFORCE_PP,
    RLOO,
    Objective,
)
from gruppo.core.returns import gae, place_score, returns_to_go


def expected_gradient(
    objective: Objective, *, rows: int, drawn_by: Tensor = LOGITS, one_group: bool = True
) -> Tensor:
    """Of the loss's policy term, over all batches of so many rows."""
    chance = probabilities(drawn_by)
    total = torch.zeros_like(LOGITS)
    for members in product(range(len(SEQUENCES)), repeat=rows):
        batch = torch.tensor(members)
        group_ids = torch.zeros(rows, dtype=torch.long) if one_group else torch.arange(rows)
        advantages, _ = group_advantages(
            SCORES[batch],
            group_ids,
            MASK[batch],
            baseline=objective.baseline,
            scale=objective.scale,
            eps=0.0,
        )
        old = None if drawn_by is LOGITS else drawn_by

        def loss(
            logits: Tensor,
            batch: Tensor = batch,
            advantages: Tensor = advantages,
            old: Tensor | None = old,
        ):
            return terms_of(logits, batch, advantages, objective, old=old)["policy"]

        total += chance[batch].prod() * gradient(loss)
    return total


def test_the_enumerated_policy_is_a_distribution():
    torch.testing.assert_close(probabilities(LOGITS).sum(), torch.tensor(1.0, dtype=torch.float64))


@pytest.mark.silent_bug(1)
@pytest.mark.parametrize(
    "choices",
    [
        *({"surrogate": name} for name in ("clip", "cispo", "sapo", "vespo", "reinforce")),
        {"ratio": "sequence"},
    ],
    ids=lambda choices: next(iter(choices.values())),
)
@pytest.mark.parametrize(
    ("average", "factor"), [("sequence_sum", 1.0), ("constant", 1 / MAX_LENGTH), ("sum", 2.0)]
)
def test_without_a_baseline_the_expected_gradient_is_the_policy_gradient(choices, average, factor):
    objective = Objective(baseline="none", scale="none", average=average, **choices)
    expected = expected_gradient(objective, rows=2)
    torch.testing.assert_close(expected, -factor * true_gradient(), rtol=1e-10, atol=1e-12)


@pytest.mark.silent_bug(1)
@pytest.mark.parametrize("rows", [2, 3])
def test_rloo_is_unbiased(rows):
    torch.testing.assert_close(
        expected_gradient(RLOO, rows=rows), -true_gradient(), rtol=1e-6, atol=1e-8
    )


@pytest.mark.silent_bug(1)
@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize(
    ("objective", "factor"),
    [
        (DR_GRPO, 1 / MAX_LENGTH),
        (replace(GRPO, scale="none", average="sequence_sum"), 1.0),
        (REINFORCE, 1.0),
        (replace(REINFORCE_PP, whiten=False, average="sequence_sum"), 1.0),
        (replace(NANOCHAT, average="sequence_sum"), 1.0),
    ],
    ids=[
        "dr_grpo",
        "grpo without its divisions",
        "reinforce",
        "reinforce++ unwhitened",
        "nanochat without its average",
    ],
)
def test_a_mean_that_holds_the_row_itself_shrinks_the_gradient_by_one_part_in_g(
    rows, objective, factor
):
    expected = expected_gradient(objective, rows=rows)
    torch.testing.assert_close(
        expected, -factor * (1 - 1 / rows) * true_gradient(), rtol=1e-6, atol=1e-8
    )


@pytest.mark.silent_bug(1)
def test_the_batch_mean_serves_groups_of_one():
    expected = expected_gradient(REINFORCE, rows=2, one_group=False)
    torch.testing.assert_close(expected, -true_gradient() / 2, rtol=1e-6, atol=1e-8)


def test_the_mean_over_tokens_is_biased_toward_short_rows():
    """GRPO's, DAPO's and nanochat's averages are no policy gradients; a test that they were would
    be blind."""
    bare = Objective(baseline="none", scale="none")
    for objective in (
        bare,
        replace(bare, average="token"),
        NANOCHAT,
        replace(NANOCHAT, average="sequence"),
    ):
        expected = expected_gradient(objective, rows=2)
        assert (
            torch.nn.functional.cosine_similarity(
                expected.flatten(), -true_gradient().flatten(), dim=0
            )
            < 0.9999
        )


@pytest.mark.silent_bug(1)
def test_an_unclipped_ratio_gives_the_gradient_of_the_token_weighted_objective_off_policy():
    """With rows of another policy the surrogate descends E_old[sum_t r_t A]: each token weighted by
    its own ratio."""
    objective = Objective(
        baseline="none", scale="none", average="sequence_sum", clip_low=1.0, clip_high=1e9
    )

    def surrogate(logits: Tensor) -> Tensor:
        every = torch.arange(len(SEQUENCES))
        ratio = (logprobs_of(logits, every) - logprobs_of(OTHER, every)).exp()
        return (probabilities(OTHER) * (ratio * MASK).sum(dim=1) * SCORES).sum()

    expected = expected_gradient(objective, rows=1, drawn_by=OTHER)
    torch.testing.assert_close(expected, -gradient(surrogate), rtol=1e-10, atol=1e-12)


# --- credit in time -------------------------------------------------------------------------------

EVERY = torch.arange(len(SEQUENCES))


def expected_with(advantages: Tensor, objective: Objective) -> Tensor:
    """The expected gradient where a row's advantages [7, 2] depend on nothing but the row."""
    total = torch.zeros_like(LOGITS)
    for n, chance in enumerate(probabilities(LOGITS)):
        row = torch.tensor([n])
        total += chance * gradient(
            lambda x, row=row: terms_of(x, row, advantages[row], objective)["policy"]
        )
    return total


def sequence_kl(logits: Tensor) -> Tensor:
    """KL(policy || OTHER) of whole sequences."""
    difference = (logprobs_of(logits, EVERY) - logprobs_of(OTHER, EVERY)).sum(dim=1)
    return (probabilities(logits) * difference).sum()


K1 = torch.where(MASK, logprobs_of(LOGITS, EVERY) - logprobs_of(OTHER, EVERY), 0)
BARE = replace(REINFORCE_PP, baseline="none", whiten=False, average="sequence_sum")


@pytest.mark.silent_bug(17)
@pytest.mark.parametrize("surrogate", ["clip", "reinforce"])
@pytest.mark.parametrize("credit", ["return_to_go", "outcome"])
def test_k1_in_the_reward_has_the_gradient_of_the_score_less_the_kl_of_sequences(credit, surrogate):
    """Exactly, prefixes included: the term in the loss holds those fixed."""
    placed = place_score(SCORES, MASK) - 0.7 * K1
    to_go = returns_to_go(placed, MASK)
    advantages = (
        to_go if credit == "return_to_go" else torch.where(MASK, placed.sum(dim=1, keepdim=True), 0)
    )
    objective = replace(BARE, credit=credit, surrogate=surrogate)
    true = gradient(lambda x: (probabilities(x) * SCORES).sum() - 0.7 * sequence_kl(x))
    torch.testing.assert_close(expected_with(advantages, objective), -true, rtol=1e-10, atol=1e-12)
    assert (
        gradient(sequence_kl)
    ).norm() > 0.1  # so that the line above tells the KL apart from none


@pytest.mark.silent_bug(17)
def test_k1_in_the_loss_with_its_own_gradient_holds_nothing_over_sequences_too():
    objective = Objective(average="sequence_sum", kl="k1", kl_gradient="naive")
    nothing = torch.zeros(1, 2)
    total = torch.zeros_like(LOGITS)
    for n, chance in enumerate(probabilities(LOGITS)):
        row = torch.tensor([n])
        total += chance * gradient(
            lambda x, row=row: terms_of(x, row, nothing, objective, ref=OTHER)["kl"]
        )
    torch.testing.assert_close(total, torch.zeros_like(LOGITS), rtol=0, atol=1e-12)


def true_values() -> Tensor:
    """[7, 2]: the expected score before the first token, and after it."""
    chance = probabilities(LOGITS)
    first = SEQUENCES[:, 0]
    after = torch.stack(
        [(chance * SCORES)[first == n].sum() / chance[first == n].sum() for n in range(3)]
    )
    return torch.stack([(chance * SCORES).sum().expand(len(EVERY)), after[first]], dim=1)


UNWHITENED = replace(PPO, whiten=False, average="sequence_sum")


@pytest.mark.silent_bug(30)
@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
def test_ppo_with_a_true_critic_is_unbiased_at_any_lambda(lam):
    advantages, returns = gae(place_score(SCORES, MASK), true_values(), MASK, gamma=1.0, lam=lam)
    torch.testing.assert_close(
        expected_with(advantages, UNWHITENED), -true_gradient(), rtol=1e-10, atol=1e-12
    )
    chance = probabilities(LOGITS)
    assert (chance * (returns[:, 0] - true_values()[:, 0])).sum().item() == pytest.approx(
        0, abs=1e-12
    )


@pytest.mark.silent_bug(30)
def test_ppo_with_a_wrong_critic_is_unbiased_at_lambda_1_alone():
    wrong = (
        true_values() + torch.tensor([0.8, 0.0]) + SEQUENCES[:, :1] * torch.tensor([0.0, 0.6])
    )  # sees the prefix
    for lam, is_right in ((1.0, True), (0.5, False), (0.0, False)):
        advantages, _ = gae(place_score(SCORES, MASK), wrong, MASK, gamma=1.0, lam=lam)
        error = (
            expected_with(advantages, UNWHITENED) + true_gradient()
        ).norm() / true_gradient().norm()
        assert error < 1e-10 if is_right else error > 0.01


@pytest.mark.silent_bug(30)
def test_a_discount_is_a_bias_that_shrinks_the_credit_of_early_actions():
    to_go = returns_to_go(place_score(SCORES, MASK), MASK, gamma=0.5)
    by_hand = torch.where(MASK[:, 1], SCORES / 2, SCORES)
    assert torch.equal(to_go[:, 0], by_hand) and torch.equal(
        to_go[:, 1], torch.where(MASK[:, 1], SCORES, 0)
    )
    assert (expected_with(to_go, BARE) + true_gradient()).norm() > 0.05 * true_gradient().norm()
