"""Small real runs whose configuration provokes a symptom, and one that is healthy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests import tiny

from gruppo import api
from gruppo.config.schema import Stage
from gruppo.doctor.record import read
from gruppo.doctor.report import diagnose

REWARDS = str(Path(__file__).with_name("provoked.py").resolve())
QUICK: dict[str, Any] = {
    "steps": 10,
    "evaluation__prompts": 0,
    "saving__every": 0,
    "show_samples_every": 0,
    "rollout__stop": tuple("abcdefghijklmn"),  # so that few answers are cut off
    "reward": [f"{REWARDS}:short"],
}
STAGES = (
    Stage(name="supervised", steps=9, rl_coef=0.0, sup_coef=1.0, lr=1e-4, warmup_steps=30),
    Stage(name="full"),
)
RUNNING = {
    "objective__baseline": "running",
    "objective__scale": "none",
}

PROVOKED: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "a reward that is always 0": ({"reward": [f"{REWARDS}:constant"]}, ["zero-spread"], ""),
    "a learning rate that ruins the weights": (
        {"optim__lr": 1e6},
        ["no-gradient"],
        "--optim.lr 10000",
    ),
    "a learning rate that takes the entropy": (
        {"optim__lr": 1e3, "reward": [tiny.reward("digits")]},
        ["zero-spread"],
        "",
    ),
    "loss_sup that does not fall": (
        {"stages": STAGES},
        ["warmup-too-long", "supervised-loss"],
        "--stages.0.lr 0.0003",
    ),
    "loss_pg that is positive and grows": (
        {"reward": [f"{REWARDS}:falls"], **RUNNING},
        ["policy-loss"],
        "--objective.baseline mean",
    ),
    "a learning rate that leaves the clip at once": (
        {"optim__minibatches": 2, "optim__epochs": 2, "optim__lr": 0.3},
        ["over-clipping"],
        "--optim.lr 0.15",
    ),
    "a learning rate that no ratio feels": (
        {"optim__minibatches": 2, "optim__lr": 1e-6},
        ["inert-clip"],
        "--optim.lr 3e-06",
    ),
    "two opposed rewards": (
        {"reward": [tiny.reward("digits"), f"{REWARDS}:letters"]},
        ["conflicting-rewards"],
        "--scoring.weights 1 0.5",
    ),
    "a reward that raises": (
        {"reward": [f"{REWARDS}:fails"]},
        ["reward-failures", "zero-spread"],
        "",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("config", "names", "change"), PROVOKED.values(), ids=PROVOKED)
def test_a_symptom_that_is_provoked_is_named(tmp_path, config, names, change):
    run = api.start(tiny.config(tmp_path, **(QUICK | config))).folder
    findings = diagnose(read(run)).findings
    assert [finding.rule for finding in findings] == names
    assert str(next(iter(findings[-1].changes), "")).startswith(change)
    if "reward-failures" in names:
        assert "Most frequent failure: fails: ValueError: an odd beginning" in findings[0].meaning


def test_a_run_that_learns_has_no_symptom(tmp_path):
    sizes = {"rollout__prompts": 6, "rollout__group_size": 8, "steps": 24}
    evaluated = {"evaluation__prompts": 4, "evaluation__every": 6}
    run = api.start(tiny.config(tmp_path, **(QUICK | sizes | evaluated))).folder
    report = diagnose(read(run))
    assert report.findings == []
    assert {
        "entropy-collapse",
        "zero-spread",
        "reward-hacking",
        "mismatch",
    }.isdisjoint(report.skipped)
