"""``gruppo.Trainer``: a run step by step, callbacks, trackers that are objects."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests import tiny
from tests.trainer.runs import Signalling, assert_same, metrics

import gruppo
from gruppo import api
from gruppo.trainer import checkpoint
from gruppo.trainer.evaluate import Evaluated
from gruppo.types import GruppoError

CONFIG: dict[str, Any] = {"steps": 4, "saving__every": 0, "stage__kl_coef": 0.05}


def opened(
    folder: Path, *, callbacks: Any = (), track: Any = None, **changes: Any
) -> gruppo.Trainer:
    return gruppo.Trainer(tiny.config(folder, **CONFIG | changes), callbacks=callbacks, track=track)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run as the command line trains it."""
    return api.start(tiny.config(tmp_path_factory.mktemp("whole"), **CONFIG)).folder


def test_steps_one_by_one_are_the_run_of_the_command_line_to_the_bit(tmp_path, whole):
    with opened(tmp_path) as trainer:
        seen = [trainer.step() for _ in range(4)]
        assert trainer.is_complete and trainer.result.after is not None
        with pytest.raises(
            GruppoError, match=r"has ended after 4 of 4 steps\. Start another run for more"
        ):
            trainer.step()
    assert_same(trainer.folder, whole)
    logged = [row for row in metrics(whole) if "reward/mean" in row]
    assert [step.metrics["reward/mean"] for step in seen] == [row["reward/mean"] for row in logged]
    assert [step.evaluation is not None for step in seen] == [False, False, True, True]
    assert all(len(step.rollouts) == len(step.scores.rewards) == 12 for step in seen)


def test_a_loop_that_is_left_saves_its_last_step_and_continues_to_the_bit(tmp_path, whole):
    with opened(tmp_path) as trainer:
        for step in trainer:
            if step.step == 3:
                break
        with pytest.raises(
            GruppoError, match=r"has 3 of 4 steps and no result yet\. Call trainer.train"
        ):
            _ = trainer.result
    assert checkpoint.steps(trainer.folder / "checkpoints") == [3]
    with gruppo.Trainer.resume(trainer.folder) as trainer:
        assert [step.step for step in trainer] == [4]
    assert_same(trainer.folder, whole)


def test_stopped_by_ones_own_code_a_run_ends_with_its_evaluation_and_its_model(tmp_path):
    with opened(tmp_path) as trainer:
        for step in trainer:
            if step.step == 2:
                trainer.stop()
        assert (
            trainer.result.after["step"] == 2
            and (trainer.result.model / "model.safetensors").is_file()
        )
    assert checkpoint.steps(trainer.folder / "checkpoints") == [2]


def test_what_fails_between_two_steps_loses_none_and_half_a_step_is_not_saved(tmp_path):
    with pytest.raises(ZeroDivisionError), opened(tmp_path / "a") as trainer:
        trainer.step()
        trainer.step()
        _ = 1 / 0
    assert checkpoint.steps(trainer.folder / "checkpoints") == [2]
    learn = api.loop.learn
    with pytest.MonkeyPatch.context() as patch, opened(tmp_path / "b") as trainer:
        trainer.step()
        patch.setattr(
            api.loop, "learn", lambda *given: (learn(*given), 1 / 0)
        )  # after it has changed the weights
        with pytest.raises(ZeroDivisionError):
            trainer.step()
        with pytest.raises(
            GruppoError,
            match=r"has ended after 1 of 4 steps\. Continue it with gruppo.Trainer.resume",
        ):
            trainer.step()
    assert checkpoint.steps(trainer.folder / "checkpoints") == []  # no weights of half a step


def test_a_signal_in_ones_own_code_stops_the_loop_at_the_next_step_and_loses_none(tmp_path, whole):
    trainer, before = opened(tmp_path), signal.getsignal(signal.SIGTERM)
    with pytest.raises(gruppo.Stopped, match="what is complete is saved"), trainer:
        for step in trainer:
            if step.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
    assert checkpoint.steps(trainer.folder / "checkpoints") == [2]
    assert_same(gruppo.resume(trainer.folder, show=False).folder, whole)


