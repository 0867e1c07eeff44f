"""Runs whose policy calls tools of an environment: what is learned from, saved, resumed, and
refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny
from tests.trainer import runs
from tests.trainer.calling import Walk, steps_taken
from tests.trainer.runs import Signalling, assert_same, metrics
from tests.trainer.test_step import run_in, step

from gruppo import api, train
from gruppo.build import Parts, build
from gruppo.config import serialization
from gruppo.trainer.loop import Stopped
from gruppo.types import GruppoError

HERE = "tests.trainer.calling"
SETTINGS: dict[str, Any] = {
    "model": f"{HERE}:policy",
    "environment": f"{HERE}:Walk",
    "environment__tools": [f"{HERE}:double"],
    "environment__turns": 4,
    "reward": [tiny.reward("digits"), f"{HERE}:steps_taken"],
    "rollout__stop": tuple("uvwxyz6789"),
    "rollout__max_new_tokens": 12,
}


def config(folder: Path, **changes: Any) -> Any:
    return tiny.config(folder, **SETTINGS | changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return api.start(config(tmp_path_factory.mktemp("whole"))).folder


def test_a_run_logs_its_calls_and_closes_its_environments(whole):
    logged = [row for row in metrics(whole) if "tools/calls_mean" in row]
    assert len(logged) == 6 and sum(row["tools/calls_mean"] for row in logged) > 4
    assert all(
        sum(row[f"tools/{name}_count"] for row in logged) > 0 for name in ("failed", "unparsed")
    )
    assert all({"reward/Walk/mean", "reward/steps_taken/mean"} <= row.keys() for row in logged)
    assert Walk.alive == 0
    sample = (whole / "samples.jsonl").read_text()
    assert '"role": "tool"' in sample and " at " in sample


@pytest.mark.slow
def test_a_run_with_environments_that_is_stopped_goes_on_to_the_bit(tmp_path, whole):
    stop = Signalling(5)

    def stopping(completions: Sequence[Any], **_: Any) -> list[float]:
        return stop(completions)

    stopping.__name__ = "digits"
    folder = tmp_path / "parts"
    with pytest.raises(Stopped):
        api.start(
            replace(config(tmp_path), runs_dir=str(folder)), Parts(rewards=[stopping, steps_taken])
        )
    assert_same(api.start(folder / "run").folder, whole)


@pytest.mark.parametrize("credit", ["outcome", "return_to_go"])
def test_results_are_neither_learned_from_nor_counted(tmp_path, credit):
    run = run_in(tmp_path, **SETTINGS, objective__credit=credit)
    collected, _ = step(run)
    rollouts, batch = collected.rollouts, collected.batch
    assert not (batch.loss_mask & ~rollouts.mask).any()
    roles = {message["role"] for messages in rollouts.completions for message in messages}
    assert roles == {"assistant", "tool", "user"}
    # the tokens of each row are the template's rendering of what it was prompted with, in one group
    for row, inputs in enumerate(rollouts.per_row["inputs"]):
        prompt = rollouts.shared["prompt_ids"][int(rollouts.group_ids[row])].tolist()
        first = int(rollouts.mask[row].nonzero()[0])
        assert prompt + rollouts.actions[row, :first].tolist() == run.policy.chat.encode(inputs)
    run.engine.close()


def test_the_ratio_starts_at_one_behind_prompts_of_single_rows(tmp_path):
    run = run_in(tmp_path, **SETTINGS, optim__epochs=2)
    collected, _ = step(run)
    old, sampled = collected.batch.old_logprobs, collected.rollouts.sampler_logprobs
    mask = collected.batch.loss_mask
    torch.testing.assert_close(old[mask], sampled[mask].to(old), rtol=0, atol=2e-5)
    run.engine.close()


@pytest.mark.slow
def test_a_run_with_lag_trains_from_what_its_environments_were_and_goes_on_from_its_ledger(
    tmp_path,
):
    changes = runs.LAGGED | {"engine__kind": f"{HERE}:engine", "reward": SETTINGS["reward"]}
    chosen = config(tmp_path, **changes)
    with api.Trainer.open(chosen) as trainer:
        for done in trainer.steps:
            state, rewards = (
                done.rollouts.per_row["state"],
                done.rollouts.per_row["environment_rewards"],
            )
            assert [own["at"] / 10 for own in state] == [own["Walk"] for own in rewards]
            if done.step == 3:
                break
    assert Walk.alive == 0
    result = api.start(trainer.folder)
    runs.assert_nothing_lost(result.folder)
    assert Walk.alive == 0 and len(metrics(result.folder)) == 6


def test_groups_grow_although_each_prompt_begins_differently(tmp_path):
    run = run_in(
        tmp_path,
        **SETTINGS
        | {
            "environment": f"{HERE}:Wander",
            "environment__tools": [],
            "reward": [tiny.reward("digits")],
        },
        objective__scale="none",
        rollout__first_samples=2,
        rollout__group_size=4,
    )
    collected, _ = step(run)
    rollouts = collected.rollouts
    sizes = rollouts.group_ids.bincount().tolist()
    assert collected.metrics["growth/grown_rows_count"] == sum(sizes) - 2 * len(sizes) > 0
    assert not any(rollouts.per_row["environment_failure"])
    for row, inputs in enumerate(rollouts.per_row["inputs"]):
        prompt = rollouts.shared["prompt_ids"][int(rollouts.group_ids[row])].tolist()
        assert prompt == run.policy.chat.encode(inputs)
    assert not (collected.batch.loss_mask & ~collected.batch.rollouts.mask).any()
    run.engine.close()


def test_demonstrations_begin_as_conversations_do(tmp_path):
    class Picky(Walk):
        def reset(self, answer: str, seed: int, number: int = 0) -> str:
            if int(answer) % 2:
                raise ValueError("no odd places")
            return super().reset(answer, seed, number)

    changes = {"stage__rl_coef": 0.0, "stage__sup_coef": 1.0, "supervised__batch": 12}
    run = run_in(
        tmp_path,
        Parts(environment=Picky),
        **SETTINGS | changes,
        supervised__template="Sum: {target}",
    )
    collected, _ = step(run)
    demos = collected.batch.demos
    for row, prompt in enumerate(demos.prompts):
        begun = prompt.inputs[-1]["content"]
        found = re.search(r" at (\d+) \d+$", begun)
        assert found is not None and prompt.target == f"Sum: {found[1]}" and int(found[1]) % 2 == 0
        assert demos.shared["prompt_ids"][row].tolist() == run.policy.chat.encode(prompt.inputs)
    assert collected.metrics["sup/skipped_count"] > 0 and Walk.alive == 0
    run.engine.close()


@pytest.mark.slow
def test_tools_and_environments_may_be_given_in_python(tmp_path):
    def treble(by: int) -> int:
        """
        Trebles.

        Args:
            by: The number.
        """
        return 3 * by

    class Own(Walk):
        pass

    given = {"environment": Own, "tools": [treble]}
    common = {name: value for name, value in SETTINGS.items() if not name.startswith("environment")}
    common |= {
        "steps": 1,
        "show": False,
        "runs_dir": str(tmp_path),
        "evaluation__prompts": 0,
        "rollout__prompts": 2,
        "scoring__isolate": False,  # a reward reads the environments, which are Python objects
    }
    done = train(data=tiny.write_rows(tmp_path / "rows.jsonl"), **given, **common)
    saved = serialization.load(done.folder / "config.json").environment
    assert saved.kind == saved.tools[0] == "<in memory>" or saved.kind.startswith("<")
    with pytest.raises(GruppoError, match=r"resume\(.*environment=\.\.\., tools=\.\.\."):
        api.start(done.folder)
    api.resume(done.folder, **given, show=False)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["environment", "environment__tools"])
def test_a_run_whose_tools_have_changed_is_not_resumed_in_silence(tmp_path, option):
    file = tmp_path / "own.py"
    file.write_text("from tests.trainer.calling import Walk, double\n")
    named = {"environment": f"{file}:Walk", "environment__tools": [f"{file}:double"]}
    done = api.start(config(tmp_path, **{option: named[option]}, steps=1))
    file.write_text("from tests.trainer.calling import Walk, double  # changed\n")
    with pytest.raises(GruppoError, match=r"the code of .*own.py.* has changed"):
        api.start(done.folder)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"environment__reply": f"{HERE}:double"}, "Leave one of the two out"),
        (
            {"environment__tools": [f"{HERE}:double", f"{HERE}:double"]},
            "two of the tools double, double have one name",
        ),
        (
            {"environment__tools": [f"{HERE}:steps_taken"]},
            "'steps_taken' cannot be shown to a model",
        ),
        ({"environment": f"{HERE}:double"}, "environment 'double' cannot be made: TypeError"),
        (
            {"reward": [tiny.reward("digits")], "scoring__weights": (1.0, 2.0)},
            r"reward weights \[1.0, 2.0, 1.0\] for 2 rewards",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_before_the_first_step(tmp_path, changes, why):
    with pytest.raises(GruppoError, match=why):
        api.start(config(tmp_path, **changes))


def test_a_reward_of_turns_needs_an_environment(tmp_path):
    given = config(
        tmp_path,
        environment="",
        environment__tools=[],
        environment__turns=8,
        reward=["tests.trainer.test_tool_runs:by_turn"],
    )
    with pytest.raises(
        GruppoError, match="reward 'by_turn' scores turns, and without an environment a row has one"
    ):
        build(given, Parts())


def by_turn(completions: Any) -> Any:
    return [
        [float(len(m["content"])) for m in messages if m["role"] == "assistant"]
        for messages in completions
    ]


by_turn.scores_turns = True  # type: ignore[attr-defined]


def test_rewards_of_turns_are_credited_from_their_turn_on(tmp_path):
    """With return_to_go, an action's advantage is the sum of the advantages of its turn and the
    later ones."""
    run = run_in(
        tmp_path,
        **SETTINGS
        | {
            "reward": ["tests.trainer.test_tool_runs:by_turn"],
            "environment": "",
            "environment__reply": f"{HERE}:go_on",
        },
        objective__credit="return_to_go",
        objective__scale="none",
        objective__baseline="none",
    )
    collected, _ = step(run)
    rollouts, advantages = collected.rollouts, collected.batch.advantages
    for row, ends in enumerate(rollouts.per_row["turn_ends"]):
        lengths = [len(m["content"]) for m in rollouts.completions[row] if m["role"] == "assistant"]
        start = 0
        for turn, end in enumerate(ends):
            own = rollouts.mask[row, start : end + 1]
            expected = torch.full((int(own.sum()),), float(sum(lengths[turn:])))
            torch.testing.assert_close(advantages[row, start : end + 1][own], expected)
            start = end + 1
    assert max(map(len, rollouts.per_row["turn_ends"])) > 2
    run.engine.close()
