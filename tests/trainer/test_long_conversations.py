"""Conversations that may outgrow the model's context or memory: said before the run, counted during
it."""

from __future__ import annotations

import pytest
from tests import tiny
from tests.trainer.test_environments import config, settings
from tests.trainer.test_step import run_in, step

from gruppo.build import Parts, build
from gruppo.modalities.text.memory import working_memory


def long() -> str:
    return "1" * 20


def test_turns_that_did_not_fit_are_counted(tmp_path):
    changes = {
        "environment__reply": f"{__file__}:long",
        "environment__turns": 9,
        "rollout__max_new_tokens": 30,
    }
    collected, _ = step(run_in(tmp_path, **settings(**changes)))
    full = collected.rollouts.per_row["context_full"].sum()
    assert collected.metrics["turns/context_full_count"] == full > 0


@pytest.mark.parametrize(
    ("reply_tokens", "cached"), [(4, lambda p: p + 9 + 8), (500, lambda p: tiny.CONTEXT)]
)
def test_memory_of_conversations_counts_replies_up_to_the_context_and_kept_rows(
    tmp_path, reply_tokens, cached
):
    run, _ = build(config(tmp_path, environment__max_reply_tokens=reply_tokens), Parts())
    single, _ = build(tiny.config(tmp_path, rollout__max_new_tokens=9), Parts())
    memory, plain = (
        working_memory(r.policy, r.config, 12, 100, 12)["cache while sampling"]
        for r in (run, single)
    )
    assert memory / plain == pytest.approx(2 * cached(12) / (12 + 9))
