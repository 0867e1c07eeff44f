"""math-verify: the built-in reward, TRL's, and a function of the user's that calls it."""

from __future__ import annotations

import pytest
from tests.rewards.fakes import rollouts_of

from gruppo.loading import load_object
from gruppo.rewards import RewardSet, resolve_reward, text
from gruppo.rewards.remote import RewardWorkers

MINE = """
from math_verify import parse, verify

def mine(completions, answer):
    return [float(verify(parse(a), parse(c))) for c, a in zip(completions, answer)]
"""


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        (r"so \boxed{\frac{2}{4}}", "1/2", 1.0),
        ("The answer is 0.5.", r"$\frac{1}{2}$", 1.0),
        (r"$x^2+2x+1$", "(x+1)^2", 1.0),
        (r"\boxed{\{2, 1\}}", r"\{1, 2\}", 1.0),
        ("5", "2 + 3 = 5\n#### 5", 1.0),
        ("<think>6 * 5</think><answer>30</answer>", "#### 30", 1.0),
        ("<answer>31</answer>", "#### 30", 0.0),
        (r"\boxed{1, 2, 3}", "1", 0.0),
        (r"\boxed{1} or \boxed{2}", "1", 0.0),
        ("", "1", 0.0),
        ("1", "", None),
        ("1", None, None),
    ],
)
def test_math_verify_compares_formulas_and_a_list_of_candidates_is_no_answer(
    completion, answer, score
):
    assert text.math_verify([completion], [answer]) == [score]


@pytest.mark.slow
def test_a_formula_that_takes_forever_costs_its_row():
    rollouts = rollouts_of([r"\boxed{9^{9^{9^{9}}}}", r"\boxed{9}"], targets=["9"])
    scores = RewardSet(resolve_reward("math_verify", RewardWorkers()), timeout_s=12.0).score(
        rollouts
    )
    assert scores.rewards[1] == 1.0 and scores.rewards[0] != 1.0


def test_math_verifys_own_parse_works_in_a_function_of_a_file_and_in_memory_the_error_names_the_fix(
    tmp_path,
):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    rollouts = rollouts_of([r"$\frac{1}{2}$", "3"], targets=["0.5"])
    isolated = RewardSet(resolve_reward(f"{file}:mine", RewardWorkers())).score(rollouts)
    assert isolated.rewards.tolist() == [1.0, 0.0]
    in_memory = RewardSet(load_object(f"{file}:mine")).score(rollouts)
    assert (
        in_memory.rewards.isnan().all()
        and "give the function as file.py:name" in in_memory.failures[0].message
    )


def test_rewards_of_trl_are_found_though_its_modules_load_them_when_they_are_first_used():
    assert load_object("trl.rewards:think_format_reward").__name__ == "think_format_reward"
    reward = RewardSet(
        resolve_reward("trl.rewards:accuracy_reward", RewardWorkers()), timeout_s=120.0
    )
    outputs = [[{"role": "assistant", "content": rf"\boxed{{{x}}}"}] for x in ("1/3", "2")]
    scores = reward.score(rollouts_of(outputs, metas=[{"solution": r"$\frac{1}{3}$"}]))
    assert (
        scores.rewards.tolist() == [1.0, 0.0]
        and scores.extras["solution"] == (r"$\frac{1}{3}$",) * 2
    )
