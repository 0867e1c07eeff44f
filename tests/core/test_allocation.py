"""A budget of samples shared out over groups, against traces by hand, all other shares, and enumeration."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from gruppo.core.advantages import group_advantages
from gruppo.core.groups import allocate_samples, has_no_spread

NAN = float("nan")


def shares(spread: list[float], sizes: list[int], *, budget: int, cap: int) -> list[int]:
    return allocate_samples(
        torch.tensor(spread), torch.tensor(sizes), budget=budget, cap=cap
    ).tolist()


def test_a_trace_by_hand_with_ties_and_a_cap():
    """Gains s^2 / (n (n + 1)): the second group's are 1/6, 1/12, 1/20 up to its cap of 5; the others' 1/24, 1/48."""
    spread, sizes = [0.5, 1.0, 0.0, 0.5], [2, 2, 2, 2]
    expected = [
        [0, 0, 0, 0],
        [0, 1, 0, 0],  # 1/6 > 1/24
        [0, 2, 0, 0],  # 1/12 > 1/24
        [0, 3, 0, 0],  # 1/20 > 1/24, and then at the cap; 1/30 would have lost to 1/24
        [1, 3, 0, 0],  # 1/24 = 1/24: the first
        [1, 3, 0, 1],  # 1/24 > 1/48
        [2, 3, 0, 1],
        [2, 3, 0, 2],
        [3, 3, 0, 2],
        [3, 3, 0, 3],
        [3, 3, 0, 3],  # all that have spread are at the cap: the rest is left
    ]
    assert [shares(spread, sizes, budget=budget, cap=5) for budget in range(11)] == expected


def test_a_group_that_is_larger_already_waits_for_the_others():
    """1/6, 1/12, 1/20 against 1/20 of the larger: equal at the end, and the first of equals is served."""
    assert shares([1.0, 1.0], [4, 2], budget=3, cap=9) == [1, 2]
    assert shares([1.0, 1.0], [9, 2], budget=3, cap=9) == [0, 3]


def test_where_nobody_is_informative_nothing_is_spent():
    assert shares([0.0, NAN, 0.0], [2, 2, 2], budget=100, cap=50) == [0, 0, 0]
    assert shares([], [], budget=3, cap=4) == []


def test_equal_spreads_share_alike_and_the_first_get_what_is_left_over():
    assert shares([0.3, 0.3, 0.0, 0.3], [2, 2, 2, 2], budget=8, cap=99) == [3, 3, 0, 2]


def test_the_greedy_shares_have_the_least_variance_of_all():
    generator = torch.Generator().manual_seed(0)
    for budget in (1, 4, 7):
        spread = torch.rand(4, generator=generator, dtype=torch.float64)
        sizes = torch.randint(2, 5, (4,), generator=generator)
        added = allocate_samples(spread, sizes, budget=budget, cap=7)
        every = [
            torch.tensor(more)
            for more in product(range(budget + 1), repeat=4)
            if sum(more) == budget
        ]
        allowed = [more for more in every if bool((sizes + more <= 7).all())]
        best = min(float((spread**2 / (sizes + more)).sum()) for more in allowed)
        assert int(added.sum()) == budget and bool((sizes + added <= 7).all())
        assert float((spread**2 / (sizes + added)).sum()) == pytest.approx(best, rel=1e-12)


def test_without_a_cap_sizes_tend_to_proportions_of_the_spreads():
    more = shares([0.1, 0.2, 0.4], [2, 2, 2], budget=6994, cap=10**6)
    assert [size + 2 for size in more] == pytest.approx([1000, 2000, 4000], abs=1)


# --- what choosing by the first rewards does to the gradient ---


def expected_gradient(rewards: list[float], first: int) -> torch.Tensor:
    """Of one prompt with three answers, over all samples: some first, four where their rewards differ; A = r - mean."""
    logits = torch.tensor([0.3, -0.5, 0.9], dtype=torch.float64)
    probabilities = logits.softmax(0)
    total = torch.zeros(3, dtype=torch.float64)
    for outcome in product(range(3), repeat=4):
        seen = torch.tensor([rewards[i] for i in outcome[:first]])
        size = first if bool(has_no_spread(seen, torch.zeros(first, dtype=torch.long))[0]) else 4
        answers = list(outcome[:size])
        observed, mask = (
            torch.tensor([rewards[i] for i in answers]),
            torch.ones(size, 1, dtype=torch.bool),
        )
        ids = torch.zeros(size, dtype=torch.long)
        advantages, _ = group_advantages(observed, ids, mask, baseline="mean", scale="none")
        gradients = (
            torch.eye(3, dtype=torch.float64)[answers] - probabilities
        )  # of each answer's log-probability
        total += probabilities[list(outcome)].prod() * (advantages.double() * gradients).sum(0)
    return total


def true_gradient(rewards: list[float]) -> torch.Tensor:
    logits = torch.tensor([0.3, -0.5, 0.9], dtype=torch.float64, requires_grad=True)
    (logits.softmax(0) * torch.tensor(rewards, dtype=torch.float64)).sum().backward()
    assert logits.grad is not None
    return logits.grad


def cosine(rewards: list[float], first: int = 2) -> float:
    return float(
        torch.cosine_similarity(expected_gradient(rewards, first), true_gradient(rewards), dim=0)
    )


def test_growing_changes_the_weight_of_a_prompt_with_two_valued_rewards_and_not_its_direction():
    for rewards in ([0.0, 1.0, 0.0], [0.0, 0.7, 0.7]):
        assert cosine(rewards) == pytest.approx(1, abs=1e-9)
        ratio = expected_gradient(rewards, 2).norm() / expected_gradient(rewards, 4).norm()
        assert 0.5 < float(ratio) < 0.9


def test_growing_may_turn_the_gradient_of_a_prompt_with_other_rewards():
    assert cosine([0.0, 0.2, 1.0], first=4) == pytest.approx(1, abs=1e-9)
    assert 0.9 < cosine([0.0, 0.2, 1.0]) < 1 - 1e-5
