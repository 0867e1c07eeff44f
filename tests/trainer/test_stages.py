"""Stages: what is in force at each step, when the next begins, and that a resume goes on in the
same place."""

from __future__ import annotations

import json
import logging
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests import processes, tiny
from tests.collecting import collect
from tests.trainer.runs import Signalling, assert_same, metrics, newest, tensors, weights

from gruppo import api
from gruppo.build import Parts, build
from gruppo.cli.options import parse_config
from gruppo.config import serialization
from gruppo.config.schema import (
    BackOffConfig,
    Config,
    CriticConfig,
    EvaluationConfig,
    OptimConfig,
    RolloutConfig,
    Stage,
)
from gruppo.core.objective import PRESETS
from gruppo.trainer import checkpoint, checks, loop
from gruppo.trainer.loop import Stopped
from gruppo.trainer.stages import StageSchedule
from gruppo.trainer.update import backward
from gruppo.types import GruppoError

GIVEN = Config(model="m", data="d", reward=("r",), steps=10, evaluation=EvaluationConfig(every=1))
WARM = Stage(name="warm", steps=3, kl_coef=0.1)
LAST = Stage(name="last")


def given(*stages: Stage, **changes) -> Config:
    return replace(GIVEN, stages=stages, **changes)


def advanced(
    stage_schedule: StageSchedule, *values: float, metric: str = "eval/reward_mean"
) -> list[str]:
    """Names of the stage after each step that measured this."""
    names = []
    for step, value in enumerate(values, start=1):
        stage_schedule.measure(step, {metric: value})
        stage_schedule.advance(step)
        names.append(stage_schedule.names[stage_schedule.index])
    return names


# --- schedules in stages ---


def test_the_step_params_of_each_step_by_hand():
    """A ramp over 4 steps after 2 of another stage; lr warms up in it; temperature and group size
    change in steps."""
    ramp = Stage(
        steps=4,
        rl_coef="linear:0,1",
        sup_coef="cosine:1,0",
        lr=0.4,
        warmup_steps=2,
        temperature="steps:1.5,2=1",
        group_size="linear:8,4",
    )
    stage_schedule = StageSchedule(given(Stage(steps=2), ramp, Stage(), optim=OptimConfig(lr=1.0)))
    result = []
    for step in range(7):
        result.append(stage_schedule.step_params(step))
        stage_schedule.advance(step + 1)
    assert [k.rl_coef for k in result] == pytest.approx([1, 1, 0, 0.25, 0.5, 0.75, 1])
    assert [k.sup_coef for k in result] == pytest.approx(
        [0, 0, *((1 + math.cos(math.pi * x / 4)) / 2 for x in range(4)), 0]
    )
    assert [k.lr for k in result] == pytest.approx([1, 1, 0.2, 0.4, 0.4, 0.4, 1])
    assert [k.sampling.temperature for k in result] == [1, 1, 1.5, 1.5, 1, 1, 1]
    assert [k.group_size for k in result] == [8, 8, 8, 7, 6, 5, 8]


def test_a_step_without_rl_kl_and_entropy_samples_nothing():
    stage_schedule = StageSchedule(given(Stage(rl_coef="linear:0,1", sup_coef=1.0)))
    assert not stage_schedule.step_params(0).samples and stage_schedule.step_params(1).samples
    assert StageSchedule(given(Stage(rl_coef=0.0, kl_coef=0.1))).step_params(0).samples


def test_one_stage_of_constants_is_the_run_as_it_was_before_there_were_stages():
    optim = OptimConfig(lr=0.5, warmup_steps=2, decay="linear")
    stage_schedule = StageSchedule(
        replace(
            GIVEN, stage=Stage(kl_coef=0.1), optim=optim, rollout=RolloutConfig(temperature=0.7)
        )
    )
    assert [stage_schedule.step_params(step).lr for step in (0, 1, 2, 6)] == pytest.approx(
        [0.25, 0.5, 0.5, 0.25]
    )
    assert (
        stage_schedule.step_params(5).kl_coef == 0.1
        and stage_schedule.step_params(5).sampling.temperature == 0.7
    )
    assert stage_schedule.metrics(stage_schedule.step_params(5)) == {}


