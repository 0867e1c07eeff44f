"""Step to value, by hand."""

from __future__ import annotations

import pytest

from gruppo.core.schedules import adaptive_coef, warmup_decay


def values(**choices) -> list[float]:
    return [warmup_decay(step, peak=2.0, **choices) for step in range(choices["total"])]


@pytest.mark.parametrize(
    ("choices", "by_hand"),
    [
        ({"warmup": 4, "total": 6, "decay": "constant"}, [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]),
        ({"warmup": 0, "total": 4, "decay": "linear"}, [2.0, 1.5, 1.0, 0.5]),
        ({"warmup": 2, "total": 6, "decay": "linear"}, [1.0, 2.0, 2.0, 1.5, 1.0, 0.5]),
        ({"warmup": 0, "total": 4, "decay": "linear", "final_frac": 0.5}, [2.0, 1.75, 1.5, 1.25]),
        ({"warmup": 0, "total": 3, "decay": "cosine"}, [2.0, 1.5, 0.5]),
        ({"warmup": 0, "total": 3, "decay": "cosine", "final_frac": 0.2}, [2.0, 1.6, 0.8]),
        ({"warmup": 5, "total": 3, "decay": "linear"}, [0.4, 0.8, 1.2]),
        ({"warmup": 1, "total": 1, "decay": "cosine"}, [2.0]),
    ],
)
def test_warmup_and_decay_by_hand(choices, by_hand):
    assert values(**choices) == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_the_step_after_the_last_and_all_later_ones_have_the_final_value(decay):
    for step in (10, 11, 1000):
        last = warmup_decay(step, peak=2.0, warmup=3, total=10, decay=decay, final_frac=0.25)
        assert last == pytest.approx(0.5, rel=1e-12)


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (6.0, 1.0),  # on target
        (6.6, 1.01),  # a tenth above: 0.1 * 100 / 1000
        (5.4, 0.99),
        (7.2, 1.02),  # a fifth above, where the clip begins
        (60.0, 1.02),
        (0.0, 0.98),
        (-3.0, 0.98),  # an estimate may be negative
        (float("nan"), 1.0),
        (float("inf"), 1.0),
    ],
)
def test_the_adaptive_coefficient_by_hand(kl, factor):
    assert adaptive_coef(0.05, kl, target=6.0, horizon=1000, n=100) == pytest.approx(0.05 * factor, rel=1e-12)


def test_the_adaptive_coefficient_over_three_steps_by_hand():
    """KL 12, 6.3, 5.1 at a target of 6: times 1.02, times 1 + 0.05 / 10, times 1 - 0.15 / 10."""
    coef = 0.2
    for kl in (12.0, 6.3, 5.1):
        coef = adaptive_coef(coef, kl, target=6.0, horizon=1000, n=100)
    assert coef == pytest.approx(0.2 * 1.02 * 1.005 * 0.985, rel=1e-12)


def test_no_adaptive_coefficient_turns_negative_or_leaves_zero():
    """A step of many horizons moves it by a fifth, where the bare formula would give 1 - 0.2 * 10 = -1."""
    assert adaptive_coef(0.1, 0.0, target=1.0, horizon=10, n=100) == pytest.approx(0.08)
    assert adaptive_coef(0.1, 9.0, target=1.0, horizon=10, n=100) == pytest.approx(0.12)
    assert adaptive_coef(0.0, 50.0, target=1.0, horizon=10, n=5) == 0
