"""Step to value, by hand."""

from __future__ import annotations

import pytest

from gruppo.core.schedules import warmup_decay


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