class Unsaved(gruppo.Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"set": {1}}


def test_between_single_steps_signals_are_the_callers(tmp_path):
    with pytest.raises(KeyboardInterrupt), opened(tmp_path, evaluation__prompts=0) as trainer:
        trainer.step()
        signal.raise_signal(signal.SIGINT)
    assert checkpoint.steps(trainer.folder / "checkpoints") == [1]


def test_evaluating_and_saving_at_any_step(tmp_path):
    with opened(tmp_path) as trainer:
        first = trainer.evaluate()
        trainer.step()
        second = trainer.evaluate()
        assert (first.step, second.step) == (0, 1) and second is not first
        assert trainer.evaluate() == second  # once at a step
        model = trainer.save()
        assert gruppo.load_policy(model).context > 0
        assert checkpoint.steps(trainer.folder / "checkpoints") == [1]
        early = (model / "model.safetensors").read_bytes()
        result = trainer.train()
        assert (
            result.model / "model.safetensors"
        ).read_bytes() != early  # that of the last step, in its place
    evaluated = json.loads((trainer.folder / "evaluations.json").read_text())
    assert [one["step"] for one in evaluated] == [0, 1, 3, 4]


# --- callbacks ------------------------------------------------------------------------------------


class Follower(gruppo.Callback):
    """Notes what it is called with; lowers the learning rate after step 2, and stops at
    ``last``."""

    def __init__(self, last: int = 99) -> None:
        self.seen, self.last = list[Any](), last

    def on_rollouts(self, trainer: Any, rollouts: Any, scores: Any) -> None:
        self.seen.append(("rollouts", trainer.run.state.step, len(rollouts), len(scores.rewards)))

    def on_step(self, trainer: Any, step: gruppo.Step) -> None:
        self.seen.append(("step", step.step, step.metrics["optim/lr"]))
        if step.step == 2:
            trainer.set(lr=1e-3, temperature=0.5)
        if step.step == self.last:
            trainer.stop()

    def on_evaluate(self, trainer: Any, evaluation: Evaluated) -> None:
        self.seen.append(("evaluate", evaluation.step))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Any) -> None:
        self.seen = [tuple(entry) for entry in state["seen"]]


SEEN = [
    ("evaluate", 0),
    *[("rollouts", 0, 12, 12), ("step", 1, 1e-2)],
    *[("rollouts", 1, 12, 12), ("step", 2, 1e-2)],
    *[("rollouts", 2, 12, 12), ("step", 3, 1e-3), ("evaluate", 3)],
    *[("rollouts", 3, 12, 12), ("step", 4, 1e-3), ("evaluate", 4)],
]


def test_callbacks_see_every_step_change_its_parameters_and_resume_to_the_bit(tmp_path):
    follower = Follower()
    config = tiny.config(tmp_path / "a", **CONFIG)
    run = gruppo.train(config, reward=[Signalling(at=0)], callbacks=[follower], show=False).folder
    assert follower.seen == SEEN
    rows = [row for row in metrics(run) if "optim/lr" in row]
    assert [row["optim/lr"] for row in rows] == [1e-2, 1e-2, 1e-3, 1e-3]
    assert [row.get("stage/temperature") for row in rows] == [None, None, 0.5, 0.5]
    killed, kill = Follower(), Signalling(at=5)  # in the evaluation at step 3, the fifth call
    config = tiny.config(tmp_path / "b", **CONFIG)
    with pytest.raises(gruppo.Stopped):
        gruppo.train(config, reward=[kill], callbacks=[killed], show=False)
    resumed = Follower()
    again = gruppo.resume(
        tmp_path / "b/runs/run", reward=[Signalling(at=0)], callbacks=[resumed], show=False
    )
    assert_same(again.folder, run)
    assert resumed.seen == SEEN


def test_a_run_is_not_resumed_without_the_callbacks_that_it_had(tmp_path):
    with opened(tmp_path, callbacks=[Follower()]) as trainer:
        trainer.step()
    with pytest.raises(GruppoError, match="the run had the callback 0 Follower"):
        gruppo.resume(trainer.folder, show=False)


