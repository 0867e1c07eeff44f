"""Controllers, by hand: what each value becomes after what each step measured."""

from __future__ import annotations

import math

import pytest

from gruppo.core.controllers import AdaptiveDifficulty, AdaptiveEntropy, AdaptiveKl, controller
from gruppo.core.schedules import Adaptive, Schedule, parse
from gruppo.types import GruppoError


def trace(of, measured, rows=100.0):
    values = [of.value]
    for number in measured:
        of.update(number, rows=rows)
        values.append(of.value)
    return values


def test_the_kl_coefficient_over_five_steps_by_hand():
    """Twice the target, on it, a tenth below, far below, not measured; 100 of a horizon of 1000 samples."""
    by_hand = [0.2, 0.204, 0.204, 0.204 * 0.99, 0.204 * 0.99 * 0.98, 0.204 * 0.99 * 0.98]
    measured = [0.1, 0.05, 0.045, 0.0, math.nan]
    assert trace(AdaptiveKl(0.2, 0.05, 1000.0), measured) == pytest.approx(by_hand, rel=1e-12)


def test_the_entropy_coefficient_over_six_steps_by_hand():
    """Target 0.5, delta 0.01: it grows below the target, shrinks at and above it, and acts only up to it."""
    measured = [0.4, 0.3, 0.5, 0.9, 0.45, math.nan]
    #  c:  0.02   0.03  0.04  0.03  0.02  0.03  0.03;  above the target it does not act
    by_hand = [0.02, 0.03, 0.04, 0.03, 0.0, 0.03, 0.03]
    assert trace(AdaptiveEntropy(0.02, 0.5, 0.01), measured) == pytest.approx(by_hand, rel=1e-12)


def test_the_entropy_coefficient_is_never_negative():
    assert trace(AdaptiveEntropy(0.005, 0.5, 0.01), [0.9, 0.9, 0.4]) == pytest.approx([0.005, 0, 0, 0.01], abs=1e-15)


def test_the_difficulty_over_five_steps_by_hand():
    """Target 0.6, rate 0.5, from 0.3: + 0.5 (r - 0.6), never below where it began nor above 1."""
    by_hand = [0.3, 0.4, 0.35, 0.3, 0.5, 0.5]
    of = controller("difficulty", Adaptive(0.3, (("target", 0.6), ("rate", 0.5))), "stage.difficulty")
    assert trace(of, [0.8, 0.5, 0.1, 1.0, math.nan]) == pytest.approx(by_hand, rel=1e-12)
    assert trace(AdaptiveDifficulty(0.9, 0.1, 1.0, 0.9), [0.9])[-1] == 1.0


@pytest.mark.parametrize("made", [AdaptiveKl(0.2, 0.05), AdaptiveEntropy(0.1, 0.5), AdaptiveDifficulty(0.2, 0.6)])
def test_a_controller_that_is_restored_goes_on_as_before(made):
    made.update(0.4, rows=10)
    again = type(made)(0.7, 0.7)
    again.load_state_dict(made.state_dict())
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
    schedule = parse(text, "x")
    assert isinstance(schedule, Schedule)
    assert [schedule.at(step, length=10) for step in steps] == pytest.approx(by_hand, rel=1e-12, abs=1e-15)


def test_a_schedule_ends_at_its_last_value_to_the_bit():
    for text in ("linear:0.1,0.3", "cosine:0.7,0.3"):
        schedule = parse(text, "x")
        assert schedule.at(10, length=10) == 0.3 and schedule.values == (schedule.at(0, length=10), 0.3)


@pytest.mark.parametrize(
    "text", ["", "linear", "linear:1", "linear:1,2,0", "linear:a,b", "steps:1", "steps:1,5=2,3=1", "steps:1,0=2", "on"]
)
def test_what_is_no_schedule_is_refused_by_its_field(text):
    with pytest.raises(GruppoError, match=r"stage\.kl_coef=.*not understood.*linear:FROM,TO"):
        parse(text, "stage.kl_coef")


@pytest.mark.parametrize(
    ("field", "text", "said"),
    [
        ("lr", "adaptive:1,target=2", "cannot be adaptive; kl_coef"),
        ("kl_coef", "adaptive:1", "needs target; it has none"),
        ("kl_coef", "adaptive:1,target=2,delta=1", "takes target and horizon"),
        ("kl_coef", "adaptive:1,target=0", "target=0 is out of range"),
        ("entropy_coef", "adaptive:0,target=0.5,delta=-1", "delta=-1 is out of range"),
        ("difficulty", "adaptive:0.2,target=nan", "target=nan is out of range; it needs a number"),
        ("difficulty", "adaptive:0.2,target=0,rate=-0.5", "rate=-0.5 is out of range"),
        ("kl_coef", "adaptive:0,target=0.1", "from 0 it never moves"),
    ],
)
def test_a_controller_that_cannot_be_is_refused(field, text, said):
    adaptive = parse(text, "x")
    assert isinstance(adaptive, Adaptive)
    with pytest.raises(GruppoError, match=said):
        controller(field, adaptive, f"stage.{field}")
