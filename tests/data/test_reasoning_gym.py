"""Tasks of reasoning-gym as a resumable stream."""

from __future__ import annotations

import pytest

from gruppo.data.reasoning_gym import HASH_DEPENDENT, INSTRUCTION, reasoning_gym
from gruppo.data.source import IndexedSource
from gruppo.types import DataError, GruppoError

pytest.importorskip("reasoning_gym")


def source(**options) -> IndexedSource:
    return reasoning_gym(
        "chain_sum", **{"seed": 3, "size_per_epoch": 20, "held_out_fraction": 0.2, **options}
    )


def said(prompts) -> list[tuple]:
    return [(p.id, p.inputs, p.target, p.draw) for p in prompts]


def test_a_prompt_is_the_question_with_the_entry_for_the_verifier():
    from reasoning_gym import get_score_answer_fn

    for p in source().take(5):
        entry = p.meta["entry"]
        assert p.inputs == [
            {"role": "user", "content": f"{entry['question'].rstrip()}\n{INSTRUCTION}"}
        ]
        assert p.target == entry["answer"]
        assert p.draw == entry["metadata"]["source_index"]
        assert get_score_answer_fn("chain_sum")(p.target, entry) == 1.0


def test_epochs_do_not_repeat_entries():
    questions = [p.inputs[0]["content"] for p in source(held_out_fraction=0).take(60)]
    assert len(set(questions)) == 60


def test_held_out_entries_are_the_same_for_every_seed_and_never_drawn():
    few = source(size_per_epoch=200, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    held = [p.inputs[0]["content"] for p in few.held_out(1000)]
    other = source(seed=9, size_per_epoch=200, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    assert held == [p.inputs[0]["content"] for p in other.held_out(1000)]
    assert len(held) == len(set(held)) > 10
    assert held[:3] == [p.inputs[0]["content"] for p in few.held_out(3)]
    assert not {p.inputs[0]["content"] for p in few.take(400)} & set(held)


def test_unknown_tasks_and_options_name_the_nearest():
    with pytest.raises(GruppoError, match="'chain_sums'; the nearest is 'chain_sum'"):
        reasoning_gym("chain_sums", seed=0)
    with pytest.raises(GruppoError, match="no option 'max_term'; the nearest is 'max_terms'"):
        source(max_term=3)
    with pytest.raises(GruppoError, match="refuses its options"):
        source(min_terms=-1)


def test_a_task_that_changes_with_the_hash_seed_is_refused_unless_it_is_fixed(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for task in HASH_DEPENDENT:
        with pytest.raises(GruppoError, match="PYTHONHASHSEED=0"):
            reasoning_gym(task, seed=0)


def test_a_held_out_share_that_leaves_nothing_is_refused_and_one_that_keeps_nothing_gives_none():
    with pytest.raises(DataError, match=r"Lower --prompts.held-out-fraction"):
        source(held_out_fraction=0.999999).take(1)
    assert source(held_out_fraction=1e-9).held_out(1) == []
    assert source(held_out_fraction=0).held_out(4) == []
