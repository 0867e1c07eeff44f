"""Schedules and controllers, by hand."""

from __future__ import annotations

import math

import pytest

from gruppo.core.schedules import (
    AdaptiveEntropy,
    AdaptiveKl,
    Schedule,
    parse_schedule,
    warmup_decay,
)


def adapted(coef: float, kl: float, *, target: float, horizon: float, rows: float) -> float:
    controller = AdaptiveKl(coef, target, horizon)
    controller.update(kl, rows=rows)
    return controller.value


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
    assert adapted(0.05, kl, target=6.0, horizon=1000, rows=100) == pytest.approx(
        0.05 * factor, rel=1e-12
    )


def test_no_adaptive_coefficient_turns_negative_or_leaves_zero():
    """A step of many horizons moves it by a fifth, where the bare formula would give 1 - 0.2 * 10 =
    -1."""
    assert adapted(0.1, 0.0, target=1.0, horizon=10, rows=100) == pytest.approx(0.08)
    assert adapted(0.1, 9.0, target=1.0, horizon=10, rows=100) == pytest.approx(0.12)
    assert adapted(0.0, 50.0, target=1.0, horizon=10, rows=5) == 0


# --- controllers ----------------------------------------------------------------------------------


def trace(of, measured, rows=100.0):
    values = [of.value]
    for number in measured:
        of.update(number, rows=rows)
        values.append(of.value)
    return values


def test_the_kl_coefficient_over_five_steps_by_hand():
    """Twice the target, on it, a tenth below, far below, not measured; 100 of a horizon of 1000
    samples."""
    by_hand = [0.2, 0.204, 0.204, 0.204 * 0.99, 0.204 * 0.99 * 0.98, 0.204 * 0.99 * 0.98]
    measured = [0.1, 0.05, 0.045, 0.0, math.nan]
    assert trace(AdaptiveKl(0.2, 0.05, 1000.0), measured) == pytest.approx(by_hand, rel=1e-12)


def test_the_entropy_coefficient_over_six_steps_by_hand():
    """Target 0.5, delta 0.01: it grows below the target, shrinks at and above it, and acts only up
    to it."""
    measured = [0.4, 0.3, 0.5, 0.9, 0.45, math.nan]
    #  c:  0.02   0.03  0.04  0.03  0.02  0.03  0.03;  above the target it does not act
    by_hand = [0.02, 0.03, 0.04, 0.03, 0.0, 0.03, 0.03]
    assert trace(AdaptiveEntropy(0.02, 0.5, 0.01), measured) == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("made", [AdaptiveKl(0.2, 0.05), AdaptiveEntropy(0.1, 0.5)])
def test_a_controller_that_is_restored_goes_on_as_before(made):
    made.update(0.4, rows=10)
    again = type(made)(0.7, 0.7)
    again.load_state_dict(vars(made))
    assert trace(again, [0.1, 0.9]) == trace(made, [0.1, 0.9])


@pytest.mark.parametrize(
    ("text", "steps", "by_hand"),
    [
        (0.5, (0, 7, 99), (0.5, 0.5, 0.5)),
        ("0.5", (0, 99), (0.5, 0.5)),
        ("linear:1,0", (0, 1, 5, 9, 10, 50), (1.0, 0.9, 0.5, 0.1, 0.0, 0.0)),
        ("linear:0,1,4", (0, 1, 3, 4, 9), (0.0, 0.25, 0.75, 1.0, 1.0)),
        ("cosine:1,0", (0, 5, 10), (1.0, 0.5, 0.0)),
        ("cosine:0,2,2", (0, 1, 2), (0.0, 1.0, 2.0)),
        ("steps:1, 3=0.5, 6=0", (0, 2, 3, 5, 6, 9), (1.0, 1.0, 0.5, 0.5, 0.0, 0.0)),
    ],
)
def test_schedules_by_hand(text, steps, by_hand):
    schedule = parse_schedule(text)
    assert isinstance(schedule, Schedule)
    assert [schedule.at(step, length=10) for step in steps] == pytest.approx(
        by_hand, rel=1e-12, abs=1e-15
    )


def test_a_schedule_ends_at_its_last_value_to_the_bit():
    for text in ("linear:0.1,0.3", "cosine:0.7,0.3"):
        schedule = parse_schedule(text)
        assert schedule.at(10, length=10) == 0.3 and schedule.values == (
            schedule.at(0, length=10),
            0.3,
        )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "linear",
        "linear:1",
        "linear:1,2,0",
        "linear:a,b",
        "steps:1",
        "steps:1,5=2,3=1",
        "steps:1,0=2",
        "on",
    ],
)
def test_what_is_no_schedule_is_refused(text):
    with pytest.raises(ValueError, match=r"not understood.*linear:FROM,TO"):
        parse_schedule(text)


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        ("lr", "adaptive:1,target=2", "cannot be adaptive; kl_coef"),
        ("kl_coef", "adaptive:1", "needs adaptive:FROM,target=X,horizon=Y"),
        ("kl_coef", "adaptive:1,target=2,delta=1", "needs adaptive:FROM,target=X,horizon=Y"),
        ("kl_coef", "adaptive:1,target=0", "above 0"),
        ("entropy_coef", "adaptive:0,target=0.5,delta=-1", "above 0"),
        ("kl_coef", "adaptive:0.2,target=nan", "out of range"),
        ("kl_coef", "adaptive:0,target=0.1", "above 0"),
    ],
)
def test_a_controller_that_cannot_be_is_refused(field, text, message):
    with pytest.raises(ValueError, match=message):
        parse_schedule(text, field)
