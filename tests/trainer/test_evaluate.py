"""Evaluations by hand: greedy, of held-out prompts, of what was scored."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny
from tests.collecting import collect
from tests.trainer.test_step import run_in, vector

from gruppo.build import Parts
from gruppo.seeds import seed_at
from gruppo.trainer.evaluate import evaluate, held_out
from gruppo.trainer.run_dir import RunFolder, boundary_state
from gruppo.trainer.stages import step_params_at
from gruppo.types import DataError, Request, Sampling


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
    greedy = run.policy.sample(
        [Request(p, 1) for p in prompts], Sampling(temperature=0.0, max_actions=8), seed=99
    )
    assert [row["completion"] for row in rows] == list(greedy.completions)


@pytest.mark.silent_bug(22)
def test_an_evaluated_row_that_lacks_a_part_is_unscored_and_not_a_sum_of_what_is_left(tmp_path):
    run = run_in(tmp_path, Parts(rewards=[but_one, lambda completions: [1.0] * len(completions)]))
    done, _ = evaluate(run, [p for p in run.source.all_prompts() if p.id in ("3", "5", "8")])
    assert (done.prompts, done.scored, done.mean) == (3, 2, 6.5)


def test_an_evaluation_leaves_the_run_as_it_was(tmp_path):
    run, other = run_in(tmp_path), run_in(tmp_path)
    before = vector(run.policy.module)
    evaluate(run, held_out(run, 4))
    assert torch.equal(vector(run.policy.module), before)
    one, two = (collect(r, step_params_at(r.config, 0)).batch for r in (run, other))
    assert torch.equal(one.rollouts.actions, two.rollouts.actions) and torch.equal(
        one.rewards, two.rewards
    )


@pytest.mark.silent_bug(33)
def test_the_counters_that_end_a_run_are_resumed(tmp_path):
    run, resumed = run_in(tmp_path), run_in(tmp_path)
    run.state.step, run.state.version, run.state.skipped_updates, run.state.unscored_steps = (
        7,
        9,
        2,
        4,
    )
    run.state.evaluations.append({"step": 0, "mean": 0.5})
    folder = RunFolder(tmp_path / "kept")
    folder.save(run, boundary_state(run))
    assert folder.restore(resumed)
    assert resumed.state == run.state


def count_of_ones(completions: Sequence[Any], **_: Any) -> list[float]:
    """1 where the completion has a digit, else 0."""
    return [
        float(any(c.isdigit() for c in completion[-1]["content"])) for completion in completions
    ]


def validation_file(folder: Path, count: int = 5) -> str:
    rows = [
        {"prompt": [{"role": "user", "content": f"{n} + 1 = ?"}], "answer": str(n + 1)}
        for n in range(90, 90 + count)
    ]
    return tiny.write_rows(folder / "validation.jsonl", rows)


def test_validation_data_are_evaluated_on_and_all_training_data_trained_on(tmp_path):
    run = run_in(tmp_path, evaluation__prompts=4, evaluation__data=validation_file(tmp_path))
    asked = {prompt.inputs[0]["content"] for prompt in held_out(run, 99)}
    assert asked == {f"{n} + 1 = ?" for n in range(90, 95)}
    assert len(held_out(run, 3)) == 3
    assert run.source.epoch_size == len(tiny.rows())


def test_validation_data_lack_no_column_that_a_reward_reads(tmp_path):
    rows = [{"prompt": "1 + 1 = ?"}]
    with pytest.raises(DataError, match="answer"):
        run_in(
            tmp_path,
            Parts(rewards=[lambda completions, answer, **_: [1.0] * len(answer)]),
            evaluation__data=tiny.write_rows(tmp_path / "bare.jsonl", rows),
        )


def test_mean_and_pass_at_k_are_those_of_k_samples_per_prompt(tmp_path):
    run = run_in(tmp_path, Parts(rewards=[count_of_ones]), evaluation__samples=3)
    prompts = held_out(run, 4)
    done, rows = evaluate(run, prompts)
    seed = seed_at(run.config.seed, "evaluation")
    sampled = run.policy.sample([Request(p, 3) for p in prompts], run.sampling, seed=seed)
    scores = torch.tensor(count_of_ones(sampled.completions)).view(4, 3)
    assert done.parts["mean@3"] == pytest.approx(float(scores.mean()))
    assert done.parts["pass@3"] == pytest.approx(float(scores.amax(1).mean()))
    assert 0 < done.parts["mean@3"] < done.parts["pass@3"]  # so that the two are told apart
    assert done.metrics()["eval/pass@3"] == done.parts["pass@3"]
    assert len(rows) == 4