def test_what_changes_is_logged_and_what_does_not_is_not():
    stage_schedule = StageSchedule(given(WARM, LAST))
    assert stage_schedule.metrics(stage_schedule.step_params(0)) == {
        "stage/kl_coef": 0.1,
        "stage/number": 1.0,
    }


# --- gates ---


def test_a_gate_ends_its_stage_as_soon_as_it_opens():
    stage_schedule = StageSchedule(
        given(replace(WARM, steps=6, until="eval/reward_mean > 0.5"), LAST)
    )
    assert advanced(stage_schedule, 0.2, 0.5, 0.6, 0.1) == ["warm", "warm", "last", "last"]
    assert stage_schedule.began == 3


@pytest.mark.parametrize(
    ("until", "opens"), [("m<1", 0.5), ("m <= 1", 1.0), ("m >= 1", 1.0), ("m > -2e-1", 0.0)]
)
def test_a_gate_compares_by_each_sign(until, opens):
    stage_schedule = StageSchedule(given(replace(WARM, until=until), LAST))
    assert advanced(stage_schedule, opens, metric="m") == ["last"]


def test_a_gate_that_never_opens_is_a_warning_with_the_value_of_its_metric(caplog):
    stage_schedule = StageSchedule(given(replace(WARM, until="eval/reward_mean > 0.9"), LAST))
    with caplog.at_level(logging.WARNING, "gruppo"):
        assert advanced(stage_schedule, 0.1, 0.2, 0.3)[-1] == "last"
    assert "'eval/reward_mean > 0.9' never opened: eval/reward_mean was 0.3 at last" in caplog.text


def test_a_gate_on_a_metric_that_does_not_exist_says_so_with_the_nearest_name(caplog):
    stage_schedule = StageSchedule(
        given(replace(WARM, steps=1, until="eval/rewards_mean > 0.9"), LAST)
    )
    with caplog.at_level(logging.WARNING, "gruppo"):
        advanced(stage_schedule, 0.1)
    assert "eval/rewards_mean was never measured." in caplog.text


@pytest.mark.parametrize("until", ["reward/mean > -1", "eval/reward_mean > -1"])
def test_a_gate_of_the_last_stage_ends_the_run_which_is_then_complete(tmp_path, until, caplog):
    """After step 1 by a metric of training, which is then evaluated; by the evaluation before it,
    without a step."""
    with caplog.at_level(logging.INFO, "gruppo"):
        run = api.start(
            tiny.config(tmp_path, steps=4, stage__until=until, evaluation__every=4)
        ).folder
    steps = int(until.startswith("reward"))
    assert f"step {steps}: the run ends ({until.split()[0]} is" in caplog.text
    assert (run / "final").is_dir() and checkpoint.steps(run / "checkpoints") == [steps] * steps
    assert [done["step"] for done in json.loads((run / "evaluations.json").read_text())] == [
        *range(steps + 1)
    ]
    before = (run / "metrics.jsonl").read_bytes()
    api.start(run)
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_value_that_is_not_finite_opens_no_gate():
    stage_schedule = StageSchedule(given(replace(WARM, until="m < 1"), LAST))
    assert advanced(stage_schedule, math.nan, -math.inf, metric="m") == ["warm", "warm"]


def test_a_boundary_is_settled_once():
    stage_schedule = StageSchedule(
        given(replace(WARM, steps=1), replace(WARM, name="second", steps=1), LAST)
    )
    stage_schedule.advance(1)
    assert (
        stage_schedule.index == 1
        and stage_schedule.advance(1) is None
        and stage_schedule.index == 1
    )


# --- refusals ---


