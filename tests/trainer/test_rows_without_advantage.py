"""Rows without an advantage cost no forward, and stay in the denominator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests import tiny
from tests.trainer.test_step import run_in, step, step_by_hand, vector

from gruppo.build import Parts


def first_group_alike(completions: Sequence[Any], prompts: Sequence[Any], **_: Any) -> list[float]:
    """The rows of the first prompt all get 1."""
    values = tiny.digits(completions)
    return [
        1.0 if prompt == prompts[0] else value
        for prompt, value in zip(prompts, values, strict=True)
    ]


@pytest.mark.silent_bug(13)
@pytest.mark.silent_bug(20)
def test_a_group_all_alike_is_not_evaluated_and_the_step_is_still_the_one_by_hand(tmp_path):
    run = run_in(
        tmp_path,
        Parts(rewards=[first_group_alike]),
        rollout__group_size=8,
        rollout__temperature=1.0,
    )
    rows_seen: set[int] = set()
    likelihood = run.policy.likelihood

    def watched(rollouts: Any, micro_batch: Any, **wanted: Any) -> Any:
        rows_seen.update(micro_batch.rows.tolist())
        return likelihood(rollouts, micro_batch, **wanted)

    run.policy.likelihood = watched
    before = vector(run.policy.module)
    collected, _ = step(run)
    alike = (collected.batch.rollouts.group_ids == 0).nonzero()[:, 0].tolist()
    others = (collected.batch.advantages != 0).any(dim=1).nonzero()[:, 0].tolist()
    assert len(alike) == 8 and rows_seen == set(others) and not rows_seen & set(alike)
    expected = step_by_hand(run, collected)
    assert (expected - before).abs().max() > 1e-3
    torch.testing.assert_close(vector(run.policy.module).double(), expected, rtol=0, atol=1e-6)
