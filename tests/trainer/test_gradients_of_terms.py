"""The gradient of each term of the loss by itself: its norm, its direction, and that looking changes nothing."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import processes, tiny
from tests.trainer import restoration_runs
from tests.trainer.restoration_runs import built, gradient, in_double, trained
from tests.trainer.runs import assert_same, metrics, weights
from torch import Tensor

from gruppo import api
from gruppo.build import Parts, build
from gruppo.config import serialization
from gruppo.config.schema import Stage
from gruppo.trainer import gradients
from gruppo.trainer.collect import collect
from gruppo.trainer.stages import StepParams
from gruppo.trainer.update import backward, learn

pytest.importorskip("PIL")

ALL = {
    "stage__rl_coef": 0.7,
    "stage__kl_coef": 0.3,
    "stage__sup_coef": 0.6,
    "stage__cons_coef": 0.4,
    "stage__entropy_coef": 0.02,
    "restoration__consistency": "equivariance",
    "restoration__action": restoration_runs.ACTION + ",learned=true",
}
COEFS = {
    "policy": "rl_coef",
    "sup": "sup_coef",
    "cons": "cons_coef",
    "kl": "kl_coef",
    "entropy": "entropy_coef",
}
CRITIC = {
    "baseline": "critic",
    "credit": "return_to_go",
    "scale": "none",
    "clip_unit": "nats",
    "kl": "exact",
}


def measured(metrics: dict[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in metrics.items()
        if name.startswith(("grad_norm/", "grad_cosine/"))
    }


def by_difference(run: Any, batch: Any, step_params: StepParams, name: str) -> Tensor:
    """What a term adds: the gradient with it less that without, where all else is as it is."""
    found = []
    for one in (step_params, replace(step_params, **{name: 0.0})):
        run.optimizer.zero_grad(set_to_none=True)
        backward(run, batch, one)
        found.append(gradient(run))
    run.optimizer.zero_grad(set_to_none=True)
    return found[0] - found[1]


@pytest.mark.parametrize(
    "what", ["sampled", "a critic", "demonstrations alone", "to the reference"]
)
def test_norms_and_cosines_are_those_of_what_each_term_adds(tmp_path, what):
    changes, coefs = dict(ALL), dict(COEFS)
    if what == "a critic":
        changes, coefs = changes | {"objective": CRITIC}, coefs | {"value": "value_coef"}
    if what == "to the reference":
        changes["restoration__consistency"] = "reference"
    if what == "demonstrations alone":
        changes |= {"stage__rl_coef": 0.0, "stage__kl_coef": 0.0, "stage__entropy_coef": 0.0}
        coefs = {name: coef for name, coef in coefs.items() if name in ("sup", "cons")}
    run = in_double(built(tmp_path, is_disturbed=True, optim__terms_every=1, **changes))
    if run.critic is not None:
        run.critic.module.double()
        torch.nn.init.normal_(run.critic.module.weight)
    step_params = run.stage_schedule.step_params(0)
    batch = collect(run, step_params).batch
    alone = {name: by_difference(run, batch, step_params, coef) for name, coef in coefs.items()}
    logged = measured(learn(run, batch, step_params))
    pairs = {
        f"grad_cosine/{one}/{other}"
        for one, other in combinations([n for n in gradients.TERMS if n in coefs], 2)
    }
    assert {*logged} == {f"grad_norm/{name}" for name in coefs} | pairs
    for name, vector in alone.items():
        assert logged[f"grad_norm/{name}"] == pytest.approx(float(vector.norm()), rel=1e-5), name
        assert float(vector.norm()) > 1e-5
    for pair in pairs:
        _, one, other = pair.split("/")
        cosine = torch.nn.functional.cosine_similarity(alone[one], alone[other], dim=0)
        assert logged[pair] == pytest.approx(float(cosine), abs=1e-5), pair
    assert any(abs(logged[pair]) > 0.05 for pair in pairs)


def test_the_gradients_of_the_terms_add_up_to_that_of_the_update(tmp_path):
    run = in_double(built(tmp_path, is_disturbed=True, optim__max_grad_norm=0.0, **ALL))
    step_params = run.stage_schedule.step_params(0)
    batch = collect(run, step_params).batch
    logged = gradients.of_terms(run, batch, step_params, backward)
    assert all(
        parameter.grad is None for parameter in run.parameters
    )  # nothing is left for the update
    names = list(COEFS)
    names.sort(key=list(gradients.TERMS).index)
    squares = sum(logged[f"grad_norm/{name}"] ** 2 for name in names)
    for one, other in combinations(names, 2):
        squares += (
            2
            * logged[f"grad_cosine/{one}/{other}"]
            * logged[f"grad_norm/{one}"]
            * logged[f"grad_norm/{other}"]
        )
    learned = learn(run, batch, step_params)
    assert math.hypot(learned["grad/norm"], learned["grad/action_norm"]) == pytest.approx(
        math.sqrt(squares), rel=1e-4
    )


SEVERAL = {
    "stages": (
        Stage(steps=2, rl_coef=0.0, sup_coef=1.0, cons_coef=0.2),
        Stage(
            steps=2,
            rl_coef="linear:0,1",
            sup_coef="linear:1,0",
            kl_coef=0.1,
            entropy_coef=0.01,
            cons_coef=0.1,
        ),
        Stage(),
    ),
    "steps": 6,
    "restoration__action": restoration_runs.ACTION + ",learned=true",
    "optim__epochs": 2,
    "optim__minibatches": 2,
    "show_samples_every": 1,
}


def test_looking_at_the_terms_changes_no_bit_of_the_run(tmp_path):
    data = restoration_runs.degraded(tmp_path)
    found = [
        trained(
            tmp_path / name, data=data, optim__terms_every=every, evaluation__prompts=2, **SEVERAL
        )
        for name, every in (("looked", 1), ("not", 0))
    ]
    looked = metrics(found[0])
    terms = [{*measured(row)} for row in looked if "optim/lr" in row]
    assert [len(names) for names in terms] == [
        3,
        3,
        10,
        15,
        1,
        1,
    ]  # of n terms: n norms, a cosine of each two
    file = found[0] / "metrics.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("".join(f"{without_terms(line)}\n" for line in lines))
    assert_same(*found)


def without_terms(line: str) -> str:
    return json.dumps(
        {name: value for name, value in json.loads(line).items() if not name.startswith("grad_")}
    )


def test_terms_are_looked_at_every_so_many_steps(tmp_path):
    path = trained(tmp_path, optim__terms_every=2, stage__kl_coef=0.1, steps=5)
    assert [bool(measured(row)) for row in metrics(path) if "optim/lr" in row] == [
        True,
        False,
        True,
        False,
        True,
    ]


def test_a_term_without_a_gradient_has_a_norm_of_0_and_no_direction(tmp_path):
    """The KL to itself."""
    run = built(tmp_path, stage__kl_coef=0.1, optim__terms_every=1)
    step_params = run.stage_schedule.step_params(0)
    logged = measured(learn(run, collect(run, step_params).batch, step_params))
    assert (
        logged["grad_norm/kl"] == 0
        and math.isnan(logged["grad_cosine/policy/kl"])
        and logged["grad_norm/policy"] > 0
    )


def test_a_kl_in_the_reward_is_no_term(tmp_path):
    reward = {"objective": {"kl": "k1", "kl_in": "reward", "credit": "return_to_go"}}
    run, _ = build(
        tiny.config(tmp_path, stage__kl_coef=0.1, optim__terms_every=1, **reward), Parts()
    )
    step_params = run.stage_schedule.step_params(0)
    assert {*measured(learn(run, collect(run, step_params).batch, step_params))} == {
        "grad_norm/policy"
    }


def test_terms_of_a_text_model_with_a_critic_of_its_own(tmp_path):
    changes = {
        "objective": "ppo",
        "critic__kind": "separate",
        "stage__kl_coef": 0.1,
        "optim__terms_every": 1,
    }
    rows = metrics(
        api.start(tiny.config(tmp_path, steps=2, evaluation__prompts=0, **changes)).folder
    )
    last = measured(rows[-1])
    assert last["grad_norm/value"] > 0 and last["grad_norm/policy"] > 0
    assert last["grad_cosine/policy/value"] == 0  # no weight in common


def train(config: dict[str, Any]) -> None:
    api.start(serialization.from_dict(config))


def test_two_ranks_say_what_one_says(tmp_path):
    """Of all rows, with demonstrations of which one rank has more; and the runs are one."""
    changes = SEVERAL | {
        "optim__terms_every": 1,
        "optim__eps": 0.1,
        "optim__lr": 0.01,
        "rollout__prompts": 3,
    }
    changes |= {"data": restoration_runs.degraded(tmp_path), "evaluation__prompts": 2}
    found: list[Path] = []
    for name, count in (("one", 1), ("two", 2)):
        config = serialization.to_dict(restoration_runs.config(tmp_path, name=name, **changes))
        processes.run_ranks(count, train, config, folder=tmp_path / name)
        found.append(tmp_path / "runs" / name)
    torch.testing.assert_close(weights(found[1]), weights(found[0]), rtol=0, atol=1e-5)
    compared = 0
    for one, two in zip(*map(metrics, found), strict=True):
        assert one.keys() == two.keys()
        for name in measured(one) | {
            name: 0.0 for name in ("loss/cons", "loss/sup", "eval/reward_mean") if name in one
        }:
            expected = one[name]
            assert two[name] == (
                None if expected is None else pytest.approx(expected, rel=1e-3, abs=1e-4)
            ), name
            compared += 1
    assert compared > 20
