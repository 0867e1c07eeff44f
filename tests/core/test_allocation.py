"""A budget of samples shared out over groups, against traces by hand, all other shares, and
enumeration."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from gruppo.core.groups import allocate_samples

NAN = float("nan")


def shares(spread: list[float], sizes: list[int], *, budget: int, cap: int) -> list[int]:
    return allocate_samples(
        torch.tensor(spread), torch.tensor(sizes), budget=budget, cap=cap
    ).tolist()


def test_a_trace_by_hand_with_ties_and_a_cap():
    """Gains s^2 / (n (n + 1)): the second group's are 1/6, 1/12, 1/20 up to its cap of 5; the
    others' 1/24, 1/48."""
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


def test_where_nobody_is_informative_nothing_is_spent():
    assert shares([0.0, NAN, 0.0], [2, 2, 2], budget=100, cap=50) == [0, 0, 0]
    assert shares([], [], budget=3, cap=4) == []


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


# --- what choosing by the first rewards does to the gradient ---