def test_a_schedule_is_parsed_where_the_config_is_read_and_its_error_names_the_stage():
    assert Stage(kl_coef="linear:0.1,0").schedules["kl_coef"].values == (0.1, 0.0)
    for entry, text in (("lr", "adaptive:1,target=1"), ("kl_coef", "linear:1")):
        stages = [{"name": "a", "steps": 2}, {entry: text}]
        with pytest.raises(GruppoError, match=rf"^stages\.1\.{entry}(=| cannot be adaptive)"):
            serialization.from_dict({"stages": stages})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            replace(GIVEN, stage=Stage(kl_coef="linear:0.1,-0.1")),
            r"kl_coef='linear:0.1,-0.1' is out of range.*at least 0",
        ),
        (replace(GIVEN, stage=Stage(temperature="linear:1,0")), "out of range.*above 0"),
        (replace(GIVEN, stage=Stage(group_size="steps:8,5=0")), "at least 1"),
        (replace(GIVEN, stage=Stage(rl_coef=0.0)), "learns nothing"),
        (replace(GIVEN, stage=Stage(weight_decay="linear:0.1,-0.1")), "at least 0"),
        (given(replace(WARM, until="m flat 2 by -1"), LAST), "is not understood"),
        (given(replace(WARM, until="m flat 1.5"), LAST), "is not understood"),
        (given(replace(WARM, until="sup/loss_nats flat 1"), LAST), "that is to"),
        (given(replace(WARM, until="eval/x flat 3"), LAST, evaluation=EvaluationConfig()), "eval"),
        (given(replace(WARM, steps=0), LAST), r"stages\.0\.steps=0 lasts to the end, but another"),
        (given(replace(WARM, steps=10), LAST), r"have 10 steps and the run 10.*steps above 10"),
        (given(replace(WARM, steps=12), LAST), r"have 12 steps and the run 10.*steps above 12"),
        (
            given(replace(WARM, until="eval/x > 1"), LAST, evaluation=EvaluationConfig()),
            "only measured before and after",
        ),
        (
            given(replace(WARM, steps=4), replace(LAST, steps=4)),
            r"have 8 steps and the run 10.*steps 8",
        ),
        (given(replace(WARM, until="kl/ref_nats"), LAST), "a metric, a comparison and a number"),
        (given(replace(WARM, until="m > nan"), LAST), "a metric, a comparison and a number"),
        (given(replace(WARM, warmup_steps=-1), LAST), r"stages\.0\.warmup_steps=-1"),
        (
            replace(GIVEN, back_off=BackOffConfig("eval/reward_mean", drop=-1.0)),
            "back_off.drop=-1.0",
        ),
        (
            replace(
                GIVEN, back_off=BackOffConfig("eval/reward_mean"), evaluation=EvaluationConfig()
            ),
            "evaluation.every",
        ),
    ],
)
def test_plans_that_cannot_be_are_refused(config, said):
    with pytest.raises(GruppoError, match=said):
        checks.check(config)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("supervize:5,full", "'supervize:5' is not a stage; it needs KIND:STEPS of supervised"),
        ("supervised,full", "lasts to the end, but another stage follows"),
        ("supervised:x,full", "is not a stage"),
        ("", "is not a stage"),
    ],
)
def test_names_of_stages_that_are_not_understood(text, said):
    with pytest.raises(GruppoError, match=said):
        checks.check(parse_config("train", ["arithmetic", "--stages", text]))


# --- whole runs ---