def test_a_callback_that_stops_the_run_leaves_a_whole_one(tmp_path):
    follower = Follower(last=2)
    result = gruppo.train(tiny.config(tmp_path, **CONFIG), callbacks=[follower], show=False)
    assert (
        result.after is not None
        and result.after["step"] == 2
        and follower.seen[-1] == ("evaluate", 2)
    )
    assert checkpoint.steps(result.folder / "checkpoints") == [2]
    early = (result.model / "model.safetensors").read_bytes()
    again = gruppo.resume(result.folder, callbacks=[Follower()], show=False)
    assert again.after["step"] == 4 and (again.model / "model.safetensors").read_bytes() != early


class Fails(gruppo.Callback):
    def on_step(self, trainer: Any, step: gruppo.Step) -> None:
        raise ValueError("of the user's")


class Misspelled:
    def on_steps(self) -> None: ...


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (Follower(), "callbacks is a Follower; it needs a list"),
        ([Follower], r"the callback Follower is a class; pass an object, Follower\(\)"),
        (
            [Misspelled()],
            r"Misspelled has a method on_steps, which is never called\. Methods: ",
        ),
        (
            [object()],
            "the callback object has no method. Methods: on_rollouts, on_step, on_evaluate",
        ),
    ],
)
def test_what_is_no_callback_is_refused_before_anything_is_made(tmp_path, callbacks, message):
    with pytest.raises(GruppoError, match=message):
        opened(tmp_path, callbacks=callbacks)
    assert not (tmp_path / "runs").exists()


def test_a_state_that_no_file_holds_is_one_line(tmp_path):
    with pytest.raises(
        GruppoError, match="state_dict of the callback Unsaved does not fit into a checkpoint"
    ):
        gruppo.train(
            tiny.config(tmp_path, **CONFIG, evaluation__prompts=0),
            callbacks=[Unsaved()],
            show=False,
        )


def test_step_parameters_that_the_run_cannot_take_are_refused_with_ours(tmp_path):
    with opened(tmp_path, stage__kl_coef=0.0, evaluation__prompts=0) as trainer:
        for params, message in [
            ({"beta": 0.1}, r"unknown step parameter beta\. beta of trl is kl_coef\."),
            ({"learning_rate": 0.1}, "unknown step parameter learning_rate"),
            ({"lr": -1}, r"set\(lr=-1\): .*lr=-1.* is out of range; it needs to be at least 0"),
            ({"lr": "linear:1,0"}, "it needs a number, or None"),
            ({"group_size": 1}, "set\\(group_size=1\\): "),
            (
                {"kl_coef": 0.1},
                "built without reference to measure a KL against. Start it with a small "
                "stage__kl_coef",
            ),
            ({"sup_coef": 0.1}, r"set\(sup_coef=0.1\): "),
        ]:
            with pytest.raises(GruppoError, match=message):
                trainer.set(**params)
        trainer.set(lr=0.5, group_size=2)
        step = trainer.step()
        assert step.metrics["optim/lr"] == 0.5 and len(step.rollouts) == 8
        trainer.set(lr=None)
        assert trainer.step().metrics["optim/lr"] == 1e-2


# --- trackers -------------------------------------------------------------------------------------


class Rows:
    def __init__(self) -> None:
        self.rows, self.samples, self.is_closed = list[Any](), 0, False

    def log(self, step: int, metrics: Any) -> None:
        self.rows.append((step, dict(metrics)))

    def log_samples(self, step: int, rows: Any) -> None:
        self.samples += len(rows)

    def close(self) -> None:
        self.is_closed = True


def test_a_tracker_that_is_an_object_gets_what_the_files_get(tmp_path):
    rows = Rows()
    gruppo.train(tiny.config(tmp_path, **CONFIG), track=[rows], show=False)
    logged = [
        json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()
    ]
    assert {(step, name) for step, row in rows.rows for name in row} == {
        (row["step"], name) for row in logged for name in row if name != "step"
    }
    assert rows.samples and rows.is_closed
    with pytest.raises(
        GruppoError, match=r"the tracker object has no log and no log_samples and no close"
    ):
        gruppo.train(tiny.config(tmp_path, name="other"), track=[object()], show=False)
