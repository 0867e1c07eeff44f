"""Tasks of reasoning-gym as a resumable stream."""

from __future__ import annotations

import pytest

from gruppo.data.reasoning_gym import INSTRUCTION, reasoning_gym
from gruppo.data.source import IndexedSource
from gruppo.types import DataError, GruppoError

pytest.importorskip("reasoning_gym")


def source(**options) -> IndexedSource:
    return reasoning_gym(
        "chain_sum", **{"seed": 3, "size_per_epoch": 20, "held_out_fraction": 0.2, **options}
    )


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


def test_unknown_tasks_and_options_name_the_nearest():
    with pytest.raises(GruppoError, match=r"'chain_sums'.* Did you mean chain_sum"):
        reasoning_gym("chain_sums", seed=0)
    with pytest.raises(GruppoError, match=r"options .*'max_term': 3.* could not make entry 0"):
        source(max_term=3)
    with pytest.raises(GruppoError, match=r"options .*'min_terms': -1"):
        source(min_terms=-1)


def test_a_held_out_share_that_leaves_nothing_is_refused_and_one_that_keeps_nothing_gives_none():
    with pytest.raises(DataError, match=r"Lower prompts.held_out_fraction"):
        source(held_out_fraction=0.999999).take(1)
    assert source(held_out_fraction=1e-9).held_out(1) == []
    assert source(held_out_fraction=0).held_out(4) == []
