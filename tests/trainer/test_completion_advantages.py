"""Rows of completions/ carry the advantage that the update learned from."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tests.trainer.test_growth import places, run_with
from tests.trainer.test_resampling import collected_by, number_of

from gruppo.trainer.samples import learned_advantages


def test_completions_have_the_advantage_of_their_own_row_also_where_the_batch_has_another_order(
    tmp_path: Path,
) -> None:
    collected = collected_by(run_with(tmp_path, places))
    assert (
        collected.rollouts is not None
        and collected.scores is not None
        and collected.sampled is not None
    )
    by_number: dict[int, list[int]] = {}
    for row, group in enumerate(collected.rollouts.group_ids.tolist()):
        by_number.setdefault(number_of(collected.rollouts.prompts[group].inputs), []).append(row)
    assert any(
        rows != list(range(rows[0], rows[0] + len(rows))) for rows in by_number.values()
    )  # grown groups
    for rows in by_number.values():
        rewards = collected.scores.rewards[rows].double()
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        found = learned_advantages(collected)[rows].double()
        assert torch.allclose(found, expected, atol=1e-3)


def test_what_nothing_is_learned_from_has_no_advantage(tmp_path: Path) -> None:
    def unscored(completions: list[str], **_: object) -> list[float | None]:
        return [None if n % 4 == 1 else float(n % 3) for n in range(len(completions))]

    collected = collected_by(run_with(tmp_path, unscored, rollout__first_samples=0))
    advantages = learned_advantages(collected)
    is_nan = [math.isnan(value) for value in advantages.tolist()]
    assert is_nan == [math.isnan(value) for value in collected.scores.rewards.tolist()] and any(
        is_nan
    )
    assert not all(is_nan) and advantages.nan_to_num().abs().max() == pytest.approx(
        collected.batch.advantages.abs().max().item(), rel=1e-5
    )
