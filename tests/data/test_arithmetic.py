"""Procedural sums: right answers, addressed by draw, with held-out problems that are never
drawn."""

from __future__ import annotations

import pytest

from gruppo.data.arithmetic import arithmetic
from gruppo.types import DataError, GruppoError


def problems(prompts) -> list[str]:
    return [p.id for p in prompts]


def test_targets_are_the_exact_sums_and_differences():
    for p in arithmetic(seed=0).take(500):
        a, operation, b = p.id.split()
        assert (p.meta["a"], p.meta["operation"], p.meta["b"]) == (int(a), operation, int(b))
        assert p.target == str(int(a) + int(b) if operation == "+" else int(a) - int(b))
        assert 0 <= p.meta["a"] <= 20 and 0 <= p.meta["b"] <= 20


def test_the_prompt_is_a_question_and_the_beginning_of_its_answer():
    (prompt,) = arithmetic(7, 7, seed=0, held_out_fraction=0).take(1)
    assert prompt.id in ("7 + 7", "7 - 7")
    assert prompt.inputs == [
        {"role": "system", "content": ""},
        {"role": "user", "content": f"What is {prompt.id}?"},
        {"role": "assistant", "content": f"{prompt.id} ="},
    ]


def test_without_negatives_no_difference_is_below_zero_and_every_other_problem_is_there():
    source = arithmetic(0, 9, seed=2, allow_negative=False, held_out_fraction=0.3)
    requested = {p.id: int(p.target) for p in (*source.take(4000), *source.held_out(1000))}
    assert min(requested.values()) == 0 and len(requested) == 10 * 10 + 10 * 11 / 2


def test_problems_are_drawn_equally_often():
    sampled = problems(arithmetic(0, 3, seed=0, held_out_fraction=0).take(16_000))
    counts = [sampled.count(problem) for problem in set(sampled)]
    assert len(counts) == 32
    # chi-square of 31 degrees, p = 0.0001
    assert sum((c - 500) ** 2 / 500 for c in counts) < 68.0


def test_a_range_too_wide_to_list_still_has_held_out_problems_that_are_never_drawn():
    source = arithmetic(-(10**6), 10**6, seed=1)
    held = problems(source.held_out(300))
    assert len(set(held)) == 300 and held == problems(
        arithmetic(-(10**6), 10**6, seed=2).held_out(300)
    )
    assert len(source.take(50)) == 50


def test_impossible_settings_are_refused():
    with pytest.raises(GruppoError, match="low=5, high=4"):
        arithmetic(5, 4, seed=0)
    with pytest.raises(DataError, match="all problems"):
        arithmetic(1, 1, seed=0, held_out_fraction=0.9999)


@pytest.mark.parametrize("fraction", [0, 0.0001])
def test_a_source_without_held_out_problems_gives_none(fraction):
    assert arithmetic(1, 1, seed=0, held_out_fraction=fraction).held_out(5) == []


def test_a_sum_and_its_mirror_image_are_on_the_same_side():
    source = arithmetic(0, 20, seed=0, held_out_fraction=0.4)
    held = {problem for problem in problems(source.held_out(1000)) if "+" in problem}
    assert len(held) > 100
    assert {f"{b} + {a}" for a, b in (problem.split(" + ") for problem in held)} == held
