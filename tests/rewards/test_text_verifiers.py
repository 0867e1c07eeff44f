"""reasoning-gym's verifiers as rewards."""

from __future__ import annotations

import builtins
import time

import pytest
from tests.rewards.fakes import rollouts_of

from gruppo.rewards import RewardSet
from gruppo.rewards.text import reasoning_gym_score
from gruppo.types import DataError, GruppoError

reasoning_gym = pytest.importorskip("reasoning_gym")


def entry_of(name, **config):
    return reasoning_gym.create_dataset(name, size=1, seed=1, **config)[0]


def score(text, entry):
    return reasoning_gym_score(completions=[text], entry=[entry])[0]


def test_the_tagged_answer_or_the_whole_text_is_judged():
    entry = entry_of("basic_arithmetic")
    gold = entry["answer"]
    assert score(f" {gold}\n", entry) == 1.0
    assert score(f"I think <answer> {gold} </answer>", entry) == 1.0
    assert score("<answer>999</answer>", entry) == 0.0
    assert score(f"<answer>999</answer> no, <answer>{gold}\n</answer>", entry) == 1.0
    assert score(f"<answer>{gold}</answer> no, <answer>999</answer>", entry) == 0.0


def test_a_task_with_many_right_answers_uses_its_own_verifier():
    entry = entry_of("countdown")  # 309 of 6, 61, 94, 4
    assert score("4*94 - 6 - 61", entry) == 1.0 and score("4*94 - 6", entry) == 0.05


def test_the_entry_travels_in_the_prompts_meta_and_a_row_without_one_is_unscored():
    entry = entry_of("basic_arithmetic")
    rewards = RewardSet(reasoning_gym_score)
    rewards.check(["entry"])
    got = rewards.score(
        rollouts_of(
            [entry["answer"], "x"],
            group_ids=[0, 1],
            targets=[None, None],
            metas=[{"entry": entry}, {}],
        )
    )
    assert got.rewards[0] == 1.0 and got.rewards[1].isnan() and got.failures == ()
    with pytest.raises(DataError, match="asks for 'entry'"):
        rewards_without = RewardSet(reasoning_gym_score)
        rewards_without.check(["answer"])


EVALUATING = [
    "string_insertion",
    "spiral_matrix",
    "binary_matrix",
    "n_queens",
    "countdown",
    "puzzle24",
    "simple_integration",
    "intermediate_integration",
    "polynomial_multiplication",
    "number_sorting",
]


@pytest.mark.silent_bug(42)
@pytest.mark.parametrize("name", EVALUATING)
def test_an_answer_that_is_code_is_never_run(name, monkeypatch, tmp_path):
    entry, ran = entry_of(name), tmp_path / "ran"
    monkeypatch.setattr(builtins, "touched", lambda: ran.write_text("x") or [], raising=False)
    codes = [
        f"open({str(ran)!r}, 'w')",
        "touched()",
        "[touched()]",
        "__import__('builtins').touched()",
        "touched().x + 1",
        "(lambda: touched())()",
        "sin(touched())",
        "[touched() for _ in [1]]",
        "f'{touched()}'",
    ]
    floor = reasoning_gym.get_score_answer_fn(name)(None, entry)
    assert [score(code, entry) for code in codes] == [floor] * len(codes) and not ran.exists()
    honest = score(entry["answer"], entry)
    assert honest == 1.0 and floor < honest


@pytest.mark.silent_bug(42)
@pytest.mark.parametrize(
    "bomb",
    [
        "9**9**9**9",
        "(9**64)**64**64",
        "9" * 4000 + "**64",
        "factorial(10**9)",
        "9!!!!!!",
        "1<<10**9",
    ],
)
def test_an_answer_that_would_take_forever_is_not_evaluated(bomb):
    began = time.monotonic()
    assert score(bomb, entry_of("countdown")) == 0.01 and time.monotonic() - began < 2


def test_a_list_is_still_read_where_the_verifier_reads_lists():
    entry = entry_of("spiral_matrix")
    assert score(str([int(x) for x in entry["answer"].split()]), entry) == 0.1


def test_without_the_package_the_line_that_installs_it_is_named(monkeypatch):
    import sys

    from gruppo.rewards.registry import resolve_reward

    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(GruppoError, match=r'pip install .*\[tasks\]"'):
        resolve_reward("reasoning_gym_score")