STAGED = {
    "steps": 8,
    "stages": (
        Stage(
            name="first",
            steps=4,
            until="eval/reward_mean > -1",
            kl_coef="adaptive:0.1,target=0.01,horizon=20",
        ),
        Stage(
            name="second",
            steps=3,
            entropy_coef="adaptive:0.01,target=5",
            temperature="linear:1.2,0.8",
        ),
        Stage(name="third", group_size=4),
    ),
    "evaluation__every": 2,
    "back_off__metric": "eval/reward_mean",
    "back_off__drop": 0.0,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("staged")
    changes = STAGED | {
        "stages": (replace(STAGED["stages"][0], until="eval/digits > 2"), *STAGED["stages"][1:])
    }
    return api.start(tiny.config(folder, **changes)).folder


def test_a_run_goes_through_its_stages_and_says_so(whole):
    logged = [row for row in metrics(whole) if "stage/number" in row]
    assert [row["stage/number"] for row in logged] == [1, 1, 1, 1, 2, 2, 2, 3]
    assert [row["stage/group_size"] for row in logged] == [3] * 7 + [4]
    assert [row["stage/temperature"] for row in logged[4:7]] == pytest.approx(
        [1.2, 1.2 - 0.4 / 3, 1.2 - 0.8 / 3]
    )
    coefs = [row["stage/kl_coef"] for row in logged[:4]]
    kls = [row["kl/ref_nats"] for row in logged[:4]]
    for before, after, kl in zip(coefs, coefs[1:], kls, strict=False):
        assert after == pytest.approx(before * (1 + min(max(kl / 0.01 - 1, -0.2), 0.2) * 12 / 20))


@pytest.mark.silent_bug(33)
@pytest.mark.parametrize("calls_before", [3, 7, 11])
def test_a_staged_run_that_is_stopped_goes_on_to_the_bit(whole, tmp_path, calls_before):
    config = replace(serialization.load(whole / "config.json"), runs_dir=str(tmp_path / "runs"))
    reward = Signalling(calls_before)
    reward.__name__ = "digits"
    with pytest.raises(Stopped):
        api.start(config, Parts(rewards=[reward]))
    assert_same(api.start(tmp_path / "runs/run").folder, whole)


def train(config) -> None:
    api.start(serialization.from_dict(config))


@pytest.mark.slow
def test_two_ranks_go_through_the_stages_as_one(tmp_path):
    found = []
    for name, count in (("one", 1), ("two", 2)):
        config = serialization.to_dict(tiny.config(tmp_path, name=name, optim__eps=0.1, **STAGED))
        processes.run_ranks(count, train, config, folder=tmp_path / name)
        rows = [row for row in metrics(tmp_path / "runs" / name) if "stage/number" in row]
        found.append([(row["stage/number"], row["stage/kl_coef"]) for row in rows])
    assert [number for number, _ in found[0]] == [number for number, _ in found[1]]
    assert [coef for _, coef in found[0]] == pytest.approx([coef for _, coef in found[1]], rel=1e-4)


# --- back-off ---


class Falls:
    """A reward that is high in one evaluation and low in all others; every step has the spread to
    learn from."""

    __name__ = "falls"

    def __init__(self, best_at: int) -> None:
        self.best_at, self.state = best_at, None

    def __call__(self, completions, trainer_state, **_):
        is_best = trainer_state.global_step == self.best_at
        values = tiny.digits(completions)
        return [value + (10.0 if is_best else 0.0) for value in values]


def test_a_fall_returns_to_the_best_weights_and_lowers_the_learning_rate(tmp_path, caplog):
    changes = {
        "steps": 4,
        "evaluation__every": 2,
        "back_off__metric": "eval/reward_mean",
        "reward": None,
    }
    config = tiny.config(tmp_path, **(changes | {"reward": ["falls"]}))
    with caplog.at_level(logging.WARNING, "gruppo"):
        backed = api.start(config, Parts(rewards=[Falls(2)]))
    assert (
        "step 4: eval/reward_mean fell to" in caplog.text
        and "back to the weights of step 2" in caplog.text
    )
    assert [
        row["back_off/returns_count"]
        for row in metrics(backed.folder)
        if "back_off/returns_count" in row
    ] == [1]
    short = api.start(replace(config, steps=2, name="short"), Parts(rewards=[Falls(2)]))
    assert weights(backed.folder).equal(weights(short.folder))


@pytest.fixture(scope="module")
def returned(tmp_path_factory):
    changes = {
        "steps": 6,
        "evaluation__every": 2,
        "back_off__metric": "eval/reward_mean",
        "reward": ["falls"],
    }
    return api.start(
        tiny.config(tmp_path_factory.mktemp("returned"), **changes), Parts(rewards=[Falls(2)])
    ).folder


@pytest.mark.slow
@pytest.mark.silent_bug(33)
@pytest.mark.parametrize("calls_before", [4, 6, 8])
def test_a_run_with_a_return_is_resumed_to_the_bit(returned, tmp_path, calls_before):
    other = replace(serialization.load(returned / "config.json"), runs_dir=str(tmp_path / "other"))
    signal, falls = Signalling(calls_before), Falls(2)

    def stopping(completions, trainer_state, **_):
        signal(completions)
        return falls(completions, trainer_state)

    stopping.__name__ = "falls"
    with pytest.raises(Stopped):
        api.start(other, Parts(rewards=[stopping]))
    assert_same(api.start(tmp_path / "other/run", Parts(rewards=[Falls(2)])).folder, returned)


def test_the_optimiser_returns_with_the_weights(tmp_path, monkeypatch):
    """A step after the return is the step after the best one, at the lower rate: with other moments
    it would not be."""
    monkeypatch.setattr(loop, "LR_FACTOR", 1.0)
    changes = {
        "evaluation__every": 2,
        "back_off__metric": "eval/reward_mean",
    }
    long = api.start(
        tiny.config(tmp_path, steps=4, **changes, reward=["falls"]), Parts(rewards=[Falls(2)])
    ).folder
    short = api.start(
        tiny.config(tmp_path, steps=2, name="short", **changes, reward=["falls"]),
        Parts(rewards=[Falls(2)]),
    )
    run, other = (newest(folder) for folder in (long, short.folder))
    assert tensors(run / "optimizer.safetensors") == tensors(other / "optimizer.safetensors")


def test_the_coefficient_of_the_surrogate_scales_its_gradient(tmp_path):
    """With plain gradients a step at 0.5 is half the step at 1."""
    moved = []
    for coef in (1.0, 0.5):
        run, _ = build(
            tiny.config(tmp_path, stage__rl_coef=coef, optim__max_grad_norm=0.0), Parts()
        )
        step_params = run.stage_schedule.step_params(0)
        backward(run, collect(run, step_params).batch, step_params)
        moved.append(torch.cat([p.grad.flatten() for p in run.parameters]))
    torch.testing.assert_close(moved[1], 0.5 * moved[0], rtol=1e-5, atol=1e-9)
    assert moved[0].abs().max() > 1e-4


def test_a_fall_at_the_last_step_is_reported_as_the_weights_that_are_left(tmp_path):
    config = tiny.config(
        tmp_path,
        steps=4,
        evaluation__every=2,
        back_off__metric="eval/reward_mean",
        reward=["falls"],
    )
    result = api.start(config, Parts(rewards=[Falls(2)]))
    assert result.after["step"] == 2 and result.after["mean"] > 10


def test_of_the_best_weights_no_more_are_kept_than_a_resume_can_ask_for(tmp_path):
    """A metric that rises with each step, and one save: the best so far, and the one that the save
    names."""
    config = tiny.config(tmp_path, steps=5, saving__every=3, reward=["rises"])
    seen = []

    def rises(completions, trainer_state, log_metric, **_):
        log_metric("rising", float(trainer_state.global_step))
        seen.append(checkpoint.steps(tmp_path / "runs/run/best"))
        return tiny.digits(completions)

    config = replace(config, back_off=BackOffConfig("reward_metric/rising"))
    api.start(config, Parts(rewards=[rises]))
    assert max(map(len, seen)) == 2 and [3, 4] in seen, seen
    assert checkpoint.steps(tmp_path / "runs/run/best") == [5]


def test_a_metric_that_back_off_never_sees_is_a_warning_with_the_nearest(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "gruppo"):
        api.start(tiny.config(tmp_path, steps=1, back_off__metric="reward/meen"))
    assert "'reward/meen' was never measured." in caplog.text


def differing(completions, log_metric, trainer_state, **_):
    """Logs what rises on one rank and falls on the other."""
    sign = 1.0 if os.environ.get("RANK", "0") == "0" else -3.0
    log_metric("own", sign * trainer_state.global_step)
    return tiny.digits(completions)


@pytest.mark.slow
def test_two_ranks_return_to_the_best_weights_together(tmp_path):
    """By what is the mean over ranks, which falls from the first step on; each by itself, one would
    wait for ever."""
    reward = [f"{Path(__file__).resolve()}:differing"]
    back_off = {"back_off__metric": "reward_metric/own", "back_off__drop": 0.0}
    config = serialization.to_dict(tiny.config(tmp_path, steps=3, reward=reward, **back_off))
    processes.run_ranks(2, train, config, folder=tmp_path / "both")
    counts = [
        row["back_off/returns_count"]
        for row in metrics(tmp_path / "runs/run")
        if "back_off/returns_count" in row
    ]
    assert counts == [1, 2]


def test_the_last_stage_has_the_steps_that_a_gate_has_saved():
    stage_schedule = StageSchedule(
        given(replace(WARM, steps=5, until="m > 0"), replace(LAST, steps=5, lr="linear:1,0"))
    )
    advanced(stage_schedule, 1.0, metric="m")
    assert stage_schedule.step_params(1).lr == 1.0 and stage_schedule.step_params(
        9
    ).lr == pytest.approx(1 / 9)


def test_the_critic_is_alone_in_its_first_steps_with_rewards_however_the_plan_is_written():
    critic = CriticConfig(warmup_steps=2)
    plans = (
        given(Stage(steps=3, rl_coef=0.0, sup_coef=1.0), Stage()),
        replace(GIVEN, stage=Stage(rl_coef="steps:0,3=1", sup_coef="steps:1,3=0")),
    )
    for plan in plans:
        stage_schedule, alone = (
            StageSchedule(replace(plan, objective=PRESETS["ppo"], critic=critic)),
            [],
        )
        for step in range(7):
            step_params = stage_schedule.step_params(step)
            alone.append(step_params.is_critic_alone)
            stage_schedule.measure(step, {}, rows=4.0 if step_params.samples else 0.0)
            stage_schedule.advance(step + 1)
        assert alone == [False, False, False, True, True, False, False]


def test_a_ramp_rises_to_the_coefficient_of_the_stage_after_it():
    stages = parse_config(
        "train", ["arithmetic", "--stages", "ramp:5,full", "--stage.rl-coef", "0.5"]
    ).stages
    assert [stage.rl_coef for stage in stages] == ["linear:0,0.5", 0.5]


# --- gates on a metric that no longer rises ---

FLAT = replace(WARM, steps=20, until="m flat 2 by 0.05")


@pytest.mark.parametrize(
    ("values", "opens_at"),
    [
        ([1.0, 1.5, 1.5], None),
        ([1.0, 1.04, 1.05], 3),
        ([1.0, 1.04, 1.0501], None),
        ([1.0, 1.2, 1.25, 1.2], 4),
        ([1.0, 0.5, 0.4], 3),
        ([0.0, 1.0, 0.5, 1.06, 1.0, 1.1], 6),
        ([1.0, 1.0], None),
        ([3.0, 1.0, 2.9], 3),
    ],
    ids=[
        "rose",
        "no more than by",
        "a little more",
        "after a rise",
        "falls",
        "a late rise",
        "too few",
        "below a best",
    ],
)
def test_a_flat_gate_opens_when_the_last_values_are_no_higher_than_the_best_before_them(
    values, opens_at
):
    stage_schedule = StageSchedule(given(FLAT, LAST))
    names = advanced(stage_schedule, *values, metric="m")
    assert names.index("last") + 1 == opens_at if opens_at else "last" not in names


def test_a_flat_gate_counts_measurements_and_not_steps():
    stage_schedule = StageSchedule(given(FLAT, LAST))
    for step in range(1, 12):
        result = {"m": 1.0} if step % 4 == 0 else {"other": 0.0}
        stage_schedule.measure(step, result)
        stage_schedule.advance(step)
    assert stage_schedule.stage.name == "warm" and stage_schedule.measure(12, {"m": 1.0}) is None
    assert "warm lasts until m flat 2 by 0.05" in str(stage_schedule.advance(12))


def test_a_flat_gate_sees_its_own_stage_alone():
    """What was measured before it does not count."""
    second = replace(FLAT, name="second")
    stage_schedule = StageSchedule(given(FLAT, second, LAST))
    assert advanced(stage_schedule, 1.0, 1.0, 1.0, 1.0, 1.0, metric="m") == [
        "warm",
        "warm",
        "second",
        "second",
        "second",
    ]
    stage_schedule.measure(6, {"m": 1.0})
    stage_schedule.advance(6)
    assert stage_schedule.stage.name == "last"


def test_a_run_waits_until_its_evaluation_is_flat_and_is_resumed_to_the_bit(tmp_path):
    """At lr 0 every evaluation is the same: that at step 0 is the stage's too, and two more are
    flat."""
    flat = Stage(name="flat", steps=5, until="eval/digits flat 2 by 0", lr=0.0)
    changes = {"stages": (flat, Stage(name="rest")), "steps": 6, "evaluation__every": 1}
    path = api.start(tiny.config(tmp_path, **changes)).folder
    assert [row["stage/number"] for row in metrics(path) if "stage/number" in row] == [
        1,
        1,
        2,
        2,
        2,
        2,
    ]
    config = tiny.config(tmp_path, **changes, runs_dir=str(tmp_path / "other"))
    reward = Signalling(4)  # the evaluation at step 0, a step, its evaluation, a step
    reward.__name__ = "digits"
    with pytest.raises(Stopped):
        api.start(config, Parts(rewards=[reward]))
    assert checkpoint.steps(tmp_path / "other/run/checkpoints")[-1] < 3
    assert_same(api.start(tmp_path / "other/run").folder, path)


# --- what a stage sets beside coefficients ---


def test_weight_decay_is_the_stages_or_the_runs():
    stages = (replace(WARM, weight_decay="linear:0.3,0"), LAST)
    stage_schedule, result = StageSchedule(given(*stages, optim=OptimConfig(weight_decay=0.01))), []
    for step in range(4):
        step_params = stage_schedule.step_params(step)
        result.append(step_params.weight_decay)
        assert stage_schedule.metrics(step_params)["stage/weight_decay"] == step_params.weight_decay
        stage_schedule.advance(step + 1)
    assert result == pytest.approx([0.3, 0.2, 0.1, 0.01])


RENEWED = {
    "stages": (
        Stage(name="first", steps=2, kl_coef=0.1),
        Stage(name="second", kl_coef=0.1, new_reference=True),
    ),
    "steps": 5,
    "evaluation__prompts": 2,
    "evaluation__every": 0,
    "lora__rank": 2,
    "optim__lr": 0.05,
}


@pytest.mark.slow
def test_the_reference_of_an_adapter_is_renewed_and_resumed_to_the_bit(tmp_path):
    path = api.start(tiny.config(tmp_path, **RENEWED)).folder
    kls = [row["kl/ref_nats"] for row in metrics(path) if "kl/ref_nats" in row]
    assert kls[0] == 0.0 and kls[2] == 0.0 and kls[1] > 1e-5 and kls[3] > 1e-5
    old = (RENEWED["stages"][0], replace(RENEWED["stages"][1], new_reference=False))
    kept = api.start(tiny.config(tmp_path, **(RENEWED | {"stages": old}), name="kept")).folder
    assert [row["kl/ref_nats"] for row in metrics(kept) if "kl/ref_nats" in row][2] > 1e-5
    config = tiny.config(tmp_path, **RENEWED, runs_dir=str(tmp_path / "other"))
    reward = Signalling(5)  # the evaluation, and the fourth step, after the reference was renewed
    reward.__name__ = "digits"
    with pytest.raises(Stopped):
        api.start(config, Parts(rewards=[reward]))
    assert checkpoint.steps(tmp_path / "other/run/checkpoints")[-1] >= 3
    assert (newest(tmp_path / "other/run") / "reference.safetensors").is_file()
    other = api.start(tmp_path / "other/run").folder
    assert metrics(other) == metrics(path)
    for name in ("model", "optimizer", "reference"):
        assert tensors(newest(other) / f"{name}.safetensors") == tensors(
            newest(path) / f"{name}.safetensors"
        ), name
