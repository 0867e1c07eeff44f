"""Runs whose policy speaks with an environment: what is learned from, saved, told, and refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import processes, tiny
from tests.trainer.runs import Signalling, assert_same, metrics
from tests.trainer.test_step import run_in, step, step_by_hand, vector

from gruppo import api, inference
from gruppo.build import Parts, build
from gruppo.modalities import modalities
from gruppo.recipes.guess import found, guess
from gruppo.recipes.guess import reply as say
from gruppo.trainer import checks
from gruppo.trainer.evaluate import evaluate, held_out
from gruppo.trainer.loop import Stopped
from gruppo.types import DataError, GruppoError

HERE = str(Path(__file__).resolve())
STOPS = tuple("abcdefghijkl0123456789")


def reply(text: str, state: dict[str, Any], answer: str, turn: int) -> str | None:
    """Ends where no more is said; wants the answer."""
    state["said"] = state.get("said", 0) + len(text)
    return None if text.endswith("z") else f"{turn} of {answer}"


def fails_now_and_then(text: str, seed: int) -> str:
    if seed % 3 == 0:
        raise ValueError("lost")
    return "1"


def always_fails() -> str:
    raise ValueError("the server is gone")


def shadows(text: str, colour: str) -> None:
    """Asks for a column that there is not."""


def wordy(state: Sequence[Mapping[str, Any]], completions: Sequence[Any]) -> list[float]:
    """What the environment held of each conversation."""
    assert len(state) == len(completions)
    return [float(own.get("said", 0)) for own in state]


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "environment__reply": f"{HERE}:reply",
        "environment__turns": 3,
        "reward": [tiny.reward("digits"), f"{HERE}:wordy"],
        "rollout__stop": STOPS,
        "rollout__max_new_tokens": 9,
    } | changes


def config(folder: Path, **changes: Any) -> Any:
    return tiny.config(folder, **settings(**changes))


FULL = {
    "kl, two epochs, refilled": {
        "optim__epochs": 2,
        "optim__minibatches": 2,
        "stage__kl_coef": 0.1,
        "rollout__refill_rounds": 1,
    },
    "ppo": {"objective": "ppo", "optim__epochs": 2},
    "gspo, growing, a reference that follows": {
        "objective": "gspo",
        "rollout__first_samples": 2,
        "rollout__group_size": 4,
        "stage__kl_coef": 0.1,
        "reference__kind": "mixed",
        "reference__update_every": 2,
        "reference__watch_prompts": 2,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FULL)
def test_a_run_that_is_stopped_goes_on_to_the_bit(tmp_path, kind):
    changes = {"steps": 4} | FULL[kind]
    whole = api.start(config(tmp_path, **changes)).folder
    logged = [row for row in metrics(whole) if "turns/mean" in row]
    assert len(logged) == 4 and any(row["turns/mean"] > 1.5 for row in logged)
    stop = Signalling(5)

    def stopping(completions: Sequence[Any], **_: Any) -> list[float]:
        return stop(completions)

    stopping.__name__ = "digits"
    parts = Parts(rewards=[stopping, wordy])
    folder = tmp_path / "parts"
    with pytest.raises(Stopped):
        api.start(replace(config(tmp_path, **changes), runs_dir=str(folder)), parts)
    assert_same(api.start(folder / "run").folder, whole)


def test_what_the_environment_said_is_neither_learned_from_nor_counted(tmp_path):
    run = run_in(tmp_path, **settings())
    collected, _ = step(run)
    batch, rollouts = collected.batch, collected.rollouts
    assert (
        torch.equal(batch.loss_mask, batch.loss_mask & rollouts.mask)
        and (rollouts.lengths > rollouts.mask.sum(1)).any()
    )
    own, turns = rollouts.mask.sum(1).double(), rollouts.per_row["turns"].double()
    logged = collected.metrics
    assert logged["len/mean_actions"] == pytest.approx(own.mean()) and logged["tokens"] == own.sum()
    assert (
        logged["turns/mean"] == pytest.approx(turns.mean()) and logged["turns/max"] == turns.max()
    )
    assert logged["environment/reply_tokens_mean"] == pytest.approx((rollouts.lengths - own).mean())
    assert logged["environment/ended_frac"] == pytest.approx(
        rollouts.per_row["ended"].double().mean()
    )
    assert logged["turns/reencoded_count"] == logged["turns/context_full_count"] == 0
    assert logged["environment/failed_count"] == 0 and logged["time/environment_s"] > 0


def test_a_step_of_conversations_is_the_step_computed_by_hand(tmp_path):
    run = run_in(tmp_path, **settings(rollout__group_size=8, reward=[f"{HERE}:wordy"]))
    before = vector(run.policy.module)
    collected, _ = step(run)
    assert not collected.batch.rollouts.mask.all()
    expected = step_by_hand(run, collected)
    assert (expected - before).abs().max() > 1e-3
    torch.testing.assert_close(vector(run.policy.module).double(), expected, rtol=0, atol=1e-6)


def test_an_evaluation_converses_too_and_samples_show_all_that_was_said(tmp_path):
    done = api.start(config(tmp_path, rollout__stop=tuple(tiny.CHARACTERS)))
    rows = [json.loads(line) for line in (done.folder / "samples.jsonl").read_text().splitlines()]
    talks = [
        sample["completion"]
        for row in rows
        for sample in row.get("samples", [row])
        if "completion" in sample
    ]
    assert any(len(talk) > 1 for talk in talks)
    assert {m["role"] for talk in talks for m in talk} == {"assistant", "user"}
    evaluated, answers = inference.evaluate_run(done.folder, prompts=4)
    assert evaluated.mean == done.after["mean"] and any(
        len(row["completion"]) > 1 for row in answers
    )


def test_a_row_that_its_environment_left_is_not_learned_from_and_the_run_goes_on(tmp_path, caplog):
    run = run_in(
        tmp_path,
        **settings(environment__reply=f"{HERE}:fails_now_and_then", reward=[tiny.reward("digits")]),
    )
    collected, _ = step(run)
    failed = [why is not None for why in collected.rollouts.per_row["environment_failure"]]
    assert 0 < sum(failed) < len(failed)
    assert (
        collected.metrics["environment/failed_count"]
        == sum(failed)
        == collected.metrics["finish/error_count"]
    )
    lost = torch.tensor(failed)
    assert (
        collected.scores.rewards[lost].isnan().all() and not collected.batch.loss_mask[lost].any()
    )
    assert "the environment gave no reply: ValueError: lost (test_environments.py:" in caplog.text


def test_an_environment_that_always_fails_ends_the_run_in_one_line(tmp_path):
    with pytest.raises(
        DataError,
        match=r"scored none of 12 completions: .*the server is gone .*Fix",
    ):
        api.start(
            config(
                tmp_path,
                environment__reply=f"{HERE}:always_fails",
                rollout__stop=tuple(tiny.CHARACTERS),
            )
        )


def test_failures_in_an_evaluation_are_told(tmp_path, caplog):
    changes = settings(environment__reply=f"{HERE}:always_fails", evaluation__prompts=4)
    run = run_in(tmp_path, **(changes | {"rollout__stop": tuple(tiny.CHARACTERS)}))
    evaluated, _ = evaluate(run, held_out(run, 4))
    assert evaluated.scored < 4
    assert re.search(
        r"held out: the environment failed in [1-4] of 4 conversations: ValueError: the server",
        caplog.text,
    )


class Buffer(list):
    def __call__(self, text: str) -> str:
        return "1"


def always() -> str:
    return "1"


def test_a_run_is_resumed_with_another_environment_by_its_name(tmp_path):
    stop = Signalling(2)

    def stopping(completions: Sequence[Any], **_: Any) -> list[float]:
        return stop(completions)

    stopping.__name__ = "digits"
    chosen = config(tmp_path, reward=[tiny.reward("digits")], evaluation__prompts=0)
    with pytest.raises(Stopped):
        api.start(chosen, Parts(rewards=[stopping], environment=lambda text: None))
    done = api.resume(tmp_path / "runs/run", environment=f"{HERE}:always", show=False)
    assert [row["environment/ended_frac"] for row in metrics(done.folder) if "turns/mean" in row][
        -1
    ] == 0


def test_the_game_of_the_recipe_guess_by_hand():
    game: dict[str, Any] = {}
    assert [say(text, game, "5") for text in ("4", " 2. ", "7", "5")] == [
        "Higher.",
        "Higher.",
        "Lower.",
        None,
    ]
    assert found(state=[game]) == [1.0]
    game = {}
    assert [say(text, game, "5") for text in ("4", "6", "3")] == ["Higher.", "Lower.", "Higher."]
    assert found(state=[game, {}]) == [0.2, 0.0]  # 3 was ruled out
    assert say("I say 5", {}, "5") is None


def test_the_recipe_guess_plays_with_any_chat_model(tmp_path):
    sizes = {
        "rollout__prompts": 2,
        "rollout__group_size": 2,
        "rollout__max_new_tokens": 4,
        "steps": 1,
    }
    model = {
        "model": tiny.write_model(tmp_path / "tiny", context=512),
        "compute": "float32",
        "name": "run",
    }
    chosen = api.change(
        guess(), sizes | model | {"runs_dir": str(tmp_path / "runs"), "evaluation__prompts": 2}
    )
    done = api.start(chosen)
    assert {"turns/mean", "reward/found/mean"} <= {
        name for row in metrics(done.folder) for name in row
    }


def test_an_environment_that_is_empty_is_one(tmp_path):
    run = build(config(tmp_path), Parts(environment=Buffer()))[0]
    assert run.environment.name == "Buffer"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"environment__turns": 0}, "environment.turns=0 is out of range"),
        ({"environment__max_reply_tokens": 0}, "environment.max_reply_tokens=0 is out of range"),
        ({"environment__timeout_s": 0.0}, "timeout_s=0.0 is out of range"),
        ({"model": "unet", "data": "digits"}, "replies to texts, and 'unet' is an image model"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_loaded(tmp_path, changes, why):
    modality = modalities()["diffusion" if "model" in changes else "text"]
    with pytest.raises(GruppoError, match=why):
        given = config(tmp_path, **changes)
        if "model" in changes:
            given = replace(given, rollout=replace(given.rollout, max_new_tokens=128, stop=()))
        checks.check(given, modality)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"environment__reply": "nowhere.py:reply"}, "there is no file .*nowhere.py"),
        ({"environment__reply": f"{HERE}:replly"}, "has no 'replly'.*Did you mean .*:reply"),
        ({"environment__reply": "reply"}, "'reply' names no object; write path/to/file.py:name"),
        ({"environment__reply": f"{HERE}:HERE"}, "the environment is .*not a function"),
        (
            {"environment__reply": f"{HERE}:shadows"},
            "asks for 'colour', which the data do not have",
        ),
        (
            {"reward": [f"{HERE}:wordy"], "environment__reply": "", "environment__turns": 8},
            "asks for 'state'",
        ),
    ],
)
def test_functions_that_are_not_understood_are_refused_in_one_line(tmp_path, changes, why):
    with pytest.raises(GruppoError, match=why):
        api.start(config(tmp_path, **changes))
    assert not (tmp_path / "runs").exists()


def test_a_column_of_a_name_that_the_environment_gives_is_refused(tmp_path):
    tiny.write_rows(tmp_path / "data.jsonl", [row | {"turn": 1} for row in tiny.rows()])
    with pytest.raises(
        DataError,
        match=r"data\.jsonl has a column 'turn', and an environment is given something else",
    ):
        api.start(config(tmp_path))


def test_rewards_of_steps_are_refused_beside_an_environment(tmp_path):
    from gruppo.rewards import step_reward

    @step_reward(separator="\n")
    def steps(steps: Any, **_: Any) -> Any:
        return [[1.0 for _ in own] for own in steps]

    chosen = config(tmp_path, objective="ppo")
    with pytest.raises(
        GruppoError, match="'steps' scores the steps of one answer, and with an environment"
    ):
        api.start(chosen, Parts(rewards=[steps]))


@pytest.mark.parametrize("count", [2])
def test_ranks_hold_the_conversations_of_one_process(tmp_path, count):
    changes = settings(evaluation__prompts=0, steps=3, rollout__prompts=4)
    whole = api.start(tiny.config(tmp_path, **changes)).folder
    shared = tiny.config(tmp_path, **(changes | {"runs_dir": str(tmp_path / "ranks")}))
    children = processes.ranks(count, api.start, shared, folder=tmp_path / "of-two")
    assert [child.wait() for child in children] == [0] * count, children[0].err
    names = ("turns/mean", "environment/reply_tokens_mean", "tokens", "reward/wordy/mean")
    one, two = (
        [{n: row[n] for n in names if n in row} for row in metrics(p)]
        for p in (whole, tmp_path / "ranks/run")
    )
    assert len(one) == len(two) and one[0] == pytest.approx(two[0])
