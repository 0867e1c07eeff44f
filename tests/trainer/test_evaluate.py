"""Evaluations by hand: greedy, of held-out prompts, of what was scored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests import tiny
from tests.trainer.test_step import run_in, vector

from gruppo.build import Parts
from gruppo.trainer.collect import collect
from gruppo.trainer.evaluate import evaluate, held_out
from gruppo.trainer.run_dir import RunFolder, boundary_state
from gruppo.trainer.stages import step_params_at
from gruppo.types import Request, Sampling


def but_one(completions: Sequence[Any], prompts: Sequence[Any], **_: Any) -> list[float | None]:
    """The first number of the prompt, and no score for one of them."""
    numbers = [int(prompt[0]["content"].split()[0]) for prompt in prompts]
    return [None if n == UNSCORED else float(n) for n in numbers]


UNSCORED = 5


@pytest.mark.silent_bug(41)
@pytest.mark.silent_bug(22)
def test_an_evaluation_is_the_mean_over_what_is_scored_of_the_greedy_answers(tmp_path):
    run = run_in(tmp_path, Parts(rewards=[but_one]), rollout__temperature=5.0)
    prompts = [p for p in run.source.all_prompts() if p.id in ("3", str(UNSCORED), "8")]
    assert len(prompts) == 3
    done, rows = evaluate(run, prompts)
    assert (done.prompts, done.scored, done.mean, done.parts) == (3, 2, 5.5, {"but_one": 5.5})
    greedy = run.policy.sample([Request(p, 1) for p in prompts], Sampling(temperature=0.0, max_actions=8), seed=99)
    assert [row["completion"] for row in rows] == list(greedy.completions)


def test_an_evaluation_leaves_the_run_as_it_was(tmp_path):
    run, other = run_in(tmp_path), run_in(tmp_path)
    before = vector(run.policy.module)
    evaluate(run, held_out(run, 4))
    assert torch.equal(vector(run.policy.module), before)
    one, two = (collect(r, step_params_at(r.config, 0)).batch for r in (run, other))
    assert torch.equal(one.rollouts.actions, two.rollouts.actions) and torch.equal(one.rewards, two.rewards)


@pytest.mark.silent_bug(33)
def test_the_counters_that_end_a_run_are_resumed(tmp_path):
    run, resumed = run_in(tmp_path), run_in(tmp_path)
    run.state.step, run.state.version, run.state.skipped_updates, run.state.unscored_steps = 7, 9, 2, 4
    run.state.evaluations.append({"step": 0, "mean": 0.5})
    folder = RunFolder(tmp_path / "kept")
    folder.save(run, boundary_state(run))
    assert folder.restore(resumed)
    assert resumed.state == run.state and resumed.engine.version == 9


def test_tiny_rows_are_numbered_by_what_they_ask():
    assert [row["prompt"][0]["content"].split()[0] for row in tiny.rows(9)] == [str(n) for n in range(9)]
